"""A clock that is set back, and file locks that are missing, change nothing."""

import os
import time
from pathlib import Path

import pytest
from support.crash_points import names_below
from support.tiny_plan import PLAN, RAW, RECIPE, in_this_process

from pipeline.artifacts import artifact
from pipeline.artifacts.artifact import read_manifest
from pipeline.artifacts.raw_input import RawInput
from pipeline.jobs.plan import load_plan, resolve_plan
from pipeline.jobs.runner import run_plan

HOUR = 3600


def run(folder: Path) -> tuple[int, list[str]]:
    """Run a plan of two stages; return its exit code and what it said."""
    said: list[str] = []
    placed = resolve_plan(
        load_plan(str(folder / "plan.toml")),
        out_dir=folder / "runs",
        given={"text": RawInput((folder / "raw",))},
    )
    return run_plan(placed, launcher=in_this_process, say=said.append), said


@pytest.fixture
def plan_folder(tmp_path: Path) -> Path:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    (tmp_path / "plan.toml").write_text(PLAN.format(recipe=tmp_path / "recipe.toml"))
    for name, text in RAW.items():
        (tmp_path / "raw" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "raw" / name).write_text(text)
    return tmp_path


def set_forward(folder: Path, seconds: float) -> None:
    """Give all files the times that they would have had the clock been ahead."""
    for path in folder.rglob("*"):
        status = path.stat()
        os.utime(path, (status.st_atime + seconds, status.st_mtime + seconds))


@pytest.mark.parametrize("seconds", [HOUR, -HOUR], ids=["back", "ahead"])
def test_a_clock_that_is_set_between_the_files_and_the_manifest_makes_nothing_stale_or_changed(
    plan_folder: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    original = artifact.settle_files

    def settle(writer: artifact.ArtifactWriter, *rest: object) -> object:
        set_forward(writer.directory, seconds)
        return original(writer, *rest)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(artifact, "settle_files", settle)
        assert run(plan_folder)[0] == 0
    code, said = run(plan_folder)
    assert code == 0
    assert said[:2] == ["corpus: already done", "clean: already done"]
    assert names_below(plan_folder / "runs") >= {"corpus/manifest.json", "clean/manifest.json"}


@pytest.mark.parametrize("seconds", [HOUR, -HOUR], ids=["back", "ahead"])
def test_a_clock_that_is_set_between_two_stages_changes_no_identity(
    plan_folder: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    assert run(plan_folder)[0] == 0
    reference = read_manifest(plan_folder / "runs" / "clean")
    assert reference is not None
    (plan_folder / "runs" / "clean").rename(plan_folder / "moved")
    set_forward(plan_folder / "runs", seconds)
    set_forward(plan_folder / "raw", seconds)
    now, durations = time.time, time.monotonic
    monkeypatch.setattr(time, "time", lambda: now() - seconds)
    monkeypatch.setattr(time, "time_ns", lambda: int((now() - seconds) * 1e9))
    code, said = run(plan_folder)
    assert (code, said[0]) == (0, "corpus: already done")
    found = read_manifest(plan_folder / "runs" / "clean")
    assert found is not None
    assert (found.key, found.digest) == (reference.key, reference.digest)
    assert 0 <= found.run.wall_seconds < durations()
