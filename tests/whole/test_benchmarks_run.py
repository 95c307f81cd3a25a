"""Every benchmark runs, with every peer that it names: a figure that cannot be remade is worthless.

Only whether it runs is tested here; how fast it is, is never tested.
"""

from pathlib import Path

import pytest
from support.bible_lines import BIBLE
from support.forked import run_script

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
BENCHMARKS = sorted(
    path
    for path in (ROOT / "tests" / "bench").glob("*.py")
    if 'if __name__ == "__main__":' in path.read_text(encoding="utf-8")
)
NEED_BIBLE = ("data", "evaluate")


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
def test_a_benchmark_runs_beside_all_of_its_peers(path: Path, tmp_path: Path) -> None:
    if path.stem in NEED_BIBLE and not BIBLE.is_dir():
        pytest.skip(f"{BIBLE} is missing: {path.name} measures on its lines.")
    done = run_script(path, ["--quick"], folder=tmp_path, timeout=400)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert "left out" not in done.stdout + done.stderr
    assert done.stdout.strip(), "it prints what it measured"
