"""The training loop: updates, validation, checkpoints, and stopping in step with all ranks."""

import math
import sys
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from itertools import islice

import torch
from torch import Tensor

from pipeline.artifacts.artifact import ArtifactWriter, open_artifact
from pipeline.artifacts.corpus import Direction
from pipeline.artifacts.mixture import read_mixture
from pipeline.artifacts.places import link_or_copy
from pipeline.artifacts.shared_hashing import check_together
from pipeline.artifacts.tokenizer import tokenizer_folder
from pipeline.artifacts.training_states import replanned
from pipeline.batching.feed import TrainingData, Update
from pipeline.batching.global_step import MicroBatch
from pipeline.checkpoints.checkpoint import write_model_files
from pipeline.checkpoints.training_state import (
    PROGRESS_FILE,
    PieceReader,
    Position,
    read_position,
    write_pieces,
)
from pipeline.checkpoints.weights import write_weights
from pipeline.config import Recipe
from pipeline.distributed.collectives import all_max, all_sum, from_rank_zero
from pipeline.distributed.signals import StopFlag
from pipeline.distributed.world import World
from pipeline.errors import Interrupted
from pipeline.kernels.cpu_choice import CpuKernels, by_processor, using_cpu_kernels
from pipeline.kernels.cpu_timing import Shape, measured_kernels
from pipeline.model.moe.routing_statistics import (
    ROUTING_FILE,
    RoutingCounter,
    RoutingStatistics,
)
from pipeline.model.transformer import Transformer
from pipeline.seeds import derive_seed
from pipeline.stages import StageCall
from pipeline.terminal import JsonLines
from pipeline.terminal import Progress as ProgressBar
from pipeline.training.engine import Engine, StepResult
from pipeline.training.optim import learning_rate, make_optimizer
from pipeline.training.quarantine import Quarantine
from pipeline.training.run_directory import RunDirectory
from pipeline.training.unspaced_lines import describe_unspaced, unspaced_lines
from pipeline.training.updates import Updater
from pipeline.training.validation import summarize_validation

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
    """Train a model on the call's data and write the stage's checkpoint."""
    data.check(max_positions=model.spec.model.max_positions)
    unspaced = unspaced_lines(model.spec, data.train_lines)
    if unspaced and world.rank == 0:
        print(f"{call.out_dir}: {describe_unspaced(unspaced)}.", file=sys.stderr, flush=True)
    engine = Engine(
        model,
        call.recipe,
        world=world,
        ds_config=call.ds_config,
        make_optimizer=lambda groups: make_optimizer(groups, call.recipe.optimizer),
    )
    TrainingRun(call, engine, data, world=world).run()


class TrainingRun:
    """One training run, from its last state (or the start) to its final checkpoint."""

    def __init__(
        self, call: StageCall, engine: Engine, data: TrainingData, *, world: World
    ) -> None:
        self.call = call
        self.recipe: Recipe = call.recipe
        self.engine, self.data, self.world = engine, data, world
        self.run_directory = RunDirectory(
            call.out_dir,
            stage=call.stage.name,
            config=call.config,
            inputs=call.records,
            world=world,
        )
        self.quarantine = Quarantine(self.run_directory.quarantine_path, world=world)
        self.updater = Updater(engine, data, call.recipe, self.quarantine)
        self.position = Position()
        self.replanned: list[dict[str, int]] = []
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
            for feed in islice(updates, total - self.position.update):
                bar.advance(note=self._update(feed))
                self._validate_if_due(stop)
                self._save_if_due(stop)

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
        state = self.run_directory.resume_from(overwrite=self.call.overwrite)
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
        self.quarantine.read()
        if self.world.rank == 0:
            self.metrics.truncate_after(self.position.update)
        self._earlier_seconds = self.position.seconds
        self._clock = time.monotonic() - self.position.seconds

    def _rehearse(self) -> None:
        """Run the largest batch of the next window once: if memory runs out, let it be now."""
        if self.position.update < self.recipe.training.updates:
            largest = self.data.planner.largest(self.position.cursor[0])
            torch.manual_seed(derive_seed("rehearsal", self.recipe.training.seed))
            self.engine.rehearse(self.data.train.batch(largest))

    def _updates(self) -> Generator[Update]:
        return self.data.updates(self.position.cursor, rank=self.world.rank, ranks=self.world.size)

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
        found = summarize_validation(
            self._validation_losses(stop),
            imported_lines=self.data.imported_lines,
            thresholds=training.resource_thresholds,
        )
        routing = {"routing": self.routing.summary()} if self.routing.layers else {}
        self._write_record("validation", {**asdict(found), **routing})
        perplexity = found.perplexity
        best = self.position.best_perplexity
        self.position = replace(self.position, validated=update)
        if best is None or perplexity < best:
            self.position = replace(self.position, best_perplexity=perplexity, best_update=update)
            self._save_best()

    def _validation_losses(self, stop: StopFlag) -> dict[Direction, tuple[float, int]]:
        """Direction → (summed cross entropy, labels), over all ranks; renews ``routing``.

        All ranks run the same number of batches: where there is none left for a rank it runs one
        whose result is not counted, since experts may live on other ranks.
        """
        plan = self.data.validation(budget=self.recipe.batches.evaluation_tokens)
        directions = sorted({direction for direction, _ in plan})
        sums = torch.zeros(len(directions), 2, dtype=torch.float64)
        spec = self.engine.model.spec
        counter = RoutingCounter(spec)
        for batch_plan, row in self._my_share(plan, directions):
            if stop.agreed():
                self._stop()
            terms = self.engine.evaluate(self.data.valid.batch(batch_plan))
            if row is not None:
                target = spec.languages.index(directions[row].target)
                counter.add(terms.routing, language=target)
                sums[row] += torch.tensor(
                    [float(terms.cross_entropy), float(batch_plan.num_labels)], dtype=torch.float64
                )
        all_sum(sums)
        all_sum(counter.sums)
        self.routing = counter.result()
        return {
            direction: (float(sums[row, 0]), int(sums[row, 1]))
            for row, direction in enumerate(directions)
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
        """After the last update only where states are kept: so that more updates repeat none."""
        update, training = self.position.update, self.recipe.training
        if update == training.updates:
            return self.recipe.saving.keep_states != "none"
        return update % training.checkpoint_every == 0

    def _stop(self) -> None:
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
            self.run_directory.states_dir / f"update-{progress.update:07d}",
            kind="training_state",
            write=write,
            in_background=in_background,
        )
        self.run_directory.prune(keep_last=self.recipe.training.keep_last)

    def _save_best(self) -> None:
        """Write the weights as they are; in the background, from a copy, as states are."""
        in_background = self.recipe.saving.in_background
        weights = self._my_weights(copied=in_background)
        held = iter(list(weights)) if in_background else weights
        position, routing = self.position, self.routing

        def write(writer: ArtifactWriter) -> None:
            try:
                writer.settled |= write_weights(
                    writer.directory / "weights", held, part=self.world.rank
                )
            finally:  # whatever became of the files: the other ranks wait for this one's shares
                for _ in held:
                    pass
            if self.world.rank == 0:
                self._describe_best(writer, position, routing)

        self.run_directory.write(
            self.run_directory.best_dir,
            kind="checkpoint",
            write=write,
            in_background=in_background,
        )

    def _my_weights(self, *, copied: bool) -> Iterator[tuple[str, Tensor]]:
        """The tensors that this rank writes; all ranks go through all of it together."""
        for index, (entry, value) in enumerate(self.engine.published_weights()):
            if self._writes(index, is_expert=entry.expert is not None):
                yield entry.name, value.detach().to("cpu", copy=copied)

    def _describe_best(
        self, writer: ArtifactWriter, position: Position, routing: RoutingStatistics
    ) -> None:
        """What a checkpoint has beside its weights."""
        write_model_files(
            writer,
            spec=self.engine.model.spec,
            tokenizer_dir=tokenizer_folder(self.call.artifacts["shards"]),
        )
        if routing.layers:
            writer.write_json(ROUTING_FILE, routing.to_json())
        writer.statistics.update(update=position.best_update, perplexity=position.best_perplexity)

    def _writes(self, index: int, *, is_expert: bool) -> bool:
        """Whether this rank writes its ``index``-th tensor: each tensor is written once."""
        parallel = self.engine.model.expert_parallel_size
        if not is_expert or parallel == 1:
            return index % self.world.size == self.world.rank
        return index % (self.world.size // parallel) == self.world.rank // parallel

    def _finish(self) -> None:
        """Publish the best weights with the curves, as the stage's artifact."""
        call, run_directory = self.call, self.run_directory
        run_directory.wait()
        if self.world.rank != 0:
            return
        self._settle_states()
        best = open_artifact(run_directory.best_dir, kind="checkpoint")
        # What earlier attempts had done when they were stopped, and all of this one: loading, the
        # last validation and writing too, which the curves' clock leaves out.
        wall_seconds = round(self._earlier_seconds + time.monotonic() - call.clock, 3)
        with call.new_artifact(wall_seconds=wall_seconds) as writer:
            for name in best.names():
                writer.take_over(name, best)
            link_or_copy(run_directory.metrics_path, writer.path("metrics.jsonl"))
            if self.quarantine.entries:
                link_or_copy(self.quarantine.path, writer.path(self.quarantine.path.name))
            writer.statistics.update(
                best.statistics, updates=self.position.update, deepspeed=self.engine.ds_config
            )
            if self.replanned:
                writer.statistics["replanned"] = self.replanned
            writer.summary += self._summary()
        if self.recipe.saving.keep_states == "none":
            run_directory.remove()

    def _settle_states(self) -> None:
        """Keep of the states what is needed once the model is there; rank 0 only."""
        match self.recipe.saving.keep_states:
            case "none":  # until it is there, all of them are needed
                self.run_directory.announce_removal(key=self.call.key)
            case "last":
                self.run_directory.prune(keep_last=1)
            case "all":
                pass

    def _summary(self) -> list[str]:
        progress, training = self.position, self.data.train_lines
        lines = [
            f"{progress.update:,} updates on {sum(training.values()):,} sentence pairs of "
            f"{len(training)} language pairs, {progress.seconds:,.0f} s of training",
            f"kept the weights of update {progress.best_update:,}, whose validation perplexity, "
            f"{progress.best_perplexity:.3f}, is the lowest",
        ]
        if self.replanned:
            changes = (
                f"{change['from']:,} → {change['to']:,} after update {change['after']:,}"
                for change in self.replanned
            )
            lines.append(f"the number of updates was changed on the way: {'; '.join(changes)}")
        if progress.overflows:
            lines.append(
                f"fp16 overflowed {progress.overflows:,} times; each of these updates was made "
                "again at a smaller loss scale"
            )
        if unspaced := unspaced_lines(self.engine.model.spec, training):
            lines.append(describe_unspaced(unspaced))
        if self.quarantine.entries:
            lines.append(
                f"{len(self.quarantine.entries):,} micro-batches were left out, whose gradients "
                f"were not finite: see {self.quarantine.path.name}"
            )
        return lines

    def _elapsed(self) -> float:
        return round(time.monotonic() - self._clock, 3)


class _Interval:
    """Sums over the updates since the last line of metrics: of this rank, and of all ranks.

    Four numbers: cross entropy, balance loss times labels, labels, seconds of the slowest rank.
    """

    def __init__(self, sums: Sequence[float] = (0.0, 0.0, 0.0, 0.0)) -> None:
        self.note = ""
        self._sums = torch.tensor(sums, dtype=torch.float64)

    def add(self, result: StepResult, *, seconds: float) -> None:
        sums = [float(result.cross_entropy), float(result.balance), float(result.labels), seconds]
        self._sums += torch.tensor(sums, dtype=torch.float64)

    def over_ranks(self) -> list[float]:
        """The sums over all ranks; all ranks call this."""
        slowest = all_max(self._sums[3:].clone())
        sums = all_sum(self._sums.clone())
        sums[3:] = slowest
        values: list[float] = sums.tolist()
        return values

    def finish(self) -> dict[str, object]:
        """Means over all ranks since the last call, the rate and the tokens; starts anew."""
        cross_entropy, balance, labels, seconds = self.over_ranks()
        self._sums.zero_()
        self.note = f"loss {cross_entropy / labels:.3f}"
        return {
            "loss": cross_entropy / labels,
            "balance": balance / labels,
            "tokens_per_second": labels / max(seconds, 1e-9),
            "target_tokens": round(labels),
        }
