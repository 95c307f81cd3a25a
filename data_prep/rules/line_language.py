"""Find training lines in another language than their side's.

:func:`line_identifier` chooses the language identifier. A side is judged if the identifier knows
its language and the text is long enough; a line in an uncertain language stays.
"""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from data_prep.settings import CleanConfig
from pipeline.errors import ConfigError
from pipeline.evaluation.language_detector import UNCERTAIN, LanguageDetector, detectable_languages
from pipeline.languages import canonical

LANGDETECT_SEED = 1
MIN_PROBABILITY = 0.5
"""Least probability of a fastText answer that counts as certain."""
LABEL = "__label__"
"""Prefix of fastText's labels: ``__label__en``, in GlotLID ``__label__eng_Latn``."""


class LineIdentifier(Protocol):
    """Interface of a language identifier."""

    @property
    def known(self) -> frozenset[str]:
        """Return the codes of the languages that it can identify."""

    def identify(self, texts: Sequence[str]) -> list[str | None]:
        """Return the language of each text; None if it is uncertain."""


def line_identifier(config: CleanConfig) -> LineIdentifier | None:
    """Return the identifier that the settings name; None if they name none.

    Raises:
        ConfigError: It is not installed, or its model cannot be read.
    """
    match config.identify_languages:
        case "no":
            return None
        case "langdetect":
            return Langdetect()
        case "fasttext":
            return FastText.load(config.language_model)


class Langdetect:
    """Identifier by langdetect, with the languages it has profiles of."""

    known: frozenset[str]

    def __init__(self) -> None:
        self.known = detectable_languages()
        self._detector = LanguageDetector(None, seed=LANGDETECT_SEED)

    def identify(self, texts: Sequence[str]) -> list[str | None]:
        """Return the language of each text; None if it is uncertain."""
        found = self._detector.detect_all(texts)
        return [None if code == UNCERTAIN else code for code in found]


class FastText:
    """Identifier by a fastText model: ``lid.176.bin``, or GlotLID's ``model.bin``.

    Args:
        model: Result of fastText's ``load_model``.
    """

    known: frozenset[str]

    def __init__(self, model: Any) -> None:
        self._model = model
        codes = {label: _code_of(label) for label in model.get_labels()}
        self._codes = {label: code for label, code in codes.items() if code is not None}
        self.known = frozenset(self._codes.values())

    @classmethod
    def load(cls, path: str) -> "FastText":
        """Load a local model file.

        Raises:
            ConfigError: FastText is missing, or the file is not a model of it.
        """
        if not Path(path).is_file():
            raise ConfigError(
                f"clean.language_model names {path!r}, which is not a file. Name fastText's "
                "lid.176.bin or GlotLID's model.bin."
            )
        try:
            fasttext = importlib.import_module("fasttext")
        except ImportError as error:
            raise ConfigError(
                "clean.identify_languages is fasttext, which is not installed. Install fasttext, "
                "or set it to langdetect."
            ) from error
        try:
            return cls(fasttext.load_model(path))
        except (ValueError, OSError) as error:
            raise ConfigError(
                f"fastText cannot read {path} ({error}). Name another file."
            ) from error

    def identify(self, texts: Sequence[str]) -> list[str | None]:
        """Return the language of each text; None if it is uncertain."""
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
    """Rule for one pair, which also counts lines in languages that cannot be identified."""

    identifier: LineIdentifier
    languages: tuple[str, str]
    min_characters: int
    not_known: dict[str, int] = field(default_factory=dict)
    """Language unknown to the identifier → lines that were not judged for it."""

    def wrong_sides(self, lines: Sequence[tuple[str, str]]) -> list[tuple[bool, bool]]:
        """Return for each line the sides that are in another language than their own."""
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
