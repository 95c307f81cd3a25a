"""Which script a text is written in, by the names that Unicode gives its letters.

Scripts have the codes of ISO 15924 (``Latn``, ``Cher``). A letter belongs to the script its name
begins with, CHEROKEE LETTER A to Cherokee; CLDR, through Babel, has the codes of these names.
"""

import unicodedata
from collections import Counter
from functools import lru_cache

_LETTERS_OF = {
    "Hans": frozenset({"Hani"}),
    "Hant": frozenset({"Hani"}),
    "Jpan": frozenset({"Hira", "Kana", "Hani"}),
    "Kore": frozenset({"Hang", "Hani"}),
}
"""Scripts of ISO 15924 that are written with the letters of others."""

_UNICODE_NAMES = {
    "BENGALI": "Beng",
    "CANADIAN SYLLABICS": "Cans",
    "CJK": "Hani",
    "CUNEIFORM": "Xsux",
    "DUPLOYAN": "Dupl",
    "EGYPTIAN HIEROGLYPH": "Egyp",
    "FULLWIDTH LATIN": "Latn",
    "HALFWIDTH HANGUL": "Hang",
    "HALFWIDTH KATAKANA": "Kana",
    "HENTAIGANA": "Hira",
    "IDEOGRAPHIC": "Hani",
    "LISU": "Lisu",
    "MANDAIC": "Mand",
    "MEETEI MAYEK": "Mtei",
    "MIAO": "Plrd",
    "NUSHU": "Nshu",
    "OLD TURKIC": "Orkh",
    "ORIYA": "Orya",
    "TAI THAM": "Lana",
    "WARANG CITI": "Wara",
}
"""What Unicode calls scripts that CLDR calls otherwise."""

_LONGEST_NAME = 3
"""Words in the longest name of a script."""


def letters_of(script: str) -> frozenset[str]:
    """The scripts whose letters a script is written with: kana and Han for ``Jpan``."""
    return _LETTERS_OF.get(script, frozenset({script}))


def script_of_text(text: str) -> str | None:
    """The script of most letters of a text; the first in the alphabet of several, None of none."""
    found = count_scripts(text)
    return min(found, key=lambda script: (-found[script], script), default=None)


def count_scripts(text: str) -> Counter[str]:
    """Script → number of its letters in a text."""
    found: Counter[str] = Counter()
    for character, count in Counter(text).items():
        if script := script_of_character(character):
            found[script] += count
    return found


@lru_cache(maxsize=2**16)
def script_of_character(character: str) -> str | None:
    """The script of a letter; None for what is no letter, or one that all scripts share."""
    if not character.isalpha():
        return None
    words = unicodedata.name(character, "").replace("-", " ").split()
    names = (" ".join(words[:length]) for length in range(min(_LONGEST_NAME, len(words)), 0, -1))
    return next((_scripts()[name] for name in names if name in _scripts()), None)


def has_letter_of(text: str, scripts: frozenset[str]) -> bool:
    """Whether a letter of one of the scripts is in a text; quick where the text begins with one."""
    return any(script_of_character(character) in scripts for character in text)


@lru_cache(maxsize=1)
def _scripts() -> dict[str, str]:
    """First words of the names of characters → script."""
    from babel import Locale

    named = {
        name.upper().replace("’", "").replace("-", " "): script
        for script, name in Locale("en").scripts.items()
    }
    return named | _UNICODE_NAMES
