"""Language accuracy: the share of lines that langdetect assigns to the target language.

Once with langdetect as it is, once with its prior restricted to the languages of the corpus. Where
langdetect does not know the target language there is no language accuracy.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from langdetect.detector_factory import PROFILES_DIRECTORY, DetectorFactory
from langdetect.lang_detect_exception import LangDetectException

from pipeline.artifacts.corpus import Direction
from pipeline.errors import ConfigError
from pipeline.evaluation.score_slot import (
    Column,
    Floats,
    LineStatistics,
    Rows,
    Score,
    Section,
    TranslatedLines,
)

Hits = npt.NDArray[np.bool_]

PROFILE_LANGUAGES = {"zh-cn": "zh", "zh-tw": "zh"}
"""langdetect profile → language code, where the two differ."""


@lru_cache(maxsize=1)
def _profiles() -> Any:
    """langdetect's profiles in sorted order: its own loader takes the file system's order."""
    factory = DetectorFactory()
    paths = sorted(Path(PROFILES_DIRECTORY).iterdir())
    factory.load_json_profile(
        [path.read_text(encoding="utf-8") for path in paths if not path.name.startswith(".")]
    )
    return factory


def detectable_languages() -> frozenset[str]:
    """Codes of the languages langdetect knows."""
    names: list[str] = _profiles().get_lang_list()
    return frozenset(PROFILE_LANGUAGES.get(name, name) for name in names)


class LanguageDetector:
    """langdetect with a fixed seed and, where candidates are given, a prior over them alone.

    Args:
        candidates: languages to choose from, with equal prior; those langdetect does not know are
            left out; None: all it knows.
        seed: of langdetect's random walk; every text starts from it, so order does not matter.
    """

    def __init__(self, candidates: Iterable[str] | None, *, seed: int) -> None:
        self._seed = seed
        self._prior = None if candidates is None else _prior(frozenset(candidates))

    def detect(self, text: str) -> str | None:
        """The most probable language of a text; None where it holds nothing to go by."""
        detector = _profiles().create()
        detector.seed = self._seed
        if self._prior is not None:
            detector.set_prior_map(self._prior)
        detector.append(text)
        try:
            found: str = detector.detect()
        except LangDetectException:
            return None
        return PROFILE_LANGUAGES.get(found, found)

    def hits(self, texts: Sequence[str], *, language: str) -> Hits:
        """Which of the texts are detected as the language, (lines,) booleans."""
        found = {text: self.detect(text) == language for text in dict.fromkeys(texts)}
        return np.array([found[text] for text in texts], dtype=np.bool_)


def _prior(candidates: frozenset[str]) -> dict[str, float]:
    """Equal weight per language, shared among a language's profiles."""
    names: list[str] = _profiles().get_lang_list()
    languages = {name: PROFILE_LANGUAGES.get(name, name) for name in names}
    profiles_per_language = Counter(languages.values())
    prior = {
        name: 1.0 / profiles_per_language[language]
        for name, language in languages.items()
        if language in candidates
    }
    if not prior:
        raise ConfigError(
            f"langdetect knows none of the languages {', '.join(sorted(candidates))}: "
            "set evaluation.language_accuracy to false."
        )
    return prior


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
        detectable = detectable_languages() & frozenset(languages)
        return cls(PLAIN, detectable, None, seed)

    @classmethod
    def restricted(cls, languages: Iterable[str], *, seed: int) -> Self:
        """With langdetect's prior over the languages of the corpus alone."""
        detectable = detectable_languages() & frozenset(languages)
        return cls(RESTRICTED, detectable, detectable, seed)

    def covers(self, direction: Direction) -> bool:
        """Whether langdetect knows the target language."""
        return direction.target in self.detectable

    def line_statistics(self, lines: TranslatedLines) -> LineStatistics:
        """(lines,) booleans."""
        detector = LanguageDetector(self.candidates, seed=self.seed)
        return LineStatistics(detector.hits(lines.hypotheses, language=lines.direction.target))

    def of_corpus(self, rows: Rows) -> float:
        """The mean, rounded as a mean is."""
        return 100.0 * float(rows.mean())

    def of_sums(self, sums: Floats, *, lines: int) -> Floats:
        """Of numbers of lines in the language, (draws, 1) → (draws,)."""
        found: Floats = 100.0 * sums[:, 0] / lines
        return found
