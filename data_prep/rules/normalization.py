"""Normalize lines for comparison: remove what does not tell two lines apart."""

import hashlib
import re
import unicodedata
from functools import cache

from pipeline.artifacts.spelling import visible

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


def digest_of(text: str) -> bytes:
    """Return eight bytes that stand for a text."""
    return hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest()


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
