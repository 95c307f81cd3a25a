"""Wait for other ranks as long as they show signs of life, instead of a fixed time.

A collective gives up after minutes, while one rank may rightly hash, read or copy for an hour
before the others can go on. So before ranks exchange anything outside the training step they
*meet*: each announces itself and waits until all are there, or until a missing rank has given no
sign of life for ``patience_seconds``. A thread of every rank sends these signs, over a store of its
own beside the process group.
"""

import contextlib
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from pipeline.errors import RankLost

if TYPE_CHECKING:
    from torch.distributed import TCPStore

BEAT_SECONDS = 5.0
PATIENCE_SECONDS = 600.0
LONGEST_POLL_SECONDS = 0.1


class Heartbeat:
    """Sends this rank's signs of life and watches those of the others."""

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        address: str,
        port: int,
        server: "TCPStore | None" = None,
        beat_seconds: float = BEAT_SECONDS,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        self._rank, self._size = rank, size
        self._server = server  # kept alive by rank 0
        self._store = _connect(address, port)
        self._beat_seconds, self._patience_seconds = beat_seconds, patience_seconds
        self._meetings = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=self._beat, args=(_connect(address, port),), name="heartbeat", daemon=True
        )
        self._thread.start()

    def meet(self) -> None:
        """Wait until every rank has called this as often as this rank.

        Raises:
            RankLost: a rank is missing and gives no sign of life.
        """
        self._meetings += 1
        here = f"here/{self._meetings}"
        self._store.set(f"{here}/{self._rank}", "")
        self._store.add(here, 1)
        watch = _Watch(self._store, patience_seconds=self._patience_seconds)
        pause = 0.0005
        while self._store.add(here, 0) < self._size:
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_POLL_SECONDS)
            if pause == LONGEST_POLL_SECONDS:
                watch.look([r for r in range(self._size) if not self._is_here(here, r)])

    def end(self) -> None:
        """Stop the signs of life, and tell the ranks that still wait for this one."""
        self._ended.set()
        self._thread.join()
        with contextlib.suppress(RuntimeError):  # rank 0 has ended, and the store with it
            self._store.set(f"gone/{self._rank}", "")

    def _is_here(self, here: str, rank: int) -> bool:
        return bool(self._store.check([f"{here}/{rank}"]))

    def _beat(self, store: "TCPStore") -> None:
        beats = 0
        while True:
            try:
                store.set(f"beat/{self._rank}", str(beats))
            except RuntimeError:  # rank 0 has ended, and the store with it
                return
            if self._ended.wait(self._beat_seconds):
                return
            beats += 1


class _Watch:
    """Remembers when each rank last gave a sign of life."""

    def __init__(self, store: "TCPStore", *, patience_seconds: float) -> None:
        self._store, self._patience_seconds = store, patience_seconds
        self._seen: dict[int, tuple[bytes, float]] = {}

    def look(self, ranks: list[int]) -> None:
        """Raise RankLost if one of the ranks has ended or given no sign of life for too long."""
        now = time.monotonic()
        for rank in ranks:
            if self._store.check([f"gone/{rank}"]):
                raise RankLost(
                    f"Rank {rank} has ended while others wait for it. Look at what it says, and "
                    "run the same command again."
                )
            beat = self._beat_of(rank)
            before, since = self._seen.setdefault(rank, (beat, now))
            if beat != before:
                self._seen[rank] = (beat, now)
            elif now - since > self._patience_seconds:
                raise RankLost(
                    f"Rank {rank} has given no sign of life for {now - since:.0f} s. Look at what "
                    "its node says, and run the same command again."
                )

    def _beat_of(self, rank: int) -> bytes:
        key = f"beat/{rank}"
        return self._store.get(key) if self._store.check([key]) else b""


def open_store(address: str) -> "TCPStore":
    """Open the store, on rank 0; the others connect to its ``port``."""
    from torch.distributed import TCPStore

    return TCPStore(address, 0, is_master=True, wait_for_workers=False)


def _connect(address: str, port: int) -> "TCPStore":
    from torch.distributed import TCPStore

    return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=PATIENCE_SECONDS))
