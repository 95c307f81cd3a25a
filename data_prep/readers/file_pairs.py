"""Read pairs of text files, in a tree of folders as OPUS-100 or with names as for Moses.

A tree has folders ``en-de`` with ``train.en`` and ``train.de`` (or ``opus.en-de-train.en``), and
the same for ``valid`` (``dev``, ``validation``) and ``test``; pairs without training text may lie
below ``zero-shot``. Folder names alone decide which pairs are wanted; other folders are not looked
into. Text of one pair in several trees follows in the order of the trees.

Moses' files are ``NAME.de-en.de`` and ``NAME.de-en.en`` in any folder. Two files that differ only
in their endings, ``train.de`` and ``train.en``, are a pair too, if both endings are codes of known
languages. A word in the name says the split (``newstest2014.de-en.de``); without one, the text is
training text.

All files may be plain, ``.gz`` or ``.zst``; line n of one file translates line n of the other.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from data_prep.readers.multiway import is_language
from data_prep.readers.raw_files import (
    PACKED,
    FilesInStep,
    RawFile,
    list_files,
    source_of,
)
from data_prep.readers.section import (
    CODE,
    FILES_IGNORED,
    FOLDERS_IGNORED,
    SPLIT_NAMES,
    SPLITS,
    LeftOut,
    NamedPair,
    RawText,
    Section,
    Source,
    is_pair_name,
    name_pairs,
    select_pairs,
    spellings_of,
)
from data_prep.settings import CorpusConfig
from pipeline.artifacts.corpus import Split, pair_name
from pipeline.artifacts.raw_input import HubDataset, RawInput, iterate_raw_lines, plain_name
from pipeline.errors import ConfigError, DataError
from pipeline.languages import Regions, find_code, is_known, without_region
from pipeline.terminal import listed

TREE_LAYOUT = (
    "folders like en-de with train.en and train.de (or opus.en-de-train.en), plain, .gz or .zst"
)

_CONTAINERS = ("supervised", "zero-shot", "zero_shot")
_SIDE_FILE = re.compile(rf"(?:.*[.-])?({'|'.join(SPLIT_NAMES)})\.({CODE}){PACKED}")


@dataclass(frozen=True)
class NamedFolder:
    """Folder with the name of a pair, not looked into yet."""

    directory: Path
    tree: int
    """Number of its tree, from 0."""
    pair: NamedPair


@dataclass(frozen=True)
class PairFolder:
    """Folder of a tree with both files of each split, in the order of the pair's name."""

    directory: Path
    tree: int
    """Number of its tree, from 0."""
    languages: tuple[str, str]
    files: dict[Split, tuple[Path, Path]]
    spellings: tuple[str, str]
    """Spellings of the languages in the folder's name."""

    @property
    def pair(self) -> str:
        """Return the name of the pair."""
        return pair_name(*self.languages)


def read_trees(raw: RawInput | None, config: CorpusConfig) -> RawText:
    """Read every pair of files in trees of pair folders, in step.

    Raises:
        ConfigError: No tree is given, or a wanted language is in no pair of wanted languages.
        DataError: No pairs, a side missing, or two folders with different text of one pair.
    """
    roots = _roots(raw)
    counts = LeftOut()
    folders = find_pairs(
        roots,
        wanted=config.languages,
        regions=config.regions,
        max_line_bytes=config.max_line_bytes,
        counts=counts,
    )
    sections = [
        _folder_section(folder, split, roots, max_line_bytes=config.max_line_bytes)
        for folder in folders
        for split in folder.files
    ]
    return RawText(sections, left_out=counts)


def find_pairs(
    roots: Sequence[Path],
    *,
    wanted: Sequence[str],
    max_line_bytes: int,
    counts: LeftOut,
    regions: Regions = "joined",
) -> list[PairFolder]:
    """Return the pair folders of trees with two wanted languages, by pair, then by tree.

    Other folders are counted and skipped; so is a second folder of one tree with the same text
    (``de-fr`` beside ``fr-de``).

    Args:
        roots: Trees.
        wanted: Languages in any usual spelling; empty for all.
        max_line_bytes: As in :func:`iterate_raw_lines`.
        counts: Counts of ``folders_ignored``, ``files_ignored`` (in the folders looked into),
            ``folders_repeated`` and ``pairs_not_selected``, to add to.
        regions: As ``corpus.regions``.

    Raises:
        ConfigError: A wanted language is in no pair of wanted languages.
        DataError: There are no pairs, a side is missing, or two folders have different text of one
            pair.
    """
    named = _name_folders(roots, regions=regions, counts=counts)
    wanted_pairs = select_pairs([folder.pair for folder in named], wanted)
    selected = [folder for folder in named if folder.pair in wanted_pairs]
    counts["pairs_not_selected"] += len(named) - len(selected)
    found: dict[tuple[str, int], PairFolder] = {}
    for folder in (_open_folder(one, roots=roots, counts=counts) for one in selected):
        known = found.setdefault((folder.pair, folder.tree), folder)
        if known is folder:
            continue
        if not _holds_same_text(known, folder, max_line_bytes=max_line_bytes):
            raise DataError(
                f"{known.directory} and {folder.directory} hold different text of the pair "
                f"{folder.pair}. Join them or remove one."
            )
        counts["folders_repeated"] += 1
    return [found[key] for key in sorted(found)]


def _roots(raw: RawInput | None) -> tuple[Path, ...]:
    match raw:
        case None:
            raise ConfigError(
                "corpus.source is 'tree', but no raw folder was given. Pass --raw DIR, a tree with "
                f"{TREE_LAYOUT}, or set corpus.source to 'cldr'."
            )
        case HubDataset():
            raise ConfigError(
                f"corpus.source is 'tree', but {raw} is a data set of the hub. Set corpus.source "
                "to 'hub', for example with --set corpus.source=hub, or pass --raw DIR."
            )
    for root in raw.paths:
        if root.is_file():
            raise DataError(
                f"{root} is a file, but a tree of pair folders is expected. Name {TREE_LAYOUT}."
            )
    return raw.paths


def _folder_section(
    folder: PairFolder, split: Split, roots: Sequence[Path], *, max_line_bytes: int
) -> Section:
    first, second = (_source(path, roots=roots, tree=folder.tree) for path in folder.files[split])
    return Section(
        split=split,
        languages=folder.languages,
        spellings=folder.spellings,
        sources=(first, second),
        lines=FilesInStep(folder.files[split], max_line_bytes),
    )


def _source(path: Path, *, roots: Sequence[Path], tree: int) -> Source:
    """Return a file of a tree as a source."""
    return source_of(path, roots[tree])._replace(name=_name(path, roots=roots, tree=tree))


def _name(path: Path, *, roots: Sequence[Path], tree: int) -> str:
    """Return a name that does not depend on where the tree lies; of several, it has the number."""
    name = path.relative_to(roots[tree]).as_posix()
    return name if len(roots) == 1 else f"{tree + 1}/{name}"


def _name_folders(roots: Sequence[Path], *, regions: Regions, counts: LeftOut) -> list[NamedFolder]:
    """Return the folders of all trees that have the name of a pair."""
    places: list[tuple[Path, int]] = []
    for tree, root in enumerate(roots):
        if not root.is_dir():
            raise DataError(f"{root} is not a folder. Name a tree with {TREE_LAYOUT}.")
        directories, others = _pair_directories(root)
        counts.ignore(FOLDERS_IGNORED, (_name(path, roots=roots, tree=tree) for path in others))
        if not directories:
            raise DataError(f"{root} holds no language pairs. Name a tree with {TREE_LAYOUT}.")
        places += [(directory, tree) for directory in directories]
    pairs = name_pairs((directory.name for directory, _ in places), regions=regions)
    return [NamedFolder(*place, pair) for place, pair in zip(places, pairs, strict=True)]


def _pair_directories(root: Path) -> tuple[list[Path], list[Path]]:
    """Return the folders of a tree that have the name of a pair, and the others."""
    found: list[Path] = []
    others: list[Path] = []
    for entry in sorted(root.iterdir()):
        if not entry.is_dir():
            continue
        if entry.name in _CONTAINERS:
            below, others_below = _pair_directories(entry)
            found += below
            others += others_below
        else:
            (found if is_pair_name(entry.name) else others).append(entry)
    return found, others


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


def _open_folder(folder: NamedFolder, *, roots: Sequence[Path], counts: LeftOut) -> PairFolder:
    directory, codes = folder.directory, folder.pair.codes
    if len(set(codes)) < 2:
        raise DataError(f"{directory} pairs a language with itself. Rename or remove the folder.")
    first, second = sorted(codes)
    found: dict[tuple[Split, str], Path] = {}
    others: list[Path] = []
    for path in sorted(entry for entry in directory.iterdir() if entry.is_file()):
        match = _SIDE_FILE.fullmatch(path.name)
        code = _side_code(match[2], folder.pair) if match else None
        if match is None or code is None:
            if not path.name.startswith("."):
                others.append(path)
            continue
        side = (SPLIT_NAMES[match[1]], code)
        if side in found:
            raise DataError(
                f"{found[side]} and {path} are both the {side[0]} text of {code}. Remove one."
            )
        found[side] = path
    files = {split: _both_sides(found, split, first, second) for split in SPLITS}
    present = {split: paths for split, paths in files.items() if paths is not None}
    if not present:
        raise DataError(f"{directory} holds no text of its pair. Name a tree with {TREE_LAYOUT}.")
    counts.ignore(FILES_IGNORED, (_name(path, roots=roots, tree=folder.tree) for path in others))
    spellings = folder.pair.spellings if codes == (first, second) else folder.pair.spellings[::-1]
    return PairFolder(directory, folder.tree, (first, second), present, spellings)


def _side_code(suffix: str, pair: NamedPair) -> str | None:
    """Return the language of a file's ending; None if it is neither of the pair's."""
    spelled = {
        spelling.lower(): code for spelling, code in zip(pair.spellings, pair.codes, strict=True)
    }
    base = {without_region(code): code for code in pair.codes}  # train.pt in the folder en-pt_BR
    found = spelled.get(suffix.lower()) or find_code(suffix, pair.codes)
    return found or base.get(find_code(suffix, base) or "")


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
        f"{present} has no counterpart in {missing}. Add the {split} text of {missing} "
        "beside it or remove the file."
    )


MOSES_LAYOUT = "NAME.de-en.de and NAME.de-en.en, or train.de and train.en, plain, .gz or .zst"


@dataclass(frozen=True)
class FilePair:
    """Two files in which line n of one translates line n of the other."""

    files: tuple[RawFile, RawFile]
    split: Split
    pair: NamedPair
    """Pair in the order of the files."""


def read_moses(raw: RawInput | None, config: CorpusConfig) -> RawText:
    """Read every pair of files with names as for Moses, in step.

    Raises:
        ConfigError: Nothing is given, or a wanted language is in no pair of wanted languages.
        DataError: There are no pairs, or a file has no counterpart.
    """
    files = list_files(raw, source="moses")
    sides = _sides_by_name(files)
    if not sides:
        places = listed(raw.values) if raw else ""
        raise DataError(f"{places} holds no pairs of files. Name a folder with {MOSES_LAYOUT}.")
    read = {file.name for of_name in sides.values() for file in of_name.values()}
    left_out = LeftOut()
    left_out.ignore(FILES_IGNORED, [file.name for file in files if file.name not in read])
    return file_pairs([_both(name, of_name) for name, of_name in sides.items()], config, left_out)


def file_pairs(
    found: Sequence[tuple[RawFile, RawFile, str]], config: CorpusConfig, left_out: LeftOut
) -> RawText:
    """Return a section per pair of files, each given with the name of its pair, sorted by pair.

    Raises:
        ConfigError: A wanted language is in no pair of wanted languages.
        DataError: A language is paired with itself.
    """
    named = name_pairs((name for *_, name in found), regions=config.regions)
    pairs = [
        FilePair((one, other), one.split(), pair)
        for (one, other, _), pair in zip(found, named, strict=True)
    ]
    wanted = select_pairs(named, config.languages)
    left_out["pairs_not_selected"] += len({*named} - wanted)
    sections = [section_of(pair, config) for pair in pairs if pair.pair in wanted]
    return RawText(sorted(sections, key=lambda section: section.pair), left_out=left_out)


def section_of(pair: FilePair, config: CorpusConfig) -> Section:
    """Return the lines of two files, in the order of the pair's languages."""
    codes, spellings = pair.pair.codes, pair.pair.spellings
    one, other = pair.files
    if codes[0] == codes[1]:
        raise DataError(f"{one.path} and {other.path} are both text of {codes[0]}. Remove one.")
    if codes[0] > codes[1]:
        codes, spellings, one, other = codes[::-1], spellings[::-1], other, one
    return Section(
        split=pair.split,
        languages=codes,
        spellings=spellings,
        sources=(one.source(), other.source()),
        lines=FilesInStep((one.path, other.path), config.max_line_bytes),
    )


def _sides_by_name(files: Sequence[RawFile]) -> dict[str, dict[str, RawFile]]:
    """Return name without ending → ending → file, for all files that are a side of a pair."""
    found: dict[str, dict[str, RawFile]] = defaultdict(dict)
    for file in files:
        stem, _, ending = plain_name(file.name).rpartition(".")
        if not _is_side(stem, ending):
            continue
        if ending in found[stem]:
            raise DataError(f"{found[stem][ending].path} and {file.path} are one text. Remove one.")
        found[stem][ending] = file
    return {stem: sides for stem, sides in found.items() if _is_of_pair(stem, sides)}


def _is_side(stem: str, ending: str) -> bool:
    """Return whether an ending is a language of the named pair, or else a known language."""
    name = _named_pair(stem)
    if name is not None:
        return ending in spellings_of(name)
    return bool(stem) and is_language(ending) and is_known(ending)


def _is_of_pair(stem: str, sides: Mapping[str, RawFile]) -> bool:
    """Return whether a file has a counterpart, or should have one by its name."""
    return len(sides) > 1 or _named_pair(stem) is not None


def _named_pair(stem: str) -> str | None:
    last = stem.rpartition("/")[2].rpartition(".")[2]
    return last if is_pair_name(last) else None


def _both(stem: str, sides: Mapping[str, RawFile]) -> tuple[RawFile, RawFile, str]:
    name = _named_pair(stem)
    wanted = spellings_of(name) if name else tuple(sorted(sides))
    if len(wanted) > 2:
        raise DataError(
            f"{listed(sorted(str(file.path) for file in sides.values()))} are more than two files "
            "of one name. Name each pair, NAME.de-en.de and NAME.de-en.en."
        )
    missing = [side for side in wanted if side not in sides]
    if missing:
        there = next(iter(sides.values()))
        raise DataError(
            f"{there.path} has no counterpart in {missing[0]}. Add {stem}.{missing[0]} beside it "
            "or remove the file."
        )
    first, second = wanted
    return sides[first], sides[second], f"{first}-{second}"
