"""Read what a client sends: a JSON object or a form, of bounded size, in valid Unicode."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

from starlette.requests import Request

BYTES_PER_CHARACTER = 12
"""Most bytes of a character in a body: two escaped surrogates of JSON."""
OTHER_BYTES = 4096
"""Bytes of a body in addition to its text."""
MAX_FIELD = 200
"""Most characters of a field that is not text to translate."""
MAX_TEXTS = 20
"""Most texts of a field other than ``q`` that lists texts."""


class Refused(Exception):
    """A request that is answered with a status and one sentence."""

    def __init__(
        self, status: int, sentence: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(sentence)
        self.status, self.headers = status, headers


@dataclass(frozen=True)
class Fields:
    """Fields of a body, which the client may have misspelled or left out."""

    values: Mapping[str, Any]

    def word(self, name: str) -> str | None:
        """Return a short text; None without it.

        Raises:
            Refused: it is no text, or too long.
        """
        value = self.values.get(name)
        if value is None or (isinstance(value, str) and len(value) <= MAX_FIELD):
            return value
        raise Refused(400, f"{name!r} is not a text of at most {MAX_FIELD} characters.")

    def required(self, name: str) -> str:
        """Return a short text that must be there.

        Raises:
            Refused: it is missing, empty, no text or too long.
        """
        if value := self.word(name):
            return value
        raise Refused(400, f"{name!r} is missing. Send it as text.")

    def number(self, name: str) -> int:
        """Return a whole number; 0 without it.

        Raises:
            Refused: it is no whole number from 0 on.
        """
        value = str(self.values.get(name, 0))
        if value.isascii() and value.isdecimal() and len(value) < 10:
            return int(value)
        raise Refused(400, f"{name!r} is not a whole number from 0 on.")

    def flag(self, name: str) -> bool:
        """Return true or false; false without it.

        Raises:
            Refused: it is neither.
        """
        match self.values.get(name, False):
            case True | "true":
                return True
            case False | "false":
                return False
        raise Refused(400, f"{name!r} is neither true nor false.")

    def short_texts(self, name: str) -> tuple[str, ...]:
        """Return a short text or a list of up to ``MAX_TEXTS`` texts; none without it.

        Raises:
            Refused: it is neither.
        """
        value = self.values.get(name, [])
        found = value if isinstance(value, list) else [value]
        if len(found) <= MAX_TEXTS and all(
            isinstance(one, str) and 0 < len(one) <= MAX_FIELD for one in found
        ):
            return tuple(found)
        raise Refused(
            400,
            f"{name!r} is not a list of at most {MAX_TEXTS} texts of 1 to {MAX_FIELD} characters.",
        )

    def texts(self, *, most_characters: int) -> list[str]:
        """Return the texts of ``q``, which is one text or a list.

        Raises:
            Refused: it is missing, neither, or longer than ``most_characters`` in all.
        """
        value = self.values.get("q")
        texts: list[Any] = value if isinstance(value, list) else [value]
        if not texts or not all(isinstance(text, str) for text in texts):
            raise Refused(400, "'q' is missing. Send a text, or a list of texts in JSON.")
        if sum(map(len, texts)) > most_characters:
            raise Refused(413, f"'q' has more than {most_characters:,} characters. Send less.")
        return texts


async def read_fields(request: Request, *, most_characters: int) -> Fields:
    """Read the fields of a request's body.

    Raises:
        Refused: the body is too large, of another type, or damaged.
    """
    body = await _read_body(request, most_characters * BYTES_PER_CHARACTER + OTHER_BYTES)
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    try:
        if kind == "application/json":
            values = json.loads(body.decode())
        elif kind == "application/x-www-form-urlencoded":
            pairs = body.decode("ascii")
            listed = parse_qsl(pairs, keep_blank_values=True, errors="strict")
            values = dict(listed)
            if len(values) < len(listed):
                raise Refused(400, "A field of the form is repeated. Send a list in JSON.")
        else:
            raise Refused(415, "The body is neither JSON nor a URL-encoded form. Send either.")
        _refuse_surrogates(values)
    except UnicodeError as error:
        raise Refused(400, "The body is not valid Unicode in UTF-8. Send UTF-8.") from error
    except (ValueError, RecursionError) as error:
        raise Refused(400, "The body is not valid JSON. Send a JSON object.") from error
    if not isinstance(values, dict):
        raise Refused(400, "The body is not a JSON object. Send an object.")
    return Fields(values)


async def _read_body(request: Request, most_bytes: int) -> bytes:
    too_large = Refused(413, f"The body has more than {most_bytes:,} bytes. Send less text.")
    if int(request.headers.get("content-length", 0)) > most_bytes:
        raise too_large
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > most_bytes:
            raise too_large
    return bytes(body)


def _refuse_surrogates(values: Any) -> None:
    """Raise UnicodeError for the half of a character, which JSON can escape."""
    json.dumps(values, ensure_ascii=False).encode()
