"""Common types of all readers: raw lines in sections, and files and pairs by their names.

A reader returns a :class:`RawText`: sections of one split of one pair, each with its raw lines or,
for a file with text in several languages, with its part of the records of this file.

Files say by their names what they hold. A word in the name of a file, or of a folder below the
named one, says the split (``all_talks_train.tsv``); without one, the text is training text. The
pair is a part of the name between dots (``newstest2014.de-en.tsv.gz``), or the name of a folder.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import NamedTuple, get_args

from pipeline.artifacts.corpus import Split, pair_name
from pipeline.artifacts.raw_input import (
    HubDataset,
    RawInput,
    iterate_raw_lines,
    named_files,
    plain_name,
)
from pipeline.errors import ConfigError, DataError
from pipeline.languages import Regions, distinct_codes, find_code, nearest_codes
from pipeline.terminal import counted, listed

CODE = r"[A-Za-z]{2,3}(?:_[A-Za-z]{4})?(?:_(?:[A-Za-z]{2}|[0-9]{3}))?"
"""Pattern of a language code, spelled as in FLORES or in BCP 47 with underscores."""

SPLIT_NAMES: dict[str, Split] = {
    "train": "train",
    "valid": "valid",
    "dev": "valid",
    "validation": "valid",
    "test": "test",
}
"""Name in raw text → split."""

_PAIR = re.compile(rf"({CODE})-({CODE})")


@dataclass(frozen=True)
class NamedPair:
    """Name of a pair and the languages it means."""

    name: str
    spellings: tuple[str, str]
    codes: tuple[str, str]
    """Codes in the order of the name."""


def is_pair_name(name: str) -> bool:
    """Return whether a name names a pair of languages, like ``de-en``."""
    return _PAIR.fullmatch(name) is not None


def name_pairs(names: Iterable[str], *, regions: Regions) -> list[NamedPair]:
    """Return the codes of all names at once, since a spelling's meaning depends on the others."""
    spelled = [(name, spellings_of(name)) for name in names]
    found = {spelling for _, spellings in spelled for spelling in spellings}
    codes = distinct_codes(found, regions=regions)
    return [
        NamedPair(name, spellings, (codes[spellings[0]], codes[spellings[1]]))
        for name, spellings in spelled
    ]


def select_pairs(pairs: Sequence[NamedPair], wanted: Sequence[str]) -> set[NamedPair]:
    """Return the pairs with two wanted languages, as :func:`wanted_codes`."""
    codes = wanted_codes(wanted, [pair.codes for pair in pairs])
    return {pair for pair in pairs if codes.issuperset(pair.codes)}


def wanted_codes(wanted: Sequence[str], pairs: Collection[Sequence[str]]) -> set[str]:
    """Return the codes of wanted languages, in any spelling; of all languages if none is named.

    Raises:
        ConfigError: A wanted language is in no pair of wanted languages. Names the nearest codes.
    """
    present = {code for pair in pairs for code in pair}
    if not wanted:
        return present
    codes = {find_code(spelling, present) or spelling for spelling in wanted}
    missing = sorted(codes - {code for pair in pairs if codes.issuperset(pair) for code in pair})
    if not missing:
        return codes
    near = sorted({code for name in {*missing} - present for code in nearest_codes(name, present)})
    hint = f" (nearest codes that are there: {', '.join(near)})" if near else ""
    raise ConfigError(
        f"corpus.languages asks for {', '.join(missing)}, which no pair of the languages asked "
        f"for has. Correct corpus.languages{hint}, or add the other language of a pair."
    )


def spellings_of(name: str) -> tuple[str, str]:
    """Return both languages of a pair's name, in its spelling."""
    match = _PAIR.fullmatch(name)
    assert match is not None
    return match[1], match[2]


SPLITS: tuple[Split, ...] = get_args(Split)


class RawLine(NamedTuple):
    """One line of every side, as found."""

    number: int
    """Line number in its sources, from 1."""
    texts: tuple[bytes, ...]
    """Bytes per side without the line end; UTF-8 unless damaged."""
    is_malformed: bool = False
    """Whether the file has a record there that has no recognizable sides."""


class LineSource(NamedTuple):
    """Origin of the lines of one side."""

    name: str
    """Name for the quarantine, which does not depend on where the raw text lies."""
    place: str
    """Path for messages."""


class Record(NamedTuple):
    """Entry of a file with text in several languages."""

    line: int
    """Line in the file, from 1, at which it begins; row of a table."""
    texts: Mapping[str, bytes]
    """Spelling of a language → text; missing and blank texts are left out."""
    is_malformed: bool = False


@dataclass(frozen=True, eq=False)
class RecordFile:
    """File with text in several languages, which is read once for all sections made of it."""

    records: Callable[[], Iterable[Record]]
    """Function that reads the file from its beginning."""
    is_surveyed: bool
    """Whether records without a pair were counted before; otherwise each pair counts its own."""


@dataclass(frozen=True)
class LinesOfPair:
    """Records of a file that have text in both of two languages."""

    file: RecordFile
    spellings: tuple[tuple[str, ...], tuple[str, ...]]
    """Spellings of each language in the file, by preference."""


@dataclass(frozen=True)
class Section:
    """Lines of one split of one pair from one place; it may have none."""

    split: Split
    languages: tuple[str, str]
    """Languages in the order of the pair's name."""
    spellings: tuple[str, str]
    """Spellings of the languages in the raw text."""
    sources: tuple[LineSource, LineSource]
    lines: Iterable[RawLine] | LinesOfPair
    """Lines, which can be iterated once; the file is opened for the first."""
    to_the_end: bool = True
    """Whether to read and count the lines beyond the number wanted, which compares files to their
    ends. False if reading costs too much for that."""

    @property
    def pair(self) -> str:
        """Return the name of the pair."""
        return pair_name(*self.languages)


FILES_IGNORED, FOLDERS_IGNORED, ONE_SIDED = "files_ignored", "folders_ignored", "records_one_sided"
FOLDERS_REPEATED = "folders_repeated"


class SkippedText(Counter[str]):
    """Counts of text that was not read, by statistic, and the names of ignored items."""

    def __init__(self, counts: Mapping[str, int] = MappingProxyType({}), /, **more: int) -> None:
        super().__init__(counts, **more)
        self.names: dict[str, list[str]] = {}

    def ignore(self, what: str, names: Iterable[str]) -> None:
        """Count items of another form, and keep their names."""
        found = list(names)
        if found:
            self[what] += len(found)
            self.names.setdefault(what, []).extend(found)


@dataclass(frozen=True)
class RawText:
    """All sections of a reader; text of one split and pair follows in their order."""

    sections: list[Section]
    left_out: SkippedText = field(default_factory=SkippedText)
    """Counts of text that was not read, complete when all sections are read."""
    is_found: bool = True
    """False for text made here, which has no bad lines and no swapped sides."""
    files: Sequence[RecordFile] = ()
    """Files with text in several languages, in the order in which a pair takes lines of them."""


# ---------------------------------------------------------------- files

PACKED = r"(?:\.gz|\.zst)?"
"""Pattern of the endings of packed files."""


def source_of(path: Path, root: Path) -> LineSource:
    """Return a file below a folder as a source."""
    return LineSource(name=path.relative_to(root).as_posix(), place=str(path))


@dataclass(frozen=True)
class FilesInStep:
    """Lines of several files side by side.

    Nothing is opened before iteration: another process can iterate.

    Raises:
        DataError: On iteration, if one file has more lines than another.
    """

    paths: tuple[Path, ...]
    max_line_bytes: int

    def __iter__(self) -> Iterator[RawLine]:
        sides = [iterate_raw_lines(path, max_line_bytes=self.max_line_bytes) for path in self.paths]
        for number, raws in enumerate(zip_longest(*sides), start=1):
            if None in raws:
                short = raws.index(None)
                long = next(side for side, raw in enumerate(raws) if raw is not None)
                found = {short: number - 1, long: number + sum(1 for _ in sides[long])}
                first, second = sorted(found)
                raise DataError(
                    f"{self.paths[first]} has {counted(found[first], 'line')} and "
                    f"{self.paths[second]} has {found[second]}. Line n of one must translate "
                    "line n of the other: fetch or align them again."
                )
            yield RawLine(number, raws)


_SPLIT_WORD = re.compile(
    r"(?<![a-z])(?:news)?(train|valid(?:ation)?|dev(?:test)?|test)(?:ing)?(?:set|s)?(?![a-z])",
    re.IGNORECASE,
)
_SPLITS = {**SPLIT_NAMES, "devtest": SPLIT_NAMES["test"]}


@dataclass(frozen=True)
class RawFile:
    """File below a raw folder, or named itself."""

    path: Path
    name: str
    """Name that does not depend on where the raw folder lies; with several raw folders it begins
    with the folder's number."""

    @property
    def ending(self) -> str:
        """Return the lower-case ending that says the form of the file: ``tmx``."""
        return PurePosixPath(plain_name(self.name)).suffix.lower().removeprefix(".")

    def split(self) -> Split:
        """Return the split that its name says; ``train`` if it says none.

        Raises:
            DataError: Its name says several.
        """
        found = {_SPLITS[word.lower()] for word in _SPLIT_WORD.findall(self.name)}
        if len(found) > 1:
            raise DataError(
                f"{self.path} is named as {' and '.join(sorted(found))} text. Rename it with "
                "a single split."
            )
        return found.pop() if found else "train"

    def pair(self) -> tuple[str, str] | None:
        """Return the pair that its name says, in its spelling and order; None if it says none.

        Raises:
            DataError: Its name says several.
        """
        *folders, name = PurePosixPath(plain_name(self.name)).parts
        found = list(filter(is_pair_name, name.split("."))) or list(filter(is_pair_name, folders))
        if len({entry.lower() for entry in found}) > 1:
            raise DataError(
                f"{self.path} is named as text of {' and '.join(found)}. Rename it with a "
                "single pair."
            )
        return spellings_of(found[0]) if found else None

    def source(self, side: str = "") -> LineSource:
        """Return the source of its lines, or of a side."""
        return LineSource(name=self.name, place=f"{self.path} ({side})" if side else str(self.path))


def find_files(
    raw: RawInput | None, *, source: str, endings: Sequence[str]
) -> tuple[list[RawFile], SkippedText]:
    """Return the files with these endings, by name, and count the others as ignored.

    Hidden files and folders are neither read nor counted.

    Raises:
        ConfigError: No paths are given.
        DataError: A path does not exist, or there is no such file.
    """
    found = list_files(raw, source=source)
    chosen = [file for file in found if file.ending in endings]
    if not chosen:
        places = listed(raw.values) if raw else ""
        names = ", ".join(f".{ending}" for ending in endings)
        what = f"file that ends in {names} (plain, .gz or .zst), which {source!r} reads"
        raise holds_no(places, what, "another folder or corpus.source")
    left_out = SkippedText()
    left_out.ignore(FILES_IGNORED, [file.name for file in found if file.ending not in endings])
    return chosen, left_out


def list_files(raw: RawInput | None, *, source: str) -> list[RawFile]:
    """Return all files that are not hidden, by name.

    Raises:
        ConfigError: No paths are given.
        DataError: A path does not exist.
    """
    paths = raw_paths(raw, source=source)
    return [RawFile(path, name) for name, path in named_files(paths)]


def raw_paths(raw: RawInput | None, *, source: str) -> tuple[Path, ...]:
    """Return the paths of a raw input.

    Raises:
        ConfigError: No paths are given.
    """
    if raw is None:
        raise unfit_source(source, "no raw text was given. Pass --raw DIR")
    if isinstance(raw, HubDataset):
        problem = f"{raw} is a data set of the hub. Set it to 'hub', or pass --raw DIR"
        raise unfit_source(source, problem)
    return raw.paths


# ---------------------------------------------------------------- refusals


def same_text(first: object, second: object, what: str, fix: str = "Remove one") -> DataError:
    """Return the refusal of two files, or parts of a data set, that are one text."""
    return DataError(f"{first} and {second} are both {what}. {fix}.")


def no_counterpart(path: Path, language: str, missing: str) -> DataError:
    """Return the refusal of one side of a pair without the other."""
    return DataError(f"{path} has no counterpart in {language}. Add {missing} or remove the file.")


def one_language(place: object, fix: str = "Rename or remove it") -> DataError:
    """Return the refusal of a pair of a language with itself."""
    return DataError(f"{place} pairs a language with itself. {fix}.")


def holds_no(place: object, what: str, advice: str) -> DataError:
    """Return the refusal of a folder without text of a form."""
    return DataError(f"{place} holds no {what}. Name {advice}.")


def no_folder(path: Path, advice: str) -> DataError:
    """Return the refusal of a path that is no folder."""
    return DataError(f"{path} is not a folder. Name {advice}.")


def unfit_source(source: str, problem: str) -> ConfigError:
    """Return the refusal of raw input, or of settings, that a source does not go with."""
    return ConfigError(f"corpus.source is {source!r}, but {problem}.")
