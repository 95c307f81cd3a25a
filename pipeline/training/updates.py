"""One update, made again where its gradient is not finite.

DeepSpeed makes no update of such a gradient: weights, moments and the place in the data stay. What
becomes of it then:

- fp16 with a dynamic loss scale: the same micro-batches are tried again, with the same dropout, at
  the smaller scale that DeepSpeed goes on with, until the gradient is finite or the scale is at its
  minimum. No sentence is passed over, and neither the number of updates nor the learning rate
  moves, so that a run with overflows sees the data of one without.
- Otherwise, and beyond the smallest scale, it is not the scale that the gradient is too large for.
  Training ends, or, with ``training.skip_nonfinite_after``, the update is tried again that many
  times, the micro-batches whose gradients are not finite are put into quarantine, and it is made of
  the rest, from the loss scale it began with. The loss is divided by the labels that remain.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pipeline.batching.feed import Update
from pipeline.batching.labelled import AnyBatch
from pipeline.config.recipe import Recipe
from pipeline.distributed.collectives import gather_objects
from pipeline.errors import CheckpointError
from pipeline.seeds import derive_seed
from pipeline.training.engine import Engine, StepResult, Verdict
from pipeline.training.optim import learning_rate
from pipeline.training.quarantine import Quarantine, culprits, left_out
from pipeline.training.task import Data


@dataclass(frozen=True)
class Made:
    """An update that was made, and how often the loss scale had to fall for it."""

    result: StepResult
    overflows: int


class Updater:
    """Makes the updates of a run; all ranks call it together."""

    def __init__(self, engine: Engine, data: Data, recipe: Recipe, quarantine: Quarantine) -> None:
        self._engine, self._data, self._recipe = engine, data, recipe
        self._quarantine = quarantine
        self._tries = recipe.training.skip_nonfinite_after

    def make(self, feed: Update, *, update: int) -> Made:
        """Make update number ``update``, without the micro-batches that are in quarantine.

        Raises:
            CheckpointError: on all ranks, where its gradient stays not finite.
        """
        scale_before = self._engine.loss_scale
        batches: Iterable[AnyBatch] = feed.batches
        overflows = tries = 0
        has_left_out = False
        while True:
            may_fall = self._engine.loss_scale_may_fall
            result = self._try(feed, batches, update=update)
            if result.was_made and math.isfinite(result.gradient_norm):
                return Made(result, overflows)
            if result.was_made:  # a ds_config has DeepSpeed not look: the weights are spoilt
                raise self._not_finite(update)
            batches = (self._batch(feed, index) for index in feed.indices)
            if may_fall:
                overflows += 1
            elif tries < self._tries:
                tries += 1
            elif has_left_out or not self._tries:
                raise self._not_finite(update)
            else:
                self._leave_out(feed, update=update)
                self._engine.restore_loss_scale(scale_before)
                overflows, has_left_out = 0, True

    def _try(self, feed: Update, batches: Iterable[AnyBatch], *, update: int) -> StepResult:
        recipe, without = self._recipe, self._quarantine.of_update(update)
        taken = self._taken(feed, without)
        return self._engine.train_step(
            self._with_stand_ins(feed, batches, taken),
            seeds=[self._seed(update, index) for index in taken],
            total_labels=_labels(feed, without),
            learning_rate=learning_rate(
                recipe.optimizer, update, total_updates=recipe.training.updates
            ),
            stand_ins=[turn for turn, index in enumerate(feed.indices) if index in without],
            progress=self._progress(update),
        )

    def _taken(self, feed: Update, without: frozenset[int]) -> list[int]:
        """This rank's micro-batches; in place of those left out the smallest of all others."""
        plans = feed.step.micro_batches
        kept = [index for index in range(len(plans)) if index not in without]
        if not kept:
            raise CheckpointError(
                f"{self._quarantine.path} leaves all micro-batches of an update out: remove the "
                "lines of that update."
            )
        smallest = min(kept, key=lambda index: plans[index].num_tokens)
        return [smallest if index in without else index for index in feed.indices]

    def _with_stand_ins(
        self, feed: Update, batches: Iterable[AnyBatch], taken: list[int]
    ) -> Iterator[AnyBatch]:
        for own, index, batch in zip(feed.indices, taken, batches, strict=True):
            yield batch if own == index else self._batch(feed, index)

    def _leave_out(self, feed: Update, *, update: int) -> None:
        """Find the micro-batches whose gradients are not finite, and record them.

        Raises:
            CheckpointError: on all ranks, where it is none of them, or all.
        """
        known = self._quarantine.of_update(update)
        verdicts = gather_objects(self._verdicts(feed, known, update=update))
        found = culprits(verdicts, sharing=self._engine.model.expert_parallel_size) - known
        plans, pairs = feed.step.micro_batches, list(self._data.train.offsets)
        if not found or len(found | known) == len(plans):
            raise self._not_finite(update)
        self._quarantine.add(
            [
                left_out(plans[index], update=update, micro_batch=index, pairs=pairs)
                for index in sorted(found)
            ]
        )

    def _verdicts(self, feed: Update, known: frozenset[int], *, update: int) -> list[Verdict]:
        return [
            self._engine.verdict(
                self._batch(feed, index),
                micro_batch=own,
                seed=self._seed(update, index),
                total_labels=_labels(feed, known),
                progress=self._progress(update),
            )
            for own, index in zip(feed.indices, self._taken(feed, known), strict=True)
        ]

    def _batch(self, feed: Update, index: int) -> AnyBatch:
        return self._data.train.batch(feed.step.micro_batches[index])

    def _progress(self, update: int) -> float:
        """Share of the training that was done before an update."""
        return (update - 1) / self._recipe.training.updates

    def _seed(self, update: int, index: int) -> int:
        return derive_seed("dropout", self._recipe.training.seed, update, index)

    def _not_finite(self, update: int) -> CheckpointError:
        run = self._quarantine.path.parent
        finding = (
            "it is not some of its micro-batches alone"
            if self._tries
            else "training.skip_nonfinite_after leaves out micro-batches that cause it"
        )
        return CheckpointError(
            f"The gradient of update {update} is not a number: the run in {run} is left at its "
            f"last state; lower optimizer.learning_rate, or look at that update's data ({finding})."
        )


def _labels(feed: Update, without: frozenset[int]) -> int:
    """Of all micro-batches that are not left out."""
    plans = feed.step.micro_batches
    return sum(plan.num_labels for index, plan in enumerate(plans) if index not in without)
