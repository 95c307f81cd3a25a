"""Tensors of other software under our names, each checked against the model they are to be.

What is stored is told apart from what it means: a :class:`Stored` knows files and their names for
things, :class:`ForeignTensors` looks them up through a family's table.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from pipeline.checkpoints.foreign.name_table import NOTHING, NameTable
from pipeline.checkpoints.sources import refuse_misfit
from pipeline.checkpoints.weights import FLOATING_TYPES
from pipeline.errors import CheckpointError
from pipeline.model.spec import ModelSpec


class Stored(Protocol):
    """Tensors under their own names."""

    @property
    def origin(self) -> Path:
        """The folder or file."""

    def names(self) -> list[str]:
        """Names in the files."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one; no values are read."""

    def read(self, name: str) -> Tensor:
        """One tensor, as stored; CheckpointError where it cannot be read."""


Adjust = Callable[[str, Tensor], Tensor]
"""Our name and their values → our values, where a family keeps them differently."""


def unchanged(name: str, value: Tensor) -> Tensor:
    """Values that are the same in both."""
    del name
    return value


@dataclass(frozen=True)
class ForeignTensors:
    """Tensors of a model of other software, by our names.

    ``adjust`` turns values into ours; shapes stay.
    """

    stored: Stored
    stored_names: Mapping[str, tuple[str, ...]] = field(repr=False)
    """Our name → theirs, the first of which is read."""
    adjust: Adjust = unchanged

    @classmethod
    def through(
        cls, table: NameTable, stored: Stored, *, spec: ModelSpec, adjust: Adjust = unchanged
    ) -> "ForeignTensors":
        """All tensors of a model, found through a family's table.

        Raises:
            CheckpointError: tensors are unknown, missing or of another shape; lists them all.
        """
        known: dict[str, list[str]] = defaultdict(list)
        unknown = []
        for name in stored.names():
            ours = table.to_ours(name)
            if ours is None:
                unknown.append(name)
            elif ours != NOTHING:
                known[ours].append(name)
        names = {ours: tuple(theirs) for ours, theirs in known.items()}
        tensors = cls(stored, names, adjust)
        refuse_misfit(tensors, spec, unknown=unknown, called=lambda name: names[name][0])
        return tensors

    @property
    def origin(self) -> Path:
        return self.stored.origin

    def names(self) -> list[str]:
        return sorted(self.stored_names)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.stored.shape(self.stored_names[name][0])

    def read(self, name: str) -> Tensor:
        """One tensor of finite numbers.

        Raises:
            CheckpointError: there is none of that name, it is stored twice with different values,
                or it holds values that are no finite numbers.
        """
        if name not in self.stored_names:
            raise CheckpointError(
                f"{self.origin} has no tensor for {name}: name a checkpoint whose model has it."
            )
        first, *others = self.stored_names[name]
        value = self.stored.read(first)
        if value.dtype not in FLOATING_TYPES:
            raise CheckpointError(
                f"{self.origin}: tensor {first} has the type {value.dtype}, where floating-point "
                "numbers are wanted: name a checkpoint that is not quantised."
            )
        if not value.sum().isfinite() and not value.isfinite().all():
            raise CheckpointError(
                f"{self.origin}: tensor {first} has values that are not finite numbers: name "
                "another checkpoint."
            )
        for other in others:
            if not torch.equal(value, self.stored.read(other)):
                raise CheckpointError(
                    f"{self.origin}: {first} and {other} are one tensor to this model, and their "
                    "values differ: name a checkpoint that ties them."
                )
        return self.adjust(name, value)
