"""Write the metrics of a training run to ``metrics.jsonl``, monitors and the console; profile it.

:class:`Profiling` profiles a window of updates with PyTorch's profiler: ``--profile 100:110``. Rank
0 records its operators, and the kernels of its GPU. ``OUT.profile/`` gets a trace for
https://ui.perfetto.dev or chrome://tracing, in which a span named ``update N`` encloses each
update, and a table of the operators that take the most time. It lies beside ``OUT.run``, which is
removed when training is done.
"""

import math
import socket
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from pipeline.artifacts.locks import refuse_if_lost
from pipeline.artifacts.places import sync
from pipeline.artifacts.run_folders import Position, run_lock_path
from pipeline.config.documents import JsonLines
from pipeline.config.recipe import Recipe
from pipeline.distributed.process import BUSY_TIME, advancing
from pipeline.distributed.world import World, gather_objects, gather_rows
from pipeline.errors import ConfigError, describe_os_error
from pipeline.machine import peak_resident_bytes
from pipeline.model.moe.routing_statistics import moe_layer_names
from pipeline.model.parameters import OPERATIONS_PER_PARAMETER, PerToken, count_multiplied
from pipeline.model.transformer import Trained, Transformer
from pipeline.stage import StageCall
from pipeline.training.engine import Engine, StepResult
from pipeline.training.optim import learning_rate
from pipeline.training.settings import passes_of

LINES = 10
"""Training lines with which the loss of the next one is compared."""
SPIKE_NATS, SPIKE_RATIO = 0.5, 1.2
"""Distance and ratio to the median of these lines above which, both, a loss is a spike."""
DROPPED = 0.2
"""Share of a layer's routes beyond the capacity of its experts above which it is said."""
IDLE_LINES = 3
"""Training lines in a row without any route to an expert after which it counts as dead."""


class Alarms:
    """Notices that training goes wrong: a loss that jumps, dropped routes, experts without tokens.

    An alarm is one sentence where it begins and one where it ends. It follows from the lines of
    ``metrics.jsonl`` only: a resumed run raises the alarms of an uninterrupted one.
    """

    def __init__(self) -> None:
        self._losses = deque[float](maxlen=LINES)
        self._is_spike = False
        self._dropping: set[str] = set()
        self._idle: dict[str, int] = {}
        """Expert → its lines without routes, up to the present one."""

    def add(self, line: Mapping[str, Any]) -> list[str]:
        """Take the next training line; return the sentences that begin or end an alarm."""
        routing = line.get("routing")
        layers: Mapping[str, Any] = routing if isinstance(routing, dict) else {}
        return [*self._loss(line.get("loss")), *self._dropped(layers), *self._dead(layers)]

    def _loss(self, loss: object) -> Iterator[str]:
        if not isinstance(loss, float) or not math.isfinite(loss):  # the file has null for it
            return
        usual = median(self._losses) if len(self._losses) == LINES else loss
        was_spike, self._is_spike = (
            self._is_spike,
            loss > max(usual + SPIKE_NATS, SPIKE_RATIO * usual),
        )
        if self._is_spike:  # later lines are not compared with it
            if not was_spike:
                yield (
                    f"the loss is {loss:.3f}, and the median of {LINES} lines before was "
                    f"{usual:.3f}. If it stays, lower optimizer.learning_rate."
                )
            return
        self._losses.append(loss)
        if was_spike:
            yield f"the loss is {loss:.3f} again."

    def _dropped(self, layers: Mapping[str, Any]) -> Iterator[str]:
        shares = {layer: counts["dropped"] for layer, counts in layers.items()}
        dropping = {layer for layer, share in shares.items() if share > DROPPED}
        begun, ended = dropping - self._dropping, self._dropping - dropping
        self._dropping = dropping
        if begun:
            named = ", ".join(f"{one} ({shares[one]:.0%})" for one in shares if one in begun)
            yield (
                f"more than {DROPPED:.0%} of the routes are dropped in {named}. Raise "
                'model.moe.capacity_factor, or set model.moe.dispatch to "dropless".'
            )
        if ended:
            named = ", ".join(one for one in shares if one in ended)
            yield f"at most {DROPPED:.0%} of the routes are dropped again in {named}."

    def _dead(self, layers: Mapping[str, Any]) -> Iterator[str]:
        idle = [
            f"{layer}:{expert}" for layer, counts in layers.items() for expert in counts["idle"]
        ]
        before, self._idle = self._idle, {one: self._idle.get(one, 0) + 1 for one in idle}
        begun = [one for one, lines in self._idle.items() if lines == IDLE_LINES]
        ended = [one for one, lines in before.items() if lines >= IDLE_LINES and one not in idle]
        if begun:
            yield (
                f"no token chose these experts in {IDLE_LINES} lines of metrics: "
                f"{', '.join(begun)}. Raise loss.balance_weight, or prune them in the end."
            )
        if ended:
            yield f"tokens choose these experts again: {', '.join(ended)}."


STRAGGLER_RATIO = 1.2
"""Time of the slowest rank per median of all ranks above which it is named."""


@dataclass(frozen=True)
class ModelOperations:
    """Floating-point operations that training needs, and those that its devices can do.

    Attributes:
        per_token: operations that a token of each side needs, forward and backward: those of the
            parameters that multiply it, as in reports. Scores of attention and recomputed layers
            are not counted.
        peak: operations per second of one device, from its data sheet.
    """

    per_token: PerToken
    peak: float

    @classmethod
    def of(cls, model: Trained, recipe: Recipe, *, peak: float | None) -> Self | None:
        """Return the operations of a model; None for taggers and readers, and without a peak."""
        if peak is None or not isinstance(model, Transformer):
            return None
        of_pass = count_multiplied(model.spec)
        factor = OPERATIONS_PER_PARAMETER * passes_of(recipe.loss.objective)
        per_token = PerToken(source=factor * of_pass.source, target=factor * of_pass.target)
        return cls(per_token, peak)

    def utilization(self, *, source: float, target: float, seconds: float, ranks: int) -> float:
        """Return the share of the devices' peak that these tokens in these seconds need (MFU)."""
        operations = self.per_token.source * source + self.per_token.target * target
        return operations / (seconds * ranks * self.peak)


@dataclass(frozen=True)
class LayersOfExperts:
    """The MoE layers of a model, whose routes are counted.

    Attributes:
        names: names of the layers, for example ``decoder.layers.1``.
        num_experts: experts of each layer.
    """

    names: tuple[str, ...] = ()
    num_experts: int = 0

    @classmethod
    def of(cls, model: Trained) -> Self:
        """Return the layers of a translation model; none for taggers and readers."""
        moe = model.spec.model.moe
        if moe is None or not isinstance(model, Transformer):
            return cls()
        return cls(moe_layer_names(model.spec), moe.num_experts)

    @property
    def num_sums(self) -> int:
        """Return how many numbers of routes an update has: chosen and kept of every expert."""
        return 2 * len(self.names) * self.num_experts

    def describe(self, routes: Sequence[float]) -> dict[str, object]:
        """Return for each layer its share of dropped routes, and the experts without any route."""
        chosen_LE, kept_LE = torch.tensor(routes, dtype=torch.float64).view(
            2, len(self.names), self.num_experts
        )
        return {
            name: {
                "dropped": round(1 - float(kept_E.sum() / chosen_E.sum().clamp_min(1)), 4),
                "idle": (chosen_E == 0).nonzero().flatten().tolist(),
            }
            for name, chosen_E, kept_E in zip(self.names, chosen_LE, kept_LE, strict=True)
        }


class MetricsLog:
    """Writes a line of metrics every ``logging.every`` updates and after every validation.

    A training line holds means over all updates since the previous one, on all ranks. Rank 0
    writes it to the file and to the monitors that the ds_config enables.

    Invariant: a resumed run writes the lines that an uninterrupted run writes, but for times and
    memory. A training state carries the sums of the unfinished interval, and :meth:`resume` drops
    the lines of updates that will be made again. What a line says of single ranks and of memory is
    of this attempt only.
    """

    def __init__(
        self,
        path: Path,
        recipe: Recipe,
        *,
        world: World,
        write_events: Callable[[Sequence[tuple[str, float, int]]], None],
        operations: ModelOperations | None = None,
        experts: LayersOfExperts = LayersOfExperts(),
    ) -> None:
        """Open no file yet; ``write_events`` passes (name, value, update) to the monitors."""
        self._file, self._recipe, self._world = JsonLines(path), recipe, world
        self._write_events, self._operations = write_events, operations
        self._interval = Interval(experts=experts)
        self._experts = experts
        self._nodes: list[str] = []
        self._alarms = Alarms()

    @classmethod
    def of(cls, engine: Engine, call: StageCall, path: Path) -> Self:
        """Return the metrics of what an engine trains."""
        return cls(
            path,
            call.recipe,
            world=engine.world,
            write_events=engine.write_events,
            operations=ModelOperations.of(engine.model, call.recipe, peak=call.peak_operations),
            experts=LayersOfExperts.of(engine.model),
        )

    def resume(self, position: Position) -> None:
        """Continue after ``position``; all ranks call this.

        Rank 0 holds the sums of the position's interval for all ranks.
        """
        self._nodes = gather_objects(socket.gethostname())
        BUSY_TIME.take()  # what an earlier run of this process left
        if self._world.rank == 0:
            self._interval = Interval(position.interval, experts=self._experts)
            # A stop in a validation saves the state of its update. If the next run is killed after
            # the validation, its line has that update, too, but is not part of the state.
            # The end of training cuts its last interval short, which a longer run goes on with.
            last = position.update - (position.interval[2] > 0)
            self._file.truncate_after(
                position.update, validation=position.validated, train=last, alarm=last
            )
            for line in self._file.read() if self._file.path.is_file() else ():
                if line.get("kind") == "train":
                    self._alarms.add(line)

    @property
    def note(self) -> str:
        """Loss, speed and any straggler of the last training line, for the progress bar."""
        return self._interval.note

    def add(self, result: StepResult, *, seconds: float) -> None:
        """Add one update of this rank to the interval."""
        self._interval.add(result, seconds=seconds)

    def interval_sums(self) -> tuple[float, ...]:
        """Return the sums of the unfinished interval over all ranks; all ranks call this."""
        return tuple(self._interval.over_ranks())

    def sync(self) -> None:
        """Force the lines so far to disk, before a state that a run resumes from without them."""
        if self._world.rank == 0 and self._file.path.is_file():
            sync(self._file.path)

    def write_update_if_due(self, position: Position, *, gradient_norm: float) -> list[str]:
        """Write the line of a training interval where one ends; all ranks call this.

        Returns:
            On rank 0 the alarms that begin or end with this line, a sentence each.
        """
        update, total = position.update, self._recipe.training.updates
        if update % self._recipe.logging.every != 0 and update != total:
            return []
        return self._write_update(position, gradient_norm=gradient_norm)

    def write_rest(self, position: Position) -> None:
        """Write the line of an interval that the end of training cuts short; all ranks call this.

        Reports add up the tokens of all lines. It has no gradient norm, which states do not carry.
        """
        if self._interval.over_ranks()[2]:
            self._write_update(position)

    def _write_update(self, position: Position, **more: float) -> list[str]:
        update, total = position.update, self._recipe.training.updates
        record = self._interval.finish(
            peak_bytes=peak_bytes(), nodes=self._nodes, operations=self._operations
        )
        record |= more
        record["learning_rate"] = learning_rate(self._recipe.optimizer, update, total_updates=total)
        if position.loss_scale is not None:
            record["loss_scale"] = position.loss_scale.scale
            record["overflows"] = position.overflows
        self._write("train", record, position)
        alarms = self._alarms.add(record) if self._world.rank == 0 else []
        for sentence in alarms:
            self._write("alarm", {"text": sentence}, position)
        return alarms

    def write_validation(self, record: Mapping[str, object], position: Position) -> None:
        """Write the line of a validation."""
        self._write("validation", record, position)

    def _write(self, kind: str, record: Mapping[str, object], position: Position) -> None:
        if self._world.rank != 0:
            return
        refuse_if_lost(run_lock_path(self._file.path.parent))
        update = position.update
        self._file.write({"kind": kind, "update": update, "seconds": position.seconds, **record})
        self._write_events(
            [
                (f"{kind}/{name}", value, update)
                for name, value in record.items()
                if isinstance(value, float)
            ]
        )


def peak_bytes() -> float:
    """Return the most memory that this process has had so far; NaN if the system does not tell.

    On a GPU it is the memory of tensors on the device, on a CPU the resident memory.
    """
    if torch.cuda.is_available():
        return float(torch.cuda.max_memory_allocated())
    found = peak_resident_bytes()
    return math.nan if found is None else float(found)


class Interval:
    """Sums over the updates since the last training line.

    The first five numbers are: cross entropy, balance loss times labels, labels, seconds of the
    slowest rank, source tokens. The routes to experts follow. States of earlier versions lack the
    routes, which then count from 0, or source tokens, too, which stay unknown until the next line.
    The time of this rank's own work and its tokens are kept apart: states do not carry them.
    """

    def __init__(
        self, sums: Sequence[float] = (0.0,) * 5, *, experts: LayersOfExperts = LayersOfExperts()
    ) -> None:
        self.note, self._experts = "", experts
        known = [*sums, *[math.nan] * (5 - len(sums))]
        routes = known[5:] or [0.0] * experts.num_sums
        self._sums = torch.tensor(known[:5] + routes, dtype=torch.float64)
        self._own = torch.zeros(2, dtype=torch.float64)

    def add(self, result: StepResult, *, seconds: float) -> None:
        """Add one update of this rank."""
        sums = [
            *(float(result.cross_entropy), float(result.balance), float(result.labels)),
            *(seconds, float(result.source_tokens)),
        ]
        own = [result.own_seconds, result.labels + result.source_tokens]
        self._sums[:5] += torch.tensor(sums, dtype=torch.float64)
        if self._experts.names and result.routes_R is not None:
            self._sums[5:] += result.routes_R
        self._own += torch.tensor(own, dtype=torch.float64)

    def over_ranks(self) -> list[float]:
        """Return the known sums over all ranks; all ranks call this."""
        values = _over_ranks(gather_rows(self._sums))
        return values[:4] if math.isnan(values[4]) else values

    def finish(
        self,
        *,
        peak_bytes: float = math.nan,
        nodes: Sequence[str] = (),
        operations: ModelOperations | None = None,
    ) -> dict[str, object]:
        """Return the record of the interval over all ranks, and start anew; all ranks call this.

        Args:
            peak_bytes: the most memory that this rank has had; NaN if unknown.
            nodes: the node of every rank.
            operations: what the utilization of devices is computed from; None: unknown.
        """
        peak = torch.tensor([peak_bytes], dtype=torch.float64)
        # one collective for everything that a line says of the ranks
        sums, own, peaks = gather_rows(torch.cat([self._sums, self._own, peak])).split(
            [len(self._sums), 2, 1], dim=1
        )
        self._sums.zero_()
        self._own.zero_()
        cross_entropy, balance, labels, seconds, source_tokens, *routes = _over_ranks(sums)
        seconds = max(seconds, 1e-9)
        record: dict[str, object] = {
            "loss": cross_entropy / labels,
            "balance": balance / labels,
            "tokens_per_second": labels / seconds,
            "target_tokens": round(labels),
        }
        if not math.isnan(source_tokens):
            record["source_tokens"] = round(source_tokens)
            record["source_tokens_per_second"] = source_tokens / seconds
            if operations is not None:
                record["mfu"] = operations.utilization(
                    source=source_tokens, target=labels, seconds=seconds, ranks=len(sums)
                )
        if not peaks.isnan().any():
            record["peak_memory_gib"] = peaks.max().item() / 2**30
        if routes:
            record["routing"] = self._experts.describe(routes)
        slow = slowest(own, nodes)
        self.note = f"loss {cross_entropy / labels:.3f}, {labels / seconds:,.0f} tokens/s"
        if "slowest_rank" in slow:
            self.note += f", {_described(slow)}"
        return record | slow


def _over_ranks(sums: Tensor) -> list[float]:
    """Sum every column over the ranks, but for the seconds, whose largest is taken."""
    totals = sums.sum(dim=0)
    totals[3] = sums[:, 3].max()
    values: list[float] = totals.tolist()
    return values


def slowest(own: Tensor, nodes: Sequence[str]) -> dict[str, object]:
    """Compare the slowest rank's time per token with the median of all ranks.

    Time per token, because ranks may have different numbers of micro-batches.

    Args:
        own: (ranks, 2): seconds of a rank's own work, and its tokens.
        nodes: the node of every rank.

    Returns:
        ``slowest_to_median``; above STRAGGLER_RATIO also ``slowest_rank`` and ``slowest_node``.
        Nothing if there is one rank, or a rank has had no tokens or no time.
    """
    if len(own) == 1 or not bool((own > 0).all()):
        return {}
    times: list[float] = (own[:, 0] / own[:, 1]).tolist()
    rank = max(range(len(times)), key=lambda one: times[one])
    ratio = times[rank] / median(times)
    found: dict[str, object] = {"slowest_to_median": ratio}
    if ratio > STRAGGLER_RATIO:
        found |= {"slowest_rank": rank, "slowest_node": nodes[rank]}
    return found


def _described(slow: Mapping[str, object]) -> str:
    return (
        f"rank {slow['slowest_rank']} on {slow['slowest_node']} takes "
        f"{slow['slowest_to_median']:.1f} × the median time"
    )


ROWS = 40
"""Operators in the table."""


class Profiling:
    """Profiles the updates that a call asks for; a context manager that ends a started profile.

    A profile begins with the window's first update that this attempt makes, and ends with the
    window or the training, whichever comes first. Ranks other than 0 do nothing.

    Invariant: weights, metrics other than times, and the manifest are as without a profile.
    """

    def __init__(self, call: StageCall, *, rank: int) -> None:
        """Check the window; start nothing yet.

        Raises:
            ConfigError: on all ranks, if training ends before the window begins.
        """
        self._dir = call.out_dir.with_name(f"{call.out_dir.name}.profile")
        self._window: tuple[int, int] | None = None
        self._profile: profile | None = None
        self._first = self._last = 0
        if call.profile is None:
            return
        (first, last), updates = call.profile, call.recipe.training.updates
        if first > updates:
            raise ConfigError(
                f"--profile {first}:{last} begins after the last update, which is {updates}. Name "
                "earlier updates."
            )
        if rank == 0:
            self._window = first, min(last, updates)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._profile is not None:
            self._finish()
        elif self._window is not None and kind is None:
            first, last = self._window
            self._say(f"nothing was profiled: no update from {first} to {last} was made now")

    @contextmanager
    def update(self, number: int) -> Iterator[None]:
        """Profile the block, which makes update ``number``, if it is of the window."""
        if self._window is None:
            yield
            return
        first, last = self._window
        if self._profile is None and first <= number <= last:
            self._start(number)
        self._last = number
        with record_function(f"update {number}"):
            yield
        if self._profile is not None and number == last:
            self._finish()

    def _start(self, number: int) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile, self._first = profile(activities=activities), number
        self._profile.start()

    def _finish(self) -> None:
        """End the profile and write it; a problem with the files does not end training.

        Many events take long to write, and the other ranks wait meanwhile.
        """
        assert self._profile is not None
        done, self._profile, self._window = self._profile, None, None
        name = f"updates-{self._first}-{self._last}"
        try:
            with advancing():
                done.stop()
                self._dir.mkdir(parents=True, exist_ok=True)
                _write_profile(done, self._dir, name)
        except OSError as error:
            self._say(f"the profile was not written: {describe_os_error(error)}")
        else:
            self._say(
                f"profiled updates {self._first} to {self._last}: {self._dir / name}.json.gz and "
                f"{name}.txt"
            )

    def _say(self, text: str) -> None:
        print(f"--profile: {text}.", file=sys.stderr, flush=True)


def _write_profile(done: profile, directory: Path, name: str) -> None:
    """Write trace and table, each complete when it appears."""
    device = "device" if torch.cuda.is_available() else "cpu"
    table = done.key_averages().table(sort_by=f"self_{device}_time_total", row_limit=ROWS)
    for ending in (".json.gz", ".txt"):  # the profiler compresses a trace whose name ends in .gz
        unfinished = directory / f".{name}.unfinished{ending}"
        if ending == ".txt":
            unfinished.write_text(table, encoding="utf-8")
        else:
            done.export_chrome_trace(str(unfinished))
        unfinished.replace(directory / f"{name}{ending}")
