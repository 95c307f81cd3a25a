"""A plan that is killed at every stage completes, with the result of one that was not."""

import time
from pathlib import Path

import pytest
from support.forked import run_command, start_command
from support.short_plan import STAGES, write_plan

from pipeline.artifacts.artifact import MANIFEST_NAME, read_manifest

pytestmark = pytest.mark.slow

ODD_NAME = 'it\'s a "plan"; $(touch made) `touch made` & more ü'
"""Of the folder of everything: a shell would run parts of it."""


def begun(out_dir: Path, stage: str) -> bool:
    """Whether a stage has written anything yet."""
    traces = (f".{stage}.*unfinished", f"{stage}.run", stage)
    return any(path for trace in traces for path in out_dir.glob(trace))


def kill_at(plan: Path, out_dir: Path, stage: str) -> bool:
    """Run until the stage shows a first sign, then kill -9; False if the plan ended before."""
    process = start_command(["run", str(plan), "--out", str(out_dir)])
    deadline = time.monotonic() + 90
    while process.is_alive() and not begun(out_dir, stage):
        assert time.monotonic() < deadline, f"{stage} never began"
        time.sleep(0.005)
    killed = process.is_alive()
    process.kill()
    process.join(timeout=30)
    return killed


@pytest.mark.timeout(600)
def test_a_plan_killed_at_every_stage_completes_with_the_same_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / ODD_NAME
    plan = write_plan(folder)
    interrupted, straight = folder / "interrupted", folder / "straight"
    killed = [stage for stage in STAGES if kill_at(plan, interrupted, stage)]
    assert {"dense", "tuned"} <= set(killed)
    for out_dir in (interrupted, straight):
        done = run_command(["run", str(plan), "--out", str(out_dir)])
        assert done.returncode == 0, done.stderr
    for stage in STAGES:
        weights, expected = (
            {name: one for name, one in made.files.items() if name.startswith("weights/")}
            for made in (read_manifest(out_dir / stage) for out_dir in (interrupted, straight))
            if made is not None
        )
        assert weights == expected, f"{stage} differs"
    leftovers = (".unfinished", ".run")
    assert not [path for path in interrupted.iterdir() if path.name.endswith(leftovers)]
    assert (interrupted / "evaluation" / MANIFEST_NAME).is_file()
    assert [path.name for path in tmp_path.iterdir()] == [ODD_NAME], "no shell has read the name"
