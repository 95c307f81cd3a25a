"""One writer at a time: lock files, which the kernel gives up when their holder ends.

Where the kernel's locks do not reach (some network file systems), a second writer signs the file
anew: the first one finds out when it looks (:meth:`Lock.refuse_if_lost`), before it publishes.
"""

import contextlib
import fcntl
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from pipeline.errors import ArtifactError, to_write

SIGNATURE = "process "
"""How the contents of every lock file begin, which say who holds it."""


@dataclass(frozen=True)
class Lock:
    """A lock file that was signed by this process."""

    path: Path
    signature: str
    what: str

    def refuse_if_lost(self) -> None:
        """Raises ArtifactError where the file is gone, or another process has signed it since."""
        try:
            found = self.path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            found = ""
        if found != self.signature:
            raise ArtifactError(
                f"{self.what} is being written by {found or 'nobody any more: its lock is gone'}: "
                "this run stops, since two would spoil each other's files."
            )


@contextmanager
def exclusive(path: Path, *, what: str, patience_seconds: float = 0.0) -> Iterator[Lock]:
    """Hold the lock file ``path``; its parent folders are made.

    ``patience_seconds``: how long to wait for a holder that may be about to end.

    Raises:
        ArtifactError: another process holds it, the message says which; or it cannot be made.
    """
    descriptor: int | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _locked(path, what=what, give_up=time.monotonic() + patience_seconds)
        signature = _sign(descriptor)
    except OSError as error:
        if descriptor is not None:
            _release(path, descriptor)
        raise ArtifactError(
            f"{what} cannot be written ({error.strerror or error}): {to_write(error)}, or choose "
            "another folder."
        ) from error
    try:
        yield Lock(path, signature, what)
    finally:
        _release(path, descriptor)


def _locked(path: Path, *, what: str, give_up: float) -> int:
    """Descriptor of the locked file that lies at ``path``, not of one just removed from there."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        text = os.pread(descriptor, 200, 0).decode(errors="replace")
        if text and not text.startswith(SIGNATURE):
            os.close(descriptor)
            raise ArtifactError(
                f"{path} is where {what} is locked, but it is another file: move it away."
            )
        if not _lock(descriptor):
            os.close(descriptor)
            if time.monotonic() < give_up:
                time.sleep(0.1)
                continue
            raise ArtifactError(
                f"{what} is being written by {text.strip() or 'another process'}: wait for it or "
                "stop it, then run again."
            )
        if path.exists() and os.fstat(descriptor).st_ino == path.stat().st_ino:
            return descriptor
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sign(descriptor: int) -> str:
    """Say who holds the lock; with a token, since numbers of processes come again."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    host, token = socket.gethostname(), secrets.token_hex(4)
    signature = f"{SIGNATURE}{os.getpid()} on {host} since {now} (run {token})"
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, signature.encode(), 0)
    return signature


def _release(path: Path, descriptor: int) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
    os.close(descriptor)
