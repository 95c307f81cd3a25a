"""Apply all rules in their order to the training lines of one pair.

Rules for a single line come first; then the language, for a block of lines; then comparisons with
the kept lines of the pair and with held-out lines.

A digest of 8 bytes stands for both sides of a line. The digests go to a temporary file and are
compared in parts, so memory grows only with the repeats: 16 bytes for each, 48 while they are
sorted, and one for every line.

Identifiers err: lid.176, for example, takes most Malay for Indonesian, langdetect much Traditional
Chinese for Korean. A side is in another language if all this holds (:meth:`LineIdentifier.deny`):

1. A fastText model knows the side's language and finds another with a probability of 0.5 or more.
2. The side has letters of the other language's script.
3. The side has no letter of its own language's script, or langdetect agrees: it knows the side's
   language and finds another, which has such letters too. If it does not know the side's language,
   it must find the same language as the model, which must find the side's own language next to
   impossible. langdetect is not asked if it knows neither language.
"""

import re
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import IO, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from data_prep.held_out import HeldOutRule, digest_of
from data_prep.settings import CleanConfig
from pipeline.artifacts.spelling import visible
from pipeline.errors import ConfigError
from pipeline.evaluation.language_detector import (
    UNCERTAIN,
    FastText,
    LanguageDetector,
    detectable_languages,
    in_small_letters,
    lid176,
)
from pipeline.languages import (
    can_be_written,
    canonical,
    count_scripts,
    has_letter_of,
    written_script,
)

COUNTED = 512
"""Lengths below this are counted in a table; the few longer lines are kept one by one."""


class LengthRatios:
    """Ratios of characters, first side to second, over the lines of a pair.

    Their median keeps the length rule from rejecting dense scripts. Lines with an empty side do not
    count. Memory grows only with long lines, by 8 bytes each.
    """

    def __init__(self) -> None:
        self._lines_LL = np.zeros((COUNTED, COUNTED), dtype=np.int64)
        self._long = array("d")

    def add(self, lines: Sequence[tuple[str, str]]) -> None:
        """Count the lines of a block."""
        lengths = np.array([(len(one), len(other)) for one, other in lines], dtype=np.int64)
        lengths = lengths.reshape(-1, 2)
        lengths = lengths[lengths.all(axis=1)]
        is_long = lengths.max(axis=1, initial=0) >= COUNTED
        self._long.extend((lengths[is_long, 0] / lengths[is_long, 1]).tolist())
        np.add.at(self._lines_LL, tuple(lengths[~is_long].T), 1)

    def median(self) -> float:
        """Return the median over the lines; 1 if there are none."""
        rows = np.flatnonzero(self._lines_LL.max(axis=1))  # first: 10 times faster for few lines
        row, other = self._lines_LL[rows].nonzero()
        one = rows[row]
        ratio_X = np.concatenate([one / other, np.frombuffer(self._long, dtype=np.float64)])
        lines_X = np.concatenate([self._lines_LL[one, other], np.ones(len(self._long), np.int64)])
        if not len(ratio_X):
            return 1.0
        order_X = np.argsort(ratio_X)
        ends_X = np.cumsum(lines_X[order_X])
        lines = ends_X[-1]
        middle = np.searchsorted(ends_X, [(lines - 1) // 2, lines // 2], side="right")
        return float(ratio_X[order_X][middle].mean())


# ---------------------------------------------------------------- repeated lines

PART, MOST_PARTS = 2**19, 64
"""Digests compared at a time, and the most parts; beyond that parts grow."""

Digests = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]


class Duplicates:
    """Repeats of lines that passed before them; asked line by line, in order.

    Args:
        repeats: Numbers of the lines that equal an earlier one, ascending.
        firsts: Number of the first equal line of each of them.
        lines: Lines of the pair.
    """

    def __init__(self, repeats: Numbers, firsts: Numbers, *, lines: int) -> None:
        self._repeats, self._firsts = repeats, firsts
        self._next = 0
        self._has_passed = bytearray(lines)

    def is_repeated(self, number: int) -> bool:
        """Return whether a line repeats one asked for before; numbers must ascend."""
        while self._next < len(self._repeats) and self._repeats[self._next] < number:
            self._next += 1
        is_repeat = self._next < len(self._repeats) and self._repeats[self._next] == number
        first = int(self._firsts[self._next]) if is_repeat else number
        repeated = bool(self._has_passed[first])
        self._has_passed[first] = True
        return repeated


class LineDigests:
    """Collects the digests of lines in a temporary file, 8 bytes each, and reads them in parts."""

    def __init__(self, file: IO[bytes]) -> None:
        self.lines, self._file = 0, file

    def add(self, lines: Sequence[str]) -> None:
        """Add the next lines in the form in which they are compared."""
        self._file.write(b"".join(map(digest_of, lines)))
        self.lines += len(lines)

    @property
    def parts(self) -> int:
        """Return the number of parts in which the digests fit into memory."""
        return min(max(1, round(self.lines / PART)), MOST_PARTS)

    def part(self, part: int, parts: int) -> tuple[Digests, Numbers]:
        """Return the digests that belong to a part, and the numbers of their lines."""
        digests, numbers, first = [np.empty(0, np.uint64)], [np.empty(0, np.int64)], 0
        self._file.seek(0)
        while chunk := self._file.read(8 * PART):
            digest_N = np.frombuffer(chunk, dtype=np.uint64)
            mine = np.flatnonzero(digest_N % np.uint64(parts) == part)
            digests.append(digest_N[mine])
            numbers.append(mine + first)
            first += len(digest_N)
        return np.concatenate(digests), np.concatenate(numbers)

    def duplicates(self) -> Duplicates:
        """Return the repeats among all lines added."""
        found = [repeats_among(*self.part(part, self.parts)) for part in range(self.parts)]
        repeats, firsts = (np.concatenate(one) for one in zip(*found, strict=True))
        order = np.argsort(repeats)
        return Duplicates(repeats[order], firsts[order], lines=self.lines)


def repeats_among(digest_N: Digests, number_N: Numbers) -> tuple[Numbers, Numbers]:
    """Return the numbers of lines that repeat a digest, and of the first lines with it."""
    order_N = np.argsort(digest_N, kind="stable")
    digest_N, number_N = digest_N[order_N], number_N[order_N]
    is_first_N = np.ones(len(digest_N), dtype=np.bool_)
    is_first_N[1:] = digest_N[1:] != digest_N[:-1]
    group_N = np.cumsum(is_first_N) - 1
    repeats = ~is_first_N
    return number_N[repeats], number_N[is_first_N][group_N[repeats]]


# ---------------------------------------------------------------- lines in another language

LANGDETECT_SEED = 1
MIN_PROBABILITY = 0.5
"""Least probability of a fastText answer that counts as certain."""
IMPOSSIBLE = 0.001
"""Below this probability, fastText rules a language out; true Malay has more in nearly all lines
that it takes for Indonesian."""


def line_identifier(config: CleanConfig) -> "LineIdentifier | None":
    """Return the identifier of the settings, if any; ConfigError if its model cannot be read."""
    if config.identify_languages == "no":
        return None
    path = config.language_model
    if path is None:
        return LineIdentifier(lid176())
    if not path.is_file():
        raise ConfigError(
            f"clean.identify_languages names {config.identify_languages!r}, which is not a file. "
            "Name fastText's lid.176.bin, GlotLID's model.bin, langdetect or no."
        )
    return LineIdentifier(FastText(str(path)))


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


# ---------------------------------------------------------------- all rules


Rule = Literal[
    "empty",
    "too_long",
    "control_characters",
    "copy",
    "swapped",
    "length_ratio",
    "wrong_language",
    "duplicate",
    "held_out_overlap",
]
RULES: tuple[Rule, ...] = get_args(Rule)
"""All rules, in the order in which they are tried."""

SIDED_RULES: tuple[Rule, ...] = (
    *("empty", "too_long", "control_characters", "wrong_language"),
    "held_out_overlap",
)
"""Rules that a side breaks; the others are broken by both sides together."""

Sides = tuple[bool, bool]
"""For each side, whether it breaks a rule."""

NO_SIDE: Sides = (False, False)
"""No single side breaks the rule."""

_CONTROL = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029]")
"""Control characters except the tab, and two separators that other tools take for line ends; none
is printable."""

Broken = tuple[Rule, Sides]
"""First rule that a line breaks, and the sides that break it."""


@dataclass
class PairRules:
    """Rules for one pair, which see its lines in order."""

    config: CleanConfig
    letters: tuple[frozenset[str], frozenset[str]]
    """Scripts of each language's letters; empty if unknown."""
    held_out: HeldOutRule
    median_ratio: float
    duplicates: Duplicates | None = None
    language_rule: LanguageRule | None = None
    _lines_before: int = 0

    def __post_init__(self) -> None:
        first, second = self.letters
        self._scripts_differ = bool(first and second and not first & second)

    def broken(self, lines: Sequence[tuple[str, str]]) -> list[Broken | None]:
        """Return the first rule that each line of the next block breaks; None for good lines."""
        found = [self._by_itself(*line, *as_seen(*line)) for line in lines]
        if self.language_rule is not None:
            self._mark_languages(self.language_rule, lines, found)
        for place, (first, second) in enumerate(lines):
            if found[place] is None:
                found[place] = self._among_others(self._lines_before + place, first, second)
        self._lines_before += len(lines)
        return found

    def _by_itself(self, first: str, second: str, one: str, other: str) -> Broken | None:
        """Return the first rule that a line breaks by itself; ``one`` and ``other`` are visible."""
        config = self.config
        if not one or not other:
            return "empty", (not one, not other)
        limit = config.max_characters
        if len(first) > limit or len(second) > limit:
            return "too_long", (len(first) > limit, len(second) > limit)
        if config.max_bytes is not None:
            sides = _exceeds(first, config.max_bytes), _exceeds(second, config.max_bytes)
            if any(sides):
                return "too_long", sides
        if not (first.isprintable() and second.isprintable()):
            sides = _CONTROL.search(first) is not None, _CONTROL.search(second) is not None
            if any(sides):
                return "control_characters", sides
        if one == other:
            return "copy", NO_SIDE
        if self._scripts_differ and self._is_swapped(first, second):
            return "swapped", NO_SIDE
        ratio = len(first) / len(second) / self.median_ratio
        if ratio > config.max_length_ratio or 1 / ratio > config.max_length_ratio:
            return "length_ratio", NO_SIDE
        return None

    def _is_swapped(self, first: str, second: str) -> bool:
        """Return whether each side has letters of the other's script and none of its own."""
        ours, theirs = self.letters
        return (
            not has_letter_of(first, ours)
            and has_letter_of(first, theirs)
            and has_letter_of(second, ours)
            and not has_letter_of(second, theirs)
        )

    def _mark_languages(
        self,
        rule: LanguageRule,
        lines: Sequence[tuple[str, str]],
        found: list[Broken | None],
    ) -> None:
        """Mark the lines that are good so far but in another language."""
        places = [place for place, broken in enumerate(found) if broken is None]
        wrong = rule.wrong_sides([lines[place] for place in places])
        for place, sides in zip(places, wrong, strict=True):
            if any(sides):
                found[place] = "wrong_language", sides

    def _among_others(self, number: int, first: str, second: str) -> Broken | None:
        if self.duplicates is not None and self.duplicates.is_repeated(number):
            return "duplicate", NO_SIDE
        sides = self.held_out.broken_sides(first, second)
        return sides and ("held_out_overlap", sides)


def _exceeds(text: str, max_bytes: int) -> bool:
    """Return whether a text has more UTF-8 bytes than ``max_bytes``."""
    return len(text) * 4 > max_bytes and len(text.encode()) > max_bytes


def as_seen(first: str, second: str) -> tuple[str, str]:
    """Return the visible text of the two sides of a line."""
    return visible(first).strip(), visible(second).strip()
