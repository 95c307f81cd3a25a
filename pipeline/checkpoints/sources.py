"""Describe a model that exists, ours or of other software: shape, tokenizer and weights.

Its tensors have our names. Names and shapes are known without reading values, and values are read
one tensor at a time.
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
"""Upper bound of the names that a report lists per problem."""


class Tensors(Protocol):
    """Weights by our names, read one tensor at a time."""

    @property
    def origin(self) -> Path:
        """Return the folder or file that holds them, for messages."""

    def names(self) -> list[str]:
        """Return all names, sorted."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor without reading its values."""

    def read(self, name: str) -> Tensor:
        """Return one tensor of finite floating-point numbers, as stored.

        Raises:
            CheckpointError: There is no such tensor, or it cannot be used.
        """


@dataclass(frozen=True)
class ModelSource:
    """A model that exists: shape, tokenizer, weights, and its record for a manifest."""

    spec: ModelSpec
    tokenizer: TokenizerFiles
    tensors: Tensors
    record: InputRecord

    @property
    def origin(self) -> Path:
        """Return the folder or file that holds the weights."""
        return self.tensors.origin


def refuse_misfit(
    tensors: Tensors,
    spec: ModelSpec,
    *,
    unknown: Sequence[str] = (),
    called: Callable[[str], str] = str,
) -> None:
    """Check that tensors are exactly those of a model.

    Args:
        tensors: The tensors by our names.
        spec: The model.
        unknown: Names in the files that have no name of ours.
        called: Turns our name into the name in the files.

    Raises:
        CheckpointError: Some are unknown, missing, superfluous or of another shape; lists them.
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
            f"{tensors.origin} holds {saved:,} parameters, but the model described there has "
            f"{expected:,}; tensors {'; '.join(filter(None, problems))}. Name a checkpoint whose "
            "files belong together."
        )


def _listing(what: str, names: Sequence[str]) -> str:
    if not names:
        return ""
    more = f", and {len(names) - _LISTED:,} more" if len(names) > _LISTED else ""
    return f"{what} ({len(names):,}): {', '.join(names[:_LISTED])}{more}"
