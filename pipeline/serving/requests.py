"""Read a client's fields, and limit requests and connections: number, time, size and form.

Fields are a JSON object, a form or a query, of bounded size, in valid Unicode.
"""

import asyncio
import hmac
import json
import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal
from urllib.parse import parse_qsl

import h11
import uvicorn
from pydantic import (
    BaseModel,
    Field,
    StrictStr,
    StringConstraints,
    ValidationError,
    field_validator,
)
from starlette.applications import Starlette
from starlette.requests import Request
from uvicorn.protocols.http.h11_impl import H11Protocol

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
MAX_ALTERNATIVES = 10**9 - 1
MAX_TEXTS = 20
"""Most texts of a field other than ``q`` that lists texts."""


WANTED = {
    "q": "a text, or a list of texts in JSON",
    "source": f"the code of a language, at most {MAX_FIELD} characters",
    "target": f"the code of a language, at most {MAX_FIELD} characters",
    "format": "'text', which is the only one",
    "alternatives": f"a whole number from 0 to {MAX_ALTERNATIVES:,}",
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
    alternatives: Annotated[int, Field(ge=0, le=MAX_ALTERNATIVES)] = 0
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
        return _pairs(body.decode())  # curl -d sends letters as they are
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


# Limits of requests and connections


@dataclass(frozen=True)
class ServerLimits:
    """The largest load that a server takes."""

    characters: int
    """Most characters of a request's texts."""
    requests: int
    """Most requests that wait or are translated; more are refused."""
    seconds: int
    """Longest time of a request, from its first byte to its answer."""


IDLE_SECONDS = 5
"""Longest time from a connection's begin, or its last answer, to the head of the next request."""
SLOW_CONNECTIONS = 128
"""Connections that may wait for their clients, without connections whose request has a place."""
ACCEPTED_AT_ONCE = 32
"""Connections that are accepted before others are closed; asyncio would accept thousands, and write
a traceback for each of them beyond the limit of open files."""
WAITING_CONNECTIONS = 2048
"""Connections that wait in the kernel to be accepted."""

_LENGTHS = {b"content-length", b"transfer-encoding"}
_MALFORMED = (
    "This is not HTTP/1.1, has both Content-Length and Transfer-Encoding, or the head is too long. "
    "Send another request."
)


class _Connection(h11.Connection):
    """HTTP that refuses requests of two lengths, whose end a proxy may see elsewhere.

    RFC 9112, §6.1 and §11.2; h11 itself takes the chunks and ignores Content-Length.
    """

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        event = super().next_event()
        if isinstance(event, h11.Request) and {name for name, _ in event.headers} >= _LENGTHS:
            raise h11.RemoteProtocolError("the request has two lengths")
        return event


class _Protocol(H11Protocol):
    """HTTP with connections that cannot wait for their clients at the cost of others.

    A connection is closed if the head of a request takes too long; uvicorn's own clock starts after
    the first answer, and any byte stops it. If there are too many connections, the one that has
    waited longest for its client gives way; uvicorn would refuse the newest, whoever stalls.
    """

    since: float
    """When the connection began, or answered its last request."""
    is_refused = False
    """Whether what still arrives is not read, since the request was malformed."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.conn = _Connection(h11.SERVER)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.limit_concurrency = None  # uvicorn's own
        self.since = self.loop.time()
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )
        self._make_room()

    def data_received(self, data: bytes) -> None:
        if not self.is_refused:
            self.conn.receive_data(data)
            self.handle_events()

    def on_response_complete(self) -> None:
        self.since = self.loop.time()
        super().on_response_complete()

    def timeout_keep_alive_handler(self) -> None:
        if self._is_idle:
            super().timeout_keep_alive_handler()

    def send_400_response(self, _: str) -> None:
        """Refuse a request; closing while its rest arrives would take the answer from the client.

        RFC 9112, §9.6.
        """
        self._refuse(400, _MALFORMED)
        self.is_refused = True
        self.transport.write_eof()
        self.loop.call_later(self.timeout_keep_alive, self._close)

    def _make_room(self) -> None:
        """If there are too many connections, close the connection that has waited longest."""
        most = self.config.limit_concurrency
        if most is None or len(self.connections) <= most:
            return
        others = [one for one in self.connections if isinstance(one, _Protocol) and one is not self]
        open_ones = [one for one in others if not one._is_closed]
        waiting = [one for one in open_ones if one._waits_for_client]
        if len(open_ones) >= most and waiting:
            longest = min(waiting, key=lambda one: one.since)
            if not longest._is_idle:
                longest._refuse(503, "Too many clients are slow. Send this request again later.")
            longest._close()

    @property
    def _is_closed(self) -> bool:
        return self.transport.is_closing() and not self.transport.get_write_buffer_size()

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    @property
    def _waits_for_client(self) -> bool:
        return self._is_idle or self.cycle.more_body or self.flow.write_paused

    def _refuse(self, status: int, sentence: str) -> None:
        """Answer in place of the application, unless its answer has begun."""
        if not self._is_idle:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        headers = [("Content-Type", "application/json"), ("Connection", "close")]
        body = json.dumps({"error": sentence}).encode()
        response = h11.Response(status_code=status, headers=headers)
        with suppress(h11.LocalProtocolError):  # an answer has begun, or has no body
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event))

    def _close(self) -> None:
        if self.transport.get_write_buffer_size():  # the client does not read
            self.transport.abort()
        else:
            self.transport.close()


class _Server(uvicorn.Server):
    """Server that accepts few connections at once, of the many that may wait."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(WAITING_CONNECTIONS)  # asyncio has one number for both


def limited_server(app: Starlette, limits: ServerLimits) -> uvicorn.Server:
    """Return a server of an application within the limits."""
    return _Server(
        uvicorn.Config(
            app,
            http=_Protocol,
            ws="none",
            lifespan="off",
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=limits.requests + SLOW_CONNECTIONS,
            backlog=ACCEPTED_AT_ONCE,
            timeout_keep_alive=min(IDLE_SECONDS, limits.seconds),
            timeout_graceful_shutdown=limits.seconds,
        )
    )
