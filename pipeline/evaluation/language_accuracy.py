"""Language accuracy: the share of lines that langdetect assigns to the target language.

Once with langdetect as it is, once with its prior restricted to the languages of the corpus. Where
langdetect does not know the target language there is no language accuracy.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import numpy as np

from pipeline.artifacts.corpus import Direction
from pipeline.evaluation.language_detector import LanguageDetector, detectable_languages
from pipeline.evaluation.score_slot import (
    Column,
    Floats,
    LineStatistics,
    Rows,
    Score,
    Section,
    TranslatedLines,
)
from pipeline.languages import without_region

LANGUAGE_ACCURACY = Section(
    title="Language accuracy",
    lead="Share of translations in the language that was asked for, over the directions whose "
    "target language the detector knows. The references' own value is the ceiling to expect: "
    "what the detector misses there it misses in any system.",
    note="Language accuracy is the share of lines that langdetect assigns to the target "
    "language, plain and with its prior restricted to the languages at hand; its "
    "accuracy on the references is what a perfect system could expect.",
)


def _column(name: str, variant: str, how: str) -> Column:
    return Column(
        name,
        f"langdetect {how}, %",
        out_of_100=True,
        section=LANGUAGE_ACCURACY,
        path=("language_accuracy", variant),
        ceiling=True,
    )


NO_LANGUAGE = "none"
"""Among the outcomes: lines without a letter to go by."""
PLAIN = _column("language", "plain", "as it is")
RESTRICTED = _column("language_restricted", "restricted", "restricted to the languages at hand")


@dataclass(frozen=True)
class LanguageAccuracy(Score):
    """Percent of lines in the target language."""

    column: Column
    detectable: frozenset[str]
    """Languages of the corpus that langdetect knows."""
    candidates: frozenset[str] | None
    """Those to choose from; None: all that langdetect knows."""
    seed: int

    @classmethod
    def plain(cls, languages: Iterable[str], *, seed: int) -> Self:
        """With langdetect as it is."""
        return cls(PLAIN, _detectable(languages), None, seed)

    @classmethod
    def restricted(cls, languages: Iterable[str], *, seed: int) -> Self:
        """With langdetect's prior over the languages of the corpus alone."""
        detectable = _detectable(languages)
        return cls(RESTRICTED, detectable, detectable, seed)

    def covers(self, direction: Direction) -> bool:
        """Whether langdetect knows the target language."""
        return self.detects(direction.target)

    def detects(self, language: str) -> bool:
        """Whether langdetect knows a language, which it does not tell from those of its regions."""
        return without_region(language) in self.detectable

    def line_statistics(self, lines: TranslatedLines) -> LineStatistics:
        """(lines,) booleans; the outcomes are the languages that were found."""
        found = LanguageDetector(self.candidates, seed=self.seed).detect_all(lines.hypotheses)
        target = without_region(lines.direction.target)
        hits = np.array([code == target for code in found], dtype=np.bool_)
        outcomes = Counter(code or NO_LANGUAGE for code in found)
        return LineStatistics(hits, outcomes=dict(sorted(outcomes.items())))

    def of_corpus(self, rows: Rows) -> float:
        """The mean, rounded as a mean is."""
        return 100.0 * float(rows.mean())

    def of_sums(self, sums: Floats, *, lines: int) -> Floats:
        """Of numbers of lines in the language, (draws, 1) → (draws,)."""
        found: Floats = 100.0 * sums[:, 0] / lines
        return found


def _detectable(languages: Iterable[str]) -> frozenset[str]:
    return detectable_languages() & {without_region(code) for code in languages}
