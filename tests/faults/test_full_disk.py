"""A full disk at any write of ours: one sentence, and what was there before is kept."""

import errno
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.folder_listing import names_in
from support.raw_trees import write
from support.state_changes import TAKING_ROOM, seeing
from support.tiny_plan import PLAN, RAW, RECIPE, in_this_process

from pipeline import cli
from pipeline.artifacts.artifact import new_artifact, open_artifact
from pipeline.artifacts.raw_input import RawInput
from pipeline.config.documents import JsonLines
from pipeline.distributed.world import LOOPBACK, World
from pipeline.errors import EXIT_USER_ERROR, ArtifactError, UserError
from pipeline.jobs.plan import load_plan, resolve_plan
from pipeline.jobs.runner import run_plan
from pipeline.training.run_directory import RunDirectory


class Disk:
    """Counts everything that takes room below a folder; number ``fails_at`` finds none."""

    def __init__(self, root: Path) -> None:
        self.root, self.fails_at, self.counted = str(root), -1, 0
        self.failed_on = ""

    def count(self, _name: str, path: str, _half: object) -> None:
        if self.counted == self.fails_at:
            self.counted += 1
            self.failed_on = path
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        self.counted += 1


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """The disk below ``tmp_path / "disk"``."""
    root = tmp_path / "disk"
    root.mkdir()
    disk = Disk(root)
    with seeing(root, disk.count, calls=TAKING_ROOM):
        yield disk


def every_write(disk: Disk, act: Callable[[], object]) -> Iterator[Exception | None]:
    """Let each write fail in turn, each time from the beginning; None where all went well."""
    for disk.fails_at in range(500):
        disk.counted, disk.failed_on = 0, ""
        try:
            act()
        except UserError as error:
            yield error
        else:
            ended = disk.counted <= disk.fails_at
            yield None
            if ended:
                return
    pytest.fail("it never ends")


def test_every_write_of_an_artifact_can_fail(disk: Disk) -> None:
    out_dir = Path(disk.root) / "deep" / "out"

    def make(text: str) -> None:
        with new_artifact(
            out_dir, kind="corpus", stage="x", config={}, inputs={}, overwrite=True
        ) as writer:
            writer.path("deep/text.txt").write_text(text)
            writer.write_json("more.json", {})

    make("old")
    failures = 0
    for error in every_write(disk, lambda: make("new")):
        found = open_artifact(out_dir, kind="corpus")
        found.check()
        text = found.file("deep/text.txt").read_text()
        if error is not None:
            failures += 1
            assert "could not be written (No space left on device)" in str(error)
            assert text == "old"
        else:
            assert text == "new"
        assert names_in(out_dir.parent) == ["out"]
        disk.fails_at = -1
        make("old")
    assert failures >= 12


@pytest.mark.slow
def test_every_write_of_a_plan_can_fail_its_lock_file_included(
    disk: Disk, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE)
    (tmp_path / "plan.toml").write_text(PLAN.format(recipe=recipe))
    write(tmp_path / "raw", RAW)
    out_dir = Path(disk.root) / "runs"
    failed_on = set()
    codes: list[int] = []

    def run() -> None:
        shutil.rmtree(out_dir, ignore_errors=True)
        placed = resolve_plan(
            load_plan(str(tmp_path / "plan.toml")),
            out_dir=out_dir,
            given={"text": RawInput((tmp_path / "raw",))},
        )
        codes.append(run_plan(placed, launcher=in_this_process, say=lambda _: None))

    for error in every_write(disk, run):
        said = capsys.readouterr().err
        if error is not None or codes[-1:] == [EXIT_USER_ERROR]:
            sentence = str(error) if error is not None else said
            assert "No space left on device" in sentence
            assert sentence.strip().count("\n") == 0, sentence
            failed_on.add(re.sub(r"\.[0-9a-f]{8}\b", "", Path(disk.failed_on).name))
        codes.clear()
    assert {".lock", ".corpus.lock", "runs", ".clean.unfinished", "manifest.json"} <= failed_on


def test_every_write_of_a_training_runs_folder_can_fail(disk: Disk) -> None:
    out_dir = Path(disk.root) / "model"
    world = World(0, 1, 0, 1, LOOPBACK, 0)

    def save(update: int) -> RunDirectory:
        directory = RunDirectory(out_dir, stage="pretrain", config={}, inputs={}, world=world)
        with directory.locked():
            directory.resume_from()
            directory.write(
                directory.states_dir / f"update-{update:07d}",
                kind="training_state",
                write=lambda writer: writer.write_json("progress.json", {"update": update}),
            )
            directory.prune(keep_last=1)
        return directory

    save(1)
    failures = 0
    for error in every_write(disk, lambda: save(2)):
        if error is not None:
            failures += 1
            assert "no space" in str(error).lower()
        disk.fails_at = -1
        directory = RunDirectory(out_dir, stage="pretrain", config={}, inputs={}, world=world)
        state = directory.resume_from()
        assert state is not None
        state.check()
        shutil.rmtree(out_dir.parent / "model.run")
        save(1)
    assert failures >= 8


def test_a_write_no_stage_has_a_sentence_for_is_one_sentence_too(
    disk: Disk, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.fails_at = 1  # the folder is there already: making it is number 0
    lines = JsonLines(Path(disk.root) / "metrics.jsonl")
    names = "pipeline.cli.plan_commands.recipe_names"
    monkeypatch.setattr(names, lambda: lines.write({"update": 1}))
    assert cli.main(["describe"]) == EXIT_USER_ERROR
    said = capsys.readouterr().err
    assert "metrics.jsonl could not be read or written (No space left on device)" in said
    assert said.count("\n") == 1


def test_a_full_standard_output_is_said_on_standard_error() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full on this system")
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "pipeline", "describe"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=120,
        )
    assert done.returncode == EXIT_USER_ERROR
    assert "No space left on device" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("what", ["weights", "offsets"])
def test_files_that_libraries_write_find_the_disk_full_like_all_others(
    small_disk: Path, what: str
) -> None:
    import torch

    from pipeline.artifacts.shards import ShardWriter
    from pipeline.checkpoints.weights import write_weights

    out_dir = small_disk / "out"
    with new_artifact(out_dir, kind="checkpoint", stage="x", config={}, inputs={}) as writer:
        writer.path("old").write_text("old")
    with (
        pytest.raises(ArtifactError, match=r"could not be written \(No space left on device\)"),
        new_artifact(
            out_dir, kind="checkpoint", stage="x", config={}, inputs={}, overwrite=True
        ) as writer,
    ):
        if what == "weights":
            write_weights(writer.directory / "weights", [("a", torch.ones(200_000))])
        else:
            side = ShardWriter(
                writer.directory, split="train", pair="de-en", language="de", size=300
            )
            side.append([[]] * 100_000)
            side.close()
    assert open_artifact(out_dir, kind="checkpoint").file("old").read_text() == "old"
    assert not (small_disk / ".out.unfinished").exists()
