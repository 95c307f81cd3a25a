"""Language accuracy: the share of lines that langdetect assigns to the target language.

Once with langdetect as it is, once with its prior restricted to the languages of the corpus. Where
langdetect does not know the target language there is no language accuracy.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from langdetect.detector_factory import PROFILES_DIRECTORY, DetectorFactory
from langdetect.lang_detect_exception import LangDetectException

from pipeline.errors import ConfigError

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


@dataclass(frozen=True)
class LanguageHits:
    """Lines detected as the target language, (lines,) booleans each."""

    plain: Hits
    restricted: Hits


def language_hits(
    texts: Sequence[str], *, language: str, candidates: frozenset[str], seed: int
) -> LanguageHits:
    """Detect every line twice: among all languages, and among the candidates."""
    return LanguageHits(
        plain=LanguageDetector(None, seed=seed).hits(texts, language=language),
        restricted=LanguageDetector(candidates, seed=seed).hits(texts, language=language),
    )


@dataclass(frozen=True)
class Detection:
    """How the language of a line is detected."""

    candidates: frozenset[str]
    """Languages of the corpus that langdetect knows."""
    seed: int

    def hits(self, texts: Sequence[str], *, target: str) -> LanguageHits | None:
        """Lines in the target language; None where langdetect does not know it."""
        if target not in self.candidates:
            return None
        return language_hits(texts, language=target, candidates=self.candidates, seed=self.seed)


@dataclass(frozen=True)
class LanguageAccuracy:
    """Percent of lines in the target language; plain, and with the prior restricted."""

    plain: float
    restricted: float


def accuracy(hits: LanguageHits) -> LanguageAccuracy:
    """Percent of hits."""
    return LanguageAccuracy(
        plain=100.0 * float(hits.plain.mean()), restricted=100.0 * float(hits.restricted.mean())
    )
