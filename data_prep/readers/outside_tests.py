"""Find the files of external test sets, and which of them translate each other.

Layouts, plain or ``.gz``, in the folder itself or up to two folders below it:

- FLORES-200: ``dev/eng_Latn.dev`` and ``devtest/eng_Latn.devtest``, one file per language;
- NTREX-128: ``newstest2019-src.eng.txt`` and ``newstest2019-ref.deu.txt``, one file per language;
- pairs: ``NAME.de-en.de`` and ``NAME.de-en.en``.

``dev`` is the validation split, ``devtest`` and NTREX the test split. Pairs are test lines unless
their name contains ``dev`` (not ``devtest``) or ``valid``.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Literal

from data_prep.settings import OutsideTestsConfig
from pipeline.artifacts.corpus import Split, pair_name
from pipeline.errors import ConfigError, DataError
from pipeline.languages import distinct_codes, find_code, nearest_codes
from pipeline.terminal import listed

LAYOUTS = (
    "dev/eng_Latn.dev and devtest/eng_Latn.devtest as in FLORES-200, newstest2019-src.eng.txt and "
    "newstest2019-ref.deu.txt as in NTREX-128, or pairs NAME.de-en.de and NAME.de-en.en"
)
DEPTH = 2
"""Levels of folders below the named one that are searched."""

Layout = Literal["FLORES-200", "NTREX-128", "pairs"]

_CODE = r"[A-Za-z]{2,3}(?:[_-][A-Za-z]{4})?(?:[_-](?:[A-Za-z]{2}|[0-9]{3}))?"
_PAIR_CODE = _CODE.replace("[_-]", "_")
_FLORES = re.compile(rf"(?P<code>{_CODE})\.(?P<split>dev|devtest)(?:\.gz)?")
_NTREX = re.compile(rf"(?P<name>.+)-(?P<role>src|ref)\.(?P<code>{_CODE})\.txt(?:\.gz)?")
_PAIR = re.compile(
    rf"(?P<name>.+)\.(?P<first>{_PAIR_CODE})-(?P<second>{_PAIR_CODE})\.(?P<code>{_PAIR_CODE})"
    r"(?:\.gz)?"
)
_VALID_NAME = re.compile("dev(?!test)|valid", re.IGNORECASE)


@dataclass(frozen=True)
class TextFile:
    """File of a test set, as its name describes it."""

    path: Path
    layout: Layout
    split: Split
    spelling: str
    """Spelling of its language."""
    set_name: str = ""
    """Common beginning of the names of a set's files, if they have one."""
    pair: tuple[str, str] | None = None
    """Spellings of the pair that it is one side of."""
    is_source: bool = False
    """Whether the other files were translated from it."""

    @property
    def languages(self) -> tuple[str, ...]:
        """Return the spellings of all languages that the file needs to be of use."""
        return self.pair or (self.spelling,)


@dataclass(frozen=True)
class AlignedFiles:
    """Files in which line n of each translates line n of all others."""

    split: Split
    paths: dict[str, Path]
    """Language → file, sorted by language."""
    pairs: tuple[tuple[str, str], ...]
    """Pairs to make of the languages, sorted inside and out."""


@dataclass(frozen=True)
class OutsideTests:
    """Files of a folder that are read, and numbers of those that are not."""

    layout: Layout
    aligned: tuple[AlignedFiles, ...]
    spellings: dict[str, str]
    """Language → spelling in the files that are read."""
    other_versions: tuple[str, ...]
    """Names of files that are not read because another one of the same language is."""
    not_wanted: int
    """Files of languages that were not asked for."""
    ignored: int
    """Files whose names belong to no layout."""


def find_tests(root: Path, config: OutsideTestsConfig, *, pivot: str) -> OutsideTests:
    """Find the test sets in a folder by the names of its files.

    Raises:
        ConfigError: A wanted language or pivot is missing, or no pair is left.
        DataError: There is no layout or more than one, a side of a pair is missing, or two files
            are the same text.
    """
    if not root.is_dir():
        raise DataError(f"{root} is not a folder. Name one with {LAYOUTS}.")
    paths = list(_files(root, depth=DEPTH))
    found = [file for path in paths if (file := describe_file(path))]
    layout = _one_layout(root, found)
    selected = select_files(found, config.languages)
    codes = _codes(selected)
    read, aligned = (
        _align_pairs(selected, codes)
        if layout == "pairs"
        else _align_languages(selected, codes, config, pivot)
    )
    if not any(files.pairs for files in aligned):
        raise ConfigError(
            f"{root} has no pair of the languages that were asked for "
            f"({listed(config.languages) or 'all'}). Add the other language of a pair."
        )
    versions = sorted(file.path.name for file in selected if file not in read)
    return OutsideTests(
        layout=layout,
        aligned=tuple(aligned),
        spellings={codes[file.spelling]: file.spelling for file in read},
        other_versions=tuple(versions),
        not_wanted=len(found) - len(selected),
        ignored=len(paths) - len(found),
    )


def describe_file(path: Path) -> TextFile | None:
    """Describe a file by its name; None if it belongs to no test set."""
    if match := _FLORES.fullmatch(path.name):
        split: Split = "valid" if match["split"] == "dev" else "test"
        return TextFile(path, "FLORES-200", split, match["code"])
    if match := _NTREX.fullmatch(path.name):
        is_source = match["role"] == "src"
        return TextFile(
            path, "NTREX-128", "test", match["code"], set_name=match["name"], is_source=is_source
        )
    match = _PAIR.fullmatch(path.name)
    if match is None or match["code"].lower() not in (
        match["first"].lower(),
        match["second"].lower(),
    ):
        return None
    split = "valid" if _VALID_NAME.search(match["name"]) else "test"
    pair = (match["first"], match["second"])
    return TextFile(path, "pairs", split, match["code"], set_name=match["name"], pair=pair)


def select_files(files: Sequence[TextFile], wanted: Sequence[str]) -> list[TextFile]:
    """Return the files of the wanted languages, in any usual spelling; all if none is named.

    Raises:
        ConfigError: A wanted language has no file.
    """
    if not wanted:
        return list(files)
    codes = _codes(files)
    present = sorted(set(codes.values()))
    chosen = {spelling: find_code(spelling, present) for spelling in wanted}
    missing = [spelling for spelling, code in chosen.items() if code is None]
    if missing:
        near = sorted({code for spelling in missing for code in nearest_codes(spelling, present)})
        raise ConfigError(
            f"tests.languages asks for {', '.join(missing)}, but no file is in it. Correct it "
            f"(nearest codes that are there: {', '.join(near) or 'none'})."
        )
    return [
        file for file in files if {codes[one] for one in file.languages} <= set(chosen.values())
    ]


def _codes(files: Sequence[TextFile]) -> dict[str, str]:
    """Return spelling → code; scripts count if one language has files in several."""
    return distinct_codes({spelling for file in files for spelling in file.languages})


def _files(directory: Path, *, depth: int) -> Iterator[Path]:
    """Yield the files of a folder and of those below it by name, without hidden ones."""
    for entry in sorted(directory.iterdir()):
        if entry.name.startswith("."):
            continue
        if entry.is_file():
            yield entry
        elif entry.is_dir() and depth:
            yield from _files(entry, depth=depth - 1)


def _one_layout(root: Path, files: Sequence[TextFile]) -> Layout:
    examples = {file.layout: file.path for file in reversed(files)}
    match list(examples):
        case []:
            raise DataError(
                f"{root} holds no test sets. Name a folder with {LAYOUTS}; for folders like en-de "
                "with test.en and test.de, use import_corpus."
            )
        case [layout]:
            return layout
    named = " and ".join(f"{layout} ({path})" for layout, path in examples.items())
    raise DataError(f"{root} holds several test sets, {named}. Import each from its own folder.")


def _align_languages(
    files: Sequence[TextFile], codes: dict[str, str], config: OutsideTestsConfig, pivot: str
) -> tuple[list[TextFile], list[AlignedFiles]]:
    """Return one set of aligned files per split, with one file per language."""
    names = sorted({file.set_name for file in files})
    if len(names) > 1:
        raise DataError(
            f"There are several test sets, {listed(names)}. Import each from its own folder."
        )
    versions: dict[tuple[Split, str], list[TextFile]] = defaultdict(list)
    for file in files:
        versions[file.split, codes[file.spelling]].append(file)
    chosen = {key: _first_version(of, config.languages) for key, of in versions.items()}
    aligned = []
    for split in sorted({split for split, _ in chosen}):
        of_split = {code: file for (own, code), file in sorted(chosen.items()) if own == split}
        paths = {code: file.path for code, file in of_split.items()}
        aligned.append(AlignedFiles(split, paths, tuple(_pairs(paths, config, pivot))))
    return list(chosen.values()), aligned


def _first_version(files: Sequence[TextFile], wanted: Sequence[str]) -> TextFile:
    """Return the file to read, among several of one language and script in one split.

    It is the variant that is wanted, else the source of the translations, else one without
    region (``fra`` before ``fra-CA``), else the first by name (``pes``, ``prs``).
    """
    meant = {find_code(asked, [file.spelling for file in files]) for asked in wanted}

    def preference(file: TextFile) -> tuple[bool, bool, int, str]:
        spelling = file.spelling
        return spelling not in meant, not file.is_source, len(spelling), spelling

    first, *others = sorted(files, key=preference)
    if others and others[0].spelling == first.spelling and not first.is_source:
        raise DataError(
            f"{first.path} and {others[0].path} are both the {first.split} text of "
            f"{first.spelling}. Remove one."
        )
    return first


def _pairs(
    paths: dict[str, Path], config: OutsideTestsConfig, pivot: str
) -> Iterator[tuple[str, str]]:
    """Yield the wanted pairs of languages."""
    if config.directions == "all":
        yield from combinations(sorted(paths), 2)
        return
    found = find_code(pivot, paths)
    if found is None:
        raise ConfigError(
            f"There is no file of the pivot {pivot!r} among {listed(sorted(paths))}. Name another "
            'corpus.pivot, or set tests.directions = "all".'
        )
    for code in sorted(paths):
        if code != found:
            first, second = sorted((code, found))
            yield first, second


def _align_pairs(
    files: Sequence[TextFile], codes: dict[str, str]
) -> tuple[list[TextFile], list[AlignedFiles]]:
    """Return one set of two aligned files per split and pair."""
    found: dict[tuple[Split, str], dict[str, TextFile]] = defaultdict(dict)
    for file in files:
        first, second = (codes[spelling] for spelling in file.languages)
        if first == second:
            raise DataError(f"{file.path} pairs a language with itself. Rename or remove it.")
        sides = found[file.split, pair_name(first, second)]
        other = sides.setdefault(codes[file.spelling], file)
        if other is not file:
            raise DataError(
                f"{other.path} and {file.path} are both {file.split} text of one pair and "
                "language. Import each test set from its own folder."
            )
    aligned = []
    for (split, name), sides in sorted(found.items()):
        first, second = name.split("-")
        _require_both(sides, first, second)
        paths = {code: sides[code].path for code in (first, second)}
        aligned.append(AlignedFiles(split, paths, ((first, second),)))
    return list(files), aligned


def _require_both(sides: dict[str, TextFile], first: str, second: str) -> None:
    for here, missing in ((first, second), (second, first)):
        if missing not in sides:
            file = sides[here]
            raise DataError(
                f"{file.path} has no counterpart in {missing}. Add the {file.split} text of "
                f"{missing} beside it or remove the file."
            )
        if sides[here].set_name != sides[missing].set_name:
            raise DataError(
                f"{sides[here].path} and {sides[missing].path} are of two test sets. Import each "
                "from its own folder."
            )
