"""S"""

import re
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np

from data_prep.rules.duplicates import Duplicates, NearDuplicates
from data_prep.rules.held_out import HeldOutLines
from data_prep.rules.line_language import LanguageRule
from data_prep.rules.normalization import visible
from pipeline.artifacts.settings import CleanConfig
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
    "near_duplicate",
    "held_out_overlap",
]
RULES: tuple[Rule, ...] = get_args(Rule)
"""In the order they are tried."""

SIDED_RULES: tuple[Rule, ...] = (
    *("empty", "too_long", "control_characters", "wrong_language"),
    "held_out_overlap",
)
"""Those that a side breaks; the others are broken by both together."""

Sides = tuple[bool, bool]
"""Which sides of a line break a rule."""

NO_SIDE: Sides = (False, False)
"""No side by itself: both together break the rule, or none is broken."""


COUNTED = 512
"""Lengths below this are counted; the few lines that are longer are kept one by one."""


class LengthRatios:
    """Characters of the first side per character of the second, over the lines of a pair.

    Lines with an empty side do not count. Memory does not grow but with the long lines: 8 bytes for
    each.
    """

    def __init__(self) -> None:
        self._lines_LL = np.zeros((COUNTED, COUNTED), dtype=np.int64)
        self._long = array("d")

    def add(self, lines: Sequence[tuple[str, str]]) -> None:
        lengths = np.array([(len(one), len(other)) for one, other in lines], dtype=np.int64)
        lengths = lengths.reshape(-1, 2)
        lengths = lengths[lengths.all(axis=1)]
        is_long = lengths.max(axis=1, initial=0) >= COUNTED
        self._long.extend((lengths[is_long, 0] / lengths[is_long, 1]).tolist())
        np.add.at(self._lines_LL, tuple(lengths[~is_long].T), 1)

    def median(self) -> float:
        """Median over the lines; 1 if there are none."""
        one, other = self._lines_LL.nonzero()
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
"""Control characters but the tab, and the two separators other tools take for line ends. None of
them is printable."""

Broken = tuple[Rule, Sides]
"""The first rule that a line breaks, and the sides that do."""


@dataclass(frozen=True)
class PairFacts:
    """What is known of a pair before its training lines are judged."""

    letters: tuple[frozenset[str], frozenset[str]]
    """Scripts of the letters of either language; none where they are not known."""
    held_out: tuple[HeldOutLines, HeldOutLines]
    """Of either language, over all pairs."""
    own_sets: frozenset[int] | None
    """Numbers of the held-out sets whose lines are dropped; None: those of all sets."""

    @property
    def scripts_differ(self) -> bool:
        first, second = self.letters
        return bool(first and second and not first & second)


@dataclass
class Judge:
    """The rules for one pair, which look at its lines in their order."""

    config: CleanConfig
    facts: PairFacts
    median_ratio: float
    duplicates: Duplicates | None = None
    language_rule: LanguageRule | None = None
    near_duplicates: NearDuplicates | None = None
    leaks: Counter[int] = field(default_factory=Counter)
    """Held-out set → lines that break no earlier rule and have a side in it."""
    _judged: int = 0

    def __post_init__(self) -> None:
        self._scripts_differ = self.facts.scripts_differ

    def judge(self, lines: Sequence[tuple[str, str]]) -> list[Broken | None]:
        """Of each line of the next block, the first rule that it breaks; None if it is good."""
        found = [self._by_itself(*line, *as_seen(*line)) for line in lines]
        if self.language_rule is not None:
            self._judge_languages(self.language_rule, lines, found)
        for place, (first, second) in enumerate(lines):
            number = self._judged + place
            if found[place] is None:
                found[place] = self._among_others(number, first, second)
            if self.near_duplicates is not None:
                self.near_duplicates.settle(number, kept=found[place] is None)
        self._judged += len(lines)
        return found

    def _by_itself(self, first: str, second: str, one: str, other: str) -> Broken | None:
        """``one`` and ``other``: what is seen of the two sides."""
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
        if config.drop_control_characters and not (first.isprintable() and second.isprintable()):
            sides = _CONTROL.search(first) is not None, _CONTROL.search(second) is not None
            if any(sides):
                return "control_characters", sides
        if config.drop_copies and one == other:
            return "copy", NO_SIDE
        if config.drop_swapped and self._scripts_differ and self._is_swapped(first, second):
            return "swapped", NO_SIDE
        ratio = len(first) / len(second) / self.median_ratio
        if ratio > config.max_length_ratio or 1 / ratio > config.max_length_ratio:
            return "length_ratio", NO_SIDE
        return None

    def _is_swapped(self, first: str, second: str) -> bool:
        """Each side has letters of the other's script and none of its own."""
        ours, theirs = self.facts.letters
        return (
            not has_letter_of(first, ours)
            and has_letter_of(first, theirs)
            and has_letter_of(second, ours)
            and not has_letter_of(second, theirs)
        )

    def _judge_languages(
        self,
        rule: LanguageRule,
        lines: Sequence[tuple[str, str]],
        found: list[Broken | None],
    ) -> None:
        """Fill in the lines that are good so far, but in another language."""
        places = [place for place, broken in enumerate(found) if broken is None]
        wrong = rule.wrong_sides([lines[place] for place in places])
        for place, sides in zip(places, wrong, strict=True):
            if any(sides):
                found[place] = "wrong_language", sides

    def _among_others(self, number: int, first: str, second: str) -> Broken | None:
        config = self.config
        if self.duplicates is not None and self.duplicates.is_repeated(number):
            return "duplicate", NO_SIDE
        near = self.near_duplicates
        if near is not None and near.is_repeated(number, first, second):
            return "near_duplicate", NO_SIDE
        one, other = self.facts.held_out
        sets = [one.find(first), other.find(second)]
        if not any(sets):
            return None
        self.leaks.update({*sets[0], *sets[1]})
        if not config.drop_held_out_overlap:
            return None
        own = self.facts.own_sets
        if own is not None:
            sets = [tuple(number for number in side if number in own) for side in sets]
        return ("held_out_overlap", (bool(sets[0]), bool(sets[1]))) if any(sets) else None


def _exceeds(text: str, max_bytes: int) -> bool:
    """Return whether the text has more UTF-8 bytes than that."""
    return len(text) * 4 > max_bytes and len(text.encode()) > max_bytes


def as_seen(first: str, second: str) -> tuple[str, str]:
    """What is seen of the two sides of a line."""
    return visible(first).strip(), visible(second).strip()
