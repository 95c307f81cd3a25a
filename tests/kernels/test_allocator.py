"""Tests of the allocator, in processes of their own: malloc is set for a whole process."""

import ctypes
import mmap
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from pipeline.kernels.allocator import LARGEST_KEPT, OWN_MAPPING, prefer_large_pages

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
    keep = (
        f"from pipeline.kernels.allocator import keep_freed_memory; keep_freed_memory(block={size})"
    )
    assert share_taken_again(size, settings=AS_AN_ENTRY_POINT) > 0.9
    assert share_taken_again(size, settings=keep) < 0.05
    too_large = keep.replace(str(size), str(LARGEST_KEPT))
    assert share_taken_again(LARGEST_KEPT, settings=too_large) > 0.9


def test_malloc_stays_as_the_environment_has_it() -> None:
    environment = {"MALLOC_TRIM_THRESHOLD_": "131072"}
    share = share_taken_again(2**24, settings=AS_AN_ENTRY_POINT, environment=environment)
    assert share > 0.9


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="no large pages in this kernel"
)
@pytest.mark.parametrize(("size", "wanted"), [(OWN_MAPPING, True), (OWN_MAPPING // 2, False)])
def test_large_pages_are_asked_for_where_a_block_has_a_mapping_of_its_own(
    size: int, wanted: bool
) -> None:
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as block:
        view = ctypes.c_char.from_buffer(block)
        address = ctypes.addressof(view)
        prefer_large_pages(address, size)
        flags = flags_of_mapping(address)
        del view
    assert ("hg" in flags) == wanted


def flags_of_mapping(address: int) -> list[str]:
    """Return the kernel's flags of the mapping that an address lies in."""
    is_there = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first and not first.endswith(":"):
            start, stop = (int(end, 16) for end in first.split("-"))
            is_there = start <= address < stop
        elif is_there and first == "VmFlags:":
            return rest
    raise AssertionError(f"nothing is mapped at {address:x}")
