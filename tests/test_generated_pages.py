"""The generated pages are those of this code, and a page that is not is named."""

import shutil
import subprocess
from pathlib import Path

import pytest
from support.forked import run_script

ROOT = Path(__file__).resolve().parents[1]
GENERATED = (
    *(f"reference/{name}.md" for name in ("commands", "settings", "recipes", "artifacts")),
    "benchmarks.md",
)


def check(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    arguments = ["--check", *options]
    return run_script(ROOT / "docs" / "generate.py", arguments, folder=folder, timeout=120)


@pytest.mark.slow
def test_the_committed_pages_are_those_of_the_code_and_the_results(tmp_path: Path) -> None:
    done = check(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_a_page_that_is_out_of_date_or_missing_is_named(tmp_path: Path) -> None:
    for name in GENERATED:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(ROOT / "docs" / name, tmp_path / name)
    settings = tmp_path / "reference" / "settings.md"
    settings.write_text(settings.read_text(encoding="utf-8").replace("warmup", "warm_up"))
    (tmp_path / "benchmarks.md").unlink()
    done = check(tmp_path, "--docs", str(tmp_path))
    assert done.returncode == 1, done.stderr
    assert done.stdout.splitlines() == [
        "docs/reference/settings.md is out of date. Run `make docs`.",
        "docs/benchmarks.md is out of date. Run `make docs`.",
    ]


def test_pages_name_no_path_of_a_machine() -> None:
    for name in GENERATED:
        text = (ROOT / "docs" / name).read_text(encoding="utf-8")
        assert str(ROOT) not in text
        assert "/home/" not in text
