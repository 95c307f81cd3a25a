"""What every reader gives: raw lines, each with its place, in sections of one split of one pair."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, get_args

from pipeline.artifacts.corpus import Split, pair_name

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
