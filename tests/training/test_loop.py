"""Training from shards to a checkpoint: stopping, resuming, validating, keeping the best."""

import io
import json
import math
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, redirect_stderr
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from pydantic import TypeAdapter
from support.corpora import writing
from support.folder_listing import names_in
from support.process_pool import RankFailed
from support.stage_runs import make_call
from support.tiny_training import (
    PAIRS,
    UPDATES,
    Inputs,
    Train,
    assert_same_runs,
    changed,
    make_recipe,
    pretrain,
    read_metrics,
    read_weights,
    scripted_validations,
    sharing_passes,
    terminate_at_call,
    trainer,
)

from pipeline.artifacts.artifact import open_artifact
from pipeline.artifacts.corpus import Direction
from pipeline.artifacts.manifest import MARKER_NAME, run_dir
from pipeline.artifacts.run_folders import Position, newest_state, set_aside
from pipeline.artifacts.tokenizer import load_tokenizer
from pipeline.batching.feed import SplitData
from pipeline.checkpoints.checkpoint import load_model
from pipeline.config.recipe import Recipe
from pipeline.distributed import process
from pipeline.distributed.process import last_update
from pipeline.distributed.world import World
from pipeline.errors import ArtifactError
from pipeline.model.moe import layer
from pipeline.model.moe.capacity import expert_capacity
from pipeline.registry import STAGES
from pipeline.stages.pretrain import summarize_validation, training_data
from pipeline.training.engine import Engine, StepResult
from pipeline.training.metrics import Interval
from pipeline.training.optim import learning_rate

pytestmark = pytest.mark.slow

NO_DROPOUT: dict[str, Any] = {"dropout": 0.0, "attention_dropout": 0.0}
DONE = ["done"] * 2


@pytest.fixture(scope="module")
def train(request: pytest.FixtureRequest, inputs: Inputs) -> Train:
    return trainer(request, inputs)


@pytest.fixture(scope="module")
def straight(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run at two ranks that nothing stopped."""
    out_dir = tmp_path_factory.mktemp("straight") / "model"
    assert train(out_dir) == DONE
    return out_dir


@pytest.fixture(scope="module")
def stopped(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run at two ranks that was stopped in its second update."""
    folder = tmp_path_factory.mktemp("stopped")
    train(folder / "model", terminate_at=(0, 2))
    return folder


@pytest.fixture(scope="module")
def without_dropout(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of two runs without dropout, one of which was stopped in its second update."""
    folder, recipe = tmp_path_factory.mktemp("plain"), make_recipe(**NO_DROPOUT)
    train(folder / "straight", recipe)
    train(folder / "stopped" / "model", recipe, terminate_at=(0, 2))
    return folder


@pytest.fixture
def out_dir(tmp_path: Path) -> Path:
    return tmp_path / "model"


def lines_of(out_dir: Path, kind: str) -> list[dict[str, Any]]:
    """Return the records of a kind, with what depends on the clock and on memory."""
    lines = map(json.loads, (out_dir / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


def test_a_run_leaves_curves_of_every_update_and_validation(straight: Path) -> None:
    records = read_metrics(straight / "metrics.jsonl")
    updates = [record["update"] for record in records if record["kind"] == "train"]
    validated = [record["update"] for record in records if record["kind"] == "validation"]
    assert updates == list(range(1, UPDATES + 1))
    assert validated == [2, 4, 6]
    last = records[-1]
    assert set(last["directions"]) == {*("de-en", "en-de", "en-fr", "fr-en", "en-ru", "ru-en")}
    assert set(last["pairs"]) == set(PAIRS)
    assert set(last["resources"]) == {"high", "medium", "low"}
    assert last["perplexity"] == pytest.approx(math.exp(last["loss"]))
    first, final = records[0], [r for r in records if r["kind"] == "train"][-1]
    assert final["loss"] < first["loss"], "six updates must teach something"
    statistics = open_artifact(straight, kind="checkpoint").statistics
    assert statistics["updates"] == UPDATES
    given = statistics["deepspeed"]
    assert given["zero_optimization"]["stage"] == 1, "what DeepSpeed was given, both halves of it"
    assert given["gradient_clipping"] == make_recipe().optimizer.clip_norm


def test_the_curves_count_the_tokens_of_every_update(
    inputs: Inputs, straight: Path, tmp_path: Path
) -> None:
    data = training_data(make_call("pretrain", make_recipe(), inputs.artifacts(), tmp_path))
    steps = islice(data.planner.steps(Position().cursor), UPDATES)
    batches = [[data.train.batch(one) for one in step.micro_batches] for step in steps]
    records = lines_of(straight, "train")
    targets = [sum(len(one.labels_L) for one in of_update) for of_update in batches]
    sources = [sum(len(one.source_N) for one in of_update) for of_update in batches]
    assert [one["target_tokens"] for one in records] == targets
    assert [one["source_tokens"] for one in records] == sources
    spent = [n / one["tokens_per_second"] for one, n in zip(records, targets, strict=True)]
    assert [one["source_tokens_per_second"] for one in records] == pytest.approx(
        [tokens / seconds for tokens, seconds in zip(sources, spent, strict=True)]
    )
    assert 0 < sum(spent) < records[-1]["seconds"]


def pretrain_said(world: World, inputs: Inputs, out_dir: Path, recipe: Recipe) -> list[str]:
    """Pretrain with room for all routes after update 3; return what is printed about them."""
    process.advance(0)  # an earlier run of this process left another number

    def capacity(rows: int, **settings: Any) -> int:
        return expert_capacity(rows, **settings) if (last_update() or 0) < 3 else rows

    said = io.StringIO()
    with mock.patch.object(layer, "expert_capacity", capacity), redirect_stderr(said):
        assert pretrain(world, inputs, out_dir, recipe) == "done"
    return [line for line in said.getvalue().splitlines() if "dropped" in line]


def test_routes_beyond_a_small_capacity_are_counted_on_all_ranks_and_said(
    train: Train, straight: Path, out_dir: Path
) -> None:
    """The limit of each micro-batch, ceil(0.25 · 2 · tokens / 4), is met by few routes in four."""
    moe = make_recipe().model.moe
    assert moe is not None
    small = moe.model_copy(update={"dispatch": "capacity", "capacity_factor": 0.25})
    recipe = changed(make_recipe(**NO_DROPOUT), "model", moe=small)
    said, said_by_other = train(out_dir, recipe, by=pretrain_said)
    for record in lines_of(out_dir, "train"):
        assert set(record["routing"]) == {"encoder.layers.0", "decoder.layers.0"}
        shares = [of_layer["dropped"] for of_layer in record["routing"].values()]
        assert all(0.5 < one < 0.8 if record["update"] <= 3 else one == 0 for one in shares)
    alarms = [(one["update"], one["text"]) for one in lines_of(out_dir, "alarm")]
    dropping = [(update, text) for update, text in alarms if "dropped" in text]
    assert [update for update, _ in dropping] == [1, 4], "where it begins and where it ends"
    assert all(f"{side}coder.layers.0" in text for _, text in dropping for side in ("en", "de"))
    assert said == [f"model, update {update}: {text}" for update, text in dropping]
    assert not said_by_other
    dropless = lines_of(straight, "train")
    assert {one["dropped"] for line in dropless for one in line["routing"].values()} == {0.0}


def largest_resident() -> int:
    """The largest resident memory of this process so far, in bytes."""
    status = Path("/proc/self/status").read_text()
    (line,) = [one for one in status.splitlines() if one.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


def pretrain_beside(
    world: World, /, inputs: Inputs, out_dir: Path, recipe: Recipe, *, num_bytes: dict[int, int]
) -> tuple[int, int]:
    """Pretrain after using memory; return the largest resident memory before and after it."""
    _ = bytearray(b"1") * num_bytes[world.rank]
    before = largest_resident()
    pretrain(world, inputs, out_dir, recipe)
    return before, largest_resident()


def test_the_peak_memory_of_a_line_is_that_of_the_rank_with_the_most(
    train: Train, out_dir: Path
) -> None:
    (_, of_first), (before, after) = train(
        out_dir, make_recipe(updates=2), by=pretrain_beside, num_bytes={0: 0, 1: 2**29}
    )
    peaks = [one["peak_memory_gib"] * 2**30 for one in lines_of(out_dir, "train")]
    late = 2**20  # the kernel adds up the pages of a process's threads now and then
    assert of_first < before <= peaks[0] + late
    assert peaks[0] <= peaks[1] <= after + late


def test_source_tokens_of_a_state_without_them_are_unknown_until_the_next_line() -> None:
    """Earlier versions kept four sums; what they did not count is not made up."""
    earlier = TypeAdapter(Position).validate_python({"interval": [6.0, 1.0, 3.0, 0.5]})
    interval = Interval(earlier.interval)
    result = StepResult(torch.tensor(2.0), torch.tensor(0.0), 1, 7, 1.0, was_made=True)
    interval.add(result, seconds=0.5)
    assert len(interval.over_ranks()) == 4
    first = interval.finish()
    assert (first["loss"], first["target_tokens"]) == (2.0, 4)
    assert "source_tokens" not in first
    interval.add(result, seconds=0.5)
    assert interval.finish()["source_tokens"] == 7


def pretrain_with_clock_set_back(
    world: World, inputs: Inputs, out_dir: Path, recipe: Recipe
) -> str:
    """Pretrain; after update 2, the wall clock of this process shows an hour less."""
    process.advance(0)  # an earlier run of this process left another number
    original = time.time

    def set_back() -> float:
        return original() - 3600 * ((last_update() or 0) >= 2)

    with mock.patch.object(time, "time", set_back):
        return pretrain(world, inputs, out_dir, recipe)


def test_a_wall_clock_that_is_set_back_changes_neither_the_run_nor_its_seconds(
    train: Train, straight: Path, out_dir: Path
) -> None:
    assert train(out_dir, by=pretrain_with_clock_set_back) == DONE
    assert_same_runs(out_dir, straight, state=UPDATES)
    seconds = [one["seconds"] for one in lines_of(out_dir, "train")]
    assert [0, *seconds] == sorted({0, *seconds})
    wall = open_artifact(out_dir, kind="checkpoint").manifest.run.wall_seconds
    assert seconds[-1] <= wall < 3600


STOPS: dict[str, tuple[tuple[int, int], bool]] = {
    "in the first update, on the other rank": ((1, 1), False),
    "in the first validation": ((1, 4), False),
    "while a state is saved in the background": ((0, 9), True),
}
"""Where a run is stopped, and whether it saves in the background."""


@pytest.mark.parametrize("stop", STOPS)
def test_a_run_stopped_by_a_signal_and_resumed_is_the_same_run(
    train: Train, straight: Path, out_dir: Path, stop: str
) -> None:
    """Its wall time holds both attempts from start to end."""
    began, (terminate_at, in_background) = time.monotonic(), STOPS[stop]
    recipe = changed(make_recipe(), "saving", in_background=in_background)
    messages = train(out_dir, recipe, terminate_at=terminate_at)
    assert messages[0] == messages[1]
    assert messages[0].startswith("stopped after update ")
    assert not out_dir.exists()
    assert train(out_dir, recipe) == DONE
    assert_same_runs(out_dir, straight, state=UPDATES)
    last_update = lines_of(out_dir, "train")[-1]["seconds"]
    wall = open_artifact(out_dir, kind="checkpoint").manifest.run.wall_seconds
    assert last_update < wall <= time.monotonic() - began


def test_a_validation_whose_run_was_killed_before_the_next_state_has_one_line(
    train: Train, straight: Path, stopped: Path, tmp_path: Path
) -> None:
    """Its line is newer than the state of its update."""
    folder = shutil.copytree(stopped, tmp_path / "copy")
    lines = (straight / "metrics.jsonl").read_text().splitlines(keepends=True)
    with (folder / "model.run" / "metrics.jsonl").open("a") as stream:
        stream.write(next(line for line in lines if json.loads(line)["kind"] == "validation"))
    assert train(folder / "model") == DONE
    assert_same_runs(folder / "model", straight, state=UPDATES)


def test_a_run_stopped_between_two_lines_of_metrics_loses_no_update_of_their_means(
    train: Train, tmp_path: Path
) -> None:
    recipe = changed(make_recipe(updates=3), "logging", every=3)
    straight, stopped = (tmp_path / name for name in ("straight", "stopped"))
    train(straight, recipe, ranks=1)
    train(stopped, recipe, ranks=1, terminate_at=(0, 1))
    train(stopped, recipe, ranks=1)
    assert read_metrics(stopped / "metrics.jsonl") == read_metrics(straight / "metrics.jsonl")


def _forced_to_disk(world: World, inputs: Inputs, out_dir: Path, recipe: Recipe) -> list[str]:
    """Train; return what was forced to disk, in order."""
    found: list[str] = []
    original = os.fsync

    def note(descriptor: int) -> None:
        found.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        original(descriptor)

    with mock.patch.object(os, "fsync", note):
        assert pretrain(world, inputs, out_dir, recipe) == "done"
    return found


def test_the_lines_before_a_state_are_on_disk_before_it_is(train: Train, out_dir: Path) -> None:
    """A run resumed from the state after a power failure does not write them again."""
    recipe, run = make_recipe(updates=2, validate_every=2, checkpoint_every=1), run_dir(out_dir)
    [paths] = train(out_dir, recipe, ranks=1, by=_forced_to_disk)
    of_metrics = [at for at, path in enumerate(paths) if path == str(run / "metrics.jsonl")]
    of_states = [at for at, path in enumerate(paths) if path.startswith(str(run / "states"))]
    assert len(of_metrics) == 2
    assert of_metrics[0] < of_states[0]
    assert of_metrics[1] < of_states[-1]


def _stop_when_saved(world: World, inputs: Inputs, out_dir: Path, recipe: Recipe) -> None:
    """Die without warning after the third update: what was done since the last state is lost."""
    with mock.patch.object(Engine, "train_step", _failing_step(Engine.train_step, 4)):
        pretrain(world, inputs, out_dir, recipe)


def _failing_step(original: Any, number: int) -> Any:
    calls = 0

    def train_step(*args: Any, **kwargs: Any) -> StepResult:
        nonlocal calls
        calls += 1
        if calls == number:
            raise RuntimeError("killed")
        result: StepResult = original(*args, **kwargs)
        return result

    return train_step


def test_a_run_that_died_goes_on_from_its_last_state_and_rewrites_what_came_after(
    train: Train, straight: Path, out_dir: Path
) -> None:
    with pytest.raises(RankFailed, match="killed"):
        train(out_dir, by=_stop_when_saved)
    states = run_dir(out_dir) / "states"
    assert names_in(states) == ["update-0000002"]
    assert read_metrics(run_dir(out_dir) / "metrics.jsonl")[-1]["update"] == 3
    leftover = states / ".update-0000004.unfinished"
    (leftover / "optimizer").mkdir(parents=True)
    (leftover / "optimizer" / "part").write_bytes(b"half")
    (leftover / MARKER_NAME).touch()
    assert train(out_dir) == DONE
    assert not leftover.exists()
    assert_same_runs(out_dir, straight)


@pytest.mark.parametrize("finished", [False, True])
def test_more_updates_go_on_from_the_last_state_and_the_model_says_so(
    train: Train, straight: Path, stopped: Path, tmp_path: Path, finished: bool
) -> None:
    """Its curves are those of the earlier plan up to that state, and have the new total's rates."""
    begun = straight.parent if finished else stopped
    out_dir = shutil.copytree(begun, tmp_path / "copy") / "model"
    planned, done = UPDATES, UPDATES if finished else 2
    before = read_metrics((out_dir if finished else run_dir(out_dir)) / "metrics.jsonl")
    longer = make_recipe(updates=planned + 2)
    if not finished:  # a second stop forgets nothing of the change
        train(out_dir, longer, terminate_at=(1, 2))
    assert train(out_dir, longer, overwrite=finished) == DONE
    found = read_metrics(out_dir / "metrics.jsonl")
    kept = [record for record in before if record["update"] <= done]
    assert found[: len(kept)] == kept
    rates = {one["update"]: one["learning_rate"] for one in lines_of(out_dir, "train")}
    assert list(rates) == list(range(1, planned + 3))
    assert rates[planned + 2] == pytest.approx(
        learning_rate(longer.optimizer, planned + 2, total_updates=planned + 2)
    )
    made = open_artifact(out_dir, kind="checkpoint")
    assert made.statistics["updates"] == planned + 2
    change = {"after": done, "from": planned, "to": planned + 2}
    assert made.statistics["replanned"] == [change]
    words = "the number of updates was changed on the way"
    said = f"{words}: {planned} → {planned + 2} after update {done}"
    assert made.manifest.summary[-1] == said


def _count_updates(world: World, inputs: Inputs, out_dir: Path, recipe: Recipe) -> int:
    """Go on with a finished run; how many updates that takes."""
    with mock.patch.object(
        Engine, "train_step", autospec=True, side_effect=Engine.train_step
    ) as one:
        assert pretrain(world, inputs, out_dir, recipe, overwrite=True) == "done"
    return one.call_count


def _stop_in_update(
    world: World, inputs: Inputs, out_dir: Path, recipe: Recipe, number: int
) -> str:
    with ExitStack() as stack:
        terminate_at_call(stack, number, names=("train_step",))
        return pretrain(world, inputs, out_dir, recipe)


def test_a_finished_run_that_is_made_longer_is_the_run_that_was_as_long_from_the_start(
    train: Train, tmp_path: Path
) -> None:
    """With a schedule that does not depend on the number of updates; none is made twice."""
    shorter = changed(make_recipe(updates=2), "optimizer", schedule="inverse_sqrt")
    longer = changed(shorter, "training", updates=4)
    train(tmp_path / "straight", longer)
    train(tmp_path / "model", shorter)
    assert train(tmp_path / "model", longer, by=_count_updates) == [2, 2]
    assert_same_runs(tmp_path / "model", tmp_path / "straight", state=4)


@pytest.mark.parametrize("updates", [3, 5])
def test_a_run_stopped_in_its_last_validation_and_made_longer_keeps_that_validation(
    train: Train, inputs: Inputs, tmp_path: Path, updates: int
) -> None:
    shorter = changed(make_recipe(updates=updates), "optimizer", schedule="inverse_sqrt")
    data = training_data(make_call("pretrain", shorter, inputs.artifacts(), tmp_path / "unused"))
    of_each = len(data.validation(budget=shorter.batches.evaluation_tokens))
    in_last = updates + of_each * (updates // 2) + 2
    train(tmp_path / "straight", shorter, ranks=1)
    train(tmp_path / "model", shorter, ranks=1, terminate_at=(0, in_last))
    train(tmp_path / "model", shorter, ranks=1)
    for name in ("straight", "model"):
        longer = changed(shorter, "training", updates=updates + 1)
        train(tmp_path / name, longer, ranks=1, overwrite=True)
    assert updates in [one["update"] for one in lines_of(tmp_path / "model", "validation")]
    assert_same_runs(tmp_path / "model", tmp_path / "straight", state=updates + 1)


def test_a_run_whose_newest_state_is_damaged_is_the_same_run_after_what_it_is_told_to_do(
    train: Train, straight: Path, out_dir: Path
) -> None:
    recipe, states = make_recipe(keep_last=2), run_dir(out_dir) / "states"
    train(out_dir, recipe, by=_stop_in_update, number=3)
    assert names_in(states) == ["update-0000002", "update-0000003"]
    newest = states / "update-0000003"
    part = max((newest / "optimizer").iterdir())
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    part.write_bytes(content)
    told = rf"{part} is damaged.*move the folder {newest} away; .* resumes after update 2\."
    for _ in range(2):  # it is never taken silently
        with pytest.raises(RankFailed, match=told):
            train(out_dir, recipe)
    newest.rename(out_dir.parent / "damaged")
    assert train(out_dir, recipe) == DONE
    assert_same_runs(out_dir, straight, state=UPDATES)


def test_a_state_of_other_settings_is_refused_with_the_difference_and_kept_when_set_aside(
    train: Train, straight: Path, stopped: Path, tmp_path: Path
) -> None:
    out_dir = shutil.copytree(stopped, tmp_path / "copy") / "model"
    other = changed(make_recipe(), "optimizer", learning_rate=0.02)
    with pytest.raises(RankFailed, match=r"optimizer.learning_rate: 0.01 → 0.02.*--overwrite"):
        train(out_dir, other)
    place = set_aside(out_dir)
    assert train(out_dir) == DONE
    assert newest_state(place) is not None
    assert_same_runs(out_dir, straight)


@pytest.mark.parametrize("ranks", [3, 4])
def test_another_number_of_ranks_resumes_to_the_same_curves(
    train: Train, straight: Path, stopped: Path, tmp_path: Path, ranks: int
) -> None:
    """Of three, one has one micro-batch more."""
    out_dir = shutil.copytree(stopped, tmp_path / "copy") / "model"
    assert train(out_dir, ranks=ranks) == ["done"] * ranks
    found, expected = (read_metrics(path / "metrics.jsonl") for path in (out_dir, straight))
    for record, wanted in zip(found, expected, strict=True):
        assert set(record) == set(wanted)
        exact = {name for name in wanted if name == "update" or name.endswith("_tokens")}
        assert {name: record[name] for name in exact} == {name: wanted[name] for name in exact}
        assert record["loss"] == pytest.approx(wanted["loss"], rel=1e-4)
    assert set(read_weights(out_dir)) == set(read_weights(straight))


def test_micro_batches_that_share_a_pass_resume_bit_for_bit(
    train: Train, straight: Path, tmp_path: Path
) -> None:
    whole, out_dir, ds_config = tmp_path / "whole", tmp_path / "model", sharing_passes(tmp_path, 2)
    # Of three ranks, one has two micro-batches, in one pass, and the others have one.
    train(whole, ranks=3, ds_config=ds_config)
    train(out_dir, ranks=3, terminate_at=(2, 2), ds_config=ds_config)
    assert train(out_dir, ranks=3, ds_config=ds_config) == ["done"] * 3
    assert_same_runs(out_dir, whole)
    metrics = read_metrics(out_dir / "metrics.jsonl")
    assert metrics != read_metrics(straight / "metrics.jsonl"), "other values are dropped"


@pytest.mark.parametrize(("ranks", "per_pass"), [(1, 8), (3, 2)])
def test_a_run_goes_on_with_other_ranks_and_passes_to_the_same_curves(
    train: Train, without_dropout: Path, tmp_path: Path, ranks: int, per_pass: int
) -> None:
    straight, recipe = without_dropout / "straight", make_recipe(**NO_DROPOUT)
    out_dir = shutil.copytree(without_dropout / "stopped", tmp_path / "copy") / "model"
    ds_config = sharing_passes(tmp_path, per_pass)
    assert train(out_dir, recipe, ranks=ranks, ds_config=ds_config) == ["done"] * ranks
    found = read_metrics(out_dir / "metrics.jsonl")
    for record, wanted in zip(found, read_metrics(straight / "metrics.jsonl"), strict=True):
        assert record["loss"] == pytest.approx(wanted["loss"], rel=1e-4)
        for name in ("balance", "gradient_norm", "target_tokens", "source_tokens"):
            if wanted["kind"] == "train":
                assert record[name] == pytest.approx(wanted[name], rel=1e-3), name


# ---------------------------------------------------------------- validation


def test_an_optimizer_that_a_ds_config_offloads_learns_the_same(
    train: Train, tmp_path: Path
) -> None:
    weights = []
    for name, more in (("kept", {}), ("moved", {"offload_optimizer": {"device": "cpu"}})):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps({"zero_optimization": {"stage": 2, **more}}))
        assert train(tmp_path / name, make_recipe(updates=4), ds_config=str(path)) == DONE
        weights.append(read_weights(tmp_path / name))
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, rtol=1e-5, atol=1e-6)


def test_tampered_shards_are_not_trained_on(inputs: Inputs, tmp_path: Path) -> None:
    shutil.copytree(inputs.shards.directory, tmp_path / "shards")
    shards = open_artifact(tmp_path / "shards", kind="shards")
    path = next(shards.directory.glob("train/*/*.tokens"))
    path.write_bytes(b"\xff" * path.stat().st_size)
    call = make_call(
        "pretrain", make_recipe(), {**inputs.artifacts(), "shards": shards}, tmp_path / "model"
    )
    with pytest.raises(ArtifactError, match=rf"{path.name} is damaged"):
        training_data(call)


def test_ids_beyond_the_vocabulary_are_refused_even_where_the_manifest_says_the_same(
    inputs: Inputs, tmp_path: Path
) -> None:
    with writing(tmp_path / "shards", "shards") as writer:
        for name in inputs.shards.names():
            shutil.copyfile(inputs.shards.file(name), writer.path(name))
        for path in writer.directory.glob("valid/*/*.tokens"):
            path.write_bytes(b"\xff" * path.stat().st_size)
        writer.statistics.update(inputs.shards.statistics)
    forged = Inputs(
        open_artifact(tmp_path / "shards", kind="shards"), inputs.mixture, inputs.groups
    )
    with pytest.raises(ArtifactError, match="holds the token id 65535 where its tokenizer has"):
        next(batches_of(forged, make_recipe()))


def batches_of(inputs: Inputs, recipe: Recipe) -> Iterator[Any]:
    """Every validation line alone, in both directions."""
    data = SplitData(
        inputs.shards,
        "valid",
        tokenizer=load_tokenizer(inputs.shards.directory / "tokenizer"),
        config=recipe.batches,
    )
    for direction, plan in data.evaluation_plan(budget=1):
        assert len(plan.line_B) == 1
        yield direction, data.batch(plan)


def losses_by_hand(directory: Path, inputs: Inputs) -> dict[str, tuple[float, int]]:
    """Direction → summed cross entropy and labels of a checkpoint, sentence by sentence."""
    model = load_model(open_artifact(directory, kind="checkpoint")).eval()
    losses: dict[str, tuple[float, int]] = {}
    for direction, batch in batches_of(inputs, make_recipe()):
        with torch.no_grad():
            logits = model(batch).logits_LV
        loss = F.cross_entropy(logits, batch.labels_L, reduction="sum").item()
        before = losses.get(str(direction), (0.0, 0))
        losses[str(direction)] = (before[0] + loss, before[1] + len(batch.labels_L))
    return losses


def test_the_checkpoint_is_the_one_of_the_lowest_validation_perplexity(
    inputs: Inputs, train: Train, out_dir: Path
) -> None:
    recipe = make_recipe(validate_every=1, checkpoint_every=100)
    recipe = changed(
        recipe, "optimizer", learning_rate=0.6, final_learning_rate=0.6, warmup_updates=6
    )
    train(out_dir, recipe)
    records = lines_of(out_dir, "validation")
    best = min(records, key=lambda record: float(record["perplexity"]))
    assert 1 < best["update"] < UPDATES, "the best must be neither the first nor the last"
    saved = open_artifact(out_dir, kind="checkpoint")
    assert saved.statistics["update"] == best["update"]
    assert saved.statistics["perplexity"] == best["perplexity"]
    trained, kept = saved.manifest.summary
    assert trained.startswith(f"{UPDATES} updates on ")
    assert kept.startswith(f"kept the weights of update {best['update']}, ")
    assert f"{best['perplexity']:.3f}" in kept
    losses = losses_by_hand(out_dir, inputs)
    total, labels = (sum(each) for each in zip(*losses.values(), strict=True))
    assert total / labels == pytest.approx(best["loss"], rel=1e-5)
    for direction, (loss, count) in losses.items():
        assert best["directions"][direction] == pytest.approx(loss / count, rel=1e-5)


def test_validation_loss_does_not_depend_on_the_world(
    train: Train, inputs: Inputs, tmp_path: Path
) -> None:
    recipe = make_recipe(updates=1, expert_parallel_size=4)
    recipe = changed(recipe, "optimizer", learning_rate=1e-9, final_learning_rate=0.0)
    data = training_data(make_call("pretrain", recipe, inputs.artifacts(), tmp_path / "unused"))
    plan_length = len(data.validation(budget=recipe.batches.evaluation_tokens))
    assert plan_length % 4 != 0, "some ranks must run out of batches before others"
    for ranks in (1, 2, 4):
        train(tmp_path / str(ranks), recipe, ranks=ranks)
    [one], *others = (lines_of(tmp_path / str(ranks), "validation") for ranks in (1, 2, 4))
    for [many] in others:
        assert many["loss"] == pytest.approx(one["loss"], rel=1e-6)
        for kind in ("directions", "pairs", "resources"):
            assert many[kind] == pytest.approx(one[kind], rel=1e-6)


def test_validation_means_are_over_tokens_not_over_directions() -> None:
    losses = {
        Direction("de", "en"): (10.0, 10),
        Direction("en", "de"): (90.0, 30),
        Direction("en", "ru"): (200.0, 50),
        Direction("ru", "fr"): (8.0, 4),
    }
    summary = summarize_validation(losses, tiers={"de-en": "high", "en-ru": "low"})
    assert summary.loss == pytest.approx(308 / 94)
    assert summary.perplexity == pytest.approx(math.exp(308 / 94))
    assert summary.directions == {"de-en": 1.0, "en-de": 3.0, "en-ru": 4.0, "ru-fr": 2.0}
    assert summary.pairs == {"de-en": 2.5, "en-ru": 4.0, "fr-ru": 2.0}
    assert summary.resources == pytest.approx({"high": 2.5, "low": 4.0})


def test_what_training_did_not_write_stays_in_a_finished_runs_folder_and_is_named(
    train: Train, out_dir: Path
) -> None:
    """By default, all that training wrote there goes."""
    recipe = make_recipe(updates=2)
    recipe = recipe.model_copy(update={"saving": Recipe(name="defaults").saving})
    train(out_dir, recipe, ranks=1, terminate_at=(0, 1))
    (run_dir(out_dir) / "notes.txt").write_text("mine")
    assert train(out_dir, recipe, ranks=1) == ["done"]
    assert names_in(run_dir(out_dir)) == [MARKER_NAME, "notes.txt"]
    assert (run_dir(out_dir) / "notes.txt").read_text() == "mine"


# Early stopping, and whose perplexity is the best


def pretrain_scripted(
    world: World,
    /,
    inputs: Inputs,
    out_dir: Path,
    recipe: Recipe,
    *,
    perplexities: dict[int, float],
    dies_at: int = 0,
    **options: Any,
) -> str:
    with ExitStack() as stack:
        stack.enter_context(scripted_validations(perplexities))
        if dies_at:
            dying = _failing_step(Engine.train_step, dies_at)
            stack.enter_context(mock.patch.object(Engine, "train_step", dying))
        return pretrain(world, inputs, out_dir, recipe, **options)


IMPATIENT = make_recipe(patience=2, validate_every=1)
SCRIPT: dict[str, Any] = {
    "by": pretrain_scripted,
    "perplexities": {1: 5.0, 2: 4.0, 3: 3.0, 4: 3.0, 5: 3.5, 6: 1.0},
}


@pytest.fixture(scope="module")
def impatient(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out_dir = tmp_path_factory.mktemp("impatient") / "model"
    train(out_dir, IMPATIENT, **SCRIPT)
    return out_dir


def test_training_ends_when_its_patience_is_at_an_end(impatient: Path) -> None:
    """Equal is not lower: updates 4 and 5 found nothing."""
    model = open_artifact(impatient, kind="checkpoint")
    assert model.statistics["updates"] == 5
    assert (model.statistics["update"], model.statistics["perplexity"]) == (3, 3.0)
    assert model.manifest.summary[2] == (
        "ended 1 update early: 2 validations in a row found none lower"
    )
    assert names_in(impatient.parent / "model.run" / "states") == ["update-0000005"]


@pytest.mark.parametrize("every", [2, 4])
def test_the_curves_count_the_tokens_of_every_update_of_a_run_that_ended_early(
    train: Train, impatient: Path, out_dir: Path, every: int
) -> None:
    """Update 5, the last one, is within an interval."""
    train(out_dir, changed(IMPATIENT, "logging", every=every), **SCRIPT)
    tokens = [
        sum(one["target_tokens"] for one in lines_of(path, "train"))
        for path in (out_dir, impatient)
    ]
    assert tokens[0] == tokens[1]
    assert lines_of(out_dir, "train")[-1]["update"] == 5


@pytest.mark.parametrize("fault", [{"dies_at": 4}, {"terminate_at": (1, 8)}], ids=str)
def test_a_run_that_ended_early_is_the_same_however_often_it_was_stopped(
    train: Train, impatient: Path, out_dir: Path, fault: dict[str, Any]
) -> None:
    """Dying at update 4, after update 3 was kept, and before it is in any state."""
    with ExitStack() as stack:
        if "dies_at" in fault:
            stack.enter_context(pytest.raises(RankFailed, match="killed"))
        train(out_dir, IMPATIENT, **SCRIPT, **fault)
    assert train(out_dir, IMPATIENT, **SCRIPT) == DONE
    assert_same_runs(out_dir, impatient)
    assert read_metrics(out_dir / "metrics.jsonl")[-1]["update"] == 5


def test_the_weights_kept_are_those_of_the_best_validation_of_a_tier(
    train: Train, straight: Path, out_dir: Path
) -> None:
    train(out_dir, make_recipe(best_by="low"))
    losses = {r["update"]: r["resources"]["low"] for r in lines_of(straight, "validation")}
    best = min(losses, key=lambda update: losses[update])
    model = open_artifact(out_dir, kind="checkpoint")
    assert model.statistics["update"] == best
    assert model.statistics["perplexity"] == pytest.approx(math.exp(losses[best]))
    assert "whose validation perplexity on low-resource pairs, " in model.manifest.summary[1]


def test_a_tier_that_nothing_is_validated_on_is_refused(train: Train, out_dir: Path) -> None:
    recipe = make_recipe(best_by="low", resource_thresholds=[0, 30])
    with pytest.raises(RankFailed, match=r"best_by is low, and no pair .* only of high, medium\."):
        train(out_dir, recipe, ranks=1)


def test_thresholds_decide_a_model_only_where_a_tier_does() -> None:
    stage = STAGES["pretrain"]
    for best_by, decides in (("all", False), ("low", True)):
        config = make_call("pretrain", make_recipe(best_by=best_by), {}, Path("unused")).config
        assert ("resource_thresholds" in stage.deciding(config)["training"]) == decides


def convolutions_of(world: World, inputs: Inputs, out_dir: Path, recipe: Recipe) -> list[bool]:
    """Whether cuDNN may only add in a fixed order, in each update of a training."""
    chosen: list[bool] = []
    step = Engine.train_step

    def noting(*given: Any, **options: Any) -> StepResult:
        chosen.append(torch.backends.cudnn.deterministic)
        return step(*given, **options)

    torch.backends.cudnn.deterministic = False
    with mock.patch.object(Engine, "train_step", noting):
        assert pretrain(world, inputs, out_dir, recipe) == "done"
    return chosen


@pytest.mark.parametrize("ranks", [1, 2])
def test_convolutions_on_a_gpu_repeat_bit_for_bit(train: Train, tmp_path: Path, ranks: int) -> None:
    recipe = make_recipe(expert_parallel_size=1)
    found = train(tmp_path / "model", recipe, ranks=ranks, by=convolutions_of)
    assert found == [[True] * UPDATES] * ranks
