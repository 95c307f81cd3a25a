"""Tell the C library to keep the memory that this process frees, on Linux.

glibc gives freed memory back to the system as soon as it can, and a training step frees as much as
it takes: the system then maps, and zeroes, the same pages at every update (``GLIBC_TUNABLES= python
tests/bench/moe_step.py`` shows the time without this module). So memory is kept once it was used,
except for large blocks, which rarely fit where a block of another size was.
"""

import ctypes
import mmap
import os
import sys
from functools import cache

OWN_MAPPING = 2**26
"""Bytes from which a block has a mapping of its own and is returned when freed, by default."""

LARGEST_KEPT = 2**28
"""Bytes from which no block is kept: too much memory would be left in pieces."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # mallopt(3)
_TRIM_AT = 2**31 - 1  # free bytes at the end of the heap: the largest number mallopt takes
_ENVIRONMENT = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory(*, block: int = 0) -> None:
    """Keep freed memory for the next step, including blocks of ``block`` bytes if not too large.

    Has no effect where the environment configures malloc, or where malloc is not glibc's.
    """
    if any(name in os.environ for name in _ENVIRONMENT):
        return
    mallopt = getattr(_libc(), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        is_kept = OWN_MAPPING <= block < LARGEST_KEPT
        mallopt(_MMAP_THRESHOLD, block + mmap.PAGESIZE if is_kept else OWN_MAPPING)
        mallopt(_TRIM_THRESHOLD, _TRIM_AT)


def prefer_large_pages(address: int, size: int) -> None:
    """Map a block that has a mapping of its own in large pages, where the system has them."""
    if size >= OWN_MAPPING and sys.platform == "linux":
        start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        length = ctypes.c_size_t(address + size - start)
        _libc().madvise(ctypes.c_void_p(start), length, mmap.MADV_HUGEPAGE)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
