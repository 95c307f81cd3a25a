"""What this machine has, asked without loading torch: the command line wants to start fast.

Not yet run on a GPU: ``nvidia-smi`` is asked as its manual says.
"""

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

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
