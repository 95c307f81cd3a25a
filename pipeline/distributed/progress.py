"""Count what this process has done, for threads and exits that cannot ask the loop.

A loop that is stuck in a collective or on a device cannot answer; a watchdog and the report of how
a rank ended read these counters instead.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

TICK_SECONDS = 1.0
LONGEST_BLOCK_SECONDS = 3600.0
"""How long a block that cannot count its own steps may take, before it counts as stuck."""


@dataclass
class _Counters:
    update: int | None = None
    steps: int = 0


_COUNTERS = _Counters()


def advance(update: int | None = None) -> None:
    """Note that a step is done: an update, if its number is given, or a part of other work."""
    _COUNTERS.steps += 1
    if update is not None:
        _COUNTERS.update = update


def last_update() -> int | None:
    """Return the last update that this process has made; None before the first."""
    return _COUNTERS.update


def count() -> int:
    """Return the number of steps so far."""
    return _COUNTERS.steps


@contextmanager
def advancing() -> Iterator[None]:
    """Count steps while the block runs that cannot count its own, up to a longest time."""
    is_done = threading.Event()

    def tick() -> None:
        deadline = time.monotonic() + LONGEST_BLOCK_SECONDS
        while not is_done.wait(TICK_SECONDS) and time.monotonic() < deadline:
            advance()

    ticker = threading.Thread(target=tick, name="progress", daemon=True)
    ticker.start()
    try:
        yield
    finally:
        is_done.set()
        ticker.join()
