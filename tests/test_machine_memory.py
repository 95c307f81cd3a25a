"""Tests of the allocator, in processes of their own: malloc is set for a whole process."""

import platform
import subprocess
import sys
from collections.abc import Mapping

import pytest

from pipeline.machine import LARGEST_KEPT, OWN_MAPPING

pytestmark = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="what is tested here is asked of glibc"
)

AS_AN_ENTRY_POINT = "from pipeline.machine import prepare_process; prepare_process()"

PAGES_TAKEN_AGAIN = """
import ctypes, resource, sys
{settings}
size = int(sys.argv[1])
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p

def use():
    block = ctypes.c_void_p(libc.malloc(ctypes.c_size_t(size)))
    ctypes.memset(block, 1, size)
    libc.free(block)

use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def share_taken_again(
    size: int, *, settings: str, environment: Mapping[str, str] | None = None
) -> float:
    """Return the share of a freed block's pages that the system maps anew for the next block."""
    done = subprocess.run(
        [sys.executable, "-c", PAGES_TAKEN_AGAIN.format(settings=settings), str(size)],
        env=environment or {},
        capture_output=True,
        check=True,
        timeout=60,
    )
    return int(done.stdout) / (size / 4096)


def test_what_was_freed_is_there_for_the_next_step() -> None:
    size = OWN_MAPPING // 2
    assert share_taken_again(size, settings=AS_AN_ENTRY_POINT) < 0.05
    assert share_taken_again(size, settings="") > 0.9


def test_large_blocks_go_back_to_the_system_unless_they_are_said_to_be_worth_keeping() -> None:
    size = OWN_MAPPING + 4096
    keep = f"from pipeline.machine import keep_freed_memory; keep_freed_memory(block={size})"
    assert share_taken_again(size, settings=AS_AN_ENTRY_POINT) > 0.9
    assert share_taken_again(size, settings=keep) < 0.05
    too_large = keep.replace(str(size), str(LARGEST_KEPT))
    assert share_taken_again(LARGEST_KEPT, settings=too_large) > 0.9


def test_malloc_stays_as_the_environment_has_it() -> None:
    environment = {"MALLOC_TRIM_THRESHOLD_": "131072"}
    share = share_taken_again(2**24, settings=AS_AN_ENTRY_POINT, environment=environment)
    assert share > 0.9
