"""The run folder of finished training is removed, however that is cut short, and nothing else."""

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from support.corpora import writing
from support.folder_listing import names_in
from support.lock_holders import elsewhere, leave

from pipeline.artifacts.artifact import Kind, open_artifact
from pipeline.artifacts.locks import Owner, exclusive, lock_path, sole_writer
from pipeline.artifacts.manifest import MARKER_NAME, run_dir
from pipeline.artifacts.places import replaced_dir, unfinished_dir
from pipeline.artifacts.run_folders import (
    announce_removal,
    claim_run_folder,
    finish_removal,
    newest_state,
    remove_contents,
    remove_emptied,
    stacks_dir,
    why_not_to_go_on,
    withdraw_removal,
)
from pipeline.config.recipe import DECIDE_NOTHING, DECIDE_WHICH_WEIGHTS, Recipe

CONFIG = {"training": {"updates": 6}}
KILLED = 9
"""Exit code of a process that ended on its way."""


def write_stacks(folder: Path) -> None:
    """As a watchdog does, which may come before the folder is claimed."""
    stacks_dir(folder).mkdir(parents=True)
    for name in ("rank-0.txt", "rank-1.txt"):
        (stacks_dir(folder) / name).write_text("Thread 0x1:\n")


def make_run(out_dir: Path, *, config: dict[str, Any] = CONFIG) -> Path:
    """A finished model, and its run folder, whose removal was announced and not begun."""
    folder = run_dir(out_dir)
    claim_run_folder(folder, work="training")
    kinds: dict[str, Kind] = {
        "states/update-0000004": "training_state",
        "states/update-0000006": "training_state",
        "best": "checkpoint",
    }
    for name, kind in kinds.items():
        with writing(folder / name, kind, "pretrain", config=config) as writer:
            writer.path("optimizer/part").write_text(name)
    (folder / "states" / ".update-0000002.unfinished" / "optimizer").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("{}\n")
    write_stacks(folder)
    with writing(out_dir, "checkpoint", "pretrain", config=config) as writer:
        writer.path("weights/part").write_text("weights")
    announce_removal(folder, key=open_artifact(out_dir, kind="checkpoint").manifest.key)
    return folder


def remove(out_dir: Path) -> None:
    """As training does at its end."""
    folder = run_dir(out_dir)
    with sole_writer(out_dir):
        remove_contents(folder)
        assert remove_emptied(folder) is None


def remove_until_killed(out_dir: Path, number: int) -> bool:
    """A process that removes, and ends after so many unlinked files and folders; whether it did."""
    child = os.fork()
    if child == 0:
        try:
            left = count(number, -1)
            for name in ("unlink", "rmdir"):
                setattr(os, name, _ending_process(getattr(os, name), left=left))
            remove(out_dir)
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, KILLED)
    return code == KILLED


def _ending_process(original: Callable[..., None], *, left: Iterator[int]) -> Callable[..., None]:
    def call(*args: Any, **kwargs: Any) -> None:
        if next(left) == 0:
            os._exit(KILLED)
        original(*args, **kwargs)

    return call


@pytest.mark.slow
def test_a_removal_killed_at_any_point_is_finished_by_the_next_start(tmp_path: Path) -> None:
    make_run(tmp_path / "template" / "model")
    for number in count():
        out_dir = tmp_path / str(number) / "model"
        folder = run_dir(out_dir)
        shutil.copytree(tmp_path / "template", out_dir.parent)
        killed = remove_until_killed(out_dir, number)
        assert finish_removal(out_dir) is None
        if folder.exists():  # nothing but what any run folder begins with: the next one's
            assert {path.name for path in folder.iterdir()} <= {MARKER_NAME}
            claim_run_folder(folder, work="training")
        open_artifact(out_dir, kind="checkpoint").check()
        if not killed:
            break
    assert number > 12, "three artifacts, curves, note, marker and folders"
    assert not folder.exists()
    assert names_in(out_dir.parent) == ["model"]


@pytest.mark.parametrize("is_signed", [True, False])
def test_what_a_kill_left_next_to_a_finished_output_goes(tmp_path: Path, is_signed: bool) -> None:
    """The lock of a process that has ended, what the output replaced, and a work folder."""
    out_dir = tmp_path / "out"
    with writing(out_dir, "corpus", "x") as writer:
        writer.path("new.txt").touch()
    lock_path(out_dir).mkdir()
    if is_signed:
        leave(lock_path(out_dir), replace(Owner.new(), started="1"))
    shutil.copytree(out_dir, replaced_dir(out_dir))
    unfinished_dir(out_dir, token="0" * 8).mkdir()
    assert finish_removal(out_dir) is None
    assert names_in(tmp_path) == ["out"]


def test_a_replaced_output_without_its_replacement_stays(tmp_path: Path) -> None:
    with writing(tmp_path / "out", "corpus", "x") as writer:
        writer.path("text.txt").touch()
    (tmp_path / "out").rename(replaced_dir(tmp_path / "out"))
    assert finish_removal(tmp_path / "out") is None
    assert open_artifact(replaced_dir(tmp_path / "out"), kind="corpus").names() == ["text.txt"]


def test_the_lock_of_a_live_process_stays_next_to_a_finished_output(tmp_path: Path) -> None:
    with writing(tmp_path / "out", "corpus", "x") as writer:
        writer.path("text.txt").touch()
    for owner in (Owner.new(), elsewhere()):
        lock = leave(lock_path(tmp_path / "out"), owner)
        assert finish_removal(tmp_path / "out") is None
        assert lock.exists()


@pytest.mark.parametrize(
    "place", ["notes.txt", "mine/notes.txt", "states/notes.txt", "states/update-0000004/notes.txt"]
)
def test_what_training_did_not_write_stays_and_is_named(tmp_path: Path, place: str) -> None:
    folder = make_run(tmp_path / "model")
    (folder / place).parent.mkdir(exist_ok=True)
    (folder / place).write_text("mine")
    problem = finish_removal(tmp_path / "model")
    assert problem is not None
    assert problem.startswith(f"{folder} is removed but for ")
    assert "which the stage did not write: move it away." in problem
    assert (folder / place).read_text() == "mine"
    assert not (folder / "states" / "update-0000006").exists()
    assert (folder / "states" / "update-0000004").exists() == ("update" in place)
    assert finish_removal(tmp_path / "model") is None, "it was said"


def test_a_link_in_a_run_folder_is_not_followed(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "model")
    elsewhere = make_run(tmp_path / "other")
    (folder / "states" / "update-0000008").symlink_to(elsewhere / "states" / "update-0000006")
    problem = finish_removal(tmp_path / "model")
    assert problem is not None
    assert "states/update-0000008" in problem
    open_artifact(elsewhere / "states" / "update-0000006", kind="training_state").check()


@pytest.mark.parametrize(
    "change",
    [
        lambda out_dir: withdraw_removal(run_dir(out_dir)),
        # As where training of more updates was killed before it had published its model.
        lambda out_dir: announce_removal(run_dir(out_dir), key="f" * 64),
        lambda out_dir: (out_dir / "manifest.json").unlink(),
    ],
    ids=["withdrawn", "for another model", "unpublished"],
)
def test_a_folder_without_its_model_stays(tmp_path: Path, change: Callable[[Path], None]) -> None:
    folder = make_run(tmp_path / "model")
    change(tmp_path / "model")
    assert finish_removal(tmp_path / "model") is None
    for update in (4, 6):
        state = folder / "states" / f"update-{update:07d}"
        open_artifact(state, kind="training_state").check()


@pytest.mark.parametrize("reader", ["run_folders.open_artifact", "manifest.read_bytes"])
def test_a_state_that_is_removed_while_it_is_read_counts_as_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: str
) -> None:
    folder = make_run(tmp_path / "model")
    module, _, name = reader.partition(".")
    read = getattr(import_module(f"pipeline.artifacts.{module}"), name)

    def remove_newest_and_read(path: Path, **options: Any) -> Any:
        if "update-0000006" in path.parts:
            shutil.rmtree(folder / "states" / "update-0000006")
        return read(path, **options)

    monkeypatch.setattr(f"pipeline.artifacts.{reader}", remove_newest_and_read)
    state = newest_state(folder)
    assert state is not None
    assert state.directory.name == "update-0000004"


def test_a_removal_that_cannot_be_done_is_said_in_one_sentence(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "model")
    with exclusive(lock_path(tmp_path / "model"), what="the model"):
        problem = finish_removal(tmp_path / "model")
    assert problem is not None
    assert problem.startswith(f"{folder} is of no more use, and could not be removed: ")
    assert finish_removal(tmp_path / "model") is None
    assert not folder.exists()


def test_a_folder_in_which_only_a_watchdog_has_written_is_claimed(tmp_path: Path) -> None:
    folder = run_dir(tmp_path / "out")
    write_stacks(folder)
    claim_run_folder(folder, work="training")
    assert remove_emptied(folder) is None
    assert not folder.exists()


CHANGES: dict[str, Any] = {
    **{"training.checkpoint_every": 7, "training.expert_parallel_size": 2, "training.keep_last": 3},
    **{"training.recompute_layers": True, "training.resource_thresholds": [10, 20]},
    **{"training.skip_nonfinite_after": 5, "batches.evaluation_tokens": 512},
    **{"training.average_last": 2, "training.patience": 3, "training.validate_every": 7},
}


OTHER_RUNS: list[tuple[dict[str, Any], str]] = [
    ({"dropout": 0.5}, "dropout: 0.3 → 0.5"),
    # The stored perplexity is of other pairs, or of another route.
    ({"best_by": "low"}, "best_by: all → low"),
    ({"best_by_route": "shared"}, "best_by_route: specific → shared"),
]


@pytest.mark.parametrize("name", sorted({*CHANGES, *DECIDE_NOTHING, *DECIDE_WHICH_WEIGHTS}))
def test_a_run_goes_on_if_a_setting_changes_no_update(tmp_path: Path, name: str) -> None:
    recipe = Recipe(name="any").model_dump(mode="json")
    before = {part: recipe[part] for part in ("training", "batches")}
    section, _, setting = name.partition(".")
    after = {**before, section: {**before[section], setting: CHANGES[name]}}
    assert after != before
    state = newest_state(make_run(tmp_path / "model", config=before))
    assert state is not None
    assert why_not_to_go_on(state, config=after, digests=None) is None
    for other, change in OTHER_RUNS:
        changed = {**after, "training": {**after["training"], **other}}
        assert why_not_to_go_on(state, config=changed, digests=None) == f"training.{change}"
