"""Make one update after another, in step on all ranks.

Read :meth:`TrainingRun.run` first. The loop owns the run's :class:`Position` and decides when
something happens; its collaborators do it:

- :class:`Updater`: one update, repeated if its gradient is not finite
- :mod:`~pipeline.training.metrics`: metrics and profiles
- :mod:`~pipeline.training.saving`: validation, the best weights so far, patience; training states,
  resuming from them, their mean; the stage's artifact
- :mod:`~pipeline.training.run_directory`: the files of the run, and the micro-batches it leaves out
"""

import gc
import math
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial

import torch

from pipeline.artifacts.run_folders import Position
from pipeline.batching.feed import Update, read_joined
from pipeline.batching.global_step import MicroBatch
from pipeline.config.recipe import Recipe
from pipeline.distributed import process
from pipeline.distributed.process import Progress as ProgressBar
from pipeline.distributed.world import StopFlag, World, gather_objects, wait_for_all
from pipeline.errors import AgreedStop, CheckpointError, ConfigError
from pipeline.model.transformer import Trained
from pipeline.seeds import derive_seed
from pipeline.stage import StageCall
from pipeline.terminal import counted
from pipeline.training.engine import Engine, StepResult, Verdict
from pipeline.training.metrics import MetricsLog, Profiling
from pipeline.training.optim import learning_rate, make_optimizer
from pipeline.training.run_directory import MOST_IN_A_ROW, Quarantine, RunDirectory, left_out
from pipeline.training.saving import (
    Publishing,
    Resuming,
    Saving,
    Validation,
    ValidationResult,
    is_out_of_patience,
    judge,
)
from pipeline.training.task import Data, Task


def train_task(call: StageCall, model: Trained, task: Task, *, world: World) -> None:
    """Train a model for a task and write the stage's artifact; all ranks call this.

    Raises:
        ConfigError: ``training.updates_of`` is not ``tokens``, and the task is not translation, or
            a GPU has too little memory.
    """
    recipe = call.recipe
    if recipe.training.updates_of != "tokens":
        raise ConfigError(
            f"training.updates_of is {recipe.training.updates_of!r}, which is for "
            'translation models. Set it to "tokens".'
        )
    task.data.check(max_positions=model.spec.model.max_positions)
    optimizer = partial(make_optimizer, config=recipe.optimizer)
    with _in_memory(call):
        engine = Engine(
            model, recipe, world=world, ds_config=call.ds_config, make_optimizer=optimizer
        )
    TrainingRun(call, engine, task, world=world).run()


@contextmanager
def _in_memory(call: StageCall) -> Iterator[None]:
    """Raise ConfigError if a GPU has too little memory for what the block keeps there."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"{call.out_dir}: a GPU has too little memory for the weights and the optimizer's "
            "state. Use more processes, or the ds_config zero2_bf16_offload."
        ) from error


class TrainingRun:
    """One training run, from its newest state (or the start) to the stage's artifact.

    Invariant: every decision (to validate, save, stop or end) follows from values that are equal
    on all ranks, so that all ranks enter the same collectives in the same order. What a run does
    next follows from its position only: a resumed run equals an uninterrupted one.
    """

    def __init__(self, call: StageCall, engine: Engine, task: Task, *, world: World) -> None:
        recipe, stage, config = call.recipe, call.stage.name, call.config
        self.call, self.recipe, self.world = call, recipe, world
        self.engine, self.data = engine, task.data
        directory = self.run_directory = RunDirectory(
            call.out_dir, stage=stage, config=config, inputs=call.records, world=world
        )
        self.quarantine = Quarantine(directory.quarantine_path, world=world)
        self.updater = Updater(engine, task.data, recipe, self.quarantine)
        self.validation = Validation(engine, task, recipe, world=world)
        self.metrics = MetricsLog.of(engine, call, directory.metrics_path)
        self.profiling = Profiling(call, rank=world.rank)
        self.saving = Saving(engine, task, recipe, directory, world=world)
        self.resuming = Resuming(call, engine, directory)
        self.publishing = Publishing(
            call, task, directory, self.quarantine, world=world, ds_config=engine.ds_config
        )
        self.position = Position()
        self.averaged: list[int] = []  # the updates whose mean the model now is; empty before

    def run(self) -> None:
        """Train to the last update, or to a stop request; write the stage's artifact.

        Raises:
            AgreedStop: a rank was asked to stop; the state is saved.
            ConfigError: a GPU has too little memory.
        """
        # cuDNN may otherwise add up the gradients of byte front ends in no fixed order.
        torch.backends.cudnn.deterministic = True
        with self.run_directory.locked(), self.profiling:
            with _in_memory(self.call):
                self._resume()
                self.engine.make_moments()  # a state has brought them
            try:
                self._rehearse()
                self._train()
            except torch.OutOfMemoryError as error:
                raise self._out_of_memory() from error
            finally:
                gc.unfreeze()
            self.publishing.publish(self.position, self.resumed, averaged=self.averaged)

    def _train(self) -> None:
        with (
            StopFlag() as self.stop,
            self._progress_bar() as bar,
            closing(self._updates()) as updates,
        ):
            self._validate_if_due()
            if self._is_done() and self.position != self.resumed.position:
                self._save_if_due()  # a stop within the last validation left a state without it
            first = self.position.update + 1
            while not self._is_done():
                for alarm in self._update(updates):
                    bar.say(f"{self.call.out_dir.name}, update {self.position.update}: {alarm}")
                if self.position.update == first:
                    _freeze_objects()
                bar.advance(note=self.metrics.note)
                self._validate_if_due()
                self._save_if_due()
            self.metrics.write_rest(self.position)
            if self.recipe.training.average_last:
                self._take_mean()

    def _is_done(self) -> bool:
        training = self.recipe.training
        at_the_end = self.position.update >= training.updates
        return at_the_end or is_out_of_patience(training, self.position)

    def _resume(self) -> None:
        self.resumed = self.resuming.resume()
        self.position = self.resumed.position
        self.quarantine.read()
        self.metrics.resume(self.position)
        self.clock = time.monotonic() - self.position.seconds

    def _rehearse(self) -> None:
        """Run the largest pass of the next window: if memory runs out, it does so now.

        Then fewer micro-batches share a pass.
        """
        if not self._is_done():
            largest = self.data.planner.largest(self.position.cursor)
            while not self._has_memory_for(largest):
                self._lower_per_pass()

    def _has_memory_for(self, largest: MicroBatch) -> bool:
        """Return whether all ranks have the memory for a pass of micro-batches of this size."""
        per_pass = self.engine.per_pass
        batch = read_joined([largest] * per_pass, self.data.train.batch, shares=per_pass > 1)
        torch.manual_seed(derive_seed("rehearsal", self.recipe.training.seed))
        is_enough = True
        try:
            self.engine.rehearse(batch)
        except torch.OutOfMemoryError:
            if self.engine.model.expert_parallel_size > 1:
                raise  # other ranks may wait for this one in a layer, and could not agree with it
            is_enough = False
        return all(gather_objects(is_enough))

    def _lower_per_pass(self) -> None:
        """Go on with fewer micro-batches per pass.

        Raises:
            ConfigError: each micro-batch has a pass of its own.
        """
        number = self.engine.per_pass
        if number == 1:
            raise self._out_of_memory()
        torch.cuda.empty_cache()
        self.engine.lower_per_pass()
        if self.world.rank == 0:
            print(
                f"{self.call.out_dir}: a GPU has too little memory for passes of {number} "
                f"micro-batches; a pass now has {self.engine.per_pass} (micro_batches_per_pass in "
                "the ds_config).",
                file=sys.stderr,
                flush=True,
            )

    def _out_of_memory(self) -> ConfigError:
        number = self.engine.per_pass
        name = "micro_batches_per_pass in the ds_config"
        fewer = f"{name} to less than {number}, " if number > 1 else ""
        return ConfigError(
            f"{self.call.out_dir}: a GPU has too little memory for a pass of "
            f"{counted(number, 'micro-batch', 'micro-batches')}. Set {fewer}"
            "training.recompute_layers to true or batches.tokens to less."
        )

    def _updates(self) -> Generator[Update]:
        return self.data.updates(
            self.position.cursor,
            rank=self.world.rank,
            ranks=self.world.size,
            update=self.position.update,
            per_pass=self.engine.per_pass,
        )

    def _progress_bar(self) -> ProgressBar:
        return ProgressBar(
            self.call.out_dir.name,
            total=self.recipe.training.updates,
            initial=self.position.update,
            enabled=self.world.rank == 0,
        )

    def _update(self, updates: Generator[Update]) -> list[str]:
        """Make an update; return the alarms that begin or end with it, on rank 0."""
        update, clock = self.position.update + 1, time.monotonic()
        with self.profiling.update(update):
            feed = next(updates)
            result, overflows = self.updater.make(feed)
        self.metrics.add(result, seconds=time.monotonic() - clock)
        self.position = replace(
            self.position,
            update=update,
            cursor=feed.step.next_cursor,
            seconds=round(time.monotonic() - self.clock, 3),
            overflows=self.position.overflows + overflows,
            loss_scale=self.engine.loss_scale,
        )
        process.advance(update)
        return self.metrics.write_update_if_due(self.position, gradient_norm=result.gradient_norm)

    def _validate_if_due(self) -> None:
        if self.validation.is_due(self.position):
            found = self._validated()
            self.metrics.write_validation(found.record(), self.position)
            self._keep_if_best(found)

    def _validated(self) -> ValidationResult:
        try:
            return self.validation.run(before_batch=self._stop_if_asked)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"{self.call.out_dir}: a GPU has too little memory for a micro-batch of "
                "validation. Set batches.evaluation_tokens to less."
            ) from error

    def _keep_if_best(self, found: ValidationResult) -> None:
        self.position, is_best = judge(self.position, found.perplexity)
        if is_best:
            self.saving.save_best(self.position, found, replanned=self.resumed.replanned)

    def _save_if_due(self) -> None:
        self.run_directory.publish_written()
        self._stop_if_asked()
        if self.saving.is_state_due(self.position, is_done=self._is_done()):
            self._save_state()

    def _save_state(self) -> None:
        self.metrics.sync()
        position = replace(self.position, interval=self.metrics.interval_sums())
        self.saving.save_state(position, replanned=self.resumed.replanned, is_done=self._is_done())

    def _stop_if_asked(self) -> None:
        if not self.stop.agreed():
            return
        if not self.averaged:  # the mean replaced the weights whose state is already saved
            self._save_state()
        self.run_directory.wait()
        wait_for_all()  # a rank that is late to leave may be killed: by then its work is saved
        raise AgreedStop(
            f"stopped after update {self.position.update} of {self.recipe.training.updates}, "
            f"state saved in {self.run_directory.directory}"
        )

    def _take_mean(self) -> None:
        """Make the mean of the last states the result of the run, instead of the best weights."""
        self.averaged = self.resuming.load_mean(end=self.position.update)
        self.saving.save_mean(self.averaged, self._validated())


def _freeze_objects() -> None:
    """Leave the objects that exist now out of garbage collections, until ``gc.unfreeze``.

    Modules, model and optimizer stay for the whole run. A full collection would visit all of them,
    while the GPU waits for work.
    """
    gc.collect()
    gc.freeze()


class Updater:
    """Makes one update, and repeats it if its gradient is not finite; all ranks call it together.

    DeepSpeed makes no update with such a gradient: weights, moments and the position in the data
    stay. The reaction depends on the loss scale:

    - fp16 with a dynamic loss scale: the same micro-batches are tried again, with the same dropout,
      at the smaller scale that DeepSpeed chooses, until the gradient is finite or the scale is at
      its minimum. No sentence is passed over, and neither the number of updates nor the learning
      rate moves: a run with overflows sees the same data as one without.
    - Otherwise, and at the smallest scale, the cause is not the scale. Training ends, or, with
      ``training.skip_nonfinite_after``, the update is tried again that many times; then the
      micro-batches whose gradients are not finite go to the quarantine, and the update is made of
      the others, from the loss scale it began with. The loss is divided by the labels that remain.
    """

    def __init__(self, engine: Engine, data: Data, recipe: Recipe, quarantine: Quarantine) -> None:
        self._engine, self._data, self._recipe = engine, data, recipe
        self._quarantine = quarantine
        self._tries = recipe.training.skip_nonfinite_after

    def make(self, feed: Update) -> tuple[StepResult, int]:
        """Make an update, without the micro-batches that are in quarantine.

        Returns:
            Its result, and how often the loss scale was lowered for it.

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
                return result, overflows
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
        # The learning rate has changed nothing before the first update.
        own = "at a router, loss or module of your own"
        fix = f"Look {own}" if update == 1 else f"Lower optimizer.learning_rate, look {own}"
        return CheckpointError(
            f"The gradient of update {update} is not a number: the run in {run} is left at its "
            f"last state. {fix}, or at that update's data ({finding})."
        )


def _labels(feed: Update, without: frozenset[int]) -> int:
    """Count the labels of all micro-batches that are not left out."""
    plans = feed.step.micro_batches
    return sum(plan.num_labels for index, plan in enumerate(plans) if index not in without)


def culprits(verdicts: Sequence[Sequence[Verdict]], *, sharing: int) -> set[int]:
    """Return the micro-batches whose gradients are not finite, from every rank's verdicts by turn.

    Groups of ``sharing`` consecutive ranks share experts. If only gradients of experts are not
    finite in a turn, the ranks' sentences cannot be told apart: all of that turn are returned.
    A stand-in is never returned: its sentence is part of a micro-batch that is checked as well.
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
