"""Find training lines in another language than their side's.

Identifiers err: langdetect takes much Traditional Chinese for Korean, lid.176 most Malay for
Indonesian. A side is in another language if all this is known (:meth:`LineIdentifier.deny`):

1. A fastText model knows the side's language and finds another with a probability of 0.5 or more.
2. The side has letters of the other language's script.
3. The side has no letter of its own language's script, or langdetect agrees: it knows the side's
   language and finds another, which has such letters too. If it does not know the side's language,
   it must find the same language as the model, which must find the side's own language next to
   impossible. langdetect is not asked if it knows neither language.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from data_prep.settings import CleanConfig
from pipeline.errors import ConfigError
from pipeline.evaluation.language_detector import (
    UNCERTAIN,
    FastText,
    LanguageDetector,
    detectable_languages,
    in_small_letters,
    lid176,
)
from pipeline.languages import can_be_written, canonical, count_scripts, written_script

LANGDETECT_SEED = 1
MIN_PROBABILITY = 0.5
"""Least probability of a fastText answer that counts as certain."""
IMPOSSIBLE = 0.001
"""Below this probability, fastText rules a language out; true Malay has more in nearly all lines
that it takes for Indonesian."""


def line_identifier(config: CleanConfig) -> "LineIdentifier | None":
    """Return the identifier that the settings name; None if they name none.

    Raises:
        ConfigError: Its model cannot be read.
    """
    match config.identify_languages:
        case "no":
            return None
        case "langdetect":
            return LineIdentifier(lid176())
        case "fasttext":
            path = config.language_model
            if not Path(path).is_file():
                raise ConfigError(
                    f"clean.language_model names {path!r}, which is not a file. Name fastText's "
                    "lid.176.bin or GlotLID's model.bin."
                )
            return LineIdentifier(FastText(path))


class LineIdentifier:
    """A fastText model, seconded by scripts and langdetect."""

    def __init__(self, model: FastText) -> None:
        self._model = model
        self._langdetect = LanguageDetector(None, seed=LANGDETECT_SEED)

    @property
    def known(self) -> frozenset[str]:
        """Return the codes of the languages that can be judged."""
        return self._model.known

    def deny(self, texts: Sequence[str], code: str, script: str | None) -> list[bool]:
        """Return for each text whether it is in another language than a known one.

        Args:
            texts: Lines of the language.
            code: The language, without script and region.
            script: Its script in these lines; None if that is unknown.
        """
        is_wrong, doubts = [False] * len(texts), dict[int, _Doubt]()
        for place, text in enumerate(texts):
            if doubt := self._doubt(text, code):
                doubts[place] = doubt
                is_wrong[place] = not can_be_written(doubt.letters, script)
        asked = {place: one for place, one in doubts.items() if not is_wrong[place]}
        seconds = self._langdetect.detect_all([in_small_letters(texts[place]) for place in asked])
        for (place, doubt), second in zip(asked.items(), seconds, strict=True):
            is_wrong[place] = _is_seconded(doubt, second, code)
        return is_wrong

    def _doubt(self, text: str, code: str) -> "_Doubt | None":
        shares = self._model.probabilities(text, least=IMPOSSIBLE)
        other = max(shares, key=shares.__getitem__, default=code)
        if other == code or shares[other] < MIN_PROBABILITY:
            return None
        letters = count_scripts(text)
        if not can_be_written(letters, written_script(other)):
            return None
        return _Doubt(letters, other, is_possible=code in shares)


class _Doubt(NamedTuple):
    """A finding of the model in a text that it takes for another language than its own."""

    letters: Counter[str]
    """Script → letters."""
    other: str
    is_possible: bool
    """Whether the text's own language is at all probable."""


def _is_seconded(doubt: _Doubt, second: str | None, code: str) -> bool:
    """Return whether langdetect's answer confirms a doubt about text of a language."""
    known = detectable_languages()
    if code not in known:
        return not doubt.is_possible and (second == doubt.other or doubt.other not in known)
    if second is None or second in (UNCERTAIN, code):
        return False
    return can_be_written(doubt.letters, written_script(second))


@dataclass
class LanguageRule:
    """Rule for one pair, which also counts lines in languages that cannot be identified."""

    identifier: LineIdentifier
    languages: tuple[str, str]
    scripts: tuple[str | None, str | None]
    """Script of each language in this corpus; None if that is unknown."""
    min_characters: int
    not_known: dict[str, int] = field(default_factory=dict)
    """Language unknown to the identifier → lines that were not judged for it."""

    def wrong_sides(self, lines: Sequence[tuple[str, str]]) -> list[tuple[bool, bool]]:
        """Return for each line the sides that are in another language than their own."""
        if not lines:
            return []
        first, second = (self._wrong([line[side] for line in lines], side) for side in (0, 1))
        return list(zip(first, second, strict=True))

    def _wrong(self, texts: list[str], side: int) -> list[bool]:
        language, wrong = self.languages[side], [False] * len(texts)
        code = canonical(language)
        if code not in self.identifier.known:
            self.not_known[language] = self.not_known.get(language, 0) + len(texts)
            return wrong
        judged = [place for place, text in enumerate(texts) if len(text) >= self.min_characters]
        denied = self.identifier.deny([texts[place] for place in judged], code, self.scripts[side])
        for place, is_wrong in zip(judged, denied, strict=True):
            wrong[place] = is_wrong
        return wrong
