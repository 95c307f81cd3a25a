"""Language accuracy: the share of lines that an identifier assigns to the target language.

There are three variants: langdetect as it is, as in the papers; langdetect with its prior
restricted to the languages of the corpus; and fastText's lid.176, which knows more languages.
Directions with a target language that the identifier does not know have no language accuracy by it.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import numpy as np

from pipeline.artifacts.corpus import Direction
from pipeline.evaluation.language_detector import (
    LID176,
    LanguageDetector,
    detectable_languages,
    lid176,
)
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

LANGDETECT = "langdetect"
NOTE = (
    "Language accuracy is the share of lines that an identifier assigns to the target language: "
    "langdetect, as it is or with its prior restricted to the languages at hand, or fastText's "
    "lid.176 in its small form. It is computed where the identifier knows the target language; "
    "each errs on some lines of every language."
)


def _column(name: str, title: str) -> Column:
    return Column(name, f"{title}, %", out_of_100=True, note=NOTE)


NO_LANGUAGE = "none"  # outcome of lines without a letter
PLAIN = _column("language", f"{LANGDETECT} as it is")
RESTRICTED = _column("language_restricted", f"{LANGDETECT} restricted to the languages at hand")
BY_LID176 = _column("language_lid176", LID176)


@dataclass(frozen=True)
class LanguageAccuracy(Score):
    """Percentage of lines in the target language."""

    column: Column
    detectable: frozenset[str]  # languages of the corpus that the identifier knows
    candidates: frozenset[str] | None = None  # languages to choose from; None: all that it knows
    seed: int = 0

    @classmethod
    def among(cls, languages: Iterable[str], *, seed: int, restricted: bool) -> Self:
        """Return the variant with langdetect's prior, or with a prior over some languages."""
        detectable = detectable_languages() & {without_region(code) for code in languages}
        candidates = detectable if restricted else None
        return cls(RESTRICTED if restricted else PLAIN, detectable, candidates, seed)

    @classmethod
    def by_lid176(cls, languages: Iterable[str]) -> Self:
        """Return the variant with fastText's lid.176."""
        return cls(BY_LID176, lid176().known & {without_region(code) for code in languages})

    @property
    def identifier(self) -> str:
        """Return the name of the identifier."""
        return LID176 if self.column == BY_LID176 else LANGDETECT

    def covers(self, direction: Direction) -> bool:
        """Return whether the identifier knows the target language."""
        return self.detects(direction.target)

    def detects(self, language: str) -> bool:
        """Return whether the identifier knows a language; none tells regions apart."""
        return without_region(language) in self.detectable

    def line_statistics(self, lines: TranslatedLines) -> LineStatistics:
        """Return (lines,) booleans; the outcomes are the languages found."""
        is_langdetect = self.identifier == LANGDETECT
        # Loaded here: a fastText model cannot be sent to a worker.
        detector = LanguageDetector(self.candidates, seed=self.seed) if is_langdetect else lid176()
        found = detector.detect_all(lines.hypotheses)
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
