"""No reader of the project meets a broken file with anything but success or one sentence.

The sweep runs in a process of its own whose memory is bounded: a reader that believes what a file
says of its size fails it, and so does a library that ends the process.
"""

import json
from typing import Any

import pytest
from support.readable_artifacts import READERS, Reader
from support.sweep_process import Sweep

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

Results = dict[str, Any]


@pytest.fixture(scope="module")
def results(sweep: Sweep) -> Results:
    errors = sweep.wait(timeout_seconds=1700)
    assert sweep.process.returncode == 0, errors[-3000:]
    found: Results = json.loads(sweep.results_path.read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_a_broken_file_gives_one_sentence_or_success(
    reader: Reader, results: Results, sweep: Sweep
) -> None:
    found = results[reader.name]
    assert not found["failures"], "\n".join(found["failures"][:20])
    assert found["cases"] >= 50 / sweep.one_in / 2, "the sample may hold half of its share"
    assert found["refused"] > found["cases"] / 10, "is the broken file read at all?"
