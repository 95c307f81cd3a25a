"""Training lines in another language than their side is named for.

Who says which language a text is in stands behind one function, :func:`line_identifier`. A side is
judged where the identifier knows its language and it has characters enough; where the identifier is
not certain, the line stays.
"""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from pipeline.artifacts.settings import CleanConfig
from pipeline.errors import ConfigError
from pipeline.evaluation.language_detector import UNCERTAIN, LanguageDetector, detectable_languages
from pipeline.languages import canonical

LANGDETECT_SEED = 1
MIN_PROBABILITY = 0.5
"""Of fastText's answer, so that it counts as certain."""
LABEL = "__label__"
"""How fastText's labels begin: ``__label__en``, of GlotLID ``__label__eng_Latn``."""


class LineIdentifier(Protocol):
    """Tells the languages of many lines."""

    @property
    def known(self) -> frozenset[str]:
        """Codes of the languages it can tell."""

    def identify(self, texts: Sequence[str]) -> list[str | None]:
        """The language of each text; None where it is not certain."""


def line_identifier(config: CleanConfig) -> LineIdentifier | None:
    """The identifier that the settings name; None where languages are not to be identified.

    Raises:
        ConfigError: it is not installed, or its model cannot be read.
    """
    match config.identify_languages:
        case "no":
            return None
        case "langdetect":
            return Langdetect()
        case "fasttext":
            return FastText.load(config.language_model)


class Langdetect:
    """langdetect, with the languages it has profiles of."""

    known: frozenset[str]

    def __init__(self) -> None:
        self.known = detectable_languages()
        self._detector = LanguageDetector(None, seed=LANGDETECT_SEED)

    def identify(self, texts: Sequence[str]) -> list[str | None]:
        """As of :class:`LineIdentifier`."""
        found = self._detector.detect_all(texts)
        return [None if code == UNCERTAIN else code for code in found]


class FastText:
    """A fastText classifier from a local file: ``lid.176.bin``, GlotLID's ``model.bin``."""

    known: frozenset[str]

    def __init__(self, model: Any) -> None:
        """``model``: what fastText's ``load_model`` returns."""
        self._model = model
        codes = {label: _code_of(label) for label in model.get_labels()}
        self._codes = {label: code for label, code in codes.items() if code is not None}
        self.known = frozenset(self._codes.values())

    @classmethod
    def load(cls, path: str) -> "FastText":
        """Raises ConfigError where fastText is missing or the file is none of its models."""
        if not Path(path).is_file():
            raise ConfigError(
                f"clean.language_model names {path!r}, which is no file: name fastText's "
                "lid.176.bin or GlotLID's model.bin."
            )
        try:
            fasttext = importlib.import_module("fasttext")
        except ImportError as error:
            raise ConfigError(
                "clean.identify_languages is fasttext, which is not installed: install fasttext, "
                "or set it to langdetect."
            ) from error
        try:
            return cls(fasttext.load_model(path))
        except (ValueError, OSError) as error:
            raise ConfigError(
                f"fastText cannot read {path} ({error}): name another file."
            ) from error

    def identify(self, texts: Sequence[str]) -> list[str | None]:
        """As of :class:`LineIdentifier`."""
        labels, probabilities = self._model.predict(list(texts), k=1)
        return [
            self._codes.get(label[0]) if len(label) and share[0] >= MIN_PROBABILITY else None
            for label, share in zip(labels, probabilities, strict=True)
        ]


def _code_of(label: str) -> str | None:
    try:
        return canonical(label.removeprefix(LABEL))
    except ConfigError:
        return None


@dataclass
class LanguageRule:
    """The rule for one pair; counts the lines of languages that nobody can tell."""

    identifier: LineIdentifier
    languages: tuple[str, str]
    min_characters: int
    not_known: dict[str, int] = field(default_factory=dict)
    """Language that the identifier does not know → lines that were not judged for it."""

    def wrong_sides(self, lines: Sequence[tuple[str, str]]) -> list[tuple[bool, bool]]:
        """Of each line, the sides that are in another language than they should be."""
        if not lines:
            return []
        first, second = (
            self._wrong([line[side] for line in lines], self.languages[side]) for side in (0, 1)
        )
        return list(zip(first, second, strict=True))

    def _wrong(self, texts: list[str], language: str) -> list[bool]:
        expected = canonical(language)
        if expected not in self.identifier.known:
            self.not_known[language] = self.not_known.get(language, 0) + len(texts)
            return [False] * len(texts)
        wrong = [False] * len(texts)
        judged = [place for place, text in enumerate(texts) if len(text) >= self.min_characters]
        if judged:
            found = self.identifier.identify([texts[place] for place in judged])
            for place, code in zip(judged, found, strict=True):
                wrong[place] = code is not None and code != expected
        return wrong
