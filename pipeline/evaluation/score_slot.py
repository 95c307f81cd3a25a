"""The interface of a score: sufficient statistics per line, and scores from their sums.

A score computes sufficient statistics of every line, and scores any set of lines from their sum: a
whole test set, or a thousand resamples at once. Its ``Column`` defines its name and format; tables,
averages, intervals and reports use nothing else. ``scoring`` turns the recipe's choice into scores.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.corpus import Direction, read_hypotheses, read_lines

Floats = npt.NDArray[np.float64]
Rows = npt.NDArray[Any]
"""(lines, statistics) integers, booleans or floats; (lines,) if a line has one figure."""
LineCount = int | Floats
"""Number of lines that statistics are summed over; if it varies, of every draw, (draws,)."""


@dataclass(frozen=True)
class Column:
    """Name, format and order of a score."""

    name: str  # key in line statistics, comparisons and ``scores.json``
    title: str
    larger_is_better: bool = True
    decimals: int = 1  # number of printed decimals
    out_of_100: bool = False  # whether the score lies in 0–100 and can be drawn as a bar
    is_main: bool = True  # whether the score is in all tables; else its averages have a section
    note: str = ""  # definition of the score, for the notes of the report

    @property
    def heading(self) -> str:
        """Return the title, with a remark if smaller values are better."""
        return self.title if self.larger_is_better else f"{self.title} (less is better)"


@dataclass(frozen=True)
class TranslatedLines:
    """The test lines of a direction and their translations, in one order."""

    direction: Direction
    hypotheses: Sequence[str]
    references: Sequence[str]
    read_sources: Callable[[], Sequence[str]]
    system: str = ""
    invalid: Sequence[int] = ()
    """Number of invalid UTF-8 sequences dropped from each line; empty: none from any."""
    truncated: int = 0
    """Number of translations of a source that was cut to the maximum length of the model."""

    @classmethod
    def read(cls, system: str, corpus: Artifact, translations: Artifact, way: Direction) -> Self:
        """Read the translations of a direction and their references."""
        hypotheses = read_hypotheses(translations, way)
        return cls(
            way,
            [one.text for one in hypotheses],
            read_lines(corpus, "test", way.pair, way.target),
            partial(read_lines, corpus, "test", way.pair, way.source),
            system=system,
            invalid=[one.invalid for one in hypotheses],
            truncated=sum(one.truncated for one in hypotheses),
        )

    @cached_property
    def sources(self) -> Sequence[str]:
        """Read the sources when a score first asks for them."""
        return self.read_sources()


@dataclass(frozen=True)
class LineStatistics:
    """Sufficient statistics of every line, and the signature of the score, if it has one."""

    rows: Rows
    signature: str = ""
    outcomes: Mapping[str, int] = field(default_factory=dict)
    """Class of a line → number of lines; empty if the score has no classes."""


class Score(ABC):
    """A score. Its settings are its fields; workers receive it, so it must be picklable."""

    column: Column

    def covers(self, direction: Direction) -> bool:  # noqa: ARG002 (one signature)
        """Return whether the direction can be scored; else the score is left out."""
        return True

    @abstractmethod
    def line_statistics(self, lines: TranslatedLines) -> LineStatistics:
        """Return the statistics of every line of a covered direction."""

    @abstractmethod
    def of_sums(self, sums: Floats, *, lines: LineCount) -> Floats:
        """Return the scores of statistics summed over lines, (draws, statistics) → (draws,)."""

    def of_corpus(self, rows: Rows) -> float:
        """Return the score of all lines together."""
        sums = rows.reshape(len(rows), -1).sum(axis=0, dtype=np.float64)
        return float(self.of_sums(sums[None], lines=len(rows))[0])

    def caveats(self) -> list[str]:
        """Return warnings for the report."""
        return []
