"""Counts of the training text of a pair: lengths, words, and the ratio of its sides."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

LENGTH_BIN = 10
"""Width of a bin of a histogram of lengths, in characters."""
RATIO_BIN = 0.02
"""Width of a bin of the natural logarithm of a ratio."""


@dataclass
class LanguageCounts:
    """Counts of the training lines of one language, in one or several pairs."""

    lines: int = 0
    characters: int = 0
    words: int = 0
    """Number of words, which spaces separate."""
    lengths: Counter[int] = field(default_factory=Counter)
    """Length in bins of ``LENGTH_BIN`` characters → lines."""

    def add(self, other: "LanguageCounts") -> None:
        """Add the counts of other lines."""
        self.lines += other.lines
        self.characters += other.characters
        self.words += other.words
        self.lengths.update(other.lengths)


@dataclass
class PairCounts:
    """Counts of the training lines of one pair."""

    sides: tuple[LanguageCounts, LanguageCounts] = field(
        default_factory=lambda: (LanguageCounts(), LanguageCounts())
    )
    ratios: Counter[int] = field(default_factory=Counter)
    """Logarithm of first by second side's characters in bins of ``RATIO_BIN`` → lines."""

    def ratio(self, share: float) -> float | None:
        """Return a quantile of the ratio of characters, first to second side, if there is one."""
        place = quantile(self.ratios, share)
        return None if place is None else math.exp(place * RATIO_BIN)


def count_pair(lines: Iterable[tuple[str, str]]) -> PairCounts:
    """Count the training lines of a pair in one pass."""
    counts = PairCounts()
    for line in lines:
        for side, text in zip(counts.sides, line, strict=True):
            side.lines += 1
            side.characters += len(text)
            side.words += len(text.split())
            side.lengths[len(text) // LENGTH_BIN] += 1
        if line[0] and line[1]:
            counts.ratios[round(math.log(len(line[0]) / len(line[1])) / RATIO_BIN)] += 1
    return counts


def quantile(histogram: Counter[int], share: float) -> int | None:
    """Return the lowest value that at least this share of the counts does not exceed."""
    wanted = share * histogram.total()
    reached = 0
    for value in sorted(histogram):
        reached += histogram[value]
        if reached >= wanted:
            return value
    return None
