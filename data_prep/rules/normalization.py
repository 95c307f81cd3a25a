"""What two lines must share to count as one: keys without what does not tell lines apart."""

import hashlib
import re
import unicodedata
from functools import cache

_INVISIBLE = (
    "\u00ad"  # soft hyphen
    "\u034f\u061c\u180b-\u180f"  # joiners, marks and selectors of single scripts
    "\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff"  # zero width, directions, byte order mark
    "\ufe00-\ufe0f\U000e0000-\U000e0fff"  # variation selectors, tags
)
_HIDDEN = re.compile(f"[{_INVISIBLE}]")
_POINT_RANGES = (
    "\u0591-\u05c7"  # Hebrew
    "\u0610-\u061a\u064b-\u065f\u0670\u06d6-\u06ed\u08d3-\u08ff"  # Arabic
    "\u0711\u0730-\u074a"  # Syriac
)
_POINTS = re.compile(f"[{_POINT_RANGES}]+")
"""Vowels and reading marks that the same text has or lacks; other scripts' vowels are spelling."""


_ASCII = bytes(range(128)).decode("ascii")
_LOWER = bytes(range(256)).lower()
_DROPPED = "".join(one for one in _ASCII if not one.isalnum()).encode("ascii")
"""Of ASCII, what a key does not have."""

_HEAD = 20
"""Characters that the head of a line has at least."""

_MARKS = ("Mn", "Mc")
"""Categories of marks that take no place, and that take one."""


def visible(line: str) -> str:
    """A line without the characters that are not seen: zero width, direction marks, selectors.

    Persian and Indic text needs some of them, so this is for comparing lines alone.
    """
    if line.isascii() or _HIDDEN.search(line) is None:
        return line
    return _HIDDEN.sub("", line)


def fold(line: str) -> str:
    """Letters, their vowel signs and digits of a line, without case.

    Compatibility forms (full-width digits, decomposed accents) are made equal first. Marks stay,
    since they are the vowels of Indic scripts and of Thai; the points of Hebrew, Arabic and Syriac,
    which most text leaves out, do not.
    """
    if line.isascii():
        return line.encode("ascii").translate(_LOWER, _DROPPED).decode("ascii")
    folded = unicodedata.normalize("NFKC", line).casefold()
    if _needs_care().search(folded) is None:
        return "".join(filter(str.isalnum, folded))
    folded = unicodedata.normalize("NFKC", visible(line)).casefold()
    return _POINTS.sub("", folded).translate(_KEPT)


def head(line: str) -> str:
    """The first words of a line: its key begins with theirs.

    A space ends them, since nothing composes with it; all of a line that has none to cut at.
    """
    if line.isascii():
        return line
    end = line.find(" ", _HEAD)
    return line if end < 0 else line[:end]


def digest_of(text: str) -> bytes:
    """Eight bytes that stand for a text."""
    return hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest()


@cache
def _needs_care() -> re.Pattern[str]:
    """Matches what composes with its neighbours, marks and jamo, points, and all beyond the first
    plane."""
    marks = (chr(point) for point in range(0x300, 0x10000))
    found = "".join(mark for mark in marks if unicodedata.category(mark) in _MARKS)
    return re.compile(f"[{found}{_POINT_RANGES}\u1100-\u11ff\U00010000-\U0010ffff]")


class _Kept(dict[int, int | None]):
    """Code point → itself for letters, digits and marks, None for what is dropped."""

    def __missing__(self, point: int) -> int | None:
        character = chr(point)
        kept = character.isalnum() or unicodedata.category(character) in _MARKS
        self[point] = point if kept else None
        return self[point]


_KEPT = _Kept()
