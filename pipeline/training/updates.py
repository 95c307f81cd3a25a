"""Make one update, repeat it if its gradient is not finite, and record micro-batches left out.

DeepSpeed makes no update with such a gradient: weights, moments and the position in the data stay.
The reaction depends on the loss scale:

- fp16 with a dynamic loss scale: the same micro-batches are tried again, with the same dropout, at
  the smaller scale that DeepSpeed chooses, until the gradient is finite or the scale is at its
  minimum. No sentence is passed over, and neither the number of updates nor the learning rate
  moves: a run with overflows sees the same data as one without.

- Otherwise, and at the smallest scale, the cause is not the scale. Training ends, or, with
  ``training.skip_nonfinite_after``, the update is tried again that many times; then the
  micro-batches whose gradients are not finite go to the quarantine, and the update is made of the
  others, from the loss scale it began with. The loss is divided by the labels that remain.

``quarantine.jsonl`` in the run directory has one JSON object per line: the update, the
micro-batch's index in it, its labels, and its lines by direction, counted from 1 in the order of
the shards. It is on disk before the update is made without them, so that a run that is resumed
before that update makes the same one.
"""

import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as validated_dataclass

from pipeline.artifacts.locks import refuse_if_lost
from pipeline.artifacts.run_folders import LOCK_NAME
from pipeline.batching.feed import Update
from pipeline.batching.global_step import MicroBatch
from pipeline.config.documents import JsonLines
from pipeline.config.recipe import Recipe
from pipeline.distributed.collectives import gather_objects, on_rank_zero
from pipeline.distributed.world import World
from pipeline.errors import CheckpointError
from pipeline.training.engine import Engine, StepResult, Verdict
from pipeline.training.optim import learning_rate
from pipeline.training.task import Data

MOST_IN_A_ROW = 10
"""Updates in a row without some of their micro-batches, of which the last ends training."""
SHOWN_LINES = 5
"""Most lines per direction that a message lists."""

Whole = Annotated[int, Field(ge=0, lt=2**63)]


@validated_dataclass(frozen=True)
class LeftOut:
    """A micro-batch that an update leaves out."""

    update: Whole
    micro_batch: Whole
    labels: Whole
    lines: Mapping[str, Sequence[Whole]]
    """Direction → lines, from 1, of the pair's shards."""

    @property
    def described(self) -> str:
        """``micro-batch 3 (de-en lines 7, 12; ru-en line 1)``."""
        parts = [_described(direction, lines) for direction, lines in self.lines.items()]
        return f"micro-batch {self.micro_batch} ({'; '.join(parts)})"


def _described(direction: str, lines: Sequence[int]) -> str:
    shown = ", ".join(map(str, lines[:SHOWN_LINES]))
    more = f" and {len(lines) - SHOWN_LINES} more" if len(lines) > SHOWN_LINES else ""
    return f"{direction} {'line' if len(lines) == 1 else 'lines'} {shown}{more}"


def left_out(plan: MicroBatch, *, update: int, micro_batch: int, pairs: Sequence[str]) -> LeftOut:
    """Return the record of a micro-batch; ``pairs`` are the names of its pair numbers."""
    lines: dict[str, list[int]] = {}
    for pair, is_reverse, line in zip(plan.pair_B, plan.reverse_B, plan.line_B, strict=True):
        first, second = pairs[pair].split("-")
        direction = f"{second}-{first}" if is_reverse else f"{first}-{second}"
        lines.setdefault(direction, []).append(int(line) + 1)
    found = {direction: sorted(numbers) for direction, numbers in sorted(lines.items())}
    return LeftOut(update, micro_batch, plan.num_labels, found)


def culprits(verdicts: Sequence[Sequence[Verdict]], *, sharing: int) -> set[int]:
    """Return the micro-batches whose gradients are not finite, from every rank's verdicts by turn.

    Groups of ``sharing`` consecutive ranks share experts. If only gradients of experts are not
    finite in a turn, the ranks' sentences cannot be told apart: all of that turn are returned.
    A stand-in is never returned: its sentence is one of a micro-batch that is checked as well.
    """
    found: set[int | None] = set()
    for turn in zip(*verdicts, strict=True):
        for start in range(0, len(turn), sharing):
            group = turn[start : start + sharing]
            own = {verdict.micro_batch for verdict in group if not verdict.is_finite}
            if not own and not all(verdict.of_experts_is_finite for verdict in group):
                own = {verdict.micro_batch for verdict in group}
            found |= own
    return {index for index in found if index is not None}


class Quarantine:
    """The record of one run; all ranks call its methods together."""

    def __init__(self, path: Path, *, world: World) -> None:
        self.path = path
        self.entries: list[LeftOut] = []
        self._world = world
        self._file = JsonLines(path)

    def read(self) -> None:
        """Read what earlier attempts at the run recorded.

        Raises:
            CheckpointError: on all ranks, where the file cannot be read or is none of a run.
        """
        self.entries = on_rank_zero(self._read, path=self.path, error=CheckpointError)

    def of_update(self, update: int) -> frozenset[int]:
        """Return the indices of an update's micro-batches that are left out."""
        return frozenset(one.micro_batch for one in self.entries if one.update == update)

    def would_end_training(self, update: int) -> bool:
        """Return whether each of the updates right before this one lacks some micro-batch."""
        return all(map(self.of_update, range(update - MOST_IN_A_ROW + 1, update)))

    def add(self, entries: Sequence[LeftOut]) -> None:
        """Record micro-batches, on disk when this returns, and print them.

        Raises:
            CheckpointError: on all ranks, where that cannot be written.
        """
        on_rank_zero(lambda: self._write(entries), path=self.path, error=CheckpointError)
        self.entries += entries
        if self._world.rank == 0:
            for one in entries:
                print(
                    f"update {one.update}: {one.described} is left out, since its gradient is not "
                    f"finite; see {self.path}",
                    file=sys.stderr,
                )

    def _read(self) -> list[LeftOut]:
        if not self.path.is_file():
            return self.entries
        # removes a last line that a killed run left incomplete
        self._file.truncate_after(sys.maxsize)
        reader = TypeAdapter(LeftOut)
        try:
            return [reader.validate_python(record) for record in self._file.read()]
        except ValidationError as error:
            raise CheckpointError(
                f"{self.path} has a line that names no micro-batch. Restore the file, or begin the "
                "run anew."
            ) from error

    def _write(self, entries: Sequence[LeftOut]) -> None:
        refuse_if_lost(self.path.parent / LOCK_NAME)
        for one in entries:
            self._file.write(vars(one))
        with self.path.open("rb") as stream:
            os.fsync(stream.fileno())


@dataclass(frozen=True)
class Made:
    """A finished update, and how often the loss scale was lowered for it."""

    result: StepResult
    overflows: int


class Updater:
    """Makes the updates of a run; all ranks call it together."""

    def __init__(self, engine: Engine, data: Data, recipe: Recipe, quarantine: Quarantine) -> None:
        self._engine, self._data, self._recipe = engine, data, recipe
        self._quarantine = quarantine
        self._tries = recipe.training.skip_nonfinite_after

    def make(self, feed: Update) -> Made:
        """Make an update, without the micro-batches that are in quarantine.

        Raises:
            CheckpointError: on all ranks, where its gradient stays not finite.
        """
        scale_before = self._engine.loss_scale
        overflows = tries = 0
        is_first, has_left_out = True, False
        while True:
            may_fall = self._engine.loss_scale_may_fall
            result = self._try(feed, is_first=is_first)
            if result.was_made and math.isfinite(result.gradient_norm):
                return Made(result, overflows)
            if result.was_made:  # the ds_config disables DeepSpeed's check: the weights are spoilt
                raise self._not_finite(feed.number)
            is_first = False
            if may_fall:
                overflows += 1
            elif tries < self._tries:
                tries += 1
            elif has_left_out or not self._tries:
                raise self._not_finite(feed.number)
            else:
                self._leave_out(feed)
                self._engine.restore_loss_scale(scale_before)
                overflows, has_left_out = 0, True

    def _try(self, feed: Update, *, is_first: bool) -> StepResult:
        recipe, without = self._recipe, self._quarantine.of_update(feed.number)
        if len(without) == len(feed.step.micro_batches):
            raise CheckpointError(
                f"{self._quarantine.path} leaves all micro-batches of an update out. Remove the "
                "lines of that update."
            )
        return self._engine.train_step(
            feed.ahead if is_first and not without else feed.passes(without=without),
            total_labels=_labels(feed, without),
            learning_rate=learning_rate(
                recipe.optimizer, feed.number, total_updates=recipe.training.updates
            ),
            progress=self._progress(feed.number),
        )

    def _leave_out(self, feed: Update) -> None:
        """Find the micro-batches whose gradients are not finite, and record them.

        Raises:
            CheckpointError: on all ranks, where it is none of them, or all, or in too many updates.
        """
        known = self._quarantine.of_update(feed.number)
        verdicts = gather_objects(self._verdicts(feed, known))
        found = culprits(verdicts, sharing=self._engine.model.expert_parallel_size) - known
        plans, pairs = feed.step.micro_batches, list(self._data.train.offsets)
        if not found or len(found | known) == len(plans):
            raise self._not_finite(feed.number)
        if self._quarantine.would_end_training(feed.number):
            raise self._not_finite(feed.number, f"as in all of the last {MOST_IN_A_ROW} updates")
        self._quarantine.add(
            [
                left_out(plans[index], update=feed.number, micro_batch=index, pairs=pairs)
                for index in sorted(found)
            ]
        )

    def _verdicts(self, feed: Update, known: frozenset[int]) -> list[Verdict]:
        return [
            self._engine.verdict(
                feed.read(feed.plan(index, without=known)),
                micro_batch=index,
                seed=feed.seed_of(index),
                total_labels=_labels(feed, known),
                progress=self._progress(feed.number),
            )
            for index in feed.taken(without=known)
        ]

    def _progress(self, update: int) -> float:
        """Return the share of training done before an update."""
        return (update - 1) / self._recipe.training.updates

    def _not_finite(self, update: int, finding: str = "") -> CheckpointError:
        run = self._quarantine.path.parent
        finding = finding or (
            "it is not some of its micro-batches alone"
            if self._tries
            else "training.skip_nonfinite_after leaves out micro-batches that cause it"
        )
        return CheckpointError(
            f"The gradient of update {update} is not a number: the run in {run} is left at its "
            f"last state. Lower optimizer.learning_rate, or look at that update's data ({finding})."
        )


def _labels(feed: Update, without: frozenset[int]) -> int:
    """Count the labels of all micro-batches that are not left out."""
    plans = feed.step.micro_batches
    return sum(plan.num_labels for index, plan in enumerate(plans) if index not in without)
