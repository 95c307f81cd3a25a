"""No reader of the project meets a broken file with anything but success or one sentence.

The sweep runs in a process of its own, whose memory is bounded: a reader that believes what a file
says of its size fails it, and so does a library that ends the process.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.readable_artifacts import READERS, Reader

SUPPORT = Path(__file__).parents[1] / "support"

Results = dict[str, Any]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("sweep")
    done = subprocess.run(
        [sys.executable, "-m", "support.readers_sweep", str(folder), str(folder / "results.json")],
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        timeout=1800,
        cwd=SUPPORT.parent,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: Results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_a_broken_file_gives_one_sentence_or_success(reader: Reader, results: Results) -> None:
    found = results[reader.name]
    assert not found["failures"], "\n".join(found["failures"][:20])
    assert found["cases"] >= 50
    assert found["refused"] > found["cases"] / 10, "is the broken file read at all?"
