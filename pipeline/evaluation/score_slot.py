"""What a score is: from the lines of one direction to a figure, and to the figure of any of them.

A score is one file in this folder. It gives every line its sufficient statistics, and scores any
set of lines by the sum of their statistics: that of a whole test set, and those of a thousand
resamples at once. What it is called and how it is shown stands in its ``Column``; tables,
averages, intervals and reports go by that alone. ``chosen_scores`` is where the recipe's choice
becomes scores.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.artifacts.corpus import Direction

Floats = npt.NDArray[np.float64]
Rows = npt.NDArray[Any]
"""(lines, statistics) integers, booleans or floats; (lines,) where a line has one figure."""


@dataclass(frozen=True)
class Section:
    """A section of the reports, for scores that stand apart from the others."""

    title: str
    lead: str
    """What is seen, where the page has room to say so."""
    note: str
    """What a reader has to know of it."""


@dataclass(frozen=True)
class Column:
    """How a score is named, shown and compared."""

    name: str
    """In line statistics and comparisons; in ``scores.json`` too, if it has no ``path``."""
    title: str
    larger_is_better: bool | None = True
    """None: neither end of the scale is the good one, and no system is the best by it."""
    decimals: int = 1
    """As printed."""
    out_of_100: bool = False
    """Whether it lies in 0–100 and can be drawn as a bar."""
    section: Section | None = None
    """None: among the main scores, in all tables."""
    path: tuple[str, ...] = ()
    """Keys that lead to it among the scores of ``scores.json``."""
    ceiling: bool = False
    """Whether the references are scored too, as what a perfect system could expect."""
    by_target: bool = False
    """Whether its signature depends on the target language."""

    @property
    def heading(self) -> str:
        """The title, and which end of the scale is the good one where it is not the upper one."""
        return f"{self.title} (less is better)" if self.larger_is_better is False else self.title

    @property
    def keys(self) -> tuple[str, ...]:
        """``path``, or the name alone."""
        return self.path or (self.name,)


@dataclass(frozen=True)
class TranslatedLines:
    """The test lines of a direction and their translations, in one order."""

    direction: Direction
    hypotheses: Sequence[str]
    references: Sequence[str]
    read_sources: Callable[[], Sequence[str]]
    system: str = ""
    """Whose translations they are; empty: the references' own."""
    invalid: Sequence[int] = ()
    """Sequences of bytes that were no UTF-8 and were dropped from each; empty: none from any."""

    @cached_property
    def sources(self) -> Sequence[str]:
        """Read when a score first asks for them, so that they cost nothing where none does."""
        return self.read_sources()


@dataclass(frozen=True)
class LineStatistics:
    """Sufficient statistics of every line, and the signature of what counted them."""

    rows: Rows
    signature: str = ""
    """Empty: it has none."""
    outcomes: Mapping[str, int] = field(default_factory=dict)
    """What lines turned out to be, and how many of them; empty where the score has no kinds."""


class Score(ABC):
    """One score; its settings are its fields. It is sent to workers, and so can be pickled."""

    column: Column

    def covers(self, direction: Direction) -> bool:  # noqa: ARG002 (one signature)
        """Whether the direction can be scored at all; where it cannot, the score is left out."""
        return True

    @abstractmethod
    def line_statistics(self, lines: TranslatedLines) -> LineStatistics:
        """The statistics of every line of a direction that is covered."""

    @abstractmethod
    def of_sums(self, sums: Floats, *, lines: int) -> Floats:
        """Scores of summed statistics, (draws, statistics) → (draws,); each sum is over ``lines``
        lines.
        """

    def of_corpus(self, rows: Rows) -> float:
        """The score of all lines together."""
        sums = rows.reshape(len(rows), -1).sum(axis=0, dtype=np.float64)
        return float(self.of_sums(sums[None], lines=len(rows))[0])

    def caveats(self) -> list[str]:
        """What a reader should be warned of, in sentences."""
        return []
