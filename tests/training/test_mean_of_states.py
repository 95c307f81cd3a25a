"""A training whose result is the mean of its last states, against sums of those by hand."""

import math
import os
import re
import shutil
import signal
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.nn.functional as F
from support.folder_listing import names_in
from support.process_pool import RankFailed
from support.stage_runs import make_call
from support.tiny_training import (
    Inputs,
    Train,
    assert_same_tensors,
    changed,
    make_recipe,
    pretrain,
    read_metrics,
    read_state,
    read_weights,
    scripted_validations,
    trainer,
)
from torch import Tensor

from pipeline.artifacts.artifact import open_artifact
from pipeline.artifacts.run_folders import state_names
from pipeline.batching.feed import Update
from pipeline.checkpoints.averaging import average_states
from pipeline.checkpoints.checkpoint import load_model, read_spec
from pipeline.checkpoints.inspection import diff
from pipeline.checkpoints.pruning import read_routing
from pipeline.config.recipe import Recipe, setting_changes
from pipeline.distributed.world import World
from pipeline.registry import STAGES
from pipeline.stages.pretrain import training_data
from pipeline.training import loop
from pipeline.training.engine import Engine
from pipeline.training.saving import Publishing, averaged_updates, describe_missing, updates_kept
from pipeline.training.settings import TrainingConfig

UPDATES = 7
AVERAGED = [4, 6, 7]
SETTINGS: dict[str, Any] = {"updates": UPDATES, "checkpoint_every": 2, "average_last": 3}


def recipe_of(keep_states: str = "all", **training: Any) -> Recipe:
    return changed(make_recipe(**{**SETTINGS, **training}), "saving", keep_states=keep_states)


def summary_of(out_dir: Path) -> str:
    return open_artifact(out_dir, kind="checkpoint").manifest.summary[1]


def mean_by_hand(out_dir: Path, updates: list[int]) -> dict[str, Tensor]:
    """Of the master weights in the files of states, in double precision, rounded once."""
    found: dict[str, list[npt.NDArray[np.float64]]] = {}
    for update in updates:
        pieces: dict[str, list[tuple[int, Tensor]]] = {}
        for key, values in read_state(out_dir, update).items():
            what, name, start = key.split(":")
            if what == "master":
                pieces.setdefault(name, []).append((int(start), values))
        for name, parts in pieces.items():
            ordered = [values for _, values in sorted(parts, key=lambda part: part[0])]
            found.setdefault(name, []).append(torch.cat(ordered).double().numpy())
    return {
        name: torch.from_numpy((np.stack(parts).sum(0) / len(updates)).astype(np.float32))
        for name, parts in found.items()
    }


def assert_is_mean(out_dir: Path, updates: list[int]) -> None:
    found = {name: value.flatten() for name, value in read_weights(out_dir).items()}
    assert_same_tensors(found, mean_by_hand(out_dir, updates))


@pytest.fixture(scope="module")
def train(request: pytest.FixtureRequest, inputs: Inputs) -> Train:
    return trainer(request, inputs)


@pytest.fixture(scope="module")
def straight(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained without a stop, on two ranks that share the experts."""
    out_dir = tmp_path_factory.mktemp("straight") / "model"
    train(out_dir, recipe_of())
    return out_dir


@pytest.fixture
def out_dir(tmp_path: Path) -> Path:
    return tmp_path / "model"


@pytest.fixture
def unpublished(straight: Path, tmp_path: Path) -> Path:
    """The run that is straight's, with its states, before the result was made."""
    shutil.copytree(straight.parent / "model.run", tmp_path / "model.run")
    return tmp_path / "model"


# Which states


@pytest.mark.parametrize(
    ("last", "every", "end", "averaged"),
    [
        (1, 2, 6, [6]),
        (1, 2, 7, [7]),
        (3, 2, 6, [2, 4, 6]),
        (3, 2, 7, [4, 6, 7]),
        (4, 2, 7, [2, 4, 6, 7]),
        (9, 2, 7, [2, 4, 6, 7]),
        (5, 10, 7, [7]),
        (5, 1, 1, [1]),
    ],
)
def test_the_states_are_those_at_multiples_and_that_of_the_end(
    last: int, every: int, end: int, averaged: list[int]
) -> None:
    training = TrainingConfig(average_last=last, checkpoint_every=every)
    assert averaged_updates(training, end=end) == averaged


def test_wherever_a_run_ends_the_states_that_its_mean_needs_were_kept() -> None:
    for last in range(1, 6):
        for every in range(1, 5):
            training = TrainingConfig(average_last=last, checkpoint_every=every)
            there: set[int] = set()
            for update in range(1, 25):
                if update % every == 0:
                    there = {*there, update} & {
                        *updates_kept(training, update=update, is_end=False)
                    }
                assert len(there) <= last
                needed = {*averaged_updates(training, end=update)}
                assert needed <= there | {update}
    for is_end in (False, True):
        assert updates_kept(TrainingConfig(checkpoint_every=2), update=9, is_end=is_end) == []


def test_a_state_that_is_gone_is_named_and_one_still_to_come_is_not() -> None:
    training = TrainingConfig(average_last=3, checkpoint_every=2)
    gone = describe_missing(training, end=8, update=6, there={6})
    assert gone is not None
    assert "not there any more: 4; lower it to 2, or begin anew" in gone
    assert describe_missing(training, end=8, update=6, there={4, 6}) is None
    assert describe_missing(training, end=20, update=6, there={6}) is None
    gone = describe_missing(training, end=6, update=6, there=())
    assert gone is not None
    assert "2, 4, 6; set it to 0" in gone


# The result


@pytest.mark.slow
def test_the_result_is_the_mean_in_double_precision_rounded_once(
    straight: Path, tmp_path: Path
) -> None:
    """The command line makes the same of the same states; keep_last is 1."""
    assert_is_mean(straight, AVERAGED)
    assert any(".experts.3." in name for name in read_weights(straight))
    made = open_artifact(straight, kind="checkpoint")
    assert (made.statistics["averaged"], made.statistics["averaged_updates"]) == (3, AVERAGED)
    assert made.statistics["updates"] == UPDATES
    assert "update" not in made.statistics
    folder = straight.parent / "model.run"
    assert state_names(folder) == [f"update-{update:07d}" for update in AVERAGED]
    assert "mean" not in names_in(folder)
    average_states(folder, last=3, out_dir=tmp_path / "mean")
    assert diff(straight, tmp_path / "mean").identical


def test_what_is_said_of_it_is_of_the_mean_and_not_of_the_best_weights(
    straight: Path, inputs: Inputs
) -> None:
    made = open_artifact(straight, kind="checkpoint")
    perplexities = validated(straight)
    found, best = made.statistics["perplexity"], min(perplexities)
    assert found not in perplexities
    assert summary_of(straight) == (
        f"took the mean of the weights after updates 4, 6, 7: its validation perplexity is "
        f"{found:.3f}, the lowest of one update's weights {best:.3f}"
    )
    assert math.isclose(perplexity_of(inputs, straight), found, rel_tol=1e-5)
    assert read_routing(made, read_spec(made)).routed_LGE.sum() > 0


def validated(out_dir: Path) -> list[float]:
    records = read_metrics(out_dir / "metrics.jsonl")
    return [one["perplexity"] for one in records if one["kind"] == "validation"]


def perplexity_of(inputs: Inputs, out_dir: Path) -> float:
    """Of a checkpoint, over all validation sentences, by the model alone."""
    recipe = recipe_of()
    data = training_data(make_call("pretrain", recipe, inputs.artifacts(), out_dir))
    model = load_model(open_artifact(out_dir, kind="checkpoint")).eval()
    total, labels = 0.0, 0
    with torch.no_grad():
        for _, planned in data.validation(budget=60):
            batch = data.valid.batch(planned)
            logits = model(batch).logits_LV
            total += F.cross_entropy(logits, batch.labels_L, reduction="sum").item()
            labels += len(batch.labels_L)
    return math.exp(total / labels)


def test_one_rank_takes_the_mean_of_states_of_two_as_those_do(
    train: Train, straight: Path, unpublished: Path
) -> None:
    assert train(unpublished, recipe_of(), ranks=1) == ["done"]
    assert_same_tensors(read_weights(unpublished), read_weights(straight))
    ours, theirs = (
        open_artifact(out_dir, kind="checkpoint").statistics["perplexity"]
        for out_dir in (unpublished, straight)
    )
    assert math.isclose(ours, theirs, rel_tol=1e-6)


@pytest.mark.slow
def test_a_mean_of_bf16_training_is_of_the_weights_that_the_optimizer_holds(
    train: Train, out_dir: Path
) -> None:
    train(out_dir, recipe_of(updates=2, checkpoint_every=1), ds_config="cpu_bf16")
    assert_is_mean(out_dir, [1, 2])
    weights = read_weights(out_dir).values()
    assert any(not torch.equal(value, value.bfloat16().float()) for value in weights)


@pytest.mark.slow
def test_language_modules_on_different_ranks_and_what_is_not_trained_are_in_the_mean(
    train: Train, out_dir: Path
) -> None:
    plain = recipe_of(updates=2, checkpoint_every=1, patience=9, best_by_route="shared")
    document = plain.model_dump()
    document["model"] |= {
        "moe": None,
        "language_modules": {"kind": "language_experts", "shared": True},
        "embedding": {"input": "frozen", "output": "untied"},
    }
    document["loss"] |= {"objective": "fuse_distillation"}
    train(out_dir, Recipe.model_validate(document))
    assert_is_mean(out_dir, [1, 2])
    assert any(".of_language.de." in name for name in read_weights(out_dir))


# Stopped, killed, gone on with


@pytest.mark.slow
def test_a_run_stopped_between_two_states_has_the_mean_of_one_that_was_not(
    train: Train, straight: Path, out_dir: Path
) -> None:
    """The stop leaves a state after update 5, which is none of those of the mean."""
    train(out_dir, recipe_of("last"), by=pretrain_stopped_after, update=5)
    folder = out_dir.parent / "model.run"
    assert state_names(folder) == [f"update-{update:07d}" for update in (2, 4, 5)]
    assert train(out_dir, recipe_of("last")) == ["done"] * 2
    assert_same_tensors(read_weights(out_dir), read_weights(straight))
    assert names_in(folder / "states") == [f"update-{UPDATES:07d}"]


def pretrain_stopped_after(
    world: World, inputs: Inputs, out_dir: Path, recipe: Recipe, *, update: int
) -> str:
    """Asked to stop when that update is made."""
    make = loop.TrainingRun._update

    def make_and_stop(run: loop.TrainingRun, updates: Generator[Update]) -> list[str]:
        alarms = make(run, updates)
        if run.position.update == update:
            os.kill(os.getpid(), signal.SIGTERM)
        return alarms

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.TrainingRun, "_update", make_and_stop)
        return pretrain(world, inputs, out_dir, recipe)


@pytest.mark.slow
def test_a_stop_while_the_mean_is_validated_saves_nothing_over_the_last_state(
    train: Train, straight: Path, unpublished: Path
) -> None:
    before = read_state(unpublished, UPDATES)
    said = train(unpublished, recipe_of(), terminate_at=(1, 1))
    assert {one.split(",")[0] for one in said} == {f"stopped after update {UPDATES} of {UPDATES}"}
    assert not unpublished.exists()
    assert_same_tensors(read_state(unpublished, UPDATES), before)
    assert train(unpublished, recipe_of()) == ["done"] * 2
    assert_same_tensors(read_weights(unpublished), read_weights(straight))


def pretrain_dying(world: World, inputs: Inputs, out_dir: Path, recipe: Recipe, *, at: str) -> str:
    """Ends with an error when something of a run is called for the first time."""

    def die(*_: object, **__: object) -> None:
        raise OSError("killed")

    where: type = Engine if hasattr(Engine, at) else Publishing
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(where, at, die)
        return pretrain(world, inputs, out_dir, recipe)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keep_states", "at"), [("none", "_summary"), ("last", "published_weights")]
)
def test_a_run_killed_while_the_mean_is_made_or_published_makes_the_same_again(
    train: Train, straight: Path, unpublished: Path, keep_states: str, at: str
) -> None:
    recipe = recipe_of(keep_states)
    with pytest.raises(RankFailed, match="killed"):
        train(unpublished, recipe, ranks=1, by=pretrain_dying, at=at)
    assert not unpublished.exists()
    assert train(unpublished, recipe, ranks=1) == ["done"]
    assert_same_tensors(read_weights(unpublished), read_weights(straight))
    left = names_in(unpublished.parent)
    assert left == (["model"] if keep_states == "none" else ["model", "model.run"])
    assert keep_states == "none" or "mean" not in names_in(unpublished.parent / "model.run")


@pytest.mark.slow
def test_a_run_goes_on_to_more_updates_from_its_last_state_and_not_from_the_mean(
    train: Train, unpublished: Path, tmp_path: Path
) -> None:
    shutil.copytree(tmp_path / "model.run", tmp_path / "plain.run")
    train(unpublished, recipe_of(updates=8))
    train(tmp_path / "plain", recipe_of(updates=8, average_last=0))
    assert_same_tensors(read_state(unpublished, 8), read_state(tmp_path / "plain", 8))
    assert_is_mean(unpublished, [4, 6, 8])


@pytest.mark.slow
def test_the_mean_of_a_run_that_ends_early_is_of_its_last_states(
    train: Train, out_dir: Path
) -> None:
    """Nothing lower was found after update 3, so that it ends after 5, where no state is due."""
    recipe = recipe_of(patience=2, validate_every=1, average_last=2, best_by="high")
    train(out_dir, recipe, by=pretrain_scripted)
    assert open_artifact(out_dir, kind="checkpoint").statistics["averaged_updates"] == [4, 5]
    assert_is_mean(out_dir, [4, 5])
    assert re.search(r"perplexity on high-resource pairs is [\d.]+,", summary_of(out_dir))


def pretrain_scripted(world: World, inputs: Inputs, out_dir: Path, recipe: Recipe) -> str:
    with scripted_validations({1: 5.0, 2: 4.0, 3: 3.0, 4: 3.0, 5: 3.5}):
        return pretrain(world, inputs, out_dir, recipe)


# What it is another result for


def test_how_often_states_are_saved_decides_a_mean_and_nothing_else() -> None:
    for average_last, decides in ((0, False), (2, True)):
        recipes = (
            make_recipe(checkpoint_every=every, average_last=average_last) for every in (2, 3)
        )
        configs = [make_call("pretrain", recipe, {}, Path("x")).config for recipe in recipes]
        one, other = (STAGES["pretrain"].deciding(config) for config in configs)
        changes = setting_changes(one, other)
        assert changes == (["training.checkpoint_every: 2 → 3"] if decides else [])


def test_without_it_no_manifest_says_anything_of_a_mean(train: Train, unpublished: Path) -> None:
    """A run that was to be averaged, and is not any more, gives its best weights."""
    train(unpublished, recipe_of(average_last=0), ranks=1)
    made = open_artifact(unpublished, kind="checkpoint")
    assert not {"averaged", "averaged_updates"} & made.statistics.keys()
    assert made.statistics["perplexity"] == min(validated(unpublished))
