"""What the C library does with this process's memory, on Linux.

glibc gives freed memory back to the system as soon as it can, and a training step frees as much as
it takes: the system then maps, and zeroes, a hundred thousand pages per update, a third of the time
of a small model with experts. So memory is kept once it was used, save in large blocks, which
rarely fit where a block of another size was.
"""

import ctypes
import mmap
import os
import sys
from functools import cache

OWN_MAPPING = 2**26
"""Bytes from which a block is mapped for itself and returned when freed, unless said otherwise."""

LARGEST_KEPT = 2**28
"""Bytes of the largest block that is worth keeping: larger ones leave too much in pieces."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # mallopt(3)
_TRIM_AT = 2**31 - 1  # free bytes at the end of the heap: the largest number mallopt takes
_ENVIRONMENT = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory(*, largest: int = OWN_MAPPING) -> None:
    """Keep what is freed for the next step, in blocks of fewer than ``largest`` bytes.

    Without effect where the environment says what malloc shall do, and where that is not glibc's.
    """
    if any(name in os.environ for name in _ENVIRONMENT):
        return
    mallopt = getattr(_libc(), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, largest)
        mallopt(_TRIM_THRESHOLD, _TRIM_AT)


def prefer_large_pages(address: int, size: int) -> None:
    """Have a mapping of its own mapped in large pages, where the system has them.

    To have it mapped in small ones would take a third of the time of a wide layer's gradients.
    """
    if size >= OWN_MAPPING and sys.platform == "linux":
        start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        length = ctypes.c_size_t(address + size - start)
        _libc().madvise(ctypes.c_void_p(start), length, mmap.MADV_HUGEPAGE)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
