"""The working folder of a training run: one writer, whole states, the right one to go on from."""

import errno
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, get_args

import pytest
from support.folder_listing import names_in
from support.forked import forking
from support.lock_holders import elsewhere, leave
from support.process_pool import ProcessPool

from pipeline.artifacts import locks
from pipeline.artifacts.artifact import ArtifactWriter, InputRecord, open_artifact
from pipeline.artifacts.manifest import MARKER_NAME
from pipeline.artifacts.run_folders import Position
from pipeline.checkpoints.weights import part_prefix
from pipeline.config.recipe import Recipe
from pipeline.distributed.world import LOOPBACK, World, wait_for_all
from pipeline.errors import ArtifactError, CheckpointError
from pipeline.training.metrics import MetricsLog
from pipeline.training.run_directory import RunDirectory

ALONE = World(0, 1, 0, 1, LOOPBACK, 0)
CONFIG: dict[str, dict[str, object]] = {
    "training": {"updates": 10, "seed": 1},
    "model": {"width": 16},
}


def trained(**settings: object) -> dict[str, object]:
    """Return the configuration with changed settings of training."""
    return {**CONFIG, "training": {**CONFIG["training"], **settings}}


FULL_DISK = OSError(errno.ENOSPC, "full")
SHARDS = InputRecord(kind="shards", path="/shards", digest="a" * 64)


def run_directory(
    tmp_path: Path,
    *,
    config: Mapping[str, object] = CONFIG,
    digest: str = SHARDS.digest,
    world: World = ALONE,
) -> RunDirectory:
    return RunDirectory(
        tmp_path / "model",
        stage="pretrain",
        config=config,
        inputs={"shards": SHARDS.model_copy(update={"digest": digest})},
        world=world,
    )


def save(directory: RunDirectory, update: int) -> None:
    def write(writer: ArtifactWriter) -> None:
        writer.write_json("progress.json", {"update": update})

    directory.write(
        directory.states_dir / f"update-{update:07d}", kind="training_state", write=write
    )


def leave_best_and_metrics(directory: RunDirectory) -> None:
    directory.best_dir.mkdir(parents=True)
    directory.metrics_path.write_text("{}\n")


def resumed_update(directory: RunDirectory) -> int | None:
    state = directory.resume_from()
    return None if state is None else state.read_json("progress.json")["update"]


# ---------------------------------------------------------------- what a run goes on from


def test_a_run_goes_on_from_its_highest_complete_state(tmp_path: Path) -> None:
    directory = run_directory(tmp_path)
    assert resumed_update(directory) is None
    for update in (900, 1000, 20):
        save(directory, update)
    assert directory.state_names() == ["update-0000020", "update-0000900", "update-0001000"]
    assert resumed_update(directory) == 1000
    shutil.rmtree(directory.states_dir / "update-0001000")
    assert resumed_update(directory) == 900


@pytest.mark.parametrize("update", [10, 900])
def test_a_state_that_lost_its_manifest_is_refused_before_its_updates_are_made_again(
    tmp_path: Path, update: int
) -> None:
    directory = run_directory(tmp_path)
    for one in (10, 900):
        save(directory, one)
    state = directory.state_dir(update)
    (state / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=f"{state.name} exists .* move your files away"):
        directory.resume_from()
    state.rename(tmp_path / "away")
    assert resumed_update(directory) == 910 - update


def test_leftovers_of_a_killed_write_are_removed_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = run_directory(tmp_path)
    save(directory, 10)
    leftovers = [
        directory.states_dir / ".update-0000020.unfinished",
        directory.states_dir / ".update-0000010.replaced",
        directory.directory / ".best.unfinished",
    ]
    for leftover in leftovers:
        (leftover / "optimizer").mkdir(parents=True)
    assert resumed_update(directory) == 10
    assert not any(leftover.exists() for leftover in leftovers)
    error = capsys.readouterr().err
    assert all(f"{leftover}: unfinished, removed" in error for leftover in leftovers)


@pytest.mark.parametrize("has_state", [False, True])
def test_best_weights_and_curves_of_a_run_are_kept_if_it_has_a_state(
    tmp_path: Path, has_state: bool
) -> None:
    directory = run_directory(tmp_path)
    if has_state:
        save(directory, 10)
    leave_best_and_metrics(directory)
    assert resumed_update(directory) == (10 if has_state else None)
    assert directory.best_dir.exists() == directory.metrics_path.exists() == has_state


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "another setting": ({"seed": 2}, r"training\.seed: 1 → 2"),
    "fewer updates than are done": (
        {"updates": 9},
        r"training\.updates: 10 → 9, where 10 are done",
    ),
    "a setting more": ({"dropout": 0.25}, r"training\.dropout: 0\.3 → 0\.25"),
    "another input": ({}, "shards: a{64} → b{64}"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_state_of_another_run_is_refused_with_the_difference_and_kept(
    tmp_path: Path, other: str
) -> None:
    change, words = OTHERS[other]
    directory = run_directory(tmp_path)
    save(directory, 10)
    leave_best_and_metrics(directory)
    digest = SHARDS.digest if change else "b" * 64
    changed = run_directory(tmp_path, config=trained(**change), digest=digest)
    with pytest.raises(CheckpointError, match=rf"\({words}\)\. .* or pass --overwrite"):
        changed.resume_from()
    assert resumed_update(directory) == 10
    assert directory.best_dir.exists()
    assert directory.metrics_path.exists()


@pytest.mark.parametrize(
    "config",
    [
        {**CONFIG, "ds_config": {"zero_optimization": {"stage": 2}}},
        trained(expert_parallel_size=4),
        trained(checkpoint_every=4, keep_last=9),
        trained(validate_every=4),
    ],
    ids=["ds_config", "expert_parallel_size", "states", "validation"],
)
def test_a_run_goes_on_where_only_its_machine_or_intervals_changed(
    tmp_path: Path, config: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    save(run_directory(tmp_path), 10)
    assert resumed_update(run_directory(tmp_path, config=config)) == 10
    assert capsys.readouterr().err == ""


FP32, FP16 = ({"fp16": {"enabled": has_fp16}} for has_fp16 in (False, True))
BF16 = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        (FP32, BF16, "in bf16 (gradients accumulated in fp32) instead of fp32 (gra"),
        (BF16, {}, "in fp32 (gradients accumulated in fp32) instead of bf16 (gra"),
        (BF16, BF16 | {"data_types": {}}, "in bf16 (gradients accumulated in bf16) instead of bf"),
        (FP32, FP16, "in fp16 (gradients accumulated in fp16) instead of fp32"),
        (FP32, {}, ""),
    ],
)
def test_a_run_that_goes_on_in_another_precision_says_so(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    before: dict[str, Any],
    now: dict[str, Any],
    said: str,
) -> None:
    save(run_directory(tmp_path, config={**CONFIG, "ds_config": before}), 6)
    assert resumed_update(run_directory(tmp_path, config={**CONFIG, "ds_config": now})) == 6
    error = capsys.readouterr().err
    assert (f": goes on after update 6 {said}" in error) if said else not error
    assert error.count("\n") == bool(said)


@pytest.mark.parametrize(
    ("schedule", "unit", "said"),
    [
        *(
            ("polynomial", unit, "schedule of the learning rate ends at the new number\n")
            for unit in ("bytes", "dense")
        ),
        (
            "polynomial",
            "tokens",
            "the polynomial schedule of the learning rate ends at the new number: at update 7 the "
            "rate is 0.0155 instead of 0.01",
        ),
        (
            "inverse_sqrt",
            "bytes",
            "inverse_sqrt schedule of the learning rate does not depend on them",
        ),
    ],
)
def test_more_updates_go_on_and_what_becomes_of_the_learning_rate_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], schedule: str, unit: str, said: str
) -> None:
    """The rates of a model that makes another number of updates than the recipe are not known."""
    rates = {"learning_rate": 0.02, "final_learning_rate": 0.005, "warmup_updates": 4}
    shorter, longer = (
        {**trained(updates=updates, updates_of=unit), "optimizer": {"schedule": schedule, **rates}}
        for updates in (10, 14)
    )
    save(run_directory(tmp_path, config=shorter), 6)
    assert resumed_update(run_directory(tmp_path, config=longer)) == 6
    (line,) = capsys.readouterr().err.splitlines(keepends=True)
    of_unit = "" if unit == "tokens" else f" of {unit}"
    assert f"goes on after update 6 to 14 updates{of_unit} instead of 10; " in line
    assert said in line


def test_the_kept_weights_may_be_of_a_later_validation_than_the_last_state(tmp_path: Path) -> None:
    directory = run_directory(tmp_path)
    assert directory.best_after(0) == {}

    def write(writer: ArtifactWriter) -> None:
        writer.statistics.update(update=8, perplexity=3.5)

    directory.write(directory.best_dir, kind="checkpoint", write=write)
    assert directory.best_after(9) == {}
    for update in (8, 7):  # a stop in the validation after update 8 saves a state that lacks it
        assert directory.best_after(update) == {"best_update": 8, "best_perplexity": 3.5}


# ---------------------------------------------------------------- one writer at a time


def hold(connection: Connection, tmp_path: Path) -> None:
    with run_directory(tmp_path).locked():
        connection.send("held")
        connection.recv()


@pytest.mark.slow
def test_a_second_run_is_refused_with_the_holders_name_until_the_first_is_dead(
    tmp_path: Path,
) -> None:
    ours, theirs = forking().Pipe()
    holder = forking().Process(target=hold, args=(theirs, tmp_path), daemon=True)
    holder.start()
    try:
        assert ours.recv() == "held"
        directory = run_directory(tmp_path)
        refusal = pytest.raises(ArtifactError, match=f"written by process {holder.pid} on ")
        with refusal, directory.locked():
            pytest.fail("two runs hold one folder")
    finally:
        holder.kill()
        holder.join(30)
    with directory.locked():
        pass


def test_the_lock_is_released_after_an_error(tmp_path: Path) -> None:
    directory = run_directory(tmp_path)
    with pytest.raises(ZeroDivisionError), directory.locked():
        raise ZeroDivisionError
    with run_directory(tmp_path).locked():
        pass


# ---------------------------------------------------------------- writing together


def write_with_others(
    world: World, tmp_path: Path, failing: tuple[int, Exception | bytes] | None
) -> list[str]:
    """Every rank adds a file; the failing rank meets an error, or has more to write."""
    directory = run_directory(tmp_path, world=world)

    def write(writer: ArtifactWriter) -> None:
        path = writer.path(f"optimizer/{part_prefix(world.rank)}000")
        fault = failing[1] if failing is not None and world.rank == failing[0] else None
        if fault is None:
            path.write_text(str(world.rank))
        wait_for_all()  # the disk has room for the files of the others
        if isinstance(fault, Exception):
            raise fault
        if fault is not None:
            path.write_bytes(fault)

    with directory.locked():
        directory.write(directory.states_dir / "update-0000001", kind="training_state", write=write)
        state = directory.resume_from()
    assert state is not None
    state.check()
    return state.names()


def failure_of(
    world: World,
    tmp_path: Path,
    failing: tuple[int, Exception | bytes] | None,
    wanted: type[Exception],
) -> str:
    with pytest.raises(wanted) as caught:
        write_with_others(world, tmp_path, failing)
    return str(caught.value)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("place", "fault"), [("tmp_path", FULL_DISK), ("small_disk", bytes(2**20))], ids=["", "real"]
)
def test_a_full_disk_on_one_rank_is_an_error_on_all_and_keeps_the_old_state(
    request: pytest.FixtureRequest,
    pool2: ProcessPool,
    rank: int,
    place: str,
    fault: Exception | bytes,
) -> None:
    tmp_path = request.getfixturevalue(place)
    pool2.run(write_with_others, tmp_path, None)
    messages = pool2.run(failure_of, tmp_path, (rank, fault), ArtifactError)
    assert messages[0] == messages[1]
    assert f"rank {rank}: no space is left" in messages[0]
    assert "no space is left; make room" in messages[0]
    assert "run again" in messages[0]
    states = tmp_path / "model.run" / "states"
    assert names_in(states) == ["update-0000001"]
    open_artifact(states / "update-0000001", kind="training_state").check()


def test_a_refusal_found_by_rank_zero_is_raised_on_all_ranks(
    pool2: ProcessPool, tmp_path: Path
) -> None:
    earlier = run_directory(tmp_path, config={"training": {"updates": 99}})
    with earlier.locked():
        save(earlier, 5)
    messages = pool2.run(failure_of, tmp_path, None, CheckpointError)
    assert messages[0] == messages[1]
    assert "other settings or inputs (model.width: 1024 → " in messages[0]


@pytest.mark.parametrize("rank", [0, 1])
def test_any_other_error_on_one_rank_is_an_error_on_all_that_says_what_it_was(
    pool2: ProcessPool, tmp_path: Path, rank: int
) -> None:
    failing = (rank, KeyError("no such tensor"))
    messages = pool2.run(failure_of, tmp_path, failing, ArtifactError)
    assert messages[0] == messages[1]
    assert "no such tensor" in messages[0]
    assert f"rank {rank}" in messages[0]


def write_slowly(world: World, tmp_path: Path, in_background: bool) -> tuple[bool, list[str]]:
    """Rank 1 writes to a temporary name, as safetensors does, while rank 0 is done already.

    Return whether the state was there while rank 1 was still writing, and its files at the end.
    """
    directory = run_directory(tmp_path, world=world)

    def write(writer: ArtifactWriter) -> None:
        path = writer.path(f"optimizer/{part_prefix(world.rank)}000")
        temporary = path.with_name(".tmpAbCdEf") if world.rank else path
        temporary.write_text(str(world.rank))
        if not in_background:
            wait_for_all()
        time.sleep(0.5 * world.rank)
        temporary.rename(path)

    out_dir = directory.states_dir / "update-0000001"
    directory.write(out_dir, kind="training_state", write=write, in_background=in_background)
    directory.publish_written()
    early = in_background and out_dir.exists()
    directory.wait()
    state = open_artifact(out_dir, kind="training_state")
    state.check()
    return early, state.names()


@pytest.mark.parametrize("in_background", [False, True])
def test_a_state_appears_when_all_ranks_are_done_and_none_takes_unfinished_files_of_another(
    pool2: ProcessPool, tmp_path: Path, in_background: bool
) -> None:
    names = ["optimizer/part-00000-000", "optimizer/part-00001-000"]
    assert pool2.run(write_slowly, tmp_path, in_background) == [(False, names)] * 2


# ---------------------------------------------------------------- attempts that were given up


@pytest.mark.parametrize("how", ["taken by another", "removed"])
def test_a_run_whose_lock_is_lost_publishes_removes_and_logs_nothing(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "LATE_SECONDS", 0.1)
    directory = run_directory(tmp_path)
    events: list[tuple[str, float, int]] = []
    log = MetricsLog(
        directory.metrics_path, Recipe(name="any"), world=ALONE, write_events=events.extend
    )
    with directory.locked():
        save(directory, 5)
        save(directory, 6)
        lock = tmp_path / ".model.lock"
        if how == "removed":
            shutil.rmtree(lock)
        else:
            leave(lock, elsewhere(), generation=2)
        actions: list[Callable[[], None]] = [
            lambda: save(directory, 10),
            lambda: directory.prune(keep_last=1),
            lambda: directory.announce_removal(key="k"),
            directory.remove_mean,
            directory.remove,
            lambda: log.write_validation({}, Position(update=7)),
        ]
        for action in actions:
            with pytest.raises(ArtifactError, match=r"process 1 on node7|its lock is gone"):
                action()
    assert directory.state_names() == ["update-0000005", "update-0000006"]
    assert names_in(directory.states_dir) == directory.state_names()
    assert not directory.metrics_path.exists()
    assert not events


def suspended_attempt(connection: Connection, tmp_path: Path) -> None:
    """Attempt 0 of a job: it stands still in the middle of a write, and goes on when told."""
    os.environ["MMNMT_ATTEMPT"] = "7.0"
    directory = run_directory(tmp_path)

    def write(writer: ArtifactWriter) -> None:
        writer.path("optimizer/part-00000-000").write_text("orphan")
        connection.send("writing")
        connection.recv()
        writer.path("optimizer/part-00000-001").write_text("orphan")

    with directory.locked():
        directory.resume_from()
        try:
            directory.write(directory.state_dir(1), kind="training_state", write=write)
        except ArtifactError as error:
            connection.send(str(error))


@pytest.mark.slow
def test_an_orphan_that_wakes_up_within_a_write_neither_publishes_nor_reaches_the_next_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = forking().Pipe()
    orphan = forking().Process(target=suspended_attempt, args=(theirs, tmp_path), daemon=True)
    orphan.start()
    theirs.close()
    assert ours.poll(60)
    assert ours.recv() == "writing"
    monkeypatch.setenv("MMNMT_ATTEMPT", "7.1")
    directory = run_directory(tmp_path)

    def write(writer: ArtifactWriter) -> None:
        writer.path("optimizer/part-00000-000").write_text("new")
        ours.send("go on")
        assert ours.poll(60)
        assert "attempt 7.1)" in ours.recv()
        orphan.join(60)

    with directory.locked():
        assert resumed_update(directory) is None
        directory.write(directory.state_dir(1), kind="training_state", write=write)
    assert orphan.exitcode == 0
    state = open_artifact(directory.state_dir(1), kind="training_state")
    state.check()
    assert state.names() == ["optimizer/part-00000-000"]
    assert state.file("optimizer/part-00000-000").read_text() == "new"
    assert names_in(directory.states_dir) == ["update-0000001"]
    assert names_in(directory.directory) == [MARKER_NAME, "states"]


Moment = Literal["before", "within", "rank 1 alone"]


def write_while_another_takes_the_lock(world: World, tmp_path: Path, moment: Moment) -> str:
    """Return the error of a write during which another process takes the lock."""
    directory = run_directory(tmp_path, world=world)

    def write(writer: ArtifactWriter) -> None:
        writer.path(f"optimizer/{part_prefix(world.rank)}000").write_text(str(world.rank))
        if moment == "within":
            take()

    def take() -> None:
        if world.rank == 1:
            leave(tmp_path / ".model.lock", elsewhere(), generation=2)
        wait_for_all()

    with directory.locked():
        if moment == "before":
            take()
        elif moment == "rank 1 alone" and world.rank == 1:
            assert directory._lock is not None
            leave(tmp_path / "seen", elsewhere(), generation=2)
            directory._lock = replace(directory._lock, path=tmp_path / "seen")
        with pytest.raises(ArtifactError) as caught:
            directory.write(directory.state_dir(1), kind="training_state", write=write)
        wait_for_all()
    return str(caught.value)


@pytest.mark.parametrize("moment", get_args(Moment))
def test_every_rank_sees_that_the_lock_is_lost_and_all_stop_with_the_same_error(
    pool2: ProcessPool, tmp_path: Path, moment: Moment
) -> None:
    messages = pool2.run(write_while_another_takes_the_lock, tmp_path, moment)
    assert messages[0] == messages[1]
    rank = 1 if moment == "rank 1 alone" else 0
    assert f"(rank {rank}: it is being written by process 1 on node7 " in messages[0]
    states = tmp_path / "model.run" / "states"
    assert not states.exists() or names_in(states) == []
