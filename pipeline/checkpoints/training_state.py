"""Training states: what resuming needs, written by all ranks and readable on any topology.

A state has the optimizer's master weights and moments. ZeRO cuts them into flat ranges; each rank
writes its own ranges as ``{what}:{tensor}:{start}``, and a reader, on any number of ranks, picks
the pieces that overlap what it needs. Nothing is gathered on one rank.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

import torch
from pydantic import Field, TypeAdapter, ValidationError
from torch import Tensor

from pipeline.artifacts.artifact import Artifact, FileRecord
from pipeline.checkpoints.weights import TensorFiles, write_weights
from pipeline.config.settings import shown
from pipeline.errors import CheckpointError

PROGRESS_FILE = "progress.json"
MAX_DIGITS = 19
"""Of a place within a tensor."""


@dataclass(frozen=True)
class Piece:
    """A contiguous range of a named tensor, flattened: one rank's share of it under ZeRO."""

    what: str
    """``master``, or the optimizer's name of a moment."""
    tensor: str
    start: int
    values: Tensor

    @property
    def key(self) -> str:
        return f"{self.what}:{self.tensor}:{self.start}"


class Ranges(Protocol):
    """Tensors by ranges of their flattened values."""

    def read(self, *, what: str, tensor: str, start: int, length: int) -> Tensor:
        """Values [start, start + length), which are not to be changed."""


class PieceReader:
    """Ranges of tensors from the pieces of a training state, whoever wrote them."""

    def __init__(self, state: Artifact) -> None:
        self._files = TensorFiles(state, "optimizer/")
        self._pieces: dict[tuple[str, str], list[tuple[int, str]]] = {}
        for key in self._files.names():
            what, tensor, start = split_key(key, state)
            self._pieces.setdefault((what, tensor), []).append((start, key))
        for pieces in self._pieces.values():
            pieces.sort()
        self._cached: tuple[str, Tensor] = ("", torch.empty(0))

    def read(self, *, what: str, tensor: str, start: int, length: int) -> Tensor:
        """Values [start, start + length) of a flattened tensor, which are not to be changed.

        Raises:
            CheckpointError: the state does not cover that range.
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
            raise CheckpointError(
                f"{self._files.artifact.directory} has {filled} of the {length} values wanted of "
                f"{what} of {tensor}: the state is incomplete; resume from an earlier one."
            )
        return parts[0] if len(parts) == 1 else torch.cat([torch.empty(0), *parts])

    def let_go(self) -> None:
        """Hold nothing of what was read last."""
        self._cached = ("", torch.empty(0))

    def _piece(self, key: str) -> Tensor:
        if self._cached[0] != key:
            self._cached = (key, self._files.read(key).flatten())
        return self._cached[1]


def split_key(key: str, state: Artifact) -> tuple[str, str, int]:
    """What a piece is of, its tensor, and where it starts (:attr:`Piece.key`)."""
    what, _, place = key.partition(":")
    tensor, _, start = place.rpartition(":")
    if not (what and tensor and start.isascii() and start.isdecimal() and len(start) < MAX_DIGITS):
        raise CheckpointError(
            f"{state.directory} has a piece named {shown(key)!r}, which is none of a training "
            "state: resume from an earlier one."
        )
    return what, tensor, int(start)


Whole = Annotated[int, Field(ge=0, lt=2**63)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Sum = Annotated[float, Field(allow_inf_nan=False)]


@dataclass(frozen=True)
class LossScale:
    """Where fp16's dynamic loss scale stands, by DeepSpeed's counters."""

    scale: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    steps: Whole
    """Tries of updates so far, made or not."""
    last_overflow: Annotated[int, Field(ge=-1, lt=2**63)]
    """After how many tries the last overflow came; -1: there was none."""
    hysteresis: Annotated[int, Field(ge=1, lt=2**63)]
    """The scale falls at this many further overflows."""


@dataclass(frozen=True)
class Position:
    """Where a training run stands: all that resuming needs beside tensors."""

    update: Whole = 0
    cursor: tuple[Whole, Whole] = (0, 0)
    """Where the batch plan goes on: (window, step within the window)."""
    validated: Whole = 0
    """Last update that was validated."""
    best_perplexity: Sum | None = None
    best_update: Whole | None = None
    validations_since_best: Whole = 0
    """In a row, none of which found a lower perplexity."""
    seconds: Seconds = 0.0
    interval: Annotated[tuple[Sum, ...], Field(min_length=4, max_length=5)] = (0.0,) * 5
    """Sums over all ranks since the last line of metrics (``training/metrics.py``). Earlier
    versions have four, without source tokens."""
    overflows: Whole = 0
    """Tries of updates that fp16's loss scale was too large for: made again at a smaller one."""
    loss_scale: LossScale | None = None
    """None: the run has no dynamic loss scale."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Any) -> "Position":
        """Raises ValidationError where the values are none of a run."""
        return TypeAdapter(cls).validate_python(values)


def read_position(state: Artifact) -> Position:
    """Where the run of a training state stands; CheckpointError where its file says otherwise."""
    path = state.file(PROGRESS_FILE)
    try:
        return Position.from_json(state.read_json(PROGRESS_FILE))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(shown(str(part)) for part in first["loc"]) or "the file"
        raise CheckpointError(
            f"{path} does not say where a run stands ({where}: {first['msg']}): resume from an "
            "earlier state."
        ) from error


def write_pieces(directory: Path, pieces: Iterator[Piece], *, part: int) -> dict[Path, FileRecord]:
    """Write one rank's optimizer pieces; returns what an artifact says of the files."""
    return write_weights(directory, ((piece.key, piece.values) for piece in pieces), part=part)
