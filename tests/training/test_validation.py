"""Validation without a model: shares of ranks, means over tokens, best weights and patience."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from support.tiny_training import changed, make_recipe

from pipeline.artifacts.corpus import Direction
from pipeline.artifacts.run_folders import Position
from pipeline.batching.global_step import MicroBatch
from pipeline.config.recipe import Recipe
from pipeline.distributed.world import LOOPBACK, World
from pipeline.errors import Interrupted
from pipeline.model.spec import ModelSpec, make_spec
from pipeline.training.engine import Engine
from pipeline.training.losses import LossTerms
from pipeline.training.saving import Validation, ValidationResult, is_out_of_patience, judge
from pipeline.training.task import Task

NONE = np.zeros(0, dtype=np.int64)
BATCHES = [
    (Direction("de", "en"), 10),
    (Direction("de", "en"), 20),
    (Direction("en", "de"), 30),
    (Direction("en", "de"), 40),
    (Direction("en", "fr"), 50),
]
"""The directions and numbers of labels of the validation batches; a label costs 0.5 nats."""


@dataclass(frozen=True)
class Losses:
    """The validation summary of the task below."""

    perplexity: float
    directions: Mapping[str, tuple[float, int]]


class AnyTask:
    """A task whose perplexity is the sum of all losses."""

    def __init__(self) -> None:
        self.data = SimpleNamespace(validation=self._plan, valid=SimpleNamespace(batch=lambda b: b))

    def _plan(self, *, budget: int) -> list[tuple[Direction, MicroBatch]]:
        del budget
        return [
            (direction, MicroBatch(NONE, NONE, NONE, num_labels=labels, num_tokens=labels))
            for direction, labels in BATCHES
        ]

    def summarize(self, losses: dict[Direction, tuple[float, int]]) -> Losses:
        """Keep the sums as they are."""
        total = sum(nats for nats, _ in losses.values())
        return Losses(total, {str(direction): sums for direction, sums in losses.items()})

    def kept_by(self, found: Losses) -> float:
        """Return the sum of all losses."""
        return found.perplexity


class CountingEngine:
    """An engine whose loss is half a nat for each label, and one on the shared route."""

    def __init__(self, *, has_shared_route: bool = False) -> None:
        self.model = SimpleNamespace(spec=dense_spec())
        self.evaluations = 0
        self._has_shared_route = has_shared_route

    def evaluate(self, batch: MicroBatch) -> LossTerms:
        """Count the call."""
        self.evaluations += 1
        labels = torch.tensor(float(batch.num_labels))
        shared = labels if self._has_shared_route else None
        return LossTerms(labels, labels / 2, torch.tensor(0.0), (), shared_cross_entropy=shared)


def dense_spec() -> ModelSpec:
    """Return the shape of a model without experts."""
    return make_spec(
        model=make_recipe().model.model_copy(update={"moe": None}),
        vocabulary_size=100,
        pad_id=0,
        languages=("de", "en", "fr"),
    )


def validation(
    engine: CountingEngine, recipe: Recipe | None = None, *, rank: int = 0, size: int = 1
) -> Validation:
    """Return the validation of one rank; no process group is open, so that sums stay its own."""
    world = World(rank, size, rank, size, LOOPBACK, 0)
    return Validation(
        cast(Engine, engine), cast(Task, AnyTask()), recipe or make_recipe(), world=world
    )


def losses_of(found: ValidationResult) -> Mapping[str, tuple[float, int]]:
    """Return the summed losses and labels of the route that decides."""
    return cast(Losses, found.by_route[found.deciding_route]).directions


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_ranks_evaluate_equally_often_and_count_every_batch_once(size: int) -> None:
    engines = [CountingEngine() for _ in range(size)]
    found = [
        losses_of(validation(engine, rank=rank, size=size).run())
        for rank, engine in enumerate(engines)
    ]
    assert {engine.evaluations for engine in engines} == {-(-len(BATCHES) // size)}
    for direction in ("de-en", "en-de", "en-fr"):
        nats, labels = (sum(each) for each in zip(*(one[direction] for one in found), strict=True))
        expected = sum(number for way, number in BATCHES if str(way) == direction)
        assert (nats, labels) == (expected / 2, expected)


def test_the_record_of_a_dense_model_with_one_route_holds_the_summary_alone() -> None:
    found = validation(CountingEngine()).run()
    assert found.perplexity == 75.0
    assert set(found.record()) == {"perplexity", "directions"}


@pytest.mark.parametrize("objective", ["fuse_distillation", "cross_entropy"])
def test_the_recipe_names_the_route_that_decides(objective: str) -> None:
    """Whichever loss has both; one of a user's own has another name."""
    recipe = changed(make_recipe(), "loss", objective=objective)
    recipe = changed(recipe, "training", best_by_route="shared")
    found = validation(CountingEngine(has_shared_route=True), recipe).run()
    assert (found.deciding_route, found.perplexity) == ("shared", 150.0)
    routes = cast(Any, found.record()["routes"])
    assert {name: one["perplexity"] for name, one in routes.items()} == {
        "specific": 75.0,
        "shared": 150.0,
    }


def test_a_stop_between_two_batches_ends_the_validation() -> None:
    engine = CountingEngine()

    def stop_at_the_third() -> None:
        if engine.evaluations == 2:
            raise Interrupted("stopped")

    with pytest.raises(Interrupted):
        validation(engine).run(before_batch=stop_at_the_third)
    assert engine.evaluations == 2


def test_validations_are_due_at_intervals_and_at_the_last_update_and_once_only() -> None:
    one = validation(CountingEngine(), make_recipe(updates=5, validate_every=2))
    due = [update for update in range(6) if one.is_due(Position(update=update))]
    assert due == [2, 4, 5]
    assert not one.is_due(Position(update=4, validated=4))


def test_only_a_lower_perplexity_is_better_and_all_others_cost_patience() -> None:
    position, kept = Position(), []
    training = make_recipe(patience=2).training
    for update, perplexity in enumerate([5.0, 4.0, 4.0, 4.5], start=1):
        assert not is_out_of_patience(training, position)
        position, is_best = judge(replace(position, update=update), perplexity)
        kept += [update] * is_best
    assert kept == [1, 2]
    assert (position.best_update, position.best_perplexity) == (2, 4.0)
    assert (position.validated, position.validations_since_best) == (4, 2)
    assert is_out_of_patience(training, position)
    assert not is_out_of_patience(make_recipe(patience=0).training, position)


def test_a_validation_that_an_earlier_attempt_made_costs_no_patience() -> None:
    """The attempt kept weights of update 6 and died; the run resumes from the state of update 2."""
    resumed = Position(update=4, best_update=6, best_perplexity=3.0)
    position, is_best = judge(resumed, 3.5)
    assert (is_best, position.validations_since_best) == (False, 0)
    position, is_best = judge(replace(position, update=6), 3.0)
    assert (is_best, position.validations_since_best) == (False, 0)
    assert judge(replace(position, update=8), 3.0)[0].validations_since_best == 1
