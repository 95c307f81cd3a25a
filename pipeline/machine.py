"""Inspect this machine without loading torch, and prepare a process for computing.

``visible_gpus`` counts GPUs, and ``prepare_process`` sets how a process keeps memory, how its
threads wait and how many files it may open. Only entry points (the command, the stages, the
benchmarks) call ``prepare_process``, so that importing the package changes nothing. torch is not
loaded because the command line has to start fast.

``nvidia-smi`` is called as its manual documents, and has not been called on a GPU yet.
"""

import ctypes
import io
import mmap
import os
import resource
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from itertools import takewhile
from pathlib import Path

OWN_MAPPING = 2**26
"""Default size in bytes from which a block has its own mapping and is returned when freed."""

LARGEST_KEPT = 2**28
"""Size in bytes from which no block is kept: fragmentation would waste too much memory."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # mallopt(3)
_TRIM_AT = 2**31 - 1  # free bytes at the end of the heap: the largest number mallopt takes
_ENVIRONMENT = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
BF16_CAPABILITY = 8.0
"""CUDA compute capability from which GPUs compute in bfloat16 (Ampere)."""
_ASK_SECONDS = 20.0


def installed_version() -> str:
    """Return the installed version of mmnmt; a clone can also be used without installing it."""
    try:
        return metadata.version("mmnmt")
    except metadata.PackageNotFoundError:
        return "(not installed)"


@dataclass(frozen=True)
class Gpus:
    """The GPUs that a process would see."""

    count: int
    has_bf16: bool


def visible_gpus() -> Gpus:
    """Return the GPUs of this machine, without those that ``CUDA_VISIBLE_DEVICES`` hides."""
    return gpus_of(_capabilities(), os.environ)


def gpu_names() -> list[str]:
    """Return, for each visible GPU, the ``CUDA_VISIBLE_DEVICES`` that shows no other."""
    count, named = visible_gpus().count, os.environ.get("CUDA_VISIBLE_DEVICES")
    names = map(str, range(count)) if named is None else map(str.strip, named.split(","))
    return [*names][:count]


def gpus_of(capabilities: tuple[float, ...], environment: Mapping[str, str]) -> Gpus:
    """Return the visible GPUs of a machine with these compute capabilities.

    If ``CUDA_VISIBLE_DEVICES`` lists identifiers instead of numbers, only their count is known; the
    lowest capability of the machine then stands for all of them.
    """
    seen, named = capabilities, environment.get("CUDA_VISIBLE_DEVICES")
    if named is not None and capabilities:
        names, count = [name.strip() for name in named.split(",")], len(capabilities)
        # CUDA stops at the first that is no device, as none, NoDevFiles and -1 are.
        if ids := [*takewhile(lambda name: name.startswith(("GPU-", "MIG-")), names)]:
            seen = (min(capabilities),) * min(len(ids), count)
        else:
            numbers = takewhile(lambda name: name.isdecimal() and int(name) < count, names)
            seen = tuple(capabilities[int(number)] for number in numbers)
    return Gpus(len(seen), has_bf16=bool(seen) and min(seen) >= BF16_CAPABILITY)


@cache
def _capabilities() -> tuple[float, ...]:
    """Return the compute capability of every GPU; an empty tuple without a driver."""
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
    """Return how many of the ``wanted`` processes to start: one per GPU, or all without GPUs.

    The result divides ``wanted``: expert parallelism that fits that number fits the result too.
    """
    if gpus == 0:
        return wanted
    return next(count for count in range(min(wanted, gpus), 0, -1) if wanted % count == 0)


def peak_resident_bytes() -> int | None:
    """Return the largest resident memory of this process; None if the system does not tell."""
    try:
        with Path("/proc/self/status").open(encoding="ascii") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except OSError:
        return None


SPIN_COUNT = "6000"
"""Iterations that a thread spins, about 50 µs, for the next parallel operator before it sleeps.

Sleeping at once (0) slows small models on CPU; libgomp's default takes cores from other work on the
machine."""

GPU_MEMORY = "expandable_segments:True"
"""Setting of torch's allocator on GPUs: sizes of batches differ, and segments that cannot grow
leave gaps."""
_GPU_MEMORY_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Names of its variable, as of torch 2.11 to 2.13; the second is the older one."""


def keep_freed_memory(*, block: int = 0) -> None:
    """Keep freed memory for the next step, including blocks of ``block`` bytes if not too large.

    By default, glibc returns freed memory to the system as soon as it can. A training step frees as
    much as it allocates: the system would map and zero the same pages at every update
    (``GLIBC_TUNABLES= python tests/bench/moe_step.py`` measures the time without). Memory is
    therefore kept, except for large blocks, which rarely fit into the gap of another block.

    Has no effect where the environment configures malloc, or where malloc is not glibc's.
    """
    if any(name in os.environ for name in _ENVIRONMENT):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, own_mapping_from(block))
        mallopt(_TRIM_THRESHOLD, _TRIM_AT)


def own_mapping_from(block: int) -> int:
    """Return the size from which blocks are returned when freed, if ``block`` bytes are kept."""
    return block + mmap.PAGESIZE if OWN_MAPPING <= block < LARGEST_KEPT else OWN_MAPPING


def prepare_process() -> None:
    """Set how memory is kept and how threads wait, unless the environment does.

    The limit on open files becomes the highest that this user may set: rank 0 of a large world has
    connections to all others.

    Standard output and standard error write characters that their encoding lacks as escapes, so
    that one arrow does not lose a whole table. A closed one becomes the null device: otherwise the
    next file that is opened would take its number, and get what libraries print. Call this before
    torch is imported: libgomp reads its variables when torch loads it.
    """
    # A rank that another one left warns with 40 C++ frames, in front of the line that says why.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    keep_freed_memory()
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            null = Path(os.devnull).open(mode, encoding="utf-8")  # noqa: SIM115 (stays open)
            setattr(sys, name, null)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    if not any(name in os.environ for name in _GPU_MEMORY_NAMES):
        os.environ[_GPU_MEMORY_NAMES[0]] = GPU_MEMORY
    _, highest = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # macOS: no limit, which it does not let one set
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest, highest))
