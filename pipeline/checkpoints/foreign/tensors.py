"""Translate tensors of other software to our names, by one table of names per family.

A table is text. Each row has their name and ours for one kind of tensor, and after a ``#`` a
remark if the row needs one::

    model.{stack}.layers.{layer}.fc1.{kind}    {stack}.layers.{layer}.feed_forward.up.{kind}
    lm_head.weight                             embedding.weight    # tied: saved once more
    final_logits_bias                          -                   # zeros

``{stack}`` is encoder or decoder, ``{kind}`` weight or bias, ``{layer}`` and ``{expert}`` are
numbers. ``-`` means that we have no such tensor. If several of their tensors are a single
tensor of ours, an export writes the first row, and an import checks that the others hold the same
values.

:class:`Stored` reads files by their own names; :class:`ForeignTensors` reads a :class:`Stored` by
our names and checks names and shapes against the model.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from pipeline.checkpoints.checkpoint import refuse_misfit
from pipeline.checkpoints.weights import FLOATING_TYPES, Tensors
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
    """The names of one kind of tensor, with placeholders."""

    theirs: str
    ours: str
    """Our name; ``NOTHING`` if we have no such tensor."""
    reason: str = ""

    def to_ours(self, name: str) -> str | None:
        """Return our name for one of their names; None if the row does not match it."""
        return _translate(self.theirs, self.ours, name)

    def to_theirs(self, name: str) -> str | None:
        """Return their name for one of our names; None if the row does not match it."""
        return _translate(self.ours, self.theirs, name)


@dataclass(frozen=True)
class NameTable:
    """The names of all tensors of one family."""

    rows: tuple[Row, ...]

    @classmethod
    def parse(cls, text: str) -> "NameTable":
        """Parse the text of a table."""
        rows = []
        for line in filter(None, map(str.strip, text.splitlines())):
            names, _, reason = line.partition("#")
            theirs, ours = names.split()
            rows.append(Row(theirs, ours, reason.strip()))
        return cls(tuple(rows))

    def renamed(self, *changes: tuple[str, str]) -> "NameTable":
        """Return the table with parts of their names replaced; ``""`` is the beginning."""
        rows = []
        for row in self.rows:
            theirs = row.theirs
            for old, new in changes:
                theirs = theirs.replace(old, new, -1 if old else 1)
            rows.append(replace(row, theirs=theirs))
        return NameTable(tuple(rows))

    def __add__(self, other: "NameTable") -> "NameTable":
        return NameTable(self.rows + other.rows)

    def with_row(self, row: Row) -> "NameTable":
        """Return the table with ``row`` in place of the row of the same ``theirs``."""
        return NameTable(tuple(row if one.theirs == row.theirs else one for one in self.rows))

    def to_ours(self, name: str) -> str | None:
        """Return our name for one of theirs: ``NOTHING`` if we have none, None if it is unknown."""
        return next(filter(None, (row.to_ours(name) for row in self.rows)), None)

    def to_theirs(self, name: str) -> str | None:
        """Return their name for one of ours; None if they have none."""
        rows = (row for row in self.rows if row.ours != NOTHING)
        return next(filter(None, (row.to_theirs(name) for row in rows)), None)


def _translate(pattern: str, replacement: str, name: str) -> str | None:
    expression = re.escape(pattern).replace(r"\{", "{").replace(r"\}", "}")
    for placeholder, group in _PLACEHOLDERS.items():
        expression = expression.replace(placeholder, group)
    found = re.fullmatch(expression, name, re.ASCII)
    return None if found is None else replacement.format_map(found.groupdict())


Stored: TypeAlias = Tensors
"""Tensors of other software under their own names, through the interface of ours."""
Adjust = Callable[[str, Tensor], Tensor]
"""Turns their values of a tensor, given by our name, into ours; the shape stays."""


def unchanged(name: str, value: Tensor) -> Tensor:
    """Return the values as they are."""
    del name
    return value


@dataclass(frozen=True)
class ForeignTensors:
    """Tensors of other software by our names."""

    stored: Stored
    stored_names: Mapping[str, tuple[str, ...]] = field(repr=False)
    """Our name → their names; the first is read, the others must hold the same values."""
    adjust: Adjust = unchanged

    @classmethod
    def through(
        cls, table: NameTable, stored: Stored, *, spec: ModelSpec, adjust: Adjust = unchanged
    ) -> "ForeignTensors":
        """Find all tensors of a model through a family's table.

        Raises:
            CheckpointError: Tensors are unknown, missing or of another shape; lists them all.
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
        """Return the folder or file that holds the tensors."""
        return self.stored.origin

    def names(self) -> list[str]:
        """Return our names of all tensors, sorted."""
        return sorted(self.stored_names)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor without reading its values."""
        return self.stored.shape(self.stored_names[name][0])

    def read(self, name: str) -> Tensor:
        """Return one tensor, and check that its values are finite.

        Raises:
            CheckpointError: There is no such tensor, it is stored twice with different values, or
                it has values that are not finite or not floating-point numbers.
        """
        if name not in self.stored_names:
            raise CheckpointError(
                f"{self.origin} has no tensor for {name}. Name a checkpoint whose model has it."
            )
        first, *others = self.stored_names[name]
        value = self.stored.read(first)
        if value.dtype not in FLOATING_TYPES:
            raise CheckpointError(
                f"{self.origin}: Tensor {first} has the type {value.dtype}, not a floating-point "
                "type. Name a checkpoint that is not quantized."
            )
        if not value.sum().isfinite() and not value.isfinite().all():
            raise CheckpointError(
                f"{self.origin}: Tensor {first} has values that are not finite numbers. Name "
                "another checkpoint."
            )
        for other in others:
            if not torch.equal(value, self.stored.read(other)):
                raise CheckpointError(
                    f"{self.origin}: {first} and {other} are one tensor in this model, but their "
                    "values differ. Name a checkpoint that ties them."
                )
        return self.adjust(name, value)
