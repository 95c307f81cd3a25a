"""The optimizer's state in training states, for any number of ranks.

A state has the optimizer's master weights and moments, which ZeRO divides into flat ranges. Each
rank writes its own ranges as ``{what}:{tensor}:{start}``. A reader, on any number of ranks, picks
the pieces that overlap the range it needs. Nothing is gathered on one rank.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from pipeline.artifacts.artifact import Artifact, FileRecord, check_together
from pipeline.artifacts.manifest import how_to_restore
from pipeline.checkpoints.weights import TensorFiles, write_weights
from pipeline.config.settings import shown
from pipeline.distributed.world import gather_objects
from pipeline.errors import CheckpointError, UserError

SHAPES_FILE = "shapes.json"
"""Shapes of the tensors, which have flat pieces; states of earlier versions lack it."""

MAX_DIGITS = 19
"""Upper bound of the digits of a place within a tensor."""


@dataclass(frozen=True)
class Piece:
    """A contiguous range of a named tensor, flattened: one rank's share of it under ZeRO."""

    what: str
    """Kind of value: ``master``, or the optimizer's name of a moment."""
    tensor: str
    start: int
    values: Tensor

    @property
    def key(self) -> str:
        """Return the name of the piece in a file."""
        return f"{self.what}:{self.tensor}:{self.start}"


@dataclass(frozen=True)
class Target:
    """Memory to fill with a range of a flattened tensor of a state."""

    what: str
    tensor: str
    start: int
    values: Tensor
    """One dimension; of any type and device."""


class Fills(Protocol):
    """A source of values for targets."""

    def fill(self, targets: Sequence[Target]) -> None:
        """Fill all targets; all ranks call this."""


class Ranges(Protocol):
    """A reader of ranges of flattened tensors."""

    def read(self, *, what: str, tensor: str, start: int, length: int) -> Tensor:
        """Return values [start, start + length), which must not be modified."""


class PieceReader:
    """Reads ranges of tensors from the pieces of a training state of any topology.

    Raises:
        CheckpointError: The state has values beyond ``shapes``, the shapes of the model's tensors,
            or had a tensor in another shape.
    """

    def __init__(self, state: Artifact, shapes: Mapping[str, torch.Size] | None = None) -> None:
        self._files = TensorFiles(state, "optimizer/")
        saved = state.read_json(SHAPES_FILE) if SHAPES_FILE in state.names() else {}
        for tensor, shape in (shapes or {}).items():
            if (found := tuple(saved.get(tensor, shape))) != shape:
                problem = f"has {tensor} in the shape {found}, and the model {tuple(shape)}"
                raise _misfit(state, problem)
        self._pieces: dict[tuple[str, str], list[tuple[int, str]]] = {}
        for key in self._files.names():
            what, tensor, start = split_key(key, state)
            end = start + math.prod(self._files.shape(key))
            size = math.prod((shapes or {}).get(tensor, [0]))
            if shapes is not None and end > size:
                values = f"{end:,} values of {what} of {tensor}"
                raise _misfit(state, f"has {values}, and the model {size:,}")
            self._pieces.setdefault((what, tensor), []).append((start, key))
        for pieces in self._pieces.values():
            pieces.sort()
        self._cached: tuple[str, Tensor] = ("", torch.empty(0))

    def read(self, *, what: str, tensor: str, start: int, length: int) -> Tensor:
        """Return values [start, start + length) of a flattened tensor, which must not be modified.

        Raises:
            CheckpointError: The state does not cover that range.
        """
        parts: list[Tensor] = []
        for piece_start, key in self._pieces.get((what, tensor), []):
            if piece_start >= start + length:
                break
            values = self._piece(key)
            low = max(start, piece_start)
            high = min(start + length, piece_start + len(values))
            if low < high:
                parts.append(values[low - piece_start : high - piece_start].float())
        filled = sum(len(part) for part in parts)
        if filled != length:
            found = f"{filled} of {length} values of {what} of {tensor}"
            raise _misfit(self._files.artifact, f"is incomplete: it has {found}")
        return parts[0] if len(parts) == 1 else torch.cat([torch.empty(0), *parts])

    def fill(self, targets: Sequence[Target]) -> None:
        """Fill all targets, one after the other."""
        for target in targets:
            values = self.read(
                what=target.what,
                tensor=target.tensor,
                start=target.start,
                length=len(target.values),
            )
            target.values.copy_(values)

    def let_go(self) -> None:
        """Free the piece that was read last."""
        self._cached = ("", torch.empty(0))

    def _piece(self, key: str) -> Tensor:
        if self._cached[0] != key:
            self._cached = (key, self._files.read(key).flatten())
        return self._cached[1]


class CheckedState:
    """A training state. Its files are compared with their digests before values are read."""

    def __init__(self, state: Artifact, shapes: Mapping[str, torch.Size] | None = None) -> None:
        self._state, self._shapes = state, shapes

    def fill(self, targets: Sequence[Target]) -> None:
        """Fill all targets from the pieces of any topology; all ranks call this.

        Raises:
            ArtifactError: A file is missing or damaged; the same error on all ranks.
            CheckpointError: A value is missing, not finite, or beyond the model, as
                :class:`PieceReader` says; the same error on all ranks.
        """
        check_together(self._state)
        problem: str | None = None
        try:
            PieceReader(self._state, self._shapes).fill(targets)
        except (UserError, OSError) as error:
            problem = str(error)
        problem = next(filter(None, gather_objects(problem)), None)
        if problem is not None:
            raise CheckpointError(problem)


def _misfit(state: Artifact, problem: str) -> CheckpointError:
    return CheckpointError(
        f"{state.directory} {problem}. If the code of the model has changed, change it back. "
        f"{how_to_restore(state.directory)}."
    )


def split_key(key: str, state: Artifact) -> tuple[str, str, int]:
    """Split a :attr:`Piece.key` into the kind of value, the tensor, and the start."""
    what, _, place = key.partition(":")
    tensor, _, start = place.rpartition(":")
    if not (what and tensor and start.isascii() and start.isdecimal() and len(start) < MAX_DIGITS):
        raise CheckpointError(
            f"{state.directory} has a piece {shown(key)!r}, which is no name of a piece. "
            f"{how_to_restore(state.directory)}."
        )
    return what, tensor, int(start)


def write_pieces(directory: Path, pieces: Iterator[Piece], *, part: int) -> dict[Path, FileRecord]:
    """Write one rank's pieces; return the record of each file for a manifest."""
    return write_weights(directory, ((piece.key, piece.values) for piece in pieces), part=part)
