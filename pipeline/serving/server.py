"""Listen on a port, and serve until asked to stop."""

import asyncio
import socket
import sys
from collections.abc import Callable, Sequence
from signal import SIGTERM

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from pipeline.distributed.signals import handled_by
from pipeline.errors import ConfigError
from pipeline.serving.api import Api, Limits
from pipeline.serving.systems import System, Systems
from pipeline.terminal import listed

IDLE_SECONDS = 5
"""Longest time from a connection's begin, or its last answer, to the head of the next request."""


class _Protocol(H11Protocol):
    """HTTP that closes a connection whose client does not end the head of a request in time.

    uvicorn's own starts the clock after the first answer, and any byte stops it.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def data_received(self, data: bytes) -> None:
        self.conn.receive_data(data)
        self.handle_events()

    def timeout_keep_alive_handler(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            super().timeout_keep_alive_handler()


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on a port, or on any free one for port 0.

    Raises:
        ConfigError: the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        reason = (error.strerror or str(error)).partition(" (")[0]  # without the address again
        raise ConfigError(
            f"Port {port} of {host} cannot be used ({reason}). Name another --port or --host."
        ) from error


def serve(
    listener: socket.socket,
    systems: Sequence[System],
    *,
    limits: Limits,
    key: str | None,
    say: Callable[[str], None],
) -> None:
    """Answer requests until SIGTERM or Ctrl-C, then those that are still open.

    Args:
        listener: from :func:`listen`.
        systems: the models.
        limits: the largest load.
        key: key that requests must have; None: they need none.
        say: receives the address.
    """
    api = Api(Systems(systems), limits=limits, key=key)
    server = uvicorn.Server(
        uvicorn.Config(
            api.app,
            http=_Protocol,
            ws="none",
            lifespan="off",
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=min(IDLE_SECONDS, limits.seconds),
            timeout_graceful_shutdown=limits.seconds,
        )
    )
    if sys.platform == "linux":  # close the connections of clients that do not read
        milliseconds = 1000 * limits.seconds
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
    host, port = listener.getsockname()[:2]
    address = f"[{host}]" if ":" in host else host
    say(f"http://{address}:{port} serves {listed(system.name for system in systems)}.")
    try:
        # uvicorn raises the signal again when it has ended.
        with handled_by(lambda _: None, signals=(SIGTERM,)):
            server.run(sockets=[listener])
    finally:
        api.close()
