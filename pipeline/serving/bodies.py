"""Read a client's fields: a JSON object, a form or a query, of bounded size, in valid Unicode."""

import hmac
import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal
from urllib.parse import parse_qsl

from pydantic import (
    BaseModel,
    Field,
    StrictStr,
    StringConstraints,
    ValidationError,
    field_validator,
)
from starlette.requests import Request

BYTES_PER_CHARACTER = 12
"""Most bytes of a character in a body: two escaped surrogates of JSON."""
OTHER_BYTES = 4096
"""Bytes of a body in addition to its text."""
MAX_FIELD = 200
"""Most characters of a field that is not text to translate."""
MAX_HEAD = 1024
"""Most bytes of the head of a form's part."""
_BOUNDARY = re.compile(r'(?ai)boundary=("?)([!-~]{1,70}?)\1(?:;|\s|$)')
_NAME = re.compile(
    rb'^content-disposition:[^\r\n]*[; ]name="([^"\r\n]*)"', re.IGNORECASE | re.MULTILINE
)
MAX_TEXTS = 20
"""Most texts of a field other than ``q`` that lists texts."""


WANTED = {
    "q": "a text, or a list of texts in JSON",
    "source": f"the code of a language, at most {MAX_FIELD} characters",
    "target": f"the code of a language, at most {MAX_FIELD} characters",
    "format": "'text', which is the only one",
    "alternatives": "a whole number from 0",
    "details": "true or false",
    "phrases": f"a text or up to {MAX_TEXTS} texts of 1 to {MAX_FIELD} characters",
    "api_key": f"a text of at most {MAX_FIELD} characters",
    "system": f"the name of a system, at most {MAX_FIELD} characters",
}
"""Field → what it may be."""


class Refused(Exception):
    """A request that is answered with a status and one sentence."""

    def __init__(
        self, status: int, sentence: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(sentence)
        self.status, self.headers = status, headers


Short = Annotated[str, StringConstraints(max_length=MAX_FIELD)]
Phrase = Annotated[str, StringConstraints(min_length=1, max_length=MAX_FIELD)]


class Fields(BaseModel):
    """Fields of a body; unknown fields are ignored, since clients of LibreTranslate send more."""

    q: StrictStr | Annotated[list[StrictStr], Field(min_length=1)]
    source: Short = ""
    target: Short = ""
    format: Literal["text"] = "text"
    alternatives: Annotated[int, Field(ge=0, lt=10**9)] = 0
    details: bool = False
    phrases: Annotated[tuple[Phrase, ...], Field(max_length=MAX_TEXTS)] = ()
    api_key: Short = ""
    system: Short | None = None

    @field_validator("alternatives", mode="before")
    @classmethod
    def _refuse_other_numbers(cls, value: Any) -> Any:
        if isinstance(value, bool | float) or (isinstance(value, str) and not value.isdecimal()):
            raise ValueError("it is no whole number")
        return value

    @field_validator("phrases", mode="before")
    @classmethod
    def _as_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    def required(self, name: Literal["source", "target"]) -> str:
        """Return a language that must be there; raise Refused without it."""
        value: str = getattr(self, name)
        if not value:
            raise Refused(400, f"{name!r} is missing. Send it as text.")
        return value

    def texts(self, *, most_characters: int) -> list[str]:
        """Return the texts of ``q``; raise Refused if they are longer in all."""
        texts = [self.q] if isinstance(self.q, str) else self.q
        if sum(map(len, texts)) > most_characters:
            raise Refused(413, f"'q' has more than {most_characters:,} characters. Send less.")
        return texts


async def read_fields(request: Request, *, most_characters: int, key: str | None) -> Fields:
    """Read the fields of a request; with a ``key``, the request must have it.

    Raises:
        Refused: the body is too large, of another type or damaged, the key is missing or wrong, or
            a field cannot be used.
    """
    body = await _read_body(request, most_characters * BYTES_PER_CHARACTER + OTHER_BYTES)
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    try:
        if kind == "application/json":
            values = json.loads(body.decode())
        else:
            # As with LibreTranslate, fields of a form may stand in the query of the address.
            listed = _pairs(request.url.query) + _form(kind, request, body)
            values = dict(listed)
            if len(values) < len(listed):
                raise Refused(400, "A field of the form is repeated. Send a list in JSON.")
        _refuse_surrogates(values)
    except UnicodeError as error:
        raise Refused(400, "The request is not valid Unicode in UTF-8. Send UTF-8.") from error
    except (ValueError, RecursionError) as error:
        raise Refused(400, "The body is not valid JSON or no valid form. Send JSON.") from error
    if not isinstance(values, dict):
        raise Refused(400, "The body is not a JSON object. Send an object.")
    given = str(values.get("api_key", "")).encode()
    if key is not None and not hmac.compare_digest(given, key.encode()):
        raise Refused(403, "'api_key' is missing or wrong. Send the key of this server.")
    try:
        return Fields.model_validate({name: of for name, of in values.items() if of is not None})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0])
        problem = f"{name!r} is missing" if first["type"] == "missing" else f"{name!r} is of no use"
        raise Refused(400, f"{problem}. Send {WANTED[name]}.") from error


def _pairs(text: str) -> list[tuple[str, str]]:
    return parse_qsl(text, keep_blank_values=True, errors="strict")


def _form(kind: str, request: Request, body: bytes) -> list[tuple[str, str]]:
    """Return the fields of a form; raise Refused if the body is of another type."""
    if kind == "application/x-www-form-urlencoded":
        return _pairs(body.decode("ascii"))
    if kind == "multipart/form-data":
        boundary = _BOUNDARY.search(request.headers["content-type"])
        if boundary is None:
            raise Refused(400, "The form names no boundary of its parts. Send JSON.")
        return _parts(body, boundary[2].encode("ascii"))
    if body:
        raise Refused(415, "The body is neither JSON nor a form. Send either.")
    return []


def _parts(body: bytes, boundary: bytes) -> list[tuple[str, str]]:
    """Return the fields of a form in parts (RFC 7578).

    It is read here since the parser of ``email`` takes time that grows with the square of a head,
    during which the server answers nobody.
    """
    _, *parts, end = (b"\r\n" + body).split(b"\r\n--" + boundary)
    heads = [part[:MAX_HEAD].partition(b"\r\n\r\n")[:2] for part in parts]
    names = [_NAME.search(head) if end_of_head else None for head, end_of_head in heads]
    if not parts or not end.startswith(b"--") or None in names:
        raise Refused(400, "The parts of the form cannot be told apart. Send JSON.")
    return [
        (name[1].decode(), part[len(head) + 4 :].decode())
        for name, (head, _), part in zip(names, heads, parts, strict=True)
        if name is not None
    ]


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
