"""Write the metrics of a training run to ``metrics.jsonl``, monitors and the console."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from pipeline.checkpoints.training_state import Position
from pipeline.config.recipe import Recipe
from pipeline.distributed.collectives import all_max, all_sum
from pipeline.distributed.world import World
from pipeline.terminal import JsonLines
from pipeline.training.engine import StepResult
from pipeline.training.optim import learning_rate


class MetricsLog:
    """Writes a line of metrics every ``logging.every`` updates and after every validation.

    A training line holds means over all updates since the previous one, on all ranks. Rank 0
    writes it to the file and to the monitors that the ds_config enables.

    Invariant: a resumed run writes the lines that an uninterrupted run writes. A training state
    carries the sums of the unfinished interval, and :meth:`resume` drops the lines of updates that
    will be made again.
    """

    def __init__(
        self,
        path: Path,
        recipe: Recipe,
        *,
        world: World,
        write_events: Callable[[Sequence[tuple[str, float, int]]], None],
    ) -> None:
        """Open no file yet; ``write_events`` passes (name, value, update) to the monitors."""
        self._file, self._recipe, self._world = JsonLines(path), recipe, world
        self._write_events = write_events
        self._interval = Interval()

    def resume(self, position: Position) -> None:
        """Continue after ``position``; rank 0 holds the sums of its interval for all ranks."""
        if self._world.rank == 0:
            self._interval = Interval(position.interval)
            self._file.truncate_after(position.update)

    @property
    def note(self) -> str:
        """The mean loss of the last training line, for the progress bar."""
        return self._interval.note

    def add(self, result: StepResult, *, seconds: float) -> None:
        """Add one update of this rank, which took ``seconds``, to the interval."""
        self._interval.add(result, seconds=seconds)

    def interval_sums(self) -> tuple[float, ...]:
        """Return the sums of the unfinished interval over all ranks; all ranks call this."""
        return tuple(self._interval.over_ranks())

    def write_update_if_due(self, position: Position, *, gradient_norm: float) -> None:
        """Write the line of a training interval where one ends; all ranks call this."""
        update, total = position.update, self._recipe.training.updates
        if update % self._recipe.logging.every != 0 and update != total:
            return
        record = self._interval.finish()
        record["gradient_norm"] = gradient_norm
        record["learning_rate"] = learning_rate(self._recipe.optimizer, update, total_updates=total)
        if position.loss_scale is not None:
            record["loss_scale"] = position.loss_scale.scale
            record["overflows"] = position.overflows
        self._write("train", record, position)

    def write_validation(self, record: Mapping[str, object], position: Position) -> None:
        """Write the line of a validation."""
        self._write("validation", record, position)

    def _write(self, kind: str, record: Mapping[str, object], position: Position) -> None:
        if self._world.rank != 0:
            return
        update = position.update
        self._file.write({"kind": kind, "update": update, "seconds": position.seconds, **record})
        self._write_events(
            [
                (f"{kind}/{name}", value, update)
                for name, value in record.items()
                if isinstance(value, float)
            ]
        )


class Interval:
    """Sums over the updates since the last training line.

    The five numbers are: cross entropy, balance loss times labels, labels, seconds of the slowest
    rank, source tokens. States of earlier versions lack the last one; it then stays unknown until
    the next line.
    """

    def __init__(self, sums: Sequence[float] = (0.0,) * 5) -> None:
        self.note = ""
        self._sums = torch.tensor([*sums, *[math.nan] * (5 - len(sums))], dtype=torch.float64)

    def add(self, result: StepResult, *, seconds: float) -> None:
        """Add one update of this rank."""
        sums = [
            *(float(result.cross_entropy), float(result.balance), float(result.labels)),
            *(seconds, float(result.source_tokens)),
        ]
        self._sums += torch.tensor(sums, dtype=torch.float64)

    def over_ranks(self) -> list[float]:
        """Return the known sums over all ranks; all ranks call this."""
        slowest = all_max(self._sums[3:4].clone())
        sums = all_sum(self._sums.clone())
        sums[3:4] = slowest
        values: list[float] = sums.tolist()
        return values[:-1] if math.isnan(values[-1]) else values

    def finish(self) -> dict[str, object]:
        """Return means per label, rate and token counts over all ranks, and start anew."""
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
