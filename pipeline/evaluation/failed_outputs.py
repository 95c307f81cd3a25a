"""Shares of translations that failed in a way that can be seen without knowing the language."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.evaluation.outputs_section import OUTPUTS
from pipeline.evaluation.score_slot import (
    Column,
    Floats,
    LineStatistics,
    Rows,
    Score,
    TranslatedLines,
)

LOOP_REPEATS = 4
"""So many times in a row is a loop."""
LOOP_WORDS, LOOP_CHARACTERS = 4, 16
"""The longest n-grams that are looked for, of words and within a long word."""
LONG_WORD = 30
"""Longer words are looked into: languages that are written without spaces have them."""


class ShareOfLines(Score):
    """Percent of lines of one kind; less is better."""

    @abstractmethod
    def flags(self, lines: TranslatedLines) -> list[bool]:
        """Which lines are of the kind."""

    def line_statistics(self, lines: TranslatedLines) -> LineStatistics:
        """(lines,) booleans."""
        return LineStatistics(np.array(self.flags(lines), dtype=np.bool_))

    def of_corpus(self, rows: Rows) -> float:
        """The mean, rounded as a mean is."""
        return 100.0 * float(rows.mean())

    def of_sums(self, sums: Floats, *, lines: int) -> Floats:
        """Of numbers of lines of the kind, (draws, 1) → (draws,)."""
        found: Floats = 100.0 * sums[:, 0] / lines
        return found


@dataclass(frozen=True)
class Copies(ShareOfLines):
    """Translations that are their own source, but for case and white space."""

    column = Column(
        "copies", "Copies of the source, %", larger_is_better=False, section=OUTPUTS, decimals=2
    )

    def flags(self, lines: TranslatedLines) -> list[bool]:
        """An empty translation is no copy."""
        pairs = zip(lines.hypotheses, lines.sources, strict=True)
        return [bool(one.strip()) and _folded(one) == _folded(other) for one, other in pairs]


@dataclass(frozen=True)
class EmptyOutputs(ShareOfLines):
    """Translations without text."""

    column = Column(
        "empty", "Empty translations, %", larger_is_better=False, section=OUTPUTS, decimals=2
    )

    def flags(self, lines: TranslatedLines) -> list[bool]:
        """White space is no text."""
        return [not one.strip() for one in lines.hypotheses]


@dataclass(frozen=True)
class InvalidOutputs(ShareOfLines):
    """Translations from which bytes were dropped, since they are no UTF-8."""

    column = Column(
        "invalid", "Invalid UTF-8, %", larger_is_better=False, section=OUTPUTS, decimals=2
    )

    def flags(self, lines: TranslatedLines) -> list[bool]:
        """References have none."""
        return [count > 0 for count in lines.invalid or [0] * len(lines.hypotheses)]


@dataclass(frozen=True)
class Loops(ShareOfLines):
    """Translations that repeat an n-gram over and over where their references do not."""

    column = Column(
        "loops", "Loops of an n-gram, %", larger_is_better=False, section=OUTPUTS, decimals=2
    )

    def flags(self, lines: TranslatedLines) -> list[bool]:
        """A reference that repeats as much excuses its translation."""
        pairs = zip(lines.hypotheses, lines.references, strict=True)
        return [has_loop(one) and not has_loop(other) for one, other in pairs]


def has_loop(text: str) -> bool:
    """Whether an n-gram stands ``LOOP_REPEATS`` times in a row."""
    words = text.split()
    return _repeats(words, longest=LOOP_WORDS) or any(
        _repeats(word, longest=LOOP_CHARACTERS) for word in words if len(word) > LONG_WORD
    )


def _repeats(tokens: Sequence[str], *, longest: int) -> bool:
    """Tokens that equal those n places on, in a row, are one n-gram repeated."""
    for n in range(1, min(longest, len(tokens) // LOOP_REPEATS) + 1):
        run, needed = 0, n * (LOOP_REPEATS - 1)
        for one, other in zip(tokens, tokens[n:], strict=False):
            run = run + 1 if one == other else 0
            if run == needed:
                return True
    return False


def _folded(text: str) -> str:
    return " ".join(text.casefold().split())
