"""Listen on a port, and serve until asked to stop."""

import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from signal import SIGTERM

from pipeline.distributed.signals import handled_by
from pipeline.errors import ConfigError
from pipeline.serving.api import Api
from pipeline.serving.limits import ServerLimits, limited_server
from pipeline.serving.systems import System, Systems
from pipeline.terminal import listed


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
    limits: ServerLimits,
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
    server = limited_server(api.app, limits)
    if sys.platform == "linux":  # close the connections of clients that do not read
        milliseconds = 1000 * limits.seconds
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
    host, port = listener.getsockname()[:2]
    address = f"[{host}]" if ":" in host else host
    with suppress(OSError):  # a log on a full disk keeps no request from its answer
        say(f"http://{address}:{port} serves {listed(system.name for system in systems)}.")
    try:
        # uvicorn raises the signal again when it has ended.
        with handled_by(lambda _: None, signals=(SIGTERM,)):
            server.run(sockets=[listener])
    finally:
        api.close()
