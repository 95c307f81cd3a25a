"""The training loop: updates, validation, checkpoints, and stopping in step with all ranks."""

import math
import sys
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor

from pipeline.artifacts.artifact import Artifact, ArtifactWriter, open_artifact
from pipeline.artifacts.corpus import Direction, resource_of
from pipeline.artifacts.mixture import read_mixture
from pipeline.artifacts.places import link_or_copy
from pipeline.artifacts.shared_hashing import check_together
from pipeline.artifacts.training_states import replanned
from pipeline.batching.equal_epochs import with_resolved_updates
from pipeline.batching.feed import TrainingData, Update
from pipeline.batching.global_step import MicroBatch
from pipeline.checkpoints.averaging import MeanOfStates
from pipeline.checkpoints.training_state import (
    PROGRESS_FILE,
    PieceReader,
    Position,
    read_position,
    write_pieces,
)
from pipeline.checkpoints.weights import write_weights
from pipeline.config import Recipe, Route, TrainingConfig
from pipeline.distributed.collectives import all_max, all_sum, from_rank_zero
from pipeline.distributed.signals import StopFlag
from pipeline.distributed.world import World
from pipeline.errors import CheckpointError, ConfigError, Interrupted
from pipeline.kernels.cpu_choice import CpuKernels, by_processor, using_cpu_kernels
from pipeline.kernels.cpu_timing import Shape, measured_kernels
from pipeline.model.labeller import Trained
from pipeline.model.language_modules.choice import languages_with_modules
from pipeline.model.moe.routing_statistics import (
    ROUTING_FILE,
    RoutingCounter,
    RoutingStatistics,
)
from pipeline.model.spec import ModelSpec
from pipeline.model.transformer import Transformer
from pipeline.seeds import derive_seed
from pipeline.stages import StageCall
from pipeline.summary import counted
from pipeline.terminal import JsonLines
from pipeline.terminal import Progress as ProgressBar
from pipeline.training.engine import Engine, StepResult
from pipeline.training.mean_of_states import averaged_updates, describe_missing, updates_kept
from pipeline.training.optim import learning_rate, make_optimizer
from pipeline.training.quarantine import Quarantine
from pipeline.training.run_directory import RunDirectory
from pipeline.training.task import Summary, Task, Translation
from pipeline.training.unspaced_lines import unspaced_notes
from pipeline.training.updates import Updater

MEASURED_TOKENS = 512
"""Of a micro-batch, when kernels are measured: enough for threads, and done within seconds."""


def training_data(call: StageCall) -> TrainingData:
    """Open the shards and the mixture a training stage is given; all ranks call this."""
    shards = call.artifacts["shards"]
    check_together(shards, shards.names())
    return TrainingData(
        shards,
        read_mixture(call.artifacts["mixture"]),
        call.recipe.batches,
        seed=call.recipe.training.seed,
    )


def train(call: StageCall, model: Transformer, data: TrainingData, *, world: World) -> None:
    """Train a model to translate the call's data, and write the stage's checkpoint."""
    # What stands in manifests, call.config, is the recipe as given.
    call = replace(call, recipe=with_resolved_updates(call.recipe, data))
    check_tier(data, call.recipe.training)
    check_languages(data, model.spec)
    notes = unspaced_notes(model.spec, data.train_lines, segmented=data.tokenizer.segmenters.keys())
    for note in notes if world.rank == 0 else ():
        print(f"{call.out_dir}: {note}.", file=sys.stderr, flush=True)
    train_task(call, model, Translation(call, data, notes=notes), world=world)


def train_task(call: StageCall, model: Trained, task: Task, *, world: World) -> None:
    """Train a model for a task and write the stage's artifact.

    Raises:
        ConfigError: updates are counted in bytes, and the task is no translation.
    """
    if call.recipe.training.updates_of != "tokens":
        raise ConfigError(
            f"training.updates_of is {call.recipe.training.updates_of!r}, which is for "
            'translation models: set it to "tokens".'
        )
    task.data.check(max_positions=model.spec.model.max_positions)
    engine = Engine(
        model,
        call.recipe,
        world=world,
        ds_config=call.ds_config,
        make_optimizer=lambda groups: make_optimizer(groups, call.recipe.optimizer),
    )
    TrainingRun(call, engine, task, world=world).run()


def check_tier(data: TrainingData, training: TrainingConfig) -> None:
    """Raises ConfigError where the best weights go by a tier that nothing is validated on."""
    tiers = {
        resource_of(data.imported_lines.get(pair, 0), thresholds=training.resource_thresholds)
        for pair in data.valid.offsets
    }
    if training.best_by != "all" and training.best_by not in tiers:
        raise ConfigError(
            f"training.best_by is {training.best_by}, and no pair with validation sentences is of "
            f"that resource tier, only of {', '.join(sorted(tiers))}: name one of them, or change "
            "training.resource_thresholds."
        )


def check_languages(data: TrainingData, spec: ModelSpec) -> None:
    """Raises ConfigError where there is text in a language that has no module of a model's."""
    own = languages_with_modules(spec)
    pairs = (*data.train.offsets, *data.valid.offsets)
    missing = sorted({code for pair in pairs for code in pair.split("-")} - set(own))
    if missing:
        raise ConfigError(
            f"The shards have text in {', '.join(missing)}, for which the model has no language "
            f"module: it has those of {', '.join(own)}; make shards of these languages alone "
            "(corpus.languages), or train a model that has all modules."
        )


class TrainingRun:
    """One training run, from its last state (or the start) to its final checkpoint."""

    def __init__(self, call: StageCall, engine: Engine, task: Task, *, world: World) -> None:
        self.call = call
        self.recipe: Recipe = call.recipe
        self.engine, self.task, self.data, self.world = engine, task, task.data, world
        self.run_directory = RunDirectory(
            call.out_dir,
            stage=call.stage.name,
            config=call.config,
            inputs=call.records,
            world=world,
        )
        self.quarantine = Quarantine(self.run_directory.quarantine_path, world=world)
        self.updater = Updater(engine, self.data, call.recipe, self.quarantine)
        self.position = Position()
        self.replanned: list[dict[str, int]] = []
        self.averaged: list[int] = []
        """After which updates the states are whose mean the model holds; none while it trains."""
        self.routing = RoutingCounter(engine.model.spec).result()
        self.metrics = JsonLines(self.run_directory.metrics_path)
        self._clock = time.monotonic()
        self._earlier_seconds = 0.0
        self._interval = _Interval()

    def run(self) -> None:
        """Train to the last update, or to a stop request; write the final checkpoint.

        Raises:
            Interrupted: a stop was requested on some rank; the state is saved.
        """
        with self.run_directory.locked():
            self._resume()
            with using_cpu_kernels(self._choose_kernels()):
                self._rehearse()
                self._train()
                self._finish()

    def _train(self) -> None:
        total = self.recipe.training.updates
        with (
            StopFlag() as stop,
            ProgressBar(
                self.call.out_dir.name,
                total=total,
                initial=self.position.update,
                enabled=self.world.rank == 0,
            ) as bar,
            closing(self._updates()) as updates,
        ):
            self._validate_if_due(stop)
            while not self._is_done():
                bar.advance(note=self._update(next(updates)))
                self._validate_if_due(stop)
                self._save_if_due(stop)
            if self.recipe.training.average_last:
                self._take_mean(stop)

    def _is_done(self) -> bool:
        return self.position.update >= self.recipe.training.updates or self._is_out_of_patience()

    def _is_out_of_patience(self) -> bool:
        """The same on all ranks: it follows from sums over all of them, and from the state."""
        patience = self.recipe.training.patience
        return 0 < patience <= self.position.validations_since_best

    def _choose_kernels(self) -> CpuKernels:
        """The kernels of rank 0's processor, or those it measures, or had measured, for this run.

        All ranks take the same ones: of some kernels gradients come in another order than of others
        (:mod:`pipeline.training.gradient_order`).
        """
        if self.recipe.training.cpu_kernels == "processor":
            return from_rank_zero(by_processor())
        kernels = self.position.cpu_kernels
        if kernels is None:
            kernels = from_rank_zero(self._measure_kernels() if self.world.rank == 0 else None)
        self.position = replace(self.position, cpu_kernels=kernels)
        return kernels or by_processor()

    def _measure_kernels(self) -> CpuKernels:
        model = self.engine.model.spec.model
        shape = Shape(
            tokens=min(self.recipe.batches.tokens, MEASURED_TOKENS),
            width=model.width,
            hidden_width=model.feed_forward_width,
            num_heads=model.num_heads,
        )
        return measured_kernels(shape, dtype=next(self.engine.model.parameters()).dtype)

    def _resume(self) -> None:
        state = self.run_directory.resume_from()
        if state is not None:
            check_together(state, state.names())
            self.position = read_position(state)
            kept = self.run_directory.best_after(self.position.update)
            self.position = replace(self.position, **kept)
            self.replanned = replanned(state, config=self.call.config)
            self.engine.load_optimizer_pieces(PieceReader(state), update=self.position.update)
            self.engine.restore_loss_scale(self.position.loss_scale)
            if self.world.rank == 0:
                self._interval = _Interval(self.position.interval)
            if not self.recipe.training.patience:  # it is known where it ends
                self._refuse_missing_states(end=self.recipe.training.updates)
        self.quarantine.read()
        if self.world.rank == 0:
            self.metrics.truncate_after(self.position.update)
        self._earlier_seconds = self.position.seconds
        self._clock = time.monotonic() - self.position.seconds

    def _rehearse(self) -> None:
        """Run the largest batch of the next window once: if memory runs out, let it be now."""
        if not self._is_done():
            largest = self.data.planner.largest(self.position.cursor[0])
            torch.manual_seed(derive_seed("rehearsal", self.recipe.training.seed))
            self.engine.rehearse(self.data.train.batch(largest))

    def _updates(self) -> Generator[Update]:
        position, world = self.position, self.world
        return self.data.updates(
            position.cursor, rank=world.rank, ranks=world.size, update=position.update
        )

    def _update(self, feed: Update) -> str:
        """One update; returns the note for the progress bar."""
        recipe, update, clock = self.recipe, self.position.update + 1, time.monotonic()
        made = self.updater.make(feed, update=update)
        self._interval.add(made.result, seconds=time.monotonic() - clock)
        self.position = replace(
            self.position,
            update=update,
            cursor=feed.step.next_cursor,
            seconds=self._elapsed(),
            overflows=self.position.overflows + made.overflows,
            loss_scale=self.engine.loss_scale,
        )
        if update % recipe.logging.every == 0 or update == recipe.training.updates:
            self._log(made.result.gradient_norm)
        return self._interval.note

    def _log(self, gradient_norm: float) -> None:
        update = self.position.update
        record = self._interval.finish()
        record["gradient_norm"] = gradient_norm
        record["learning_rate"] = learning_rate(
            self.recipe.optimizer, update, total_updates=self.recipe.training.updates
        )
        if self.position.loss_scale is not None:
            record["loss_scale"] = self.position.loss_scale.scale
            record["overflows"] = self.position.overflows
        self._write_record("train", record)

    def _write_record(self, kind: str, record: Mapping[str, object]) -> None:
        progress = self.position
        if self.world.rank == 0:
            self.metrics.write(
                {"kind": kind, "update": progress.update, "seconds": progress.seconds, **record}
            )
            self.engine.write_events(
                [
                    (f"{kind}/{name}", value, progress.update)
                    for name, value in record.items()
                    if isinstance(value, float)
                ]
            )

    def _validate_if_due(self, stop: StopFlag) -> None:
        update, training = self.position.update, self.recipe.training
        due = update > 0 and (update % training.validate_every == 0 or update == training.updates)
        if not due or self.position.validated >= update:
            return
        by_route = self._validation(stop)
        found = by_route[self._deciding_route(by_route)]
        routing = {"routing": self.routing.summary()} if self.routing.layers else {}
        routes = {"routes": {route: asdict(one) for route, one in by_route.items()}}
        more = {**routing, **(routes if len(by_route) > 1 else {})}
        self._write_record("validation", {**asdict(found), **more})
        self._keep_if_best(self.task.kept_by(found))

    def _validation(self, stop: StopFlag) -> dict[Route, Summary]:
        """What a validation finds of every route that is trained; all ranks call this."""
        losses = self._validation_losses(stop)
        return {route: self.task.summarize(found) for route, found in losses.items()}

    def _deciding_route(self, by_route: Mapping[Route, object]) -> Route:
        return self.recipe.training.best_by_route if len(by_route) > 1 else "specific"

    def _keep_if_best(self, perplexity: float) -> None:
        """Keep the weights of the lowest perplexity so far, and count validations since then.

        A validation that an earlier attempt came through before it ended counts as it did then:
        what that attempt kept is of this update or of a later one.
        """
        position = replace(self.position, validated=self.position.update)
        best, best_update = position.best_perplexity, position.best_update
        if best is None or best_update is None or perplexity < best:
            self.position = replace(
                position,
                best_perplexity=perplexity,
                best_update=position.update,
                validations_since_best=0,
            )
            self._save_best()
        else:
            since = position.validations_since_best + 1 if best_update < position.update else 0
            self.position = replace(position, validations_since_best=since)

    def _validation_losses(self, stop: StopFlag) -> dict[Route, dict[Direction, tuple[float, int]]]:
        """Of every route that is trained: direction → (summed cross entropy, labels).

        Over all ranks; renews ``routing``.

        All ranks run the same number of batches: where there is none left for a rank it runs one
        whose result is not counted, since experts may live on other ranks.
        """
        plan = self.data.validation(budget=self.recipe.batches.evaluation_tokens)
        directions = sorted({direction for direction, _ in plan})
        sums = torch.zeros(len(directions), 3, dtype=torch.float64)
        spec = self.engine.model.spec
        counter = RoutingCounter(spec)
        for batch_plan, row in self._my_share(plan, directions):
            if stop.agreed():
                self._stop()
            terms = self.engine.evaluate(self.data.valid.batch(batch_plan))
            if row is not None:
                target = spec.languages.index(directions[row].target)
                counter.add(terms.routing, language=target)
                shared = terms.shared_cross_entropy
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
        self.routing = counter.result()
        trains_both = self.recipe.loss.objective == "fuse_distillation"
        routes: tuple[Route, ...] = ("specific", "shared") if trains_both else ("specific",)
        return {
            route: {
                direction: (float(sums[row, column]), int(sums[row, 0]))
                for row, direction in enumerate(directions)
            }
            for column, route in enumerate(routes, start=1)
        }

    def _my_share(
        self, plan: list[tuple[Direction, MicroBatch]], directions: list[Direction]
    ) -> Iterator[tuple[MicroBatch, int | None]]:
        rounds = math.ceil(len(plan) / self.world.size)
        for turn in range(rounds):
            index = turn * self.world.size + self.world.rank
            direction, batch_plan = plan[min(index, len(plan) - 1)]
            yield batch_plan, directions.index(direction) if index < len(plan) else None

    def _save_if_due(self, stop: StopFlag) -> None:
        self.run_directory.publish_written()
        if stop.agreed():
            self._stop()
        if self._is_state_due():
            self._save()

    def _is_state_due(self) -> bool:
        """After the last update only where states are kept, so that more updates repeat none, or
        where their mean is taken."""
        update, training = self.position.update, self.recipe.training
        if self._is_done() and training.average_last:
            return True
        if update == training.updates:
            return self.recipe.saving.keep_states != "none"
        return update % training.checkpoint_every == 0

    def _stop(self) -> None:
        if not self.averaged:  # of the weights that the model held before there is a state
            self._save()
        self.run_directory.wait()
        raise Interrupted(
            f"stopped after update {self.position.update} of {self.recipe.training.updates}, "
            f"state saved in {self.run_directory.directory}"
        )

    def _save(self) -> None:
        """Write the training state; in the background, from a copy, where the recipe says so."""
        progress = replace(self.position, interval=tuple(self._interval.over_ranks()))
        in_background = self.recipe.saving.in_background
        pieces = self.engine.optimizer_pieces(copied=in_background)
        held = iter(list(pieces)) if in_background else pieces

        def write(writer: ArtifactWriter) -> None:
            writer.settled |= write_pieces(
                writer.directory / "optimizer", held, part=self.world.rank
            )
            if self.world.rank == 0:
                writer.write_json(PROGRESS_FILE, progress.to_json())
                writer.statistics.update(update=progress.update, replanned=self.replanned)

        self.run_directory.write(
            self.run_directory.state_dir(progress.update),
            kind="training_state",
            write=write,
            in_background=in_background,
        )
        training = self.recipe.training
        self.run_directory.prune(
            keep_last=training.keep_last,
            updates_kept=updates_kept(training, update=progress.update, is_end=self._is_done()),
        )

    def _save_best(self) -> None:
        best = {"update": self.position.best_update, "perplexity": self.position.best_perplexity}
        self._save_weights(self.run_directory.best_dir, best)

    def _take_mean(self, stop: StopFlag) -> None:
        """Put the mean of the last states into the model, validate it and write it.

        All ranks take their shares of every tensor, as when a run goes on from one state.
        """
        training, update = self.recipe.training, self.position.update
        self.run_directory.wait()
        self._refuse_missing_states(end=update)
        averaged = averaged_updates(training, end=update)
        states = [
            open_artifact(self.run_directory.state_dir(one), kind="training_state")
            for one in averaged
        ]
        for state in states:
            check_together(state, state.names())
        self.engine.load_weights(MeanOfStates(states))
        self.averaged = averaged
        by_route = self._validation(stop)
        found = {
            "averaged": len(averaged),
            "averaged_updates": averaged,
            "perplexity": self.task.kept_by(by_route[self._deciding_route(by_route)]),
        }
        self._save_weights(self.run_directory.mean_dir, found)

    def _refuse_missing_states(self, *, end: int) -> None:
        """Raises CheckpointError where states are gone of which the result is to be the mean."""
        if not self.recipe.training.average_last:
            return
        problem = describe_missing(
            self.recipe.training,
            end=end,
            update=self.position.update,
            there=self.run_directory.states_after(),
        )
        if problem is not None:
            raise CheckpointError(f"{self.run_directory.directory}: {problem}.")

    def _save_weights(self, directory: Path, found: Mapping[str, object]) -> None:
        """Write the weights as they are, and what was found of them; in the background, from a
        copy, as states are."""
        in_background = self.recipe.saving.in_background
        weights = self._my_weights(copied=in_background)
        held = iter(list(weights)) if in_background else weights
        routing = self.routing

        def write(writer: ArtifactWriter) -> None:
            try:
                writer.settled |= write_weights(
                    writer.directory / "weights", held, part=self.world.rank
                )
            finally:  # whatever became of the files: the other ranks wait for this one's shares
                for _ in held:
                    pass
            if self.world.rank == 0:
                self._describe_weights(writer, routing)
                writer.statistics.update(found)

        self.run_directory.write(
            directory,
            kind=self.task.makes,
            write=write,
            in_background=in_background,
        )

    def _my_weights(self, *, copied: bool) -> Iterator[tuple[str, Tensor]]:
        """The tensors that this rank writes; all ranks go through all of it together."""
        passed = {True: 0, False: 0}  # ranks may hold different numbers of languages' experts
        for entry, value in self.engine.published_weights():
            is_expert = entry.expert is not None
            if self._writes(passed[is_expert], is_expert=is_expert):
                yield entry.name, value.detach().to("cpu", copy=copied)
            passed[is_expert] += 1

    def _describe_weights(self, writer: ArtifactWriter, routing: RoutingStatistics) -> None:
        """What a checkpoint has beside its weights."""
        self.task.describe(writer, self.engine.model.spec)
        if routing.layers:
            writer.write_json(ROUTING_FILE, routing.to_json())

    def _writes(self, index: int, *, is_expert: bool) -> bool:
        """Whether this rank writes its ``index``-th tensor of either kind: each is written once."""
        parallel = self.engine.model.expert_parallel_size
        if not is_expert or parallel == 1:
            return index % self.world.size == self.world.rank
        return index % (self.world.size // parallel) == self.world.rank // parallel

    def _finish(self) -> None:
        """Publish the best weights, or the mean, with the curves, as the stage's artifact."""
        call, run_directory = self.call, self.run_directory
        run_directory.wait()
        if self.world.rank != 0:
            return
        self._settle_states()
        weights_dir = run_directory.mean_dir if self.averaged else run_directory.best_dir
        weights = open_artifact(weights_dir, kind=self.task.makes)
        # What earlier attempts had done when they were stopped, and all of this one: loading, the
        # last validation and writing too, which the curves' clock leaves out.
        wall_seconds = round(self._earlier_seconds + time.monotonic() - call.clock, 3)
        with call.new_artifact(wall_seconds=wall_seconds) as writer:
            for name in weights.names():
                writer.take_over(name, weights)
            link_or_copy(run_directory.metrics_path, writer.path("metrics.jsonl"))
            if self.quarantine.entries:
                link_or_copy(self.quarantine.path, writer.path(self.quarantine.path.name))
            writer.statistics.update(
                weights.statistics, updates=self.position.update, deepspeed=self.engine.ds_config
            )
            if self.replanned:
                writer.statistics["replanned"] = self.replanned
            writer.summary += self._summary(weights)
        self._remove_what_is_done_with()

    def _settle_states(self) -> None:
        """Keep of the states what is needed once the model is there; rank 0 only."""
        match self.recipe.saving.keep_states:
            case "none":  # until it is there, all of them are needed
                self.run_directory.announce_removal(key=self.call.key)
            case "last" if not self.averaged:
                self.run_directory.prune(keep_last=1)
            case _:
                pass

    def _remove_what_is_done_with(self) -> None:
        """Now that the model is there; rank 0 only."""
        keep_states = self.recipe.saving.keep_states
        if keep_states == "none":
            self.run_directory.remove()
        elif self.averaged:
            self.run_directory.remove_mean()
            if keep_states == "last":
                self.run_directory.prune(keep_last=1)

    def _summary(self, weights: Artifact) -> list[str]:
        progress = self.position
        lines = [
            f"{counted(progress.update, 'update')} on {self.task.trained_on()}, "
            f"{progress.seconds:,.0f} s of training",
            self._which_weights(weights),
        ]
        if self._is_out_of_patience() and progress.update < self.recipe.training.updates:
            lines.append(
                f"ended {counted(self.recipe.training.updates - progress.update, 'update')} early: "
                f"{counted(progress.validations_since_best, 'validation')} in a row found none "
                "lower"
            )
        if self.replanned:
            changes = (
                f"{change['from']:,} → {change['to']:,} after update {change['after']:,}"
                for change in self.replanned
            )
            lines.append(f"the number of updates was changed on the way: {'; '.join(changes)}")
        if progress.overflows:
            lines.append(
                f"fp16 overflowed {counted(progress.overflows, 'time')}; each of these updates was "
                "made again at a smaller loss scale"
            )
        lines += self.task.notes
        if self.quarantine.entries:
            lines.append(
                f"{counted(len(self.quarantine.entries), 'micro-batch', 'micro-batches')} left "
                f"out, since gradients were not finite: see {self.quarantine.path.name}"
            )
        return lines

    def _which_weights(self, weights: Artifact) -> str:
        progress, last = self.position, self.recipe.training.average_last
        if not self.averaged:
            return (
                f"kept the weights of update {progress.best_update:,}, whose validation perplexity"
                f"{self._of_tier()}, {progress.best_perplexity:.3f}, is the lowest"
            )
        updates = ", ".join(f"{update:,}" for update in self.averaged)
        fewer = f"; {last} were asked for" if len(self.averaged) < last else ""
        return (
            f"took the mean of the weights after updates {updates}{fewer}: its validation "
            f"perplexity{self._of_tier()} is {weights.statistics['perplexity']:.3f}, the lowest "
            f"of one update's weights {progress.best_perplexity:.3f}"
        )

    def _of_tier(self) -> str:
        tier = self.recipe.training.best_by
        return "" if tier == "all" else f" on {tier.replace('_', ' ')}-resource pairs"

    def _elapsed(self) -> float:
        return round(time.monotonic() - self._clock, 3)


class _Interval:
    """Sums over the updates since the last line of metrics: of this rank, and of all ranks.

    Five numbers: cross entropy, balance loss times labels, labels, seconds of the slowest rank,
    source tokens. States of earlier versions lack the last: it is not known until the next line.
    """

    def __init__(self, sums: Sequence[float] = (0.0,) * 5) -> None:
        self.note = ""
        self._sums = torch.tensor([*sums, *[math.nan] * (5 - len(sums))], dtype=torch.float64)

    def add(self, result: StepResult, *, seconds: float) -> None:
        sums = [
            *(float(result.cross_entropy), float(result.balance), float(result.labels)),
            *(seconds, float(result.source_tokens)),
        ]
        self._sums += torch.tensor(sums, dtype=torch.float64)

    def over_ranks(self) -> list[float]:
        """The sums over all ranks that are known; all ranks call this."""
        slowest = all_max(self._sums[3:4].clone())
        sums = all_sum(self._sums.clone())
        sums[3:4] = slowest
        values: list[float] = sums.tolist()
        return values[:-1] if math.isnan(values[-1]) else values

    def finish(self) -> dict[str, object]:
        """Means over all ranks since the last call, the rate and the tokens; starts anew."""
        cross_entropy, balance, labels, seconds, *source_tokens = self.over_ranks()
        self._sums.zero_()
        self.note = f"loss {cross_entropy / labels:.3f}"
        known = {"source_tokens": round(source_tokens[0])} if source_tokens else {}
        return {
            "loss": cross_entropy / labels,
            "balance": balance / labels,
            "tokens_per_second": labels / max(seconds, 1e-9),
            "target_tokens": round(labels),
            **known,
        }
