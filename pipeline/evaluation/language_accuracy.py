"""Language accuracy: the share of lines that langdetect assigns to the target language.

There are two variants: langdetect as it is, and with its prior restricted to the languages of the
corpus. Directions with a target language that langdetect does not know have no language accuracy.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import numpy as np

from pipeline.artifacts.corpus import Direction
from pipeline.evaluation.language_detector import LanguageDetector, detectable_languages
from pipeline.evaluation.scores import (
    Column,
    Floats,
    LineCount,
    LineStatistics,
    Rows,
    Score,
    TranslatedLines,
)
from pipeline.languages import without_region

NOTE = (
    "Language accuracy is the share of lines that langdetect assigns to the target language, as it "
    "is or with its prior restricted to the languages at hand. It is computed where langdetect "
    "knows the target language; langdetect errs on some lines of every language."
)


def _column(name: str, how: str) -> Column:
    return Column(name, f"langdetect {how}, %", out_of_100=True, note=NOTE)


NO_LANGUAGE = "none"  # outcome of lines without a letter
PLAIN = _column("language", "as it is")
RESTRICTED = _column("language_restricted", "restricted to the languages at hand")


@dataclass(frozen=True)
class LanguageAccuracy(Score):
    """Percentage of lines in the target language."""

    column: Column
    detectable: frozenset[str]  # languages of the corpus that langdetect knows
    candidates: frozenset[str] | None  # languages to choose from; None: all that langdetect knows
    seed: int

    @classmethod
    def among(cls, languages: Iterable[str], *, seed: int, restricted: bool) -> Self:
        """Return the variant with langdetect's prior, or with a prior over some languages."""
        detectable = detectable_languages() & {without_region(code) for code in languages}
        candidates = detectable if restricted else None
        return cls(RESTRICTED if restricted else PLAIN, detectable, candidates, seed)

    def covers(self, direction: Direction) -> bool:
        """Return whether langdetect knows the target language."""
        return self.detects(direction.target)

    def detects(self, language: str) -> bool:
        """Return whether langdetect knows a language; it does not tell regions apart."""
        return without_region(language) in self.detectable

    def line_statistics(self, lines: TranslatedLines) -> LineStatistics:
        """Return (lines,) booleans; the outcomes are the languages found."""
        found = LanguageDetector(self.candidates, seed=self.seed).detect_all(lines.hypotheses)
        target = without_region(lines.direction.target)
        hits = np.array([code == target for code in found], dtype=np.bool_)
        outcomes = Counter(code or NO_LANGUAGE for code in found)
        return LineStatistics(hits, outcomes=dict(sorted(outcomes.items())))

    def of_corpus(self, rows: Rows) -> float:
        """Return the mean, rounded as a mean is."""
        return 100.0 * float(rows.mean())

    def of_sums(self, sums: Floats, *, lines: LineCount) -> Floats:
        """Return percentages from numbers of hits, (draws, 1) → (draws,)."""
        shares: Floats = 100.0 * sums[:, 0] / lines
        return shares
