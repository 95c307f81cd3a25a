"""Length ratio and failed outputs: defects that are visible without knowing the language."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.evaluation.score_slot import (
    Column,
    Floats,
    LineCount,
    LineStatistics,
    Score,
    Section,
    ShareOfLines,
    TranslatedLines,
)

OUTPUTS = Section(
    title="Lengths and failed outputs",
    lead="Length ratio of translations to references in characters, and the shares of translations "
    "that copy the source, are empty, contained invalid UTF-8, or repeat an n-gram in a loop.",
    note="Length ratios count characters. A copy is a translation equal to its source except for "
    "case and white space. A loop is an n-gram of up to four words (or of up to sixteen "
    "characters within a word longer than thirty) at least four times in a row, unless the "
    "reference has one too. Bytes that are not valid UTF-8 are dropped before scoring.",
)
LOOP_REPEATS = 4  # repetitions in a row that make a loop
LOOP_WORDS, LOOP_CHARACTERS = 4, 16  # longest n-grams, in words and in characters of a long word
LONG_WORD = 30  # longer words are searched for loops: some languages are written without spaces


@dataclass(frozen=True)
class LengthRatio(Score):
    """Characters of translations divided by characters of references; neither end is better."""

    column = Column(
        "length_ratio", "Length ratio", larger_is_better=None, decimals=2, section=OUTPUTS
    )

    def line_statistics(self, lines: TranslatedLines) -> LineStatistics:
        """Return characters of hypothesis and reference without outer white space, (lines, 2)."""
        sides = (lines.hypotheses, lines.references)
        counted = [[len(text.strip()) for text in side] for side in sides]
        return LineStatistics(np.array(counted, dtype=np.int32).T)

    def of_sums(self, sums: Floats, *, lines: LineCount) -> Floats:  # noqa: ARG002 (one signature)
        """Return ratios of characters, (draws, 2) → (draws,)."""
        found: Floats = sums[:, 0] / np.maximum(sums[:, 1], 1.0)
        return found


class FailedOutputs(ShareOfLines):
    """Percentage of translations with one defect."""

    @abstractmethod
    def flags(self, lines: TranslatedLines) -> list[bool]:
        """Return for every line whether it has the defect."""

    def line_statistics(self, lines: TranslatedLines) -> LineStatistics:
        """Return the flags as (lines,) booleans."""
        return LineStatistics(np.array(self.flags(lines), dtype=np.bool_))


def _column(name: str, title: str) -> Column:
    return Column(name, title, larger_is_better=False, section=OUTPUTS, decimals=2)


@dataclass(frozen=True)
class Copies(FailedOutputs):
    """Translations that equal their source except for case and white space."""

    column = _column("copies", "Copies of the source, %")

    def flags(self, lines: TranslatedLines) -> list[bool]:
        """Return which lines are copies; an empty translation is none."""
        sides = (lines.hypotheses, lines.sources)
        folded = [[" ".join(text.casefold().split()) for text in side] for side in sides]
        return [bool(one) and one == other for one, other in zip(*folded, strict=True)]


@dataclass(frozen=True)
class EmptyOutputs(FailedOutputs):
    """Translations without text."""

    column = _column("empty", "Empty translations, %")

    def flags(self, lines: TranslatedLines) -> list[bool]:
        """Return which lines hold nothing but white space."""
        return [not one.strip() for one in lines.hypotheses]


@dataclass(frozen=True)
class InvalidOutputs(FailedOutputs):
    """Translations from which invalid UTF-8 was dropped."""

    column = _column("invalid", "Invalid UTF-8, %")

    def flags(self, lines: TranslatedLines) -> list[bool]:
        """Return which lines lost bytes; references never do."""
        return [count > 0 for count in lines.invalid or [0] * len(lines.hypotheses)]


@dataclass(frozen=True)
class Loops(FailedOutputs):
    """Translations that repeat an n-gram in a loop, unless their references do too."""

    column = _column("loops", "Loops of an n-gram, %")

    def flags(self, lines: TranslatedLines) -> list[bool]:
        """Return which lines have a loop that their reference has not."""
        pairs = zip(lines.hypotheses, lines.references, strict=True)
        return [has_loop(one) and not has_loop(other) for one, other in pairs]


def has_loop(text: str) -> bool:
    """Return whether an n-gram occurs ``LOOP_REPEATS`` times in a row."""
    words = text.split()
    return _repeats(words, longest=LOOP_WORDS) or any(
        _repeats(word, longest=LOOP_CHARACTERS) for word in words if len(word) > LONG_WORD
    )


def _repeats(tokens: Sequence[str], *, longest: int) -> bool:
    # A run of tokens that equal those n positions later is one n-gram repeated.
    for n in range(1, min(longest, len(tokens) // LOOP_REPEATS) + 1):
        run, needed = 0, n * (LOOP_REPEATS - 1)
        for one, other in zip(tokens, tokens[n:], strict=False):
            run = run + 1 if one == other else 0
            if run == needed:
                return True
    return False
