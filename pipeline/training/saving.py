"""Validate; write and load training states, kept weights, and the stage's artifact.

:class:`Validation` computes the losses by which weights are kept. :class:`Saving` writes into the
run directory while training goes on, :class:`Resuming` goes on from its newest state, and
:class:`Publishing` makes the stage's artifact from it at the end.

The mean of the last states (``training.average_last``) is of the states after every
``checkpoint_every`` updates and of the state at the run's end. A stop request saves a state in
between, which never counts. The mean is therefore a function of the settings, however often a run
was stopped.
"""

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from pipeline.artifacts.artifact import (
    Artifact,
    ArtifactWriter,
    check_together,
    open_artifact,
    read_manifest,
)
from pipeline.artifacts.corpus import Direction
from pipeline.artifacts.manifest import how_to_restore
from pipeline.artifacts.places import link_or_copy
from pipeline.artifacts.run_folders import PROGRESS_FILE, Position, read_position, replanned
from pipeline.batching.global_step import MicroBatch
from pipeline.checkpoints.averaging import MeanOfStates
from pipeline.checkpoints.resharding import SHAPES_FILE, CheckedState, write_pieces
from pipeline.checkpoints.weights import write_weights
from pipeline.config.recipe import Recipe
from pipeline.config.settings import Route
from pipeline.distributed.world import World, all_sum
from pipeline.errors import CheckpointError
from pipeline.model.moe.routing_statistics import ROUTING_FILE, RoutingCounter, RoutingStatistics
from pipeline.model.parameters import shapes_of_all
from pipeline.stage import StageCall
from pipeline.terminal import counted
from pipeline.training.engine import Engine
from pipeline.training.run_directory import Quarantine, RunDirectory
from pipeline.training.settings import TrainingConfig
from pipeline.training.task import Summary, Task


@dataclass(frozen=True)
class ValidationResult:
    """The result of one validation, equal on all ranks.

    Attributes:
        by_route: a summary for each trained route; a model without two routes has ``specific``.
        deciding_route: the route that decides, by its perplexity, which weights are kept.
        perplexity: the perplexity that decides, of the deciding route.
        routing: expert statistics over all validation tokens.
    """

    by_route: Mapping[Route, Summary]
    deciding_route: Route
    perplexity: float
    routing: RoutingStatistics

    def record(self) -> dict[str, object]:
        """Return the fields of this validation's line in the metrics."""
        record = asdict(self.by_route[self.deciding_route])
        if self.routing.layers:
            record["routing"] = self.routing.summary()
        if len(self.by_route) > 1:
            record["routes"] = {route: asdict(one) for route, one in self.by_route.items()}
        return record


class Validation:
    """Computes the losses of the current weights on the validation sentences.

    The ranks share the batches and sum their losses: every rank gets the same result and
    takes the same decisions from it.

    Invariant: all ranks evaluate the same number of batches. Under expert parallelism an
    evaluation needs every rank, so a rank that has no batch left evaluates the last one again and
    discards the result.
    """

    def __init__(self, engine: Engine, task: Task, recipe: Recipe, *, world: World) -> None:
        self._engine, self._task, self._recipe, self._world = engine, task, recipe, world

    def is_due(self, position: Position) -> bool:
        """Return whether the weights at ``position`` are to be validated and were not yet."""
        update, training = position.update, self._recipe.training
        is_turn = update % training.validate_every == 0 or update == training.updates
        return update > 0 and is_turn and position.validated < update

    def run(self, *, before_batch: Callable[[], None] = lambda: None) -> ValidationResult:
        """Validate the current weights; all ranks call this together.

        Args:
            before_batch: called on every rank before each batch; the loop stops here if asked to.
        """
        losses, routing = self._losses(before_batch)
        by_route = {route: self._task.summarize(found) for route, found in losses.items()}
        deciding = self._recipe.training.best_by_route if len(by_route) > 1 else "specific"
        return ValidationResult(by_route, deciding, self._task.kept_by(by_route[deciding]), routing)

    def _losses(
        self, before_batch: Callable[[], None]
    ) -> tuple[dict[Route, dict[Direction, tuple[float, int]]], RoutingStatistics]:
        """Return route → direction → (summed cross entropy in nats, labels), over all ranks."""
        data, spec = self._task.data, self._engine.model.spec
        plan = data.validation(budget=self._recipe.batches.evaluation_tokens)
        directions = sorted({direction for direction, _ in plan})
        # columns: labels, cross entropy of the specific route, cross entropy of the shared route
        sums = torch.zeros(len(directions), 3, dtype=torch.float64)
        counter = RoutingCounter(spec)
        shared: Tensor | None = None
        for batch_plan, row in self._share(plan, directions):
            before_batch()
            terms = self._engine.evaluate(data.valid.batch(batch_plan))
            shared = terms.shared_cross_entropy
            if row is None:
                continue
            counter.add(terms.routing, language=spec.languages.index(directions[row].target))
            sums[row] += torch.tensor(
                [
                    float(batch_plan.num_labels),
                    float(terms.cross_entropy),
                    0.0 if shared is None else float(shared),
                ],
                dtype=torch.float64,
            )
        all_sum(sums)
        all_sum(counter.sums)
        routes: tuple[Route, ...] = ("specific",) if shared is None else ("specific", "shared")
        losses: dict[Route, dict[Direction, tuple[float, int]]] = {
            route: {
                direction: (float(sums[row, column]), int(sums[row, 0]))
                for row, direction in enumerate(directions)
            }
            for column, route in enumerate(routes, start=1)
        }
        return losses, counter.result()

    def _share(
        self, plan: list[tuple[Direction, MicroBatch]], directions: list[Direction]
    ) -> Iterator[tuple[MicroBatch, int | None]]:
        """Yield this rank's batches with their direction's row; None marks one not to count."""
        for turn in range(math.ceil(len(plan) / self._world.size)):
            index = turn * self._world.size + self._world.rank
            direction, batch_plan = plan[min(index, len(plan) - 1)]
            yield batch_plan, directions.index(direction) if index < len(plan) else None


def judge(position: Position, perplexity: float) -> tuple[Position, bool]:
    """Return the position after a validation, and whether its weights are the best so far.

    The best weights have a lower perplexity than the weights of every earlier validation; an equal
    one is not enough.

    An attempt that ended before it saved a state may already have kept weights of this update or
    of a later one. The validation then counts as it did in that attempt: not against patience.
    """
    position = replace(position, validated=position.update)
    best, best_update = position.best_perplexity, position.best_update
    # What is no number is higher than any number.
    is_first_number = best is not None and math.isnan(best) and not math.isnan(perplexity)
    if best is None or best_update is None or is_first_number or perplexity < best:
        improved = replace(
            position,
            best_perplexity=perplexity,
            best_update=position.update,
            validations_since_best=0,
        )
        return improved, True
    since = position.validations_since_best + 1 if best_update < position.update else 0
    return replace(position, validations_since_best=since), False


def is_out_of_patience(training: TrainingConfig, position: Position) -> bool:
    """Return whether ``training.patience`` validations in a row found no lower perplexity.

    All ranks agree: the count follows from sums over all ranks and is part of training states.
    """
    return 0 < training.patience <= position.validations_since_best


class Saving:
    """Writes training states and weights into the run directory; all ranks call it together.

    With ``saving.in_background`` it writes a copy in host memory while training goes on.

    Invariant: every rank writes its own share, each tensor is written exactly once, and an
    artifact appears in the run directory only when all ranks have written theirs. The newest
    complete state is never removed while training goes on.
    """

    def __init__(
        self,
        engine: Engine,
        task: Task,
        recipe: Recipe,
        run_directory: RunDirectory,
        *,
        world: World,
    ) -> None:
        self._engine, self._task, self._recipe = engine, task, recipe
        self._run_directory, self._world = run_directory, world

    def is_state_due(self, position: Position, *, is_done: bool) -> bool:
        """Return whether a state is saved at ``position``.

        The last update needs a state only if it is averaged, or kept so that training can be
        continued to more updates.
        """
        training = self._recipe.training
        if is_done:
            return training.average_last > 0 or self._recipe.saving.keep_states != "none"
        return position.update % training.checkpoint_every == 0

    def save_state(
        self, position: Position, *, replanned: Sequence[Mapping[str, int]], is_done: bool
    ) -> None:
        """Write the training state of ``position`` and remove states that nothing needs."""
        in_background = self._recipe.saving.in_background
        pieces = self._engine.optimizer_pieces(copied=in_background)
        held = iter(list(pieces)) if in_background else pieces

        def write(writer: ArtifactWriter) -> None:
            writer.settled |= write_pieces(
                writer.directory / "optimizer", held, part=self._world.rank
            )
            if self._world.rank == 0:
                writer.write_json(PROGRESS_FILE, position.to_json())
                writer.write_json(SHAPES_FILE, shapes_of_all(self._engine.model))
                writer.statistics.update(update=position.update, replanned=replanned)

        self._run_directory.write(
            self._run_directory.state_dir(position.update),
            kind="training_state",
            write=write,
            in_background=in_background,
        )
        training = self._recipe.training
        self._run_directory.prune(
            keep_last=training.keep_last,
            updates_kept=updates_kept(training, update=position.update, is_end=is_done),
        )

    def save_best(
        self,
        position: Position,
        found: ValidationResult,
        *,
        replanned: Sequence[Mapping[str, int]] = (),
    ) -> None:
        """Write the current weights as the weights of the best validation."""
        best = {
            "update": position.best_update,
            "perplexity": position.best_perplexity,
            **({"replanned": replanned} if replanned else {}),
        }
        self._save_weights(self._run_directory.best_dir, best, found.routing)

    def save_mean(self, averaged: Sequence[int], found: ValidationResult) -> None:
        """Write the current weights as the mean of the states after the ``averaged`` updates."""
        mean = {
            "averaged": len(averaged),
            "averaged_updates": averaged,
            "perplexity": found.perplexity,
        }
        self._save_weights(self._run_directory.mean_dir, mean, found.routing)

    def _save_weights(
        self, directory: Path, statistics: Mapping[str, object], routing: RoutingStatistics
    ) -> None:
        in_background = self._recipe.saving.in_background
        weights = self._own_weights(copied=in_background)
        held = iter(list(weights)) if in_background else weights

        def write(writer: ArtifactWriter) -> None:
            try:
                writer.settled |= write_weights(
                    writer.directory / "weights", held, part=self._world.rank
                )
            finally:  # even if writing failed: the other ranks wait for this rank's shares
                for _ in held:
                    pass
            if self._world.rank == 0:
                self._task.describe(writer, self._engine.model.spec)
                if routing.layers:
                    writer.write_json(ROUTING_FILE, routing.to_json())
                writer.statistics.update(statistics)

        self._run_directory.write(
            directory, kind=self._task.makes, write=write, in_background=in_background
        )

    def _own_weights(self, *, copied: bool) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that this rank writes; all ranks iterate to the end together."""
        # Counted apart, since ranks may hold different numbers of experts (of languages).
        passed = {True: 0, False: 0}
        for entry, value in self._engine.published_weights():
            is_expert = entry.expert is not None
            if self._writes(passed[is_expert], is_expert=is_expert):
                yield entry.name, value.detach().to("cpu", copy=copied)
            passed[is_expert] += 1

    def _writes(self, index: int, *, is_expert: bool) -> bool:
        """Return whether this rank writes its ``index``-th expert or other tensor."""
        parallel = self._engine.model.expert_parallel_size
        if not is_expert or parallel == 1:
            return index % self._world.size == self._world.rank
        return index % (self._world.size // parallel) == self._world.rank // parallel


@dataclass(frozen=True)
class Resumed:
    """The point from which a run continues.

    Attributes:
        replanned: all changes of ``training.updates`` so far: ``after`` which update, ``from``
            and ``to`` which number.
    """

    position: Position
    replanned: list[dict[str, int]]


class Resuming:
    """Restores the newest training state of a run, or loads the mean of the last states at its end.

    The state holds master weights, moments, loss scale and position. It may come from another
    number of ranks.

    Invariant: a run that was stopped and resumed makes the same updates as one that was not. A
    state that cannot be continued from is an error on all ranks before the first update. The mean
    is of exactly the states that :func:`averaged_updates` lists. If a state is gone, the run
    fails instead of averaging the rest.
    """

    def __init__(self, call: StageCall, engine: Engine, run_directory: RunDirectory) -> None:
        self._config, self._training = call.config, call.recipe.training
        self._engine, self._run_directory = engine, run_directory

    def resume(self) -> Resumed:
        """Load the newest state into the engine; all ranks call this.

        Raises:
            CheckpointError: the state belongs to other settings or inputs, lies beyond the last
                update, or a state is missing that the mean of the last states needs.
        """
        state = self._run_directory.resume_from()
        if state is None:
            return Resumed(Position(), replanned=[])
        position = read_position(state)
        updates = self._training.updates
        if position.update > updates:  # with updates_of = "bytes", only known once data is read
            raise CheckpointError(
                f"{state.directory}: {position.update:,} updates are done, and the recipe makes "
                f"{updates:,} with this vocabulary. Raise training.updates, or name another --out."
            )
        position = replace(position, **self._run_directory.best_after(position.update))
        changes = replanned(state, config=self._config)
        checked = CheckedState(state, shapes_of_all(self._engine.model))
        self._engine.load_optimizer_pieces(checked, update=position.update)
        self._engine.restore_loss_scale(position.loss_scale)
        if not self._training.patience:  # otherwise the last update is not known yet
            self._refuse_missing(end=updates, update=position.update)
        return Resumed(position, changes)

    def load_mean(self, *, end: int) -> list[int]:
        """Put the mean of the last states of a run that ended after ``end`` into the model.

        All ranks call this. Returns the updates after which the averaged states were saved. Each
        rank reads its shares of every tensor.
        """
        self._run_directory.wait()
        self._refuse_missing(end=end, update=end)
        averaged = averaged_updates(self._training, end=end)
        states = [
            open_artifact(self._run_directory.state_dir(update), kind="training_state")
            for update in averaged
        ]
        check_together(*states)
        self._engine.load_weights(MeanOfStates(states, shapes_of_all(self._engine.model)))
        return averaged

    def _refuse_missing(self, *, end: int, update: int) -> None:
        """Check the states of a run that ends after ``end`` and stands at ``update``.

        Raises:
            CheckpointError: on all ranks, if a state that the mean needs is gone.
        """
        if not self._training.average_last:
            return
        there = self._run_directory.states_after()
        problem = describe_missing(self._training, end=end, update=update, there=there)
        if problem is not None:
            raise CheckpointError(f"{self._run_directory.directory}: {problem}.")


def averaged_updates(training: TrainingConfig, *, end: int) -> list[int]:
    """Return the updates whose states are averaged in a run that ends after ``end``, oldest first.

    There are ``average_last`` of them, or fewer if the run is too short.
    """
    regular = range(training.checkpoint_every, end, training.checkpoint_every)
    before_the_end = training.average_last - 1
    return [*regular[max(0, len(regular) - before_the_end) :], end]


def updates_kept(training: TrainingConfig, *, update: int, is_end: bool) -> list[int]:
    """Return the updates whose states the mean may need, oldest first.

    Args:
        training: the recipe's section.
        update: the last update so far.
        is_end: whether the run ends with it; otherwise it may end at any later one.
    """
    if is_end and training.average_last:
        return averaged_updates(training, end=update)
    every = training.checkpoint_every
    regular = range(every, update + 1, every)
    return [*regular[max(0, len(regular) - training.average_last) :]]


def describe_missing(
    training: TrainingConfig, *, end: int, update: int, there: Collection[int]
) -> str | None:
    """Describe the states that the mean needs and that are gone, and what to do.

    Returns None if all states up to ``update`` are there.
    """
    needed = averaged_updates(training, end=end)
    missing = [one for one in needed if one <= update and one not in there]
    if not missing:
        return None
    left = len([one for one in needed if one > missing[-1]])
    listed = ", ".join(f"{one:,}" for one in missing)
    lower = f"lower it to {left}, " if left else "set it to 0, "
    return (
        f"training.average_last is {training.average_last}, and of the states that the mean is of "
        f"those after these updates are not there any more: {listed}; {lower}or begin anew in "
        'another --out (saving.keep_states = "all" keeps them where a run is to go on later)'
    )


class Publishing:
    """Makes the stage's artifact from the weights that a finished run kept.

    The artifact holds the weights, the metrics, the quarantine if there is one, and a summary.

    Invariant: nothing that is needed to make the artifact is removed before it is complete. A
    process that is killed here makes the same artifact when it is started again.
    """

    def __init__(
        self,
        call: StageCall,
        task: Task,
        run_directory: RunDirectory,
        quarantine: Quarantine,
        *,
        world: World,
        ds_config: Mapping[str, object],
    ) -> None:
        """Prepare to publish; ``ds_config`` is the merged one, for the manifest."""
        self._call, self._task, self._recipe = call, task, call.recipe
        self._run_directory, self._quarantine = run_directory, quarantine
        self._world, self._ds_config = world, ds_config

    def publish(
        self,
        position: Position,
        resumed: Resumed,
        *,
        averaged: Sequence[int],
    ) -> None:
        """Make the artifact and remove files that nothing needs any longer; all ranks call this.

        Args:
            position: where training ended.
            resumed: where this attempt at the run began.
            averaged: the updates whose states were averaged; empty: publish the best weights.
        """
        self._run_directory.wait()
        if self._world.rank != 0:
            return
        self._settle_states(averaged)
        directory = self._run_directory.mean_dir if averaged else self._run_directory.best_dir
        if read_manifest(directory) is None:
            raise CheckpointError(
                f"{directory} with the weights of the run is gone. {how_to_restore(directory)}."
            )
        weights = open_artifact(directory, kind=self._task.makes)
        # The metrics' clock leaves out loading, the last validation and writing; this one has them.
        wall_seconds = time.monotonic() - self._call.clock + resumed.position.seconds
        with self._call.new_artifact(wall_seconds=round(wall_seconds, 3)) as writer:
            for name in weights.names():
                writer.take_over(name, weights)
            self._run_directory.metrics_path.touch()  # a user may have removed a damaged one
            link_or_copy(self._run_directory.metrics_path, writer.path("metrics.jsonl"))
            writer.notes.add("metrics.jsonl")  # seconds, memory, resumptions
            if self._quarantine.entries:
                link_or_copy(self._quarantine.path, writer.path(self._quarantine.path.name))
            writer.statistics.update(
                weights.statistics, updates=position.update, deepspeed=self._ds_config
            )
            if resumed.replanned:
                writer.statistics["replanned"] = resumed.replanned
            writer.summary += self._summary(weights, position, resumed.replanned, averaged)
        self._remove_leftovers(averaged)

    def _settle_states(self, averaged: Sequence[int]) -> None:
        """Prepare the removal of states before the artifact exists."""
        match self._recipe.saving.keep_states:
            case "none":  # all of them are needed until the artifact exists
                self._run_directory.announce_removal(key=self._call.key)
            case "last" if not averaged:
                self._run_directory.prune(keep_last=1)
            case "all":  # one written in the background was not there when others were removed
                keep_last = self._recipe.training.keep_last
                self._run_directory.prune(keep_last=keep_last, updates_kept=averaged)

    def _remove_leftovers(self, averaged: Sequence[int]) -> None:
        """Remove files that nothing needs once the artifact exists."""
        keep_states = self._recipe.saving.keep_states
        if keep_states == "none":
            self._run_directory.remove()
        elif averaged:
            self._run_directory.remove_mean()
            if keep_states == "last":
                self._run_directory.prune(keep_last=1)

    def _summary(
        self,
        weights: Artifact,
        position: Position,
        replanned: Sequence[Mapping[str, int]],
        averaged: Sequence[int],
    ) -> list[str]:
        updates = self._recipe.training.updates
        lines = [
            f"{counted(position.update, 'update')} on {self._task.trained_on()}, "
            f"{position.seconds:,.0f} s of training",
            self._which_weights(weights, position, averaged),
        ]
        if is_out_of_patience(self._recipe.training, position) and position.update < updates:
            lines.append(
                f"ended {counted(updates - position.update, 'update')} early: "
                f"{counted(position.validations_since_best, 'validation')} in a row found none "
                "lower"
            )
        if replanned:
            changes = (
                f"{change['from']:,} → {change['to']:,} after update {change['after']:,}"
                for change in replanned
            )
            lines.append(f"the number of updates was changed on the way: {'; '.join(changes)}")
        if position.overflows:
            lines.append(
                f"fp16 overflowed {counted(position.overflows, 'time')}; each of these updates was "
                "made again at a smaller loss scale"
            )
        lines += self._task.notes
        if self._quarantine.entries:
            lines.append(
                f"{counted(len(self._quarantine.entries), 'micro-batch', 'micro-batches')} left "
                f"out, since gradients were not finite: see {self._quarantine.path.name}"
            )
        return lines

    def _which_weights(self, weights: Artifact, position: Position, averaged: Sequence[int]) -> str:
        training = self._recipe.training
        tier = training.best_by.replace("_", " ")
        of_tier = "" if training.best_by == "all" else f" on {tier}-resource pairs"
        if not averaged:
            if position.best_perplexity is not None and math.isnan(position.best_perplexity):
                return (
                    f"kept the weights of update {position.best_update:,}, the first validated: "
                    f"no validation perplexity{of_tier} is a number. Look at metrics.jsonl"
                )
            return (
                f"kept the weights of update {position.best_update:,}, whose validation perplexity"
                f"{of_tier}, {position.best_perplexity:.3f}, is the lowest"
            )
        updates, last = ", ".join(f"{update:,}" for update in averaged), training.average_last
        fewer = f"; {last} were asked for" if len(averaged) < last else ""
        return (
            f"took the mean of the weights after updates {updates}{fewer}: its validation "
            f"perplexity{of_tier} is {weights.statistics['perplexity']:.3f}, the lowest "
            f"of one update's weights {position.best_perplexity:.3f}"
        )
