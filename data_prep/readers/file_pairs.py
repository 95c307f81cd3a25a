"""Read pairs of text files: in trees of folders, named as for Moses, or as a recipe lists them.

A tree, as of OPUS-100, has folders ``en-de`` with ``train.en`` and ``train.de`` (or
``opus.en-de-train.en``), and the same for ``valid`` (``dev``, ``validation``) and ``test``; pairs
without training text may lie below ``zero-shot``. The names of folders decide which pairs are
wanted; other folders are not looked into. Text of one pair in several trees follows in the order of
the trees.

Moses' files are ``NAME.de-en.de`` and ``NAME.de-en.en`` in any folder. Two files that differ only
in their endings, ``train.de`` and ``train.en``, are a pair too, if both endings are codes of known
languages. A word in the name says the split (``newstest2014.de-en.de``); without one, the text is
training text.

``corpus.files`` lists split, pair and paths of each text, as ``mtdata`` does. Two paths are a pair
of files. One path is a file of both languages, read by its ending: ``.tmx``, ``.tsv``,
``.parquet``, ``.jsonl``, ``.json`` or ``.csv``. Sections of one split and pair follow in the order
of the list.

All files may be plain, ``.gz`` or ``.zst``; line n of one file translates line n of the other.
"""

import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path

from data_prep.readers.raw_text import (
    CODE,
    FILES_IGNORED,
    FOLDERS_IGNORED,
    FOLDERS_REPEATED,
    OR_APART,
    PACKED,
    PAIR_FORM,
    SPLIT_NAMES,
    SPLITS,
    FilesInStep,
    MultiwayFile,
    NamedPair,
    RawFile,
    RawText,
    Section,
    SkippedText,
    holds_no,
    is_language,
    is_pair_name,
    list_files,
    name_pairs,
    no_counterpart,
    no_folder,
    one_language,
    raw_paths,
    same_text,
    section_of_pair,
    select_pairs,
    spellings_of,
    unfit_source,
)
from data_prep.readers.tables import COLUMN_ENDINGS, TSV_ENDINGS, open_table
from data_prep.readers.tmx import survey_file
from data_prep.settings import CorpusConfig, ListedText
from pipeline.artifacts.corpus import Split
from pipeline.artifacts.raw_input import RawInput, plain_name, refuse_no_file
from pipeline.errors import ConfigError, DataError
from pipeline.languages import find_code, is_known, without_region
from pipeline.terminal import listed

TREE_LAYOUT = (
    "folders like en-de with train.en and train.de (or opus.en-de-train.en), plain, .gz or .zst"
)
MOSES_LAYOUT = "NAME.de-en.de and NAME.de-en.en, or train.de and train.en, plain, .gz or .zst"

TABLE_ENDINGS = (*TSV_ENDINGS, *COLUMN_ENDINGS)
_CONTAINERS = ("supervised", "zero-shot", "zero_shot")
_SIDE = CODE.replace("_", "[-_]")  # no ending is two codes, as the name of a folder is
_SIDE_FILE = re.compile(rf"(?:.*[.-])?({'|'.join(SPLIT_NAMES)})\.({_SIDE}){PACKED}")


@dataclass(frozen=True)
class FilePair:
    """Two files in which line n of one translates line n of the other."""

    files: tuple[RawFile, RawFile]
    split: Split
    pair: NamedPair
    """Pair in the order of the files."""

    def section(self) -> Section:
        """Return the lines, in the order of the pair's languages; DataError if it has only one."""
        (code, spelling, one), (other_code, other_spelling, other) = sorted(
            zip(self.pair.codes, self.pair.spellings, self.files, strict=True),
            key=lambda side: side[0],
        )
        if code == other_code:
            fix = f"Remove one, {OR_APART}"
            raise same_text(one.path, other.path, f"text of {code}", fix)
        return Section(
            split=self.split,
            languages=(code, other_code),
            spellings=(spelling, other_spelling),
            sources=(one.source(), other.source()),
            lines=FilesInStep((one.path, other.path)),
        )


# ---------------------------------------------------------------- trees


@dataclass(frozen=True)
class PairFolder:
    """Folder of a tree with the name of a pair."""

    directory: Path
    root: Path
    prefix: str
    """Beginning of the names of its files, which tells several trees apart."""

    def file(self, path: Path) -> RawFile:
        """Return a file or folder below the tree, with its name there."""
        return RawFile(path, self.prefix + path.relative_to(self.root).as_posix())


def read_trees(raw: RawInput | None, config: CorpusConfig) -> RawText:
    """Read every pair of files in trees of pair folders, by pair, then by tree.

    Folders of other pairs are counted and not looked into; so is a second folder of one tree with
    the same text (``zh-de`` next to ``de-zh``).
    """
    left_out = SkippedText()
    folders = _pair_folders(raw_paths(raw, source="tree"), left_out)
    pairs = name_pairs((folder.directory.name for folder in folders), regions=config.regions)
    wanted = select_pairs(pairs, config.languages)
    chosen = [both for both in zip(folders, pairs, strict=True) if both[1] in wanted]
    left_out["pairs_not_selected"] += len(folders) - len(chosen)
    found: dict[tuple[str, str], tuple[PairFolder, list[Section]]] = {}
    for folder, pair in chosen:
        sections = [entry.section() for entry in _folder_files(folder, pair, left_out)]
        key = sections[0].pair, folder.prefix
        first, known = found.setdefault(key, (folder, sections))
        if first is folder:
            continue
        if not _hold_same_text(known, sections):
            raise DataError(
                f"{first.directory} and {folder.directory} hold different text of the pair "
                f"{key[0]}. Join them, remove one, {OR_APART}."
            )
        left_out[FOLDERS_REPEATED] += 1
    # A stable sort: the folders of a pair stay in the order of their trees.
    ordered = sorted(found.items(), key=lambda item: item[0][0])
    sections = [section for _, (_, of_folder) in ordered for section in of_folder]
    return RawText(sections, left_out=left_out)


def _hold_same_text(one: Sequence[Section], other: Sequence[Section]) -> bool:
    lines, others = (
        {entry.split: entry.lines for entry in side if isinstance(entry.lines, FilesInStep)}
        for side in (one, other)
    )
    return lines.keys() == others.keys() and all(
        line == other_line
        for split in lines
        for line, other_line in zip_longest(lines[split], others[split])
    )


def _pair_folders(roots: Sequence[Path], left_out: SkippedText) -> list[PairFolder]:
    """Return the folders of all trees that have the name of a pair; count the others."""
    found: list[PairFolder] = []
    for number, root in enumerate(roots, start=1):
        if not root.is_dir():
            raise no_folder(root, f"a tree with {TREE_LAYOUT}")
        tree = PairFolder(root, root, prefix=f"{number}/" if len(roots) > 1 else "")
        below = list(_folders_below(root))
        directories = [path for path in below if is_pair_name(path.name)]
        if not directories:
            deeper = chain.from_iterable(root.glob("*/" * depth) for depth in range(2, 5))
            inner = sorted(path.parent for path in deeper if is_pair_name(path.name))
            trees = (path.parent if path.name in _CONTAINERS else path for path in inner)
            advice = listed(map(str, dict.fromkeys(trees))) or f"a tree with {TREE_LAYOUT}"
            alike = [path.name for path in below if re.match("[A-Za-z]{2,3}-", path.name)]
            why = f" ({listed(alike)}: a pair is {PAIR_FORM})" if alike else ""
            raise holds_no(root, f"language pairs{why}", advice)
        others = [path for path in below if not is_pair_name(path.name)]
        left_out.ignore(FOLDERS_IGNORED, (tree.file(path).name for path in others))
        found += [PairFolder(directory, root, tree.prefix) for directory in directories]
    return found


def _folders_below(root: Path) -> Iterator[Path]:
    """Yield the folders of a tree, and instead of containers of pairs the folders below them."""
    for path in sorted(root.iterdir()):
        refuse_no_file(path)
        if path.is_dir() and path.name in _CONTAINERS:
            yield from _folders_below(path)
        elif path.is_dir():
            yield path


def _folder_files(folder: PairFolder, pair: NamedPair, left_out: SkippedText) -> list[FilePair]:
    """Return both files of each split."""
    if len(set(pair.codes)) < 2:
        raise one_language(folder.directory, f"Rename or remove it, {OR_APART}")
    found: dict[tuple[Split, str], RawFile] = {}
    others: list[str] = []
    for path in sorted(folder.directory.iterdir()):
        refuse_no_file(path)
        if not path.is_file():
            continue
        file = folder.file(path)
        match = _SIDE_FILE.fullmatch(path.name)
        code = _side_code(match[2], pair) if match else None
        if match is None or code is None:
            if not path.name.startswith("."):
                others.append(file.name)
            continue
        split = SPLIT_NAMES[match[1]]
        if found.setdefault((split, code), file) is not file:
            raise same_text(found[split, code].path, path, f"the {split} text of {code}")
    left_out.ignore(FILES_IGNORED, others)
    pairs = []
    for split in SPLITS:
        present = [found[split, code] for code in pair.codes if (split, code) in found]
        if len(present) == 1:
            [missing] = [code for code in pair.codes if (split, code) not in found]
            text = f"the {split} text of {missing} to its folder"
            raise no_counterpart(present[0].path, missing, text)
        if present:
            pairs.append(FilePair((present[0], present[1]), split, pair))
    if not pairs:
        raise holds_no(folder.directory, "text of its pair", f"a tree with {TREE_LAYOUT}")
    return pairs


def _side_code(suffix: str, pair: NamedPair) -> str | None:
    """Return the language of a file's ending; None if it is neither of the pair's."""
    spelled = {
        spelling.lower(): code for spelling, code in zip(pair.spellings, pair.codes, strict=True)
    }
    base = {without_region(code): code for code in pair.codes}  # train.pt in the folder en-pt_BR
    found = spelled.get(suffix.lower()) or find_code(suffix, pair.codes)
    return found or base.get(find_code(suffix, base) or "")


# ---------------------------------------------------------------- names as for Moses


def read_moses(raw: RawInput | None, config: CorpusConfig) -> RawText:
    """Read every pair of files with names as for Moses, by pair."""
    files = list_files(raw, source="moses")
    sides = {
        stem: of_name
        for stem, of_name in _sides_by_name(files).items()
        if len(of_name) > 1 or _named_pair(stem)
    }
    if not sides:
        places = listed(raw.values) if raw else ""
        raise holds_no(places, "pairs of files", f"a folder with {MOSES_LAYOUT}")
    read = {file.name for of_name in sides.values() for file in of_name.values()}
    left_out = SkippedText()
    left_out.ignore(FILES_IGNORED, [file.name for file in files if file.name not in read])
    spellings = [_spellings(stem, of_name) for stem, of_name in sides.items()]
    named = name_pairs(map("-".join, spellings), regions=config.regions)
    wanted = select_pairs(named, config.languages)
    left_out["pairs_not_selected"] += len({*named} - wanted)
    sections = []
    for pair, of_name in zip(named, sides.values(), strict=True):
        if pair in wanted:
            one, other = (of_name[spelling] for spelling in pair.spellings)
            sections.append(FilePair((one, other), one.split(), pair).section())
    return RawText(sorted(sections, key=lambda section: section.pair), left_out=left_out)


def _sides_by_name(files: Sequence[RawFile]) -> dict[str, dict[str, RawFile]]:
    """Return name without ending → ending → file, for the endings that name a language.

    It is a language of the pair that the name has, else a known one.
    """
    found: dict[str, dict[str, RawFile]] = defaultdict(dict)
    for file in files:
        stem, _, ending = plain_name(file.name).rpartition(".")
        ending = ending.replace("-", "_")  # pairs are named with underscores
        if pair := _named_pair(stem):
            is_side = ending in spellings_of(pair)
        else:
            is_side = bool(stem) and is_language(ending) and is_known(ending)
        if is_side and found[stem].setdefault(ending, file) is not file:
            raise same_text(found[stem][ending].path, file.path, f"{stem} in {ending}")
    return found


def _named_pair(stem: str) -> str | None:
    last = stem.rpartition("/")[2].rpartition(".")[2]
    return last if is_pair_name(last) else None


def _spellings(stem: str, sides: Mapping[str, RawFile]) -> tuple[str, str]:
    """Return the endings of both files of a pair; DataError if there are not two."""
    pair = _named_pair(stem)
    first, second, *more = spellings_of(pair) if pair else sorted(sides)
    if more:
        raise DataError(
            f"{listed(sorted(str(file.path) for file in sides.values()))} are more than two files "
            "of one name. Name each pair, NAME.de-en.de and NAME.de-en.en."
        )
    for side in (first, second):
        if side not in sides:
            there = next(iter(sides.values()))
            raise no_counterpart(there.path, side, f"{stem}.{side}")
    return first, second


# ---------------------------------------------------------------- files that a recipe lists


def read_listed(raw: RawInput | None, config: CorpusConfig) -> RawText:
    """Read the files of ``corpus.files`` that are in wanted languages."""
    root = _root(raw)
    if not config.files:
        example = '[{ split = "train", pair = "de-en", paths = ["a.de.gz", "a.en.gz"] }]'
        raise unfit_source(
            "listed", f"corpus.files is empty. Name each file, as in files = {example}"
        )
    for entry in config.files:
        first, _, second = entry.pair.partition("-")
        if not is_pair_name(entry.pair) or first.lower() == second.lower():
            raise ConfigError(f"corpus.files names the pair {entry.pair!r}. Write {PAIR_FORM}.")
    names = [entry.paths[0] for entry in config.files if len(entry.paths) == 1]
    if config.columns and not any(RawFile(root, name).ending in TABLE_ENDINGS for name in names):
        problem = "corpus.files has no table with corpus.columns. List one, or leave them out"
        raise unfit_source("listed", problem)
    pairs = name_pairs((entry.pair for entry in config.files), regions=config.regions)
    wanted = select_pairs(pairs, config.languages)
    left_out = SkippedText(pairs_not_selected=len({*pairs} - wanted))
    chosen = [both for both in zip(config.files, pairs, strict=True) if both[1] in wanted]
    sections = [_listed_section(root, entry, pair, config, left_out) for entry, pair in chosen]
    return RawText(sections, left_out=left_out)


def _root(raw: RawInput | None) -> Path:
    paths = raw_paths(raw, source="listed")
    if len(paths) > 1 or not paths[0].is_dir():
        problem = f"{', '.join(map(str, paths))} is not one folder"
        raise unfit_source(
            "listed", f"{problem}. Name the folder that the paths of corpus.files start from"
        )
    return paths[0]


def _listed_section(
    root: Path, entry: ListedText, pair: NamedPair, config: CorpusConfig, left_out: SkippedText
) -> Section:
    files = [_listed_file(root, path) for path in entry.paths]
    if len(files) == 2:
        if files[0].path.samefile(files[1].path):
            raise ConfigError(
                f"corpus.files names {files[0].path} for both sides of {entry.pair}. Name a file "
                "per language."
            )
        return FilePair((files[0], files[1]), entry.split, pair).section()
    opened = _open(files[0], entry, pair, config, left_out)
    return section_of_pair(opened, pair, config)


def _listed_file(root: Path, name: str) -> RawFile:
    path = root / name
    if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root)):
        raise ConfigError(f"corpus.files names {name!r}, which lies outside of {root}. Move it in.")
    if not path.is_file():
        raise DataError(f"{path}, which corpus.files names, is not a file. Correct its name.")
    return RawFile(path, name)


def _open(
    file: RawFile,
    entry: ListedText,
    pair: NamedPair,
    config: CorpusConfig,
    left_out: SkippedText,
) -> MultiwayFile:
    if file.ending == "tmx":
        return survey_file(file, entry.split, left_out=left_out)
    if file.ending in TABLE_ENDINGS:
        return open_table(file, entry.split, config, pair=pair.spellings, left_out=left_out)
    raise DataError(
        f"{file.path} is one file of both languages, but ends in none of .tmx, "
        f"{', '.join(f'.{ending}' for ending in TABLE_ENDINGS)}. Name a file per "
        "language."
    )
