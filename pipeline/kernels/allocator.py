"""Configure glibc to keep memory that this process frees, on Linux.

By default, glibc returns freed memory to the system as soon as it can. A training step frees as
much as it allocates: the system would map and zero the same pages at every update
(``GLIBC_TUNABLES= python tests/bench/moe_step.py`` measures the time without this module). Memory
is therefore kept, except for large blocks, which rarely fit into the gap of another block.
"""

import ctypes
import mmap
import os
import sys
from functools import cache

OWN_MAPPING = 2**26
"""Default size in bytes from which a block has its own mapping and is returned when freed."""

LARGEST_KEPT = 2**28
"""Size in bytes from which no block is kept: fragmentation would waste too much memory."""

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
        mallopt(_MMAP_THRESHOLD, own_mapping_from(block))
        mallopt(_TRIM_THRESHOLD, _TRIM_AT)


def own_mapping_from(block: int) -> int:
    """Return the size from which blocks are returned when freed, if ``block`` bytes are kept."""
    return block + mmap.PAGESIZE if OWN_MAPPING <= block < LARGEST_KEPT else OWN_MAPPING


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
