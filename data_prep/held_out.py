"""Drop training lines that are in held-out sets.

Lines are compared with the held-out lines of their language only, with letters and digits folded,
by digests of 8 bytes. The first characters of the key tell most lines from all held-out lines, so
only the head of a line needs folding.

Every process reads the held-out lines of a language when it first needs them.
"""

import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache

from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.corpus import (
    Split,
    iterate_lines,
    languages,
    line_counts,
    meant_languages,
    text_name,
)
from pipeline.artifacts.spelling import visible

HELD_OUT_SPLITS: tuple[Split, ...] = ("valid", "test")
START = 12
"""Characters of a key that are compared first."""
LANGUAGES_HELD = 128
"""Languages with held-out lines that a process keeps in memory."""


def digest_of(text: str) -> bytes:
    """Return eight bytes that stand for a text."""
    return hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest()


@dataclass
class HeldOutLines:
    """Held-out lines of one language.

    Every set of lines has a number. A line in several sets is found in all of them.
    """

    starts: set[str] = field(default_factory=set)
    sets: dict[bytes, tuple[int, ...]] = field(default_factory=dict)
    """Digest of a key → numbers of the sets with such a line, ascending."""

    def add(self, lines: Iterable[str], number: int) -> None:
        """Add a set of lines; set numbers must ascend."""
        for key in map(fold, lines):
            if key:
                self.starts.add(key[:START])
                digest = digest_of(key)
                known = self.sets.get(digest, ())
                if number not in known[-1:]:
                    self.sets[digest] = (*known, number)

    def find(self, line: str) -> tuple[int, ...]:
        """Return the numbers of the sets that hold a line."""
        if not self.sets:
            return ()
        start = fold(head(line))
        if len(start) >= START and start[:START] not in self.starts:
            return ()
        return self.sets.get(digest_of(fold(line)), ())


@dataclass(frozen=True)
class HeldOutSet:
    """Validation or test lines of a pair."""

    name: str
    """``de-en/test``, or ``flores:de-en/test`` of another corpus."""
    corpus: Artifact
    pair: str
    split: Split
    size: int
    """Number of lines."""
    meant: Mapping[str, set[str]]
    """Language of its corpus → languages of training lines that its lines are compared with."""


@dataclass(frozen=True, eq=False)
class HeldOutSets:
    """All sets of held-out lines, of the corpus itself and of others, by their numbers."""

    sets: tuple[HeldOutSet, ...]


def held_out_sets(corpus: Artifact, tests: Mapping[str, Artifact]) -> HeldOutSets:
    """Return the held-out sets of a corpus, and of others by name, after a check of their files."""
    found = []
    for prefix, one in {"": corpus, **{f"{name}:": test for name, test in tests.items()}}.items():
        meant = meant_languages(one, languages(corpus))
        for split in HELD_OUT_SPLITS:
            one.check(one.names(f"{split}/"))
            found += [
                HeldOutSet(f"{prefix}{pair}/{split}", one, pair, split, size, meant)
                for pair, size in line_counts(one, split).items()
            ]
    return HeldOutSets(tuple(found))


@lru_cache(maxsize=LANGUAGES_HELD)
def held_out_lines(held_out: HeldOutSets, language: str) -> HeldOutLines:
    """Return the held-out lines of a language over all pairs, from files checked before."""
    found = HeldOutLines()
    for number, one in enumerate(held_out.sets):
        for code in (code for code in one.pair.split("-") if language in one.meant[code]):
            name = text_name(one.split, one.pair, code)
            found.add(iterate_lines(one.corpus.unchecked_file(name)), number)
    return found


@dataclass
class HeldOutRule:
    """Rule that drops lines with a held-out side, and counts them in any case."""

    first: HeldOutLines
    second: HeldOutLines
    drops: bool
    leaks: Counter[int] = field(default_factory=Counter)
    """Held-out set → lines with a side in it."""

    def broken_sides(self, first: str, second: str) -> tuple[bool, bool] | None:
        """Count a line, and return the sides for which it is dropped; None if it is kept."""
        sets = self.first.find(first), self.second.find(second)
        self.leaks.update({*sets[0], *sets[1]})
        return (bool(sets[0]), bool(sets[1])) if self.drops and any(sets) else None


# ---------------------------------------------------------------- normalization


_POINT_RANGES = (
    "\u0591-\u05c7"  # Hebrew
    "\u0610-\u061a\u064b-\u065f\u0670\u06d6-\u06ed\u08d3-\u08ff"  # Arabic
    "\u0711\u0730-\u074a"  # Syriac
)
_POINTS = re.compile(f"[{_POINT_RANGES}]+")
"""Optional vowels and reading marks; in other scripts vowels are part of the spelling."""


_ASCII = bytes(range(128)).decode("ascii")
_LOWER = bytes(range(256)).lower()
_DROPPED = "".join(one for one in _ASCII if not one.isalnum()).encode("ascii")
"""ASCII characters that a key leaves out."""

_HEAD = 20
"""Fewest characters of the head of a line."""

_MARKS = ("Mn", "Mc")
"""Unicode categories of marks that take no space, and that take some."""


def fold(line: str) -> str:
    """Return the letters, vowel signs and digits of a line, without case.

    Compatibility forms (full-width digits, decomposed accents) become equal. Marks stay, because
    they are vowels in Indic scripts and Thai; the points of Hebrew, Arabic and Syriac go, because
    most text omits them.
    """
    if line.isascii():
        return line.encode("ascii").translate(_LOWER, _DROPPED).decode("ascii")
    folded = unicodedata.normalize("NFKC", line).casefold()
    if _needs_care().search(folded) is None:
        return "".join(filter(str.isalnum, folded))
    folded = unicodedata.normalize("NFKC", visible(line)).casefold()
    return _POINTS.sub("", folded).translate(_KEPT)


def head(line: str) -> str:
    """Return the first words of a line; their key begins the line's key.

    The head ends at a space, since nothing composes with a space; without one it is the whole line.
    """
    if line.isascii():
        return line
    end = line.find(" ", _HEAD)
    return line if end < 0 else line[:end]


@cache
def _needs_care() -> re.Pattern[str]:
    """Match composing marks and jamo, points, and all characters beyond the first plane."""
    marks = (chr(point) for point in range(0x300, 0x10000))
    found = "".join(mark for mark in marks if unicodedata.category(mark) in _MARKS)
    return re.compile(f"[{found}{_POINT_RANGES}\u1100-\u11ff\U00010000-\U0010ffff]")


class _Kept(dict[int, int | None]):
    """Code point → itself for letters, digits and marks, None for dropped characters."""

    def __missing__(self, point: int) -> int | None:
        character = chr(point)
        kept = character.isalnum() or unicodedata.category(character) in _MARKS
        self[point] = point if kept else None
        return self[point]


_KEPT = _Kept()
