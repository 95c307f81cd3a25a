"""Length ratio and failed outputs: defects that are visible without knowing the language."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from pipeline.evaluation.score_slot import (
    Column,
    Floats,
    LineCount,
    LineStatistics,
    Score,
    ShareOfLines,
    TranslatedLines,
)

LOOP_REPEATS = 4  # repetitions in a row that make a loop
LOOP_WORDS, LOOP_CHARACTERS = 4, 16  # longest n-grams, in words and in characters of a long word
LONG_WORD = 30  # longer words are searched for loops: some languages are written without spaces


@dataclass(frozen=True)
class LengthRatio(Score):
    """Characters of translations divided by characters of references; neither end is better."""

    column = Column(
        "length_ratio",
        "Length ratio",
        larger_is_better=None,
        decimals=2,
        is_main=False,
        note="Length ratios count characters of translations and references.",
    )

    def line_statistics(self, lines: TranslatedLines) -> LineStatistics:
        """Return characters of hypothesis and reference without outer white space, (lines, 2)."""
        sides = (lines.hypotheses, lines.references)
        lengths = [[len(text.strip()) for text in side] for side in sides]
        return LineStatistics(np.array(lengths, dtype=np.int32).T)

    def of_sums(self, sums: Floats, *, lines: LineCount) -> Floats:  # noqa: ARG002 (one signature)
        """Return ratios of characters, (draws, 2) → (draws,)."""
        ratios: Floats = sums[:, 0] / np.maximum(sums[:, 1], 1.0)
        return ratios


def copies(lines: TranslatedLines) -> list[bool]:
    """Return which translations equal their source; an empty translation is no copy."""
    sides = (lines.hypotheses, lines.sources)
    folded = [[" ".join(text.casefold().split()) for text in side] for side in sides]
    return [bool(text) and text == source for text, source in zip(*folded, strict=True)]


def empty(lines: TranslatedLines) -> list[bool]:
    """Return which translations hold nothing but white space."""
    return [not text.strip() for text in lines.hypotheses]


def invalid(lines: TranslatedLines) -> list[bool]:
    """Return which translations lost bytes that are no valid UTF-8."""
    return [count > 0 for count in lines.invalid or [0] * len(lines.hypotheses)]


def loops(lines: TranslatedLines) -> list[bool]:
    """Return which translations have a loop that their reference does not have."""
    pairs = zip(lines.hypotheses, lines.references, strict=True)
    return [has_loop(text) and not has_loop(reference) for text, reference in pairs]


DEFECTS: dict[str, tuple[Callable[[TranslatedLines], list[bool]], str, str]] = {
    "copies": (
        copies,
        "Copies of the source, %",
        "A copy is a translation equal to its source except for case and white space.",
    ),
    "empty": (empty, "Empty translations, %", ""),
    "invalid": (
        invalid,
        "Invalid UTF-8, %",
        "Bytes that are not valid UTF-8 are dropped before scoring.",
    ),
    "loops": (
        loops,
        "Loops of an n-gram, %",
        f"A loop is an n-gram of up to {LOOP_WORDS} words (or of up to {LOOP_CHARACTERS} "
        f"characters within a word longer than {LONG_WORD}) at least {LOOP_REPEATS} times in a "
        "row, unless the reference has a loop too.",
    ),
}
"""Name of a score → its test of every line, title, and definition."""


@dataclass(frozen=True)
class FailedOutputs(ShareOfLines):
    """Percentage of translations with a defect of ``DEFECTS``."""

    column: Column

    @classmethod
    def with_defect(cls, name: str) -> Self:
        """Return the score of this name."""
        _, title, note = DEFECTS[name]
        return cls(
            Column(name, title, larger_is_better=False, decimals=2, is_main=False, note=note)
        )

    def line_statistics(self, lines: TranslatedLines) -> LineStatistics:
        """Return whether every line has the defect, (lines,) booleans."""
        has_defect, *_ = DEFECTS[self.column.name]
        return LineStatistics(np.array(has_defect(lines), dtype=np.bool_))


def has_loop(text: str) -> bool:
    """Return whether an n-gram occurs ``LOOP_REPEATS`` times in a row."""
    words = text.split()
    return _repeats(words, longest=LOOP_WORDS) or any(
        _repeats(word, longest=LOOP_CHARACTERS) for word in words if len(word) > LONG_WORD
    )


def _repeats(tokens: Sequence[str], *, longest: int) -> bool:
    # A run of tokens that equal the tokens n positions later is one n-gram repeated.
    for n in range(1, min(longest, len(tokens) // LOOP_REPEATS) + 1):
        run, needed = 0, n * (LOOP_REPEATS - 1)
        for token, later in zip(tokens, tokens[n:], strict=False):
            run = run + 1 if token == later else 0
            if run == needed:
                return True
    return False
