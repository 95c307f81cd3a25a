"""S"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, get_args

from pipeline.artifacts.corpus import Split, pair_name
from pipeline.errors import ConfigError
from pipeline.languages import Regions, distinct_codes, find_code, nearest_codes

CODE = r"[A-Za-z]{2,3}(?:_[A-Za-z]{4})?(?:_(?:[A-Za-z]{2}|[0-9]{3}))?"
"""A language code, in the spelling of FLORES or of BCP 47 with underscores."""

SPLIT_NAMES: dict[str, Split] = {
    "train": "train",
    "valid": "valid",
    "dev": "valid",
    "validation": "valid",
    "test": "test",
}

_PAIR = re.compile(rf"({CODE})-({CODE})")


@dataclass(frozen=True)
class NamedPair:
    """A name and the languages it means."""

    name: str
    spellings: tuple[str, str]
    codes: tuple[str, str]
    """In the order of the name."""


def is_pair_name(name: str) -> bool:
    return _PAIR.fullmatch(name) is not None


def name_pairs(names: Iterable[str], *, regions: Regions) -> list[NamedPair]:
    """The codes of all names at once: what a spelling means depends on the others."""
    spelled = [(name, spellings_of(name)) for name in names]
    found = {spelling for _, spellings in spelled for spelling in spellings}
    codes = distinct_codes(found, regions=regions)
    return [
        NamedPair(name, spellings, (codes[spellings[0]], codes[spellings[1]]))
        for name, spellings in spelled
    ]


def select_pairs(pairs: Sequence[NamedPair], wanted: Sequence[str]) -> set[NamedPair]:
    """Those both languages of which are wanted; all where nothing is.

    Raises:
        ConfigError: a wanted language is in no pair of wanted languages.
    """
    if not wanted:
        return set(pairs)
    present = {code for pair in pairs for code in pair.codes}
    codes = {find_code(spelling, present) or spelling for spelling in wanted}
    selected = {pair for pair in pairs if codes.issuperset(pair.codes)}
    require_languages(codes, (pair.codes for pair in selected), present=present)
    return selected


def require_languages(
    wanted: Iterable[str], pairs: Iterable[Sequence[str]], *, present: Iterable[str]
) -> None:
    """Raises ConfigError unless each wanted language is in one of the pairs."""
    missing = sorted(set(wanted) - {code for pair in pairs for code in pair})
    if not missing:
        return
    there = set(present)
    near = sorted(
        {code for name in missing if name not in there for code in nearest_codes(name, there)}
    )
    hint = f" (nearest codes that are there: {', '.join(near)})" if near else ""
    raise ConfigError(
        f"corpus.languages asks for {', '.join(missing)}, which no pair of the languages asked "
        f"for has: correct corpus.languages{hint}, or add the other language of a pair."
    )


def spellings_of(name: str) -> tuple[str, str]:
    """Both languages of a name of a pair, as it spells them."""
    match = _PAIR.fullmatch(name)
    assert match is not None
    return match[1], match[2]


SPLITS: tuple[Split, ...] = get_args(Split)


class RawLine(NamedTuple):
    """One line of every side, as it was found."""

    number: int
    """In its sources, from 1."""
    texts: tuple[bytes, ...]
    """One per side, without the line end; UTF-8 if all is well."""
    is_malformed: bool = False
    """Whether its file says that something is there, but not what each side is."""


class Source(NamedTuple):
    """Where the lines of one side come from."""

    name: str
    """For the quarantine: the same wherever the raw text lies."""
    place: str
    """For messages: where its owner finds it."""


@dataclass(frozen=True)
class Section:
    """The lines of one split of one pair from one place.

    What all its lines share is said here once, and a file without lines is a section too.
    """

    split: Split
    languages: tuple[str, str]
    """In the order of the pair's name."""
    spellings: tuple[str, str]
    """How the languages are spelled there."""
    sources: tuple[Source, Source]
    lines: Iterable[RawLine]
    """Opened when the first is asked for, and read once."""
    to_the_end: bool = True
    """Whether lines beyond the number wanted are read over and counted: so files are compared to
    their ends. False where reading costs more than what that tells."""

    @property
    def pair(self) -> str:
        return pair_name(*self.languages)


FILES_IGNORED, FOLDERS_IGNORED = "files_ignored", "folders_ignored"


class LeftOut(Counter[str]):
    """How much was not read, as statistics call it, and the names of what was ignored."""

    def __init__(self, **counts: int) -> None:
        super().__init__(**counts)
        self.names: dict[str, list[str]] = {}

    def ignore(self, what: str, names: Iterable[str]) -> None:
        """Count what is not of the form that is read, and keep its names."""
        found = list(names)
        if found:
            self[what] += len(found)
            self.names.setdefault(what, []).extend(found)


@dataclass(frozen=True)
class RawText:
    """All that a reader has to give; sections of one split and pair follow in their order."""

    sections: list[Section]
    left_out: LeftOut = field(default_factory=LeftOut)
    """What was not read, as statistics call it; complete once all sections are read."""
    is_found: bool = True
    """False for text that is made here: no line of it is bad, and no side is another language."""
