"""Micro-batches that training left out, since their gradients were not finite: a run's record.

``quarantine.jsonl`` in the run's folder has one JSON object per line: the update, the micro-batch's
index in it, its labels, and its lines by direction, counted from 1 in the order of the shards. It
is on disk before the update is made without them, so that a run that is resumed before that update
makes the same one.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from pipeline.batching.global_step import MicroBatch
from pipeline.distributed.collectives import from_rank_zero
from pipeline.distributed.world import World
from pipeline.errors import CheckpointError, UserError
from pipeline.terminal import JsonLines
from pipeline.training.engine import Verdict

SHOWN_LINES = 5
"""Of every direction, in a message."""

Whole = Annotated[int, Field(ge=0, lt=2**63)]


@dataclass(frozen=True)
class LeftOut:
    """A micro-batch of an update."""

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
    """The record of a micro-batch; ``pairs`` are the names its numbers of pairs stand for."""
    lines: dict[str, list[int]] = {}
    for pair, is_reverse, line in zip(plan.pair_B, plan.reverse_B, plan.line_B, strict=True):
        first, second = pairs[pair].split("-")
        direction = f"{second}-{first}" if is_reverse else f"{first}-{second}"
        lines.setdefault(direction, []).append(int(line) + 1)
    found = {direction: sorted(numbers) for direction, numbers in sorted(lines.items())}
    return LeftOut(update, micro_batch, plan.num_labels, found)


def culprits(verdicts: Sequence[Sequence[Verdict]], *, sharing: int) -> set[int]:
    """Micro-batches whose gradients are not finite, of every rank's verdicts turn by turn.

    ``sharing`` ranks in a row share experts. Where in a turn no gradient but that of experts is
    not finite, it cannot be told which rank's sentences did it: all of that turn are named.
    """
    found: set[int] = set()
    for turn in zip(*verdicts, strict=True):
        for start in range(0, len(turn), sharing):
            group = turn[start : start + sharing]
            own = {verdict.micro_batch for verdict in group if not verdict.is_finite}
            if not own and not all(verdict.of_experts_is_finite for verdict in group):
                own = {verdict.micro_batch for verdict in group}
            found |= own
    return found


class Quarantine:
    """The record of one run; all ranks call its methods together."""

    def __init__(self, path: Path, *, world: World) -> None:
        self.path = path
        self.entries: list[LeftOut] = []
        self._world = world
        self._file = JsonLines(path)

    def read(self) -> None:
        """Take up what earlier attempts at the run recorded.

        Raises:
            CheckpointError: on all ranks, where the file cannot be read or is none of a run.
        """
        self._on_rank_zero(self._read)
        self.entries = from_rank_zero(self.entries)

    def of_update(self, update: int) -> frozenset[int]:
        """Indices of an update's micro-batches that are left out."""
        return frozenset(one.micro_batch for one in self.entries if one.update == update)

    def add(self, entries: Sequence[LeftOut]) -> None:
        """Record micro-batches, on disk when this returns, and say so.

        Raises:
            CheckpointError: on all ranks, where that cannot be written.
        """
        self._on_rank_zero(lambda: self._write(entries))
        self.entries += entries
        if self._world.rank == 0:
            for one in entries:
                print(
                    f"update {one.update}: {one.described} is left out, since its gradient is not "
                    f"finite; see {self.path}",
                    file=sys.stderr,
                )

    def _read(self) -> None:
        if not self.path.is_file():
            return
        self._file.truncate_after(sys.maxsize)  # of the last line, if a killed run did not end it
        reader = TypeAdapter(LeftOut)
        try:
            self.entries = [reader.validate_python(record) for record in self._file.read()]
        except ValidationError as error:
            raise CheckpointError(
                f"{self.path} has a line that names no micro-batch: restore the file, or begin the "
                "run anew."
            ) from error

    def _write(self, entries: Sequence[LeftOut]) -> None:
        for one in entries:
            self._file.write(vars(one))
        with self.path.open("rb") as stream:
            os.fsync(stream.fileno())

    def _on_rank_zero(self, action: Callable[[], None]) -> None:
        problem: str | None = None
        if self._world.rank == 0:
            try:
                action()
            except UserError as error:
                problem = str(error)
            except OSError as error:
                problem = f"{self.path} cannot be read or written ({error})."
        problem = from_rank_zero(problem)
        if problem:
            raise CheckpointError(problem)
