"""A raw tree: which folders are language pairs, under which codes, and which are wanted.

An OPUS-100-like tree has folders ``en-de`` with ``train.en`` and ``train.de`` (or
``opus.en-de-train.en``), the same for ``valid`` (``dev``, ``validation``) and ``test``, plain or
``.gz``; pairs without training text may lie below ``zero-shot``. What is wanted is decided by the
names of the folders; nothing else of a folder that is not wanted is looked at.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import get_args

from data_prep.raw_lines import iterate_raw_lines
from pipeline.artifacts.corpus import Split, pair_name
from pipeline.errors import ConfigError, DataError
from pipeline.languages import distinct_codes, find_code, nearest_codes

SPLITS: tuple[Split, ...] = get_args(Split)
LAYOUT = "folders like en-de with train.en and train.de (or opus.en-de-train.en), plain or .gz"

_SPLIT_NAMES: dict[str, Split] = {
    "train": "train",
    "valid": "valid",
    "dev": "valid",
    "validation": "valid",
    "test": "test",
}
_CONTAINERS = ("supervised", "zero-shot", "zero_shot")
_CODE = r"[A-Za-z]{2,3}(?:_[A-Za-z]{4})?(?:_(?:[A-Za-z]{2}|[0-9]{3}))?"
"""A language code, in the spelling of FLORES or of BCP 47 with underscores."""
_PAIR_FOLDER = re.compile(rf"({_CODE})-({_CODE})")
_SIDE_FILE = re.compile(rf"(?:.*[.-])?({'|'.join(_SPLIT_NAMES)})\.({_CODE})(?:\.gz)?")


@dataclass(frozen=True)
class NamedFolder:
    """A folder named like a pair, not looked into yet."""

    directory: Path
    spellings: tuple[str, str]
    codes: tuple[str, str]
    """In the order of the name."""


@dataclass(frozen=True)
class PairFolder:
    """One folder of the tree: per split, the file of each side in the order of the pair's name."""

    directory: Path
    languages: tuple[str, str]
    files: dict[Split, tuple[Path, Path]]
    spellings: tuple[str, str]
    """How the folder spells the languages."""

    @property
    def pair(self) -> str:
        return pair_name(*self.languages)


def find_pairs(
    root: Path, *, wanted: Sequence[str], max_line_bytes: int, counts: Counter[str]
) -> list[PairFolder]:
    """The pair folders of a tree whose two languages are wanted, by pair.

    Other folders are counted and left alone; so is a second folder with the same text (``de-fr``
    beside ``fr-de``).

    Args:
        root: the tree.
        wanted: languages in any usual spelling; none: all.
        max_line_bytes: see ``iterate_raw_lines``.
        counts: of ``folders_ignored``, ``folders_repeated`` and ``pairs_not_selected``.

    Raises:
        ConfigError: a wanted language is in no pair of wanted languages.
        DataError: no pairs, a side missing, or two folders with different text of one pair.
    """
    if not root.is_dir():
        raise DataError(f"{root} is no folder: name a tree with {LAYOUT}.")
    named = name_folders(_pair_directories(root, counts=counts))
    if not named:
        raise DataError(f"{root} holds no language pairs: {LAYOUT} are expected.")
    selected = select_folders(named, wanted)
    counts["pairs_not_selected"] += len(named) - len(selected)
    found: dict[str, PairFolder] = {}
    for folder in map(_open_folder, selected):
        known = found.setdefault(folder.pair, folder)
        if known is folder:
            continue
        if not _holds_same_text(known, folder, max_line_bytes=max_line_bytes):
            raise DataError(
                f"{known.directory} and {folder.directory} hold different text of the pair "
                f"{folder.pair}: join them or remove one."
            )
        counts["folders_repeated"] += 1
    return [found[pair] for pair in sorted(found)]


def name_folders(directories: Iterable[Path]) -> list[NamedFolder]:
    """The codes of all folders at once: what a spelling means depends on the others."""
    spelled = [(path, _spellings(path)) for path in directories]
    codes = distinct_codes({spelling for _, spellings in spelled for spelling in spellings})
    return [
        NamedFolder(path, spellings, (codes[spellings[0]], codes[spellings[1]]))
        for path, spellings in spelled
    ]


def select_folders(folders: list[NamedFolder], wanted: Sequence[str]) -> list[NamedFolder]:
    """The folders both languages of which are wanted; all where nothing is.

    Raises:
        ConfigError: a wanted language is in no pair of wanted languages.
    """
    if not wanted:
        return folders
    present = {code for folder in folders for code in folder.codes}
    codes = {find_code(spelling, present) or spelling for spelling in wanted}
    selected = [folder for folder in folders if codes.issuperset(folder.codes)]
    require_languages(codes, (folder.codes for folder in selected), present=present)
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


def _pair_directories(root: Path, *, counts: Counter[str]) -> Iterator[Path]:
    for entry in sorted(root.iterdir()):
        if not entry.is_dir():
            continue
        if entry.name in _CONTAINERS:
            yield from _pair_directories(entry, counts=counts)
        elif _PAIR_FOLDER.fullmatch(entry.name):
            yield entry
        else:
            counts["folders_ignored"] += 1


def _spellings(directory: Path) -> tuple[str, str]:
    match = _PAIR_FOLDER.fullmatch(directory.name)
    assert match is not None
    return match[1], match[2]


def _holds_same_text(one: PairFolder, other: PairFolder, *, max_line_bytes: int) -> bool:
    return one.files.keys() == other.files.keys() and all(
        line == other_line
        for split, paths in one.files.items()
        for path, other_path in zip(paths, other.files[split], strict=True)
        for line, other_line in zip_longest(
            iterate_raw_lines(path, max_line_bytes=max_line_bytes),
            iterate_raw_lines(other_path, max_line_bytes=max_line_bytes),
        )
    )


def _open_folder(folder: NamedFolder) -> PairFolder:
    directory, codes = folder.directory, folder.codes
    if len(set(codes)) < 2:
        raise DataError(f"{directory} pairs a language with itself: rename or remove the folder.")
    first, second = sorted(codes)
    found: dict[tuple[Split, str], Path] = {}
    for path in sorted(entry for entry in directory.iterdir() if entry.is_file()):
        match = _SIDE_FILE.fullmatch(path.name)
        code = _side_code(match[2], folder) if match else None
        if match is None or code is None:
            continue
        side = (_SPLIT_NAMES[match[1]], code)
        if side in found:
            raise DataError(
                f"{found[side]} and {path} are both the {side[0]} text of {code}: remove one."
            )
        found[side] = path
    files = {split: _both_sides(found, split, first, second) for split in SPLITS}
    present = {split: paths for split, paths in files.items() if paths is not None}
    if not present:
        raise DataError(f"{directory} holds no text of its pair: {LAYOUT} are expected.")
    spellings = folder.spellings if codes == (first, second) else folder.spellings[::-1]
    return PairFolder(directory, (first, second), present, spellings)


def _side_code(suffix: str, folder: NamedFolder) -> str | None:
    """The language that a file's ending means, None where it is neither of the pair's."""
    spelled = {
        spelling.lower(): code
        for spelling, code in zip(folder.spellings, folder.codes, strict=True)
    }
    return spelled.get(suffix.lower()) or find_code(suffix, folder.codes)


def _both_sides(
    found: dict[tuple[Split, str], Path], split: Split, first: str, second: str
) -> tuple[Path, Path] | None:
    sides = [found.get((split, code)) for code in (first, second)]
    match sides:
        case [None, None]:
            return None
        case [Path() as one, Path() as other]:
            return one, other
    missing = first if sides[0] is None else second
    present = sides[0] or sides[1]
    raise DataError(
        f"{present} has no counterpart in {missing}: add the {split} text of {missing} "
        "beside it or remove the file."
    )
