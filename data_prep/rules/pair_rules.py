"""Apply all rules in their order to the training lines of one pair.

Rules for a single line come first; then the language, for a block of lines; then comparisons with
the kept lines of the pair and with held-out lines.
"""

import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from data_prep.rules.duplicates import Duplicates
from data_prep.rules.held_out import HeldOutRule
from data_prep.rules.line_language import LanguageRule
from data_prep.settings import CleanConfig
from pipeline.artifacts.spelling import visible
from pipeline.languages import has_letter_of

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
