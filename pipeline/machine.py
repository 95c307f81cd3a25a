"""What this machine has, asked without loading torch: the command line wants to start fast.

Not yet run on a GPU: ``nvidia-smi`` is asked as its manual says.

How much memory a piece of work takes beyond what the process holds when it begins.

What an entry point sets in its process: for itself, and for what it starts.

Entry points are the command, the stages as modules of their own, and the benchmarks. Nothing else
calls this, so that whoever imports the package keeps a process as it was.
"""

import io
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pipeline.kernels.allocator import keep_freed_memory

BF16_CAPABILITY = 8.0
"""CUDA compute capability from which GPUs compute in bfloat16 (Ampere)."""
_ASK_SECONDS = 20.0


@dataclass(frozen=True)
class Gpus:
    """The GPUs a process would see."""

    count: int
    has_bf16: bool


def visible_gpus() -> Gpus:
    """GPUs of this machine, less those that ``CUDA_VISIBLE_DEVICES`` hides."""
    return gpus_of(_capabilities(), os.environ)


def gpus_of(capabilities: tuple[float, ...], environment: Mapping[str, str]) -> Gpus:
    """Of a machine with GPUs of these compute capabilities, in an environment.

    Of GPUs named by identifiers instead of numbers only their number is known, and the least of
    the machine's capabilities counts.
    """
    named = environment.get("CUDA_VISIBLE_DEVICES")
    if named is None or not capabilities:
        seen = capabilities
    else:
        names = [name.strip() for name in named.split(",") if name.strip()]
        seen = _seen(capabilities, names)
    return Gpus(len(seen), has_bf16=bool(seen) and min(seen) >= BF16_CAPABILITY)


def _seen(capabilities: tuple[float, ...], names: list[str]) -> tuple[float, ...]:
    """CUDA stops at the first name that is none of a device."""
    if all(name.isdecimal() for name in names):
        numbers = [int(name) for name in names]
        valid = next((i for i, n in enumerate(numbers) if n >= len(capabilities)), len(numbers))
        return tuple(capabilities[number] for number in numbers[:valid])
    if names[:1] == ["-1"]:
        return ()
    return (min(capabilities),) * min(len(names), len(capabilities))


@cache
def _capabilities() -> tuple[float, ...]:
    """Compute capability of every GPU of the machine; none where there is no driver."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=_ASK_SECONDS,
            check=True,
        )
        return tuple(float(line) for line in done.stdout.split())
    except (OSError, subprocess.SubprocessError, ValueError):
        return ()


def processes_here(wanted: int, *, gpus: int) -> int:
    """As many of the wanted processes as there are GPUs for, one each; all of them without GPUs.

    A divisor of the wanted number, so that it divides the micro-batches of an update, too.
    """
    if gpus == 0:
        return wanted
    return next(count for count in range(min(wanted, gpus), 0, -1) if wanted % count == 0)


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


SPIN_COUNT = "6000"
"""Threads wait for the next parallel operator, some 50 µs, before they sleep.

Sleeping at once (0) makes small models slower on CPU; waiting as long as is the default takes the
cores from whatever else the machine does.
"""


def prepare_process() -> None:
    """Say how memory is kept and how threads wait, unless the environment does.

    Standard output and standard error write characters that their encoding lacks as escapes: a
    table is not lost to one arrow in it. Threads are libgomp's, which reads its variables when
    torch loads it: to be called before.
    """
    keep_freed_memory()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
