"""Where a model's weights come from: a checkpoint of ours, or one of other software.

Whatever it is, it has our names, is looked at without reading values, and gives one tensor at a
time.

A checkpoint of other software as one of ours, tensor by tensor.

A model at a path, whatever it is: a checkpoint of ours, or one of other software.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from pipeline.artifacts.manifest import InputRecord
from pipeline.artifacts.tokenizer import TokenizerFiles
from pipeline.checkpoints.names import tensor_shapes
from pipeline.errors import CheckpointError
from pipeline.model.spec import ModelSpec

_LISTED = 8
"""Names that a report lists of each kind of misfit."""


class Tensors(Protocol):
    """Weights under our names, read one at a time."""

    @property
    def origin(self) -> Path:
        """What people know them by: the folder or file they are in."""

    def names(self) -> list[str]:
        """All names, sorted."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one; no values are read."""

    def read(self, name: str) -> Tensor:
        """One tensor of finite floating-point numbers, as stored.

        Raises:
            CheckpointError: there is no such tensor, or it cannot be used.
        """


@dataclass(frozen=True)
class ModelSource:
    """A model that exists: shape, tokenizer, weights, and what a manifest says of it."""

    spec: ModelSpec
    tokenizer: TokenizerFiles
    tensors: Tensors
    record: InputRecord

    @property
    def origin(self) -> Path:
        return self.tensors.origin


def refuse_misfit(
    tensors: Tensors,
    spec: ModelSpec,
    *,
    unknown: Sequence[str] = (),
    called: Callable[[str], str] = str,
) -> None:
    """Refuse tensors that are not those of a model, with a full report.

    Args:
        unknown: names of what has no name of ours.
        called: our name → what it is called in the files.

    Raises:
        CheckpointError: some are unknown, missing, too many or of another shape.
    """
    wanted = tensor_shapes(spec)
    found = set(tensors.names())
    shapes = {name: tensors.shape(name) for name in sorted(found & set(wanted))}
    problems = [
        _listing("unknown", unknown),
        _listing("missing", sorted(set(wanted) - found)),
        _listing("beyond the model", sorted(found - set(wanted))),
        _listing(
            "of another shape",
            [
                f"{called(name)} {list(shape)} instead of {list(wanted[name])}"
                for name, shape in shapes.items()
                if shape != tuple(wanted[name])
            ],
        ),
    ]
    if any(problems):
        saved = sum(torch.Size(tensors.shape(name)).numel() for name in found)
        expected = sum(shape.numel() for shape in wanted.values())
        raise CheckpointError(
            f"{tensors.origin} holds {saved:,} parameters where the model described there has "
            f"{expected:,}; tensors {'; '.join(filter(None, problems))}: name a checkpoint whose "
            "files belong together."
        )


def _listing(what: str, names: Sequence[str]) -> str:
    if not names:
        return ""
    more = f", and {len(names) - _LISTED:,} more" if len(names) > _LISTED else ""
    return f"{what} ({len(names):,}): {', '.join(names[:_LISTED])}{more}"
