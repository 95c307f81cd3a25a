"""Tables of names: what other software calls a tensor, and what we call it.

A table is text, one row per kind of tensor, their name and ours, aligned, with the reason behind a
``#`` where a row needs one::

    model.{stack}.layers.{layer}.fc1.{kind}    {stack}.layers.{layer}.feed_forward.up.{kind}
    lm_head.weight                             embedding.weight    # tied: saved once more
    final_logits_bias                          -                   # zeros

``{stack}`` is encoder or decoder, ``{kind}`` weight or bias, ``{layer}`` and ``{expert}`` are
numbers. ``-``: we have no such tensor. Where several of theirs are one of ours, the first row is
the one that is written, and the others hold the same values once more.

Tensors of other software under our names, each checked against the model they are to be.

What is stored is told apart from what it means: a :class:`Stored` knows files and their names for
things, :class:`ForeignTensors` looks them up through a family's table.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from pipeline.checkpoints.sources import refuse_misfit
from pipeline.checkpoints.weights import FLOATING_TYPES
from pipeline.errors import CheckpointError
from pipeline.model.spec import ModelSpec

_PLACEHOLDERS = {
    "{stack}": r"(?P<stack>encoder|decoder)",
    "{layer}": r"(?P<layer>0|[1-9]\d{0,4})",
    "{expert}": r"(?P<expert>0|[1-9]\d{0,4})",
    "{kind}": r"(?P<kind>weight|bias)",
}
NOTHING = "-"


@dataclass(frozen=True)
class Row:
    """One kind of tensor, by names with placeholders."""

    theirs: str
    ours: str
    """``NOTHING`` where we have none."""
    reason: str = ""

    def to_ours(self, name: str) -> str | None:
        """Our name of one of their tensors, None where the row is of another kind."""
        return _translate(self.theirs, self.ours, name)

    def to_theirs(self, name: str) -> str | None:
        """Their name of one of our tensors, None where the row is of another kind."""
        return _translate(self.ours, self.theirs, name)


@dataclass(frozen=True)
class NameTable:
    """The rows of one family."""

    rows: tuple[Row, ...]

    @classmethod
    def parse(cls, text: str) -> "NameTable":
        """A table from its text."""
        rows = []
        for line in filter(None, map(str.strip, text.splitlines())):
            names, _, reason = line.partition("#")
            theirs, ours = names.split()
            rows.append(Row(theirs, ours, reason.strip()))
        return cls(tuple(rows))

    def with_row(self, row: Row) -> "NameTable":
        """The same table with another row for what ``row.theirs`` names."""
        return NameTable(tuple(row if one.theirs == row.theirs else one for one in self.rows))

    def to_ours(self, name: str) -> str | None:
        """Our name of one of their tensors, ``NOTHING`` where we have none; None if unknown."""
        return next(filter(None, (row.to_ours(name) for row in self.rows)), None)

    def to_theirs(self, name: str) -> str | None:
        """Their name of one of our tensors; None where they have none."""
        rows = (row for row in self.rows if row.ours != NOTHING)
        return next(filter(None, (row.to_theirs(name) for row in rows)), None)


def _translate(pattern: str, replacement: str, name: str) -> str | None:
    expression = re.escape(pattern).replace(r"\{", "{").replace(r"\}", "}")
    for placeholder, group in _PLACEHOLDERS.items():
        expression = expression.replace(placeholder, group)
    found = re.fullmatch(expression, name, re.ASCII)
    return None if found is None else replacement.format_map(found.groupdict())


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
