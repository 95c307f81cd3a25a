"""How much memory a block of work took."""

import subprocess
import sys

import pytest

MEASURED = """
import random, sys
from pipeline.machine import peak_memory
with peak_memory() as taken:
    block = b"x" * (200 * 2**20)
    del block
print(taken.num_bytes)
with peak_memory() as taken:
    pass
print(taken.num_bytes)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts the peak anew")
def test_the_peak_of_a_block_is_what_it_holds_at_once_and_no_earlier_one() -> None:
    told = subprocess.run(
        [sys.executable, "-c", MEASURED], capture_output=True, text=True, check=True, timeout=60
    )
    within, after = map(int, told.stdout.split())
    assert 199 * 2**20 <= within < 230 * 2**20
    assert after < 20 * 2**20
