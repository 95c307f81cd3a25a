"""The language of a line as langdetect finds it, with a fixed seed, for many lines at once."""

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np

from pipeline.errors import ConfigError
from pipeline.evaluation.language_grams import Floats, grams_of_lines, langdetect_profiles
from pipeline.evaluation.language_walk import language_probabilities

PROFILE_LANGUAGES = {"zh-cn": "zh", "zh-tw": "zh"}
"""langdetect profile → language code, where the two differ."""
UNCERTAIN, MIN_PROBABILITY = "unknown", 0.1
"""langdetect's answer where no language is as probable as that."""


def detectable_languages() -> frozenset[str]:
    """Codes of the languages langdetect knows."""
    return frozenset(PROFILE_LANGUAGES.get(name, name) for name in langdetect_profiles().names)


class LanguageDetector:
    """langdetect with a fixed seed and, where candidates are given, a prior over them alone.

    Args:
        candidates: languages to choose from, with equal prior; those langdetect does not know are
            left out; None: all it knows.
        seed: of langdetect's random walk; every text starts from it, so order does not matter.
    """

    def __init__(self, candidates: Iterable[str] | None, *, seed: int) -> None:
        self._seed = seed
        given = None if candidates is None else frozenset(candidates)
        self._names, self._prior, self._probabilities = _choice(given)

    def detect_all(self, texts: Sequence[str]) -> list[str | None]:
        """The most probable language of every text; None where it holds nothing to go by."""
        places = {text: place for place, text in enumerate(dict.fromkeys(texts))}
        found = self._detect_distinct(tuple(places))
        return [found[places[text]] for text in texts]

    def detect(self, text: str) -> str | None:
        """The most probable language of one text."""
        return self.detect_all([text])[0]

    def _detect_distinct(self, texts: tuple[str, ...]) -> list[str | None]:
        grams = grams_of_lines(texts)
        probabilities = language_probabilities(
            grams, probabilities=self._probabilities, prior=self._prior, seed=self._seed
        )
        best = probabilities.argmax(axis=1)
        certain = probabilities.max(axis=1) > MIN_PROBABILITY
        return [
            None if not count else self._names[place] if sure else UNCERTAIN
            for count, place, sure in zip(
                grams.counts.tolist(), best.tolist(), certain.tolist(), strict=True
            )
        ]


@lru_cache(maxsize=4)
def _choice(candidates: frozenset[str] | None) -> tuple[tuple[str, ...], Floats, Floats]:
    """Languages of the profiles to choose from, their prior, their probabilities of n-grams.

    Candidates have equal weight, shared among a language's profiles.
    """
    profiles = langdetect_profiles()
    languages = tuple(PROFILE_LANGUAGES.get(name, name) for name in profiles.names)
    if candidates is None:
        prior = np.full(len(languages), 1.0 / len(languages))
        return languages, prior, profiles.probabilities
    chosen = [place for place, language in enumerate(languages) if language in candidates]
    if not chosen:
        raise ConfigError(
            f"langdetect knows none of the languages {', '.join(sorted(candidates))}: "
            "set evaluation.language_accuracy to false."
        )
    counts = Counter(languages)
    weights = np.array([1.0 / counts[languages[place]] for place in chosen])
    kept = np.ascontiguousarray(profiles.probabilities[:, chosen])
    return tuple(languages[place] for place in chosen), weights / sum(weights.tolist()), kept
