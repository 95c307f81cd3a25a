"""Tables of names: what other software calls a tensor, and what we call it.

A table is text, one row per kind of tensor, their name and ours, aligned, with the reason behind a
``#`` where a row needs one::

    model.{stack}.layers.{layer}.fc1.{kind}    {stack}.layers.{layer}.feed_forward.up.{kind}
    lm_head.weight                             embedding.weight    # tied: saved once more
    final_logits_bias                          -                   # zeros

``{stack}`` is encoder or decoder, ``{kind}`` weight or bias, ``{layer}`` and ``{expert}`` are
numbers. ``-``: we have no such tensor. Where several of theirs are one of ours, the first row is
the one that is written, and the others hold the same values once more.
"""

import re
from dataclasses import dataclass

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
