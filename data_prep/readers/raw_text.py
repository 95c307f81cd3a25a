"""Common types of all readers: raw lines in sections, and files and pairs by their names.

A reader returns a :class:`RawText`: sections of one split of one pair, each with its raw lines or,
for a file with text in several languages, with its part of the records of this file.

Files say by their names what they hold. A word in the name of a file, or of a folder below the
named one, says the split (``all_talks_train.tsv``), else a named folder's whole name if several
are named (``--raw train dev``); otherwise the text is training text. The pair is a part of the name
between dots (``newstest2014.de-en.tsv.gz``), or the name of a folder.

Records of translation memories and tables hold any number of languages, and a file is read once for
all of its pairs. A language with several spellings in a file (``pt``, ``pt-br``) is one language,
and a record gives the text asked for, else the first in the order of the spellings, unless
``corpus.regions`` keeps them apart.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import combinations, zip_longest
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import NamedTuple, get_args

from data_prep.settings import CorpusConfig
from pipeline.artifacts.corpus import Split, pair_name
from pipeline.artifacts.raw_input import (
    RawInput,
    iterate_raw_lines,
    named_files,
    plain_name,
)
from pipeline.config.settings import shown
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

OR_APART = "or set corpus.regions to 'apart' if they are two regions"
"""Advice where two spellings count as one language, as ``pt_BR`` and ``pt_PT``."""

_PAIR = re.compile(rf"({CODE})-({CODE})")
PAIR_FORM = "two codes of ISO 639, script and region after underscores, as in de-en or en-sr_Latn"
"""Form of a name that names a pair, for messages."""


@dataclass(frozen=True)
class NamedPair:
    """Name of a pair and the languages it means."""

    name: str
    spellings: tuple[str, str]
    codes: tuple[str, str]
    """Codes in the order of the name."""


def is_pair_name(name: str) -> bool:
    """Return whether a name names a pair of languages, for example ``de-en``."""
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
        ConfigError: A wanted language is in no pair of wanted languages.
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
    left_out: Mapping[str, int] = MappingProxyType({})
    """Statistic → texts left out: no tag, or a private tag, says their language (``UNTAGGED``), or
    another in their language comes first (``REPEATED``)."""


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
FOLDERS_REPEATED, COLUMNS_IGNORED = "folders_repeated", "columns_ignored"
UNTAGGED, REPEATED = "segments_untagged", "segments_repeated"


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
    """Lines of several files side by side; DataError if one has more lines than another.

    Nothing is opened before iteration: another process can iterate.
    """

    paths: tuple[Path, ...]

    def __iter__(self) -> Iterator[RawLine]:
        longest = CorpusConfig.max_line_bytes
        sides = [iterate_raw_lines(path, max_line_bytes=longest) for path in self.paths]
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
    r"(?<![a-z])(?:news(?:discuss)?|wmt|general)?(train|valid(?:ation)?|dev(?:test)?|test)"
    r"(?:ing)?(?:set|s)?(?![a-z])",
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
    folder: str = ""
    """Name of the named folder, if several are named."""

    @property
    def ending(self) -> str:
        """Return the lower-case ending that says the form of the file: ``tmx``."""
        return PurePosixPath(plain_name(self.name)).suffix.lower().removeprefix(".")

    def split(self) -> Split:
        """Return the split that its name says, else ``train``; DataError if it says several."""
        folder = _SPLIT_WORD.fullmatch(self.folder)
        words = _SPLIT_WORD.findall(self.name) or ([folder[1]] if folder else [])
        found = {_SPLITS[word.lower()] for word in words}
        if len(found) > 1:
            raise self._named_twice(f"{' and '.join(sorted(found))} text", "split")
        return found.pop() if found else "train"

    def pair(self) -> tuple[str, str] | None:
        """Return the pair as its name spells it, if any; DataError if it says several."""
        *folders, name = PurePosixPath(plain_name(self.name)).parts
        found = list(filter(is_pair_name, name.split("."))) or list(filter(is_pair_name, folders))
        if len({entry.lower() for entry in found}) > 1:
            raise self._named_twice(f"text of {' and '.join(found)}", "pair")
        return spellings_of(found[0]) if found else None

    def _named_twice(self, said: str, what: str) -> DataError:
        return DataError(f"{self.path} is named as {said}. Rename it with a single {what}.")

    def source(self, side: str = "") -> LineSource:
        """Return the source of its lines, or of a side."""
        return LineSource(name=self.name, place=f"{self.path} ({side})" if side else str(self.path))


def find_files(
    raw: RawInput | None, *, source: str, endings: Sequence[str]
) -> tuple[list[RawFile], SkippedText]:
    """Return the files with these endings, by name, and count the others as ignored.

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
    """Return all files that are not hidden, by name."""
    paths = raw_paths(raw, source=source)
    if len(paths) == 1:
        return [RawFile(path, name) for name, path in named_files(paths)]
    return [
        RawFile(path, name, folder=paths[int(name.partition("/")[0]) - 1].name)
        for name, path in named_files(paths)
    ]


def raw_paths(raw: RawInput | None, *, source: str) -> tuple[Path, ...]:
    """Return the paths of a raw input; ConfigError if none are given."""
    if raw is None:
        raise unfit_source(source, "no raw text was given. Pass --raw DIR")
    if raw.dataset is not None:
        problem = f"{raw.dataset} is a data set of the hub. Set it to 'hub', or pass --raw DIR"
        raise unfit_source(source, problem)
    return raw.paths


# ---------------------------------------------------------------- files with several languages

_END = "(?![A-Za-z0-9])"
_SPELLING = re.compile(
    rf"([A-Za-z]{{2,3}}){_END}(?:[-_]([A-Za-z]{{4}}){_END})?(?:[-_]([A-Za-z]{{2}}|[0-9]{{3}}){_END})?"
)
_WITHDRAWN_TAGS = {"zh-chs": "zh-Hans", "zh-cht": "zh-Hant", "no-bok": "nb", "no-nyn": "nn"}


@dataclass(frozen=True, eq=False)
class MultiwayFile(RecordFile):
    """File with text in several languages, and which of them share records."""

    file: RawFile
    split: Split
    together: Collection[frozenset[str]]
    """Sets of spellings of languages that share a record, which may be all pairs of them."""

    @property
    def spellings(self) -> set[str]:
        """Return all spellings of languages in the file."""
        return {spelling for spellings in self.together for spelling in spellings}


def is_language(spelling: str) -> bool:
    """Return whether a spelling is a language code, with or without script and region."""
    return _SPELLING.fullmatch(spelling) is not None


@lru_cache(maxsize=1024)
def without_variant(spelling: str) -> str | None:
    """Return a BCP 47 tag up to its region (``de-DE`` of ``de-DE-1996``); None if it is none."""
    match = _SPELLING.match(_WITHDRAWN_TAGS.get(spelling.lower().replace("_", "-"), spelling))
    return match and match[0]


def pair_up(
    files: Sequence[MultiwayFile], config: CorpusConfig, *, left_out: SkippedText
) -> RawText:
    """Return a section per wanted pair of languages of each file, by pair, then by file.

    Raises:
        ConfigError: No pair that was found is wanted.
        DataError: No file has a pair.
    """
    spellings = {spelling for file in files for spelling in file.spellings}
    codes = distinct_codes(spellings, regions=config.regions)
    found = [(pair, file) for file in files for pair in _pairs(file, codes)]
    if not found:
        paths = listed([str(file.file.path) for file in files])
        fix = f", {OR_APART}" * any(len(group) > 1 for file in files for group in file.together)
        raise DataError(f"No record has text in two languages in {paths}. Name other files{fix}.")
    wanted = _wanted_text({(pair, file.split) for pair, file in found}, config)
    sections = [
        _section(file, pair, codes, asked=config.languages)
        for pair, file in sorted(found, key=lambda entry: entry[0])
        if (pair, file.split) in wanted
    ]
    left_out["pairs_not_selected"] += len(
        {pair for pair, _ in found} - {pair for pair, _ in wanted}
    )
    return RawText(sections, left_out=left_out, files=files)


def select_sections(raw: RawText, config: CorpusConfig) -> RawText:
    """Leave out the pairs that are not wanted, unless the reader did so."""
    if "pairs_not_selected" in raw.left_out:  # a reader that selects pairs counts them, even if 0
        return raw
    wanted = _wanted_text({(section.languages, section.split) for section in raw.sections}, config)
    kept = [section for section in raw.sections if (section.languages, section.split) in wanted]
    lost = {section.pair for section in raw.sections} - {section.pair for section in kept}
    raw.left_out["pairs_not_selected"] += len(lost)
    return replace(raw, sections=kept)


def section_of_pair(file: MultiwayFile, pair: NamedPair, config: CorpusConfig) -> Section:
    """Return a file's lines in the two languages of a pair; DataError if no record has both."""
    codes = distinct_codes(file.spellings, regions=config.regions)
    (first, one), (second, other) = sorted(
        (code, find_code(spelling, codes.values()) or spelling)
        for code, spelling in zip(pair.codes, pair.spellings, strict=True)
    )
    if not _pairs(file, codes) & {(one, other), (other, one)}:
        raise DataError(
            f"{file.file.path} has no record with text in both languages of {pair.name}. Correct "
            "the pair, or take the file out."
        )
    section = _section(file, (one, other), codes, asked=pair.spellings)
    return replace(section, languages=(first, second))


def preferred(spellings: Collection[str], asked: Iterable[str] = ()) -> list[str]:
    """Sort spellings of one language: those asked for, then those without script and region."""
    meant = {find_code(spelling, spellings) for spelling in asked}
    return sorted(spellings, key=lambda spelling: (spelling not in meant, len(spelling), spelling))


def _pairs(file: MultiwayFile, codes: Mapping[str, str]) -> set[tuple[str, str]]:
    together = {frozenset(codes[spelling] for spelling in group) for group in file.together}
    return {pair for group in together for pair in combinations(sorted(group), 2)}


def _wanted_text(
    found: Collection[tuple[tuple[str, str], Split]], config: CorpusConfig
) -> set[tuple[tuple[str, str], Split]]:
    """Return the pairs and splits that ``corpus.languages`` and ``corpus.directions`` include."""
    codes = wanted_codes(config.languages, {pair for pair, _ in found})
    selected = {(pair, split) for pair, split in found if codes.issuperset(pair)}
    wanted = {(pair, split) for pair, split in selected if _is_wanted(pair, split, config)}
    if not wanted:
        names = listed(sorted({pair_name(*pair) for pair, _ in selected}))
        raise ConfigError(
            f"No pair that was found ({names}) has the pivot {config.pivot!r}. Set corpus.pivot to "
            "another, or corpus.directions to 'all'."
        )
    return wanted


def _is_wanted(pair: tuple[str, str], split: Split, config: CorpusConfig) -> bool:
    """Return whether ``corpus.directions`` includes a pair."""
    if config.directions == "all" or (config.directions == "zero_shot" and split == "test"):
        return True
    return find_code(config.pivot, pair) is not None


def _section(
    file: MultiwayFile,
    pair: tuple[str, str],
    codes: Mapping[str, str],
    *,
    asked: Iterable[str],
) -> Section:
    first, second = (
        tuple(preferred([name for name in file.spellings if codes[name] == code], asked))
        for code in pair
    )
    return Section(
        split=file.split,
        languages=pair,
        spellings=(first[0], second[0]),
        sources=(file.file.source(first[0]), file.file.source(second[0])),
        lines=LinesOfPair(file, (first, second)),
    )


# ---------------------------------------------------------------- refusals


def misread(reader: str, found: str, wanted: str) -> ConfigError:
    """Return the refusal of what a reader returned in the place of something else."""
    return ConfigError(f"The reader {reader!r} returned {found}. Return {wanted}.")


def checked_text(raw: object, reader: str) -> RawText:
    """Return what a reader returned; ConfigError if it would fail later, far from its code."""
    if not (isinstance(raw, RawText) and isinstance(raw.sections, list)):
        of = f" with sections = {shown(repr(raw.sections))}" if isinstance(raw, RawText) else ""
        raise misread(reader, f"a {type(raw).__name__}{of}", "a RawText of a list of Section")
    if not raw.sections:
        raise misread(reader, "no Section", "one for each pair and split, or raise DataError")
    if not isinstance(raw.left_out, SkippedText):
        found = f"a RawText with left_out = {shown(repr(raw.left_out))}"
        raise misread(reader, found, "a SkippedText")
    if not (isinstance(raw.files, Sequence) and all(map(_can_be_read, raw.files))):
        found = f"a RawText with files = {shown(repr(raw.files))}"
        raise misread(reader, found, f"a list of {_FILE}")
    for section in raw.sections:
        if not isinstance(section, Section):
            raise misread(reader, f"a {type(section).__name__} among its sections", "a Section")
        codes, spellings = section.languages, section.spellings
        for name, fits, wanted in (
            ("split", section.split in SPLITS, " or ".join(SPLITS)),
            (
                "languages",
                _are_two(codes, str) and len({*codes}) == 2 and is_pair_name("-".join(codes)),
                "two different codes, as ('de', 'sr_Latn')",
            ),
            (
                "spellings",
                _are_two(spellings, str) and all(map(is_language, spellings)),
                "two codes, as ('de', 'sr-Latn')",
            ),
            ("sources", _are_two(section.sources, LineSource), "two LineSource"),
            (
                "lines",
                _are_lines(section.lines),
                "an iterable of RawLine, or LinesOfPair with spellings (('de',), ('en',)) and a "
                f"{_FILE}",
            ),
        ):
            if not fits:
                found = f"a Section with {name} = {shown(repr(getattr(section, name)))}"
                raise misread(reader, found, wanted)
    return raw


_FILE = "RecordFile with a function as records"


def _can_be_read(file: object) -> bool:
    return isinstance(file, RecordFile) and callable(file.records)


def _are_lines(lines: object) -> bool:
    if isinstance(lines, LinesOfPair):
        return _can_be_read(lines.file) and _are_two(lines.spellings, tuple)
    return isinstance(lines, Iterable)


def _are_two(values: Sequence[object], kind: type) -> bool:
    fits = isinstance(values, tuple) and len(values) == 2
    return fits and all(isinstance(value, kind) for value in values)


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
