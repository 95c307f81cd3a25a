"""Stage import_corpus: raw pair folders, or phrases made from Unicode CLDR, become a corpus.

Files used: an OPUS-100-like tree, folders ``en-de`` with ``train.en`` and ``train.de`` (or
``opus.en-de-train.en``), the same for ``valid`` (``dev``, ``validation``) and ``test``, plain or
``.gz``; pairs without training text may lie below ``zero-shot``. Files built: the corpus layout of
``pipeline/corpus.py``, and ``quarantine.jsonl`` with every line that is no text. A tree is read in
constant memory.
"""

import codecs
import gzip
import json
import re
import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations, zip_longest
from pathlib import Path
from typing import BinaryIO, TextIO, get_args

from data_prep.cldr import Phrase, check_languages, make_phrases
from pipeline.artifacts import ArtifactWriter
from pipeline.config import CorpusConfig
from pipeline.corpus import Split, pair_name, text_name
from pipeline.errors import ConfigError, DataError
from pipeline.languages import ALIASES, canonical
from pipeline.progress import track
from pipeline.stages import StageCall

SPLITS: tuple[Split, ...] = get_args(Split)
LAYOUT = "folders like en-de with train.en and train.de (or opus.en-de-train.en), plain or .gz"
QUARANTINE_NAME = "quarantine.jsonl"
QUARANTINED_LINES, QUARANTINED_SHARE = 10, 0.05
"""Above both of these a pair of files is refused: it is damaged, or not UTF-8 at all."""

_SPLIT_NAMES: dict[str, Split] = {
    "train": "train",
    "valid": "valid",
    "dev": "valid",
    "validation": "valid",
    "test": "test",
}
_CONTAINERS = ("supervised", "zero-shot", "zero_shot")
_PAIR_FOLDER = re.compile(r"([A-Za-z]{2,3}(?:_[A-Za-z]{2,4})?)-([A-Za-z]{2,3}(?:_[A-Za-z]{2,4})?)")
_SIDE_FILE = re.compile(rf"(?:.*[.-])?({'|'.join(_SPLIT_NAMES)})\.([A-Za-z_]+)(?:\.gz)?")
_INNER_SEPARATORS = re.compile("[\r\v\f\x1c-\x1e\x85\u2028\u2029]")


@dataclass(frozen=True)
class PairFolder:
    """One folder of the tree: per split, the file of each side in the order of the pair's name."""

    directory: Path
    languages: tuple[str, str]
    files: dict[Split, tuple[Path, Path]]

    @property
    def pair(self) -> str:
        return pair_name(*self.languages)


@dataclass
class Tally:
    """What was read and written; becomes the statistics of the artifact."""

    pairs: dict[str, dict[Split, int]] = field(default_factory=dict)
    characters: dict[str, dict[Split, dict[str, int]]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    def add(
        self, split: Split, languages: Sequence[str], *, lines: int, characters: Sequence[int]
    ) -> None:
        """Record what one split of a pair holds; characters per side, without line ends."""
        pair = pair_name(*languages)
        self.pairs.setdefault(pair, dict.fromkeys(SPLITS, 0))[split] = lines
        sides = dict(zip(languages, characters, strict=True))
        self.characters.setdefault(pair, {})[split] = sides


class _NoText(Exception):
    """A line that cannot be a sentence; its argument is the rule it breaks."""


def run(call: StageCall) -> None:
    """Bring raw text into the layout that all later stages read."""
    config = call.recipe.corpus
    tally = Tally()
    with call.new_artifact() as writer:
        if config.source == "cldr":
            import_phrases(config, writer, tally=tally)
        else:
            import_tree(raw_dir(call), config, writer, tally=tally)
        writer.statistics["pairs"] = tally.pairs
        writer.statistics["characters"] = tally.characters
        writer.statistics["counts"] = dict(sorted(tally.counts.items()))


def raw_dir(call: StageCall) -> Path:
    """The raw folder; ConfigError where none was given."""
    if "raw" not in call.raw:
        raise ConfigError(
            "corpus.source is 'tree', but no raw folder was given: pass --raw DIR, a tree with "
            f"{LAYOUT}, or set corpus.source to 'cldr'."
        )
    root = call.raw["raw"]
    if not root.is_dir():
        raise DataError(f"{root} is a file where a tree of pair folders is wanted: {LAYOUT}.")
    return root


def find_pairs(root: Path, *, tally: Tally) -> list[PairFolder]:
    """All pair folders of a tree by pair; other folders are counted and left alone.

    So is a second folder with the same text (``de-fr`` beside ``fr-de``).

    Raises:
        ConfigError: a folder named like a pair has an unknown language code.
        DataError: no pairs, a side missing, or two folders with different text of one pair.
    """
    found: dict[str, PairFolder] = {}
    for folder in _pair_folders(root, tally=tally):
        known = found.setdefault(folder.pair, folder)
        if known is folder:
            continue
        if not _holds_same_text(known, folder):
            raise DataError(
                f"{known.directory} and {folder.directory} hold different text of the pair "
                f"{folder.pair}: join them or remove one."
            )
        tally.counts["folders_repeated"] += 1
    if not found:
        raise DataError(f"{root} holds no language pairs: {LAYOUT} are expected.")
    return [found[pair] for pair in sorted(found)]


def select_languages(
    folders: list[PairFolder], config: CorpusConfig, *, tally: Tally
) -> list[PairFolder]:
    """The folders whose two languages are wanted.

    Raises:
        ConfigError: a wanted language is in no pair of wanted languages.
    """
    if not config.languages:
        return folders
    wanted = {canonical(code) for code in config.languages}
    selected = [folder for folder in folders if wanted.issuperset(folder.languages)]
    tally.counts["pairs_not_selected"] = len(folders) - len(selected)
    _require_languages(wanted, (folder.languages for folder in selected))
    return selected


def import_tree(root: Path, config: CorpusConfig, writer: ArtifactWriter, *, tally: Tally) -> None:
    """Read every pair of files once, in step, and write the lines that are text."""
    folders = select_languages(find_pairs(root, tally=tally), config, tally=tally)
    with writer.path(QUARANTINE_NAME).open("w", encoding="utf-8", newline="\n") as quarantine:
        for folder in track(folders, label="import"):
            for split, paths in folder.files.items():
                _import_files(
                    paths,
                    folder.languages,
                    split,
                    writer,
                    limit=_limit(config, split),
                    quarantine=Quarantine(quarantine, root),
                    tally=tally,
                )


def import_phrases(config: CorpusConfig, writer: ArtifactWriter, *, tally: Tally) -> None:
    """Write CLDR phrases: all splits for pairs with the pivot, test alone for zero-shot pairs."""
    cldr = check_languages(config.cldr)
    phrases = make_phrases(cldr)
    wanted = {canonical(code) for code in config.languages} or {cldr.pivot, *cldr.train_pairs}
    splits: dict[str, dict[Split, list[Phrase]]] = {
        pair_name(cldr.pivot, code): {
            "train": phrases.train[code],
            "valid": phrases.valid,
            "test": phrases.test,
        }
        for code in cldr.train_pairs
    }
    for first, second in combinations(cldr.zero_shot, 2):
        splits[pair_name(first, second)] = {"test": phrases.test}
    selected = {pair: of for pair, of in splits.items() if wanted.issuperset(pair.split("-"))}
    _require_languages(wanted, (pair.split("-") for pair in selected))
    for pair, of_pair in sorted(selected.items()):
        for split, listed in of_pair.items():
            _write_phrases(listed[: _limit(config, split)], pair, split, writer, tally=tally)


@dataclass(frozen=True)
class Quarantine:
    """Where lines that are no text are listed: file, line number from 1, and the rule broken."""

    stream: TextIO
    root: Path

    def add(self, path: Path, *, line: int, reason: str) -> None:
        record = {"file": path.relative_to(self.root).as_posix(), "line": line, "reason": reason}
        self.stream.write(json.dumps(record, ensure_ascii=False) + "\n")


def iterate_raw_lines(path: Path) -> Iterator[bytes]:
    """Lines of a plain or gzip file without their ``\\n``; no other byte ends a line.

    Raises:
        DataError: the file is cut off, damaged, or no gzip file.
    """
    try:
        with _open_bytes(path) as stream:
            for line in stream:
                yield line.removesuffix(b"\n")
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{path} is no complete gzip file ({error}): fetch it again, or unpack it and remove "
            "the .gz from its name."
        ) from error


def _open_bytes(path: Path) -> BinaryIO | gzip.GzipFile:
    if path.suffix == ".gz":
        return gzip.GzipFile(path, "rb")
    return path.open("rb")


def _pair_folders(root: Path, *, tally: Tally) -> Iterator[PairFolder]:
    for entry in sorted(root.iterdir()):
        if not entry.is_dir():
            continue
        match = _PAIR_FOLDER.fullmatch(entry.name)
        if entry.name in _CONTAINERS:
            yield from _pair_folders(entry, tally=tally)
        elif match is None:
            tally.counts["folders_ignored"] += 1
        else:
            yield _open_folder(entry, match.groups())


def _holds_same_text(one: PairFolder, other: PairFolder) -> bool:
    return one.files.keys() == other.files.keys() and all(
        line == other_line
        for split, paths in one.files.items()
        for path, other_path in zip(paths, other.files[split], strict=True)
        for line, other_line in zip_longest(iterate_raw_lines(path), iterate_raw_lines(other_path))
    )


def _open_folder(directory: Path, spellings: Sequence[str]) -> PairFolder:
    codes = {spelling.lower(): canonical(spelling) for spelling in spellings}
    if len(set(codes.values())) < 2:
        raise DataError(f"{directory} pairs a language with itself: rename or remove the folder.")
    first, second = sorted(codes.values())
    found: dict[tuple[Split, str], Path] = {}
    for path in sorted(entry for entry in directory.iterdir() if entry.is_file()):
        match = _SIDE_FILE.fullmatch(path.name)
        suffix = match[2].lower() if match else ""
        code = codes.get(suffix, ALIASES.get(suffix, suffix))
        if match is None or code not in (first, second):
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
    return PairFolder(directory, (first, second), present)


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


def _import_files(
    paths: tuple[Path, Path],
    languages: tuple[str, str],
    split: Split,
    writer: ArtifactWriter,
    *,
    limit: int | None,
    quarantine: Quarantine,
    tally: Tally,
) -> None:
    outputs = [
        writer.path(text_name(split, pair_name(*languages), code)).open(
            "w", encoding="utf-8", newline="\n"
        )
        for code in languages
    ]
    lines, characters = 0, [0, 0]
    with outputs[0], outputs[1]:
        for texts in _good_pairs(paths, limit=limit, quarantine=quarantine, tally=tally):
            for side in (0, 1):
                outputs[side].write(texts[side] + "\n")
                characters[side] += len(texts[side])
            lines += 1
    tally.add(split, languages, lines=lines, characters=characters)


def _good_pairs(
    paths: tuple[Path, Path], *, limit: int | None, quarantine: Quarantine, tally: Tally
) -> Iterator[list[str]]:
    """At most ``limit`` pairs of lines that are text; both files are read to their ends."""
    bad = good = 0
    for number, raws in enumerate(_in_step(paths), start=1):
        if limit is not None and good >= limit:
            tally.counts["lines_over_limit"] += 1
            continue
        texts: list[str] = []
        for path, raw in zip(paths, raws, strict=True):
            try:
                texts.append(_decode(raw, is_first=number == 1, counts=tally.counts))
            except _NoText as error:
                quarantine.add(path, line=number, reason=str(error))
        if len(texts) == len(paths):
            good += 1
            yield texts
        else:
            bad += 1
    tally.counts["quarantined"] += bad
    if bad > max(QUARANTINED_LINES, QUARANTINED_SHARE * (good + bad)):
        raise DataError(
            f"{paths[0]} and {paths[1]}: {bad} of {good + bad} lines are not UTF-8 text: "
            "convert the files to UTF-8 or fetch them again."
        )


def _in_step(paths: tuple[Path, Path]) -> Iterator[tuple[bytes, bytes]]:
    """Lines of both files; DataError with both counts where one file is longer."""
    first_lines = second_lines = 0
    for first, second in zip_longest(iterate_raw_lines(paths[0]), iterate_raw_lines(paths[1])):
        first_lines += first is not None
        second_lines += second is not None
        if first is not None and second is not None:
            yield first, second
    if first_lines != second_lines:
        raise DataError(
            f"{paths[0]} has {first_lines} lines and {paths[1]} has {second_lines}: line n of one "
            "must translate line n of the other, so fetch or align them again."
        )


def _decode(raw: bytes, *, is_first: bool, counts: Counter[str]) -> str:
    """One line as text; raises _NoText for a NUL or invalid UTF-8."""
    if is_first and raw.startswith(codecs.BOM_UTF8):
        raw = raw.removeprefix(codecs.BOM_UTF8)
        counts["byte_order_marks"] += 1
    if raw.endswith(b"\r"):
        raw = raw[:-1]
        counts["carriage_returns"] += 1
    if b"\0" in raw:
        counts["lines_with_nul"] += 1
        raise _NoText("nul")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        counts["lines_with_invalid_utf8"] += 1
        raise _NoText("invalid_utf8") from error
    if _INNER_SEPARATORS.search(text):
        counts["lines_with_inner_separator"] += 1
    if not text or text.isspace():
        counts["lines_without_text"] += 1
    return text


def _write_phrases(
    phrases: list[Phrase], pair: str, split: Split, writer: ArtifactWriter, *, tally: Tally
) -> None:
    languages = pair.split("-")
    for code in languages:
        with writer.path(text_name(split, pair, code)).open(
            "w", encoding="utf-8", newline="\n"
        ) as stream:
            stream.writelines(f"{phrase[code]}\n" for phrase in phrases)
    characters = [sum(len(phrase[code]) for phrase in phrases) for code in languages]
    tally.add(split, languages, lines=len(phrases), characters=characters)


def _require_languages(wanted: set[str], pairs: Iterable[Sequence[str]]) -> None:
    if missing := sorted(wanted - {code for pair in pairs for code in pair}):
        raise ConfigError(
            f"corpus.languages asks for {', '.join(missing)}, which no pair of the languages asked "
            "for has: correct corpus.languages, or add the other language of a pair."
        )


def _limit(config: CorpusConfig, split: Split) -> int | None:
    match split:
        case "train":
            return config.max_train_lines
        case "valid":
            return config.max_valid_lines
        case "test":
            return config.max_test_lines


if __name__ == "__main__":
    from pipeline.cli import stage_main

    sys.exit(stage_main("import_corpus"))
