"""Limit requests and connections: their number, their time, their size and their form."""

import asyncio
import json
import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import h11
import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol


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
