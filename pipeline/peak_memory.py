"""How much memory a piece of work takes beyond what the process holds when it begins."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
"""What makes Linux count ``VmHWM`` anew (proc(5))."""


@dataclass
class PeakMemory:
    """What a block of work took; None until it ends, and where the system does not tell."""

    num_bytes: int | None = None


@contextmanager
def peak_memory() -> Iterator[PeakMemory]:
    """Measure the block: largest resident memory within it less that at its beginning."""
    found = PeakMemory()
    try:
        _RESET.write_text(_RESET_PEAK, encoding="ascii")
        before = _resident_bytes("VmRSS")
    except OSError:
        yield found
        return
    yield found
    found.num_bytes = max(_resident_bytes("VmHWM") - before, 0)


def _resident_bytes(name: str) -> int:
    with _STATUS.open(encoding="ascii") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
