"""Wait for other ranks as long as they show signs of life, instead of a fixed time.

A collective gives up after minutes, while one rank may rightly hash, read or copy for an hour
before the others can go on. So before ranks exchange anything outside the training step they
*meet*: each announces itself and waits until all are there, or until a rank has ended or given no
sign of life for ``patience_seconds``. A thread of every rank sends these signs, over a store of its
own beside the process group. Another thread runs the watchdog
(:mod:`~pipeline.distributed.watchdog`), since the first one waits without a bound while the node of
rank 0, which serves the store, is frozen or cut off.

Invariant: what rank 0, which serves the store, does per second grows linearly with the number of
ranks. Each rank has one connection, watches one other rank and asks one question per poll. A
meeting leaves no key behind.
"""

import contextlib
import socket
import threading
import time
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

from pipeline.distributed import progress
from pipeline.distributed.watchdog import (
    ALARM,
    BEAT_SECONDS,
    Heard,
    Silence,
    Watch,
    Watchdog,
    named,
)
from pipeline.errors import RankLost

if TYPE_CHECKING:
    from torch.distributed import TCPStore

PATIENCE_SECONDS = 600.0
SHORTEST_POLL_SECONDS = 0.0005
LONGEST_POLL_SECONDS = 0.1
MOST_POLLS_PER_SECOND = 2000.0
"""Questions per second with which the ranks of one meeting together load the store."""

JOIN_SECONDS = 10.0
"""Longest wait at the end, for the thread and on rank 0 for the others: some may be gone."""

MET, LOST, ADVANCED = "met", "lost", "advanced"
"""Keys: number of the last complete meeting; lost rank, and how long it was silent if it did not
end; count of advances."""
_SEPARATOR = "|"


class Heartbeat:
    """Sends this rank's signs of life and watches those of the next rank."""

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
        watch: Watch | None = None,
    ) -> None:
        self._rank, self._size, self._next = rank, size, (rank + 1) % size
        # A client locks itself, so that both threads share it; rank 0 uses the server's own.
        self._store = server or _connect(address, port)
        self._store.set(f"node/{rank}", socket.gethostname())
        self._name_of_zero = named(0, self._store.get("node/0"))
        self._beat_seconds, self._patience_seconds = beat_seconds, patience_seconds
        self._longest_poll = max(LONGEST_POLL_SECONDS, size / MOST_POLLS_PER_SECOND)
        self._meetings = 0
        self._beats = 0
        self._count = progress.count()
        self._silence_of_next = Silence(longest_step=2 * beat_seconds)
        self._heard = Heard()
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._run, name="heartbeat", daemon=True)]
        if watch is not None:
            dog = Watchdog(self._store, watch, rank=rank, size=size)
            self._threads.append(
                threading.Thread(target=self._watch, args=(dog,), name="watchdog", daemon=True)
            )
        for thread in self._threads:
            thread.start()

    def meet(self) -> None:
        """Wait until every rank has called this as often as this rank.

        Raises:
            RankLost: a rank has ended or gives no sign of life.
        """
        self._meetings += 1
        try:
            self._meet(self._meetings)
        except RuntimeError as error:
            raise _lost(self._name_of_zero) from error

    def _meet(self, number: int) -> None:
        here = f"here/{number}"
        if self._store.add(here, 1) == self._size:
            self._store.set(MET, str(number))
            self._store.delete_key(here)
            return
        pause = SHORTEST_POLL_SECONDS
        while True:
            met, lost = self._store.multi_get([MET, LOST])
            if int(met) >= number:  # asked first: a rank may end as soon as all have met
                return
            if lost:
                raise _lost(*lost.decode().split(_SEPARATOR))
            time.sleep(pause)
            pause = min(2 * pause, self._longest_poll)

    def leave(self) -> None:
        """End after all ranks have met for the last time; rank 0, which has the store, is last."""
        if not self._stop():
            return
        with contextlib.suppress(RuntimeError):  # rank 0 has ended, and the store with it
            number = self._store.add("left", 1)
            deadline = time.monotonic() + JOIN_SECONDS
            while self._rank == 0 and number < self._size and time.monotonic() < deadline:
                time.sleep(SHORTEST_POLL_SECONDS)
                number = self._store.add("left", 0)

    def end(self) -> None:
        """End early, and tell the ranks that still wait for this one."""
        if not self._stop():
            return
        with contextlib.suppress(RuntimeError):  # rank 0 has ended, and the store with it
            self._report_lost(named(self._rank, socket.gethostname().encode()))

    def _stop(self) -> bool:
        """End the threads; return whether the store answers, or is known to be gone."""
        self._ended.set()
        for thread in self._threads:
            thread.join(JOIN_SECONDS)
        return not self._threads[0].is_alive()

    def _run(self) -> None:
        while True:
            try:
                self._beat()
            except RuntimeError:  # rank 0 has ended, and the store with it
                self._heard = replace(self._heard, is_gone=True)
            if self._ended.wait(self._beat_seconds):
                return

    def _watch(self, watchdog: Watchdog) -> None:
        while True:
            watchdog.look(self._heard, server=self._name_of_zero)
            if self._ended.wait(self._beat_seconds):
                return

    def _beat(self) -> None:
        """Give a sign of life, look for the next rank's, and note what the watchdog needs."""
        self._beats += 1
        self._store.set(f"beat/{self._rank}", str(self._beats))
        if self._count != progress.count():
            self._count = progress.count()
            self._store.add(ADVANCED, 1)
        beat, advanced, alarm = self._store.multi_get([f"beat/{self._next}", ADVANCED, ALARM])
        silent_seconds = self._silence_of_next.since_change_of(beat)
        if silent_seconds > self._patience_seconds:
            name = named(self._next, self._store.get(f"node/{self._next}"))
            self._report_lost(name, f"{silent_seconds:.0f}")
        self._heard = Heard(self._beats, advanced, alarm)

    def _report_lost(self, *found: str) -> None:
        """Tell the ranks that wait; the rank that was lost first is the cause, and stays."""
        self._store.compare_set(LOST, "", _SEPARATOR.join(found))


def _lost(name: str, silent_seconds: str = "") -> RankLost:
    """Return the error about a rank that fell silent, or ended."""
    if silent_seconds:
        return RankLost(
            f"{name} has given no sign of life for {silent_seconds} s. Look at what its node says, "
            "and run the same command again."
        )
    return RankLost(
        f"{name} has ended while others wait for it. Look at what it says, and run the same "
        "command again."
    )


def open_store(address: str, *, size: int) -> "TCPStore":
    """Open the store of ``size`` ranks, on rank 0; the others connect to its ``port``.

    Every key that is ever read exists from here on, since a client waits for one that does not.
    """
    from torch.distributed import TCPStore

    store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
    of_ranks = [f"{kind}/{rank}" for kind in ("node", "beat", "where") for rank in range(size)]
    first = {MET: "0", LOST: "", ADVANCED: "0", ALARM: "", **dict.fromkeys(of_ranks, "")}
    first["node/0"] = socket.gethostname()  # others ask for it before this rank has a heartbeat
    for key, value in first.items():
        store.set(key, value)
    return store


def _connect(address: str, port: int) -> "TCPStore":
    from torch.distributed import TCPStore

    return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=PATIENCE_SECONDS))
