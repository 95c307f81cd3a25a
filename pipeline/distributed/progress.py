"""Count what this process has done, for threads and exits that cannot ask the loop.

A loop that is stuck in a collective or on a device cannot answer; a watchdog and the report of how
a rank ended read these counters instead.
"""

from dataclasses import dataclass


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
