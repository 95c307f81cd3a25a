"""Stage import_tests: turn external test sets into a corpus of validation and test lines.

Reads a folder in a layout named below. Makes a corpus without training lines, and
``quarantine.jsonl``. Files of one language each are joined into pairs, with the pivot or each with
each. A line that is not text in one file is left out of all files aligned with it.

Layouts, plain or ``.gz``, in the folder itself or up to two folders below it:

- FLORES-200: ``dev/eng_Latn.dev`` and ``devtest/eng_Latn.devtest``, one file per language;
- NTREX-128: ``newstest2019-src.eng.txt`` and ``newstest2019-ref.deu.txt``, one file per language;
- pairs: ``NAME.de-en.de`` and ``NAME.de-en.en``.

``dev`` is the validation split, ``devtest`` and NTREX the test split. Pairs are test lines unless
their name contains ``dev`` (not ``devtest``) or ``valid``.
"""

import re
import shutil
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from data_prep.raw_lines import (
    QUARANTINE_NAME,
    REASONS,
    LineCounts,
    checked_lines,
    good_lines,
    refuse_damaged,
)
from data_prep.readers.raw_text import (
    SPLITS,
    FilesInStep,
    holds_no,
    no_counterpart,
    no_folder,
    one_language,
    same_text,
    source_of,
)
from data_prep.settings import CorpusConfig, OutsideTestsConfig
from pipeline.artifacts.artifact import ArtifactWriter
from pipeline.artifacts.corpus import Split, pair_name, text_name
from pipeline.artifacts.raw_input import refuse_no_file
from pipeline.distributed.process import track
from pipeline.errors import ConfigError, DataError
from pipeline.languages import Regions, distinct_codes, find_code, nearest_codes
from pipeline.stage import StageCall
from pipeline.terminal import counted, listed, tallied

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
class SetFile:
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
    spellings: dict[str, set[str]]
    """Language → spellings in the files that are read."""
    other_versions: tuple[str, ...]
    """Names of files that are not read because another file of the same language is."""
    not_wanted: int
    """Files of languages that were not asked for, or without another language of a pair."""
    ignored: int
    """Files with names that belong to no layout."""


@dataclass(frozen=True)
class ImportedFiles:
    """Aligned files, and the counts of their lines."""

    files: AlignedFiles
    counts: LineCounts
    """Counts with a side per language, in the order of the files."""
    characters: Counter[str] = field(default_factory=Counter)
    """Language → characters of its good lines."""


def run(call: StageCall) -> None:
    """Write the lines of every language once per pair that it is in."""
    root, recipe = call.raw["raw"].only_path(), call.recipe
    tests = find_tests(root, recipe.tests, recipe.corpus)
    with call.new_artifact() as writer:
        writer.path(QUARANTINE_NAME).touch()
        found = [
            import_aligned(files, root, writer) for files in track(tests.aligned, label="import")
        ]
        if not any(one.counts.kept for one in found):
            raise DataError(f"{root} has no lines. Fetch its files again.")
        writer.statistics |= statistics(tests, found)
        writer.summary += summary(tests, found)


def import_aligned(files: AlignedFiles, root: Path, writer: ArtifactWriter) -> ImportedFiles:
    """Read aligned files once, in step, and copy their good lines to all their pairs."""
    sources = [source_of(path, root) for path in files.paths.values()]
    found = ImportedFiles(files, LineCounts.for_sides(len(sources)))
    lines = FilesInStep(tuple(files.paths.values()))
    with TemporaryDirectory(dir=writer.directory) as name:
        texts = {code: Path(name) / code for code in files.paths}
        with ExitStack() as stack:
            streams = [
                stack.enter_context(path.open("w", encoding="utf-8", newline="\n"))
                for path in texts.values()
            ]
            for line in good_lines(
                checked_lines(lines, reader="import_tests", sides=len(sources)),
                sources,
                counts=found.counts,
                quarantine_path=writer.path(QUARANTINE_NAME),
            ):
                for code, stream, text in zip(texts, streams, line, strict=True):
                    stream.write(text + "\n")
                    found.characters[code] += len(text)
        refuse_damaged(sources, found.counts)
        for pair in files.pairs:
            for code in pair:
                path = writer.path(text_name(files.split, pair_name(*pair), code))
                shutil.copyfile(texts[code], path)
    return found


def statistics(tests: OutsideTests, found: Sequence[ImportedFiles]) -> dict[str, object]:
    """Return lines and characters per pair and split, and counts of defects."""
    pairs: dict[str, dict[Split, int]] = {}
    characters: dict[str, dict[Split, dict[str, int]]] = {}
    for one in found:
        split = one.files.split
        for pair in one.files.pairs:
            name = pair_name(*pair)
            pairs.setdefault(name, dict.fromkeys(SPLITS, 0))[split] = one.counts.kept
            sides = {code: one.characters[code] for code in pair}
            characters.setdefault(name, {})[split] = sides
    return {
        "pairs": pairs,
        "characters": characters,
        "counts": _counts(found),
        "languages": {
            code: {"spellings": sorted(s)} for code, s in sorted(tests.spellings.items())
        },
        "layout": tests.layout,
        "other_versions": list(tests.other_versions),
    }


def summary(tests: OutsideTests, found: Sequence[ImportedFiles]) -> list[str]:
    """Summarize the layout and lines read, the lines set aside, and the files not read."""
    lines, counts = Counter[Split](), _counts(found)
    tested, pairs = set[tuple[str, str]](), set[tuple[str, str]]()
    for one in found:
        lines[one.files.split] += one.counts.kept
        pairs |= {*one.files.pairs}
        if one.files.split == "test" and one.counts.kept:
            tested |= {*one.files.pairs}
    parts = [
        f"{tests.layout}: {counted(lines['test'], 'test line')} and "
        f"{counted(lines['valid'], 'valid line')} of "
        f"{counted(len(tests.spellings), 'language')}, in {counted(len(pairs), 'pair')} "
        f"({counted(2 * len(tested), 'test direction')})"
    ]
    if counts["quarantined"]:
        reasons = Counter[str]()
        for one in found:
            for code, side in zip(one.files.paths, one.counts.no_text, strict=True):
                reasons.update({f"{reason} in {code}": side[reason] for reason in REASONS})
        parts.append(
            f"left out: {counted(counts['quarantined'], 'line')} in all languages, into "
            f"{QUARANTINE_NAME} ({tallied(dict(sorted(reasons.items())))})"
        )
    if counts["lines_without_text"]:
        parts.append(f"no text (kept) in {counted(counts['lines_without_text'], 'line')}")
    if tests.other_versions:
        names = listed(tests.other_versions)
        parts.append(f"not read, since another file of the same language is: {names}")
    if tests.ignored or tests.not_wanted:
        ignored = {"of other languages": tests.not_wanted, "of other names": tests.ignored}
        parts.append(f"files not read: {tallied(ignored)}")
    return parts


def _counts(found: Sequence[ImportedFiles]) -> Counter[str]:
    return sum((one.counts.statistics() for one in found), Counter())


def find_tests(root: Path, config: OutsideTestsConfig, corpus: CorpusConfig) -> OutsideTests:
    """Find the test sets in a folder by the names of its files."""
    regions = corpus.regions
    if not root.is_dir():
        raise no_folder(root, f"a folder with {LAYOUTS}")
    paths = list(_files(root, depth=DEPTH))
    found = [file for path in paths if (file := describe_file(path))]
    layout = _one_layout(root, found)
    selected = select_files(found, config.languages, regions=regions)
    codes = _codes(selected, regions)
    read, aligned = _align(selected, codes, config, corpus.pivot)
    if not any(files.pairs for files in aligned):
        raise ConfigError(
            f"{root} has no pair of the languages that were asked for "
            f"({listed(config.languages) or 'all'}). Add the other language of a pair."
        )
    # A split may have no file but the pivot's, which is of no use then.
    unpaired = {path for one in aligned if not one.pairs for path in one.paths.values()}
    spellings: dict[str, set[str]] = {}
    for file in read:
        if file.path not in unpaired:
            spellings.setdefault(codes[file.spelling], set()).add(file.spelling)
    return OutsideTests(
        layout=layout,
        aligned=tuple(files for files in aligned if files.pairs),
        spellings=spellings,
        other_versions=tuple(sorted(file.path.name for file in selected if file not in read)),
        not_wanted=len(found) - len(selected) + len(unpaired),
        ignored=len(paths) - len(found),
    )


def describe_file(path: Path) -> SetFile | None:
    """Describe a file by its name; None if it belongs to no test set."""
    if match := _FLORES.fullmatch(path.name):
        split: Split = "valid" if match["split"] == "dev" else "test"
        return SetFile(path, "FLORES-200", split, match["code"])
    if match := _NTREX.fullmatch(path.name):
        is_source = match["role"] == "src"
        return SetFile(
            path, "NTREX-128", "test", match["code"], set_name=match["name"], is_source=is_source
        )
    match = _PAIR.fullmatch(path.name)
    if match is None:
        return None
    split = "valid" if _VALID_NAME.search(match["name"]) else "test"
    pair = (match["first"], match["second"])
    for spelling in pair:
        if spelling.lower() == match["code"].lower():
            return SetFile(path, "pairs", split, spelling, set_name=match["name"], pair=pair)
    return None


def select_files(
    files: Sequence[SetFile], wanted: Sequence[str], *, regions: Regions
) -> list[SetFile]:
    """Return the files of the wanted languages, in any usual spelling; all if none is named."""
    if not wanted:
        return list(files)
    codes = _codes(files, regions)
    present = sorted(set(codes.values()))
    chosen = {spelling: find_code(spelling, present) for spelling in wanted}
    missing = [spelling for spelling, code in chosen.items() if code is None]
    if missing:
        near = sorted({code for spelling in missing for code in nearest_codes(spelling, present)})
        raise ConfigError(
            f"tests.languages asks for {', '.join(missing)}, but no file is in it. Correct it "
            f"(nearest codes that are there: {listed(near or present)})."
        )
    return [
        file for file in files if {codes[one] for one in file.languages} <= set(chosen.values())
    ]


def _codes(files: Sequence[SetFile], regions: Regions) -> dict[str, str]:
    """Return spelling → code; scripts count if one language has files in several."""
    spellings = {spelling for file in files for spelling in file.languages}
    return distinct_codes(spellings, regions=regions)


def _files(directory: Path, *, depth: int) -> Iterator[Path]:
    """Yield the files of a folder and its subfolders by name, except hidden files."""
    for entry in sorted(directory.iterdir()):
        if entry.name.startswith("."):
            continue
        refuse_no_file(entry)
        if entry.is_file():
            yield entry
        elif entry.is_dir() and depth:
            yield from _files(entry, depth=depth - 1)


def _one_layout(root: Path, files: Sequence[SetFile]) -> Layout:
    examples = {file.layout: file.path for file in reversed(files)}
    match list(examples):
        case []:
            other = "for folders like en-de with test.en and test.de, use import_corpus"
            raise holds_no(root, "test sets", f"a folder with {LAYOUTS}; {other}")
        case [layout]:
            return layout
    raise _several([f"{layout} ({path})" for layout, path in examples.items()])


def _several(names: Sequence[str]) -> DataError:
    return DataError(
        f"There are several test sets, {listed(names)}. Import each from its own folder."
    )


def _align(
    files: Sequence[SetFile], codes: dict[str, str], config: OutsideTestsConfig, pivot: str
) -> tuple[list[SetFile], list[AlignedFiles]]:
    """Return the files to read, aligned per split, and per pair if their names have one."""
    versions: dict[tuple[Split, tuple[str, ...]], dict[str, list[SetFile]]] = {}
    for file in files:
        pair = tuple(sorted({codes[spelling] for spelling in file.pair or ()}))
        if file.pair and len(pair) < 2:
            raise one_language(file.path)
        of_code = versions.setdefault((file.split, pair), defaultdict(list))
        of_code[codes[file.spelling]].append(file)
    read: list[SetFile] = []
    aligned = []
    for (split, pair), of_code in sorted(versions.items(), key=lambda item: item[0]):
        names = sorted({file.set_name for of in of_code.values() for file in of})
        if len(names) > 1:
            raise _several(names)
        chosen = {code: _first_version(of, config.languages) for code, of in of_code.items()}
        if missing := sorted({*pair} - chosen.keys()):
            [file] = chosen.values()
            text = f"the {split} text of {missing[0]} to its folder"
            raise no_counterpart(file.path, missing[0], text)
        paths = {code: chosen[code].path for code in sorted(chosen)}
        pairs = [(pair[0], pair[1])] if pair else _pairs(paths, config, pivot)
        aligned.append(AlignedFiles(split, paths, tuple(pairs)))
        read += chosen.values()
    return read, aligned


def _first_version(files: Sequence[SetFile], wanted: Sequence[str]) -> SetFile:
    """Return the file to read, among several of one language and script in one split.

    It is the variant that is wanted, else the source of the translations, else one without
    region (``fra`` before ``fra-CA``), else the first by name (``pes``, ``prs``).
    """
    meant = {find_code(asked, [file.spelling for file in files]) for asked in wanted}

    def preference(file: SetFile) -> tuple[bool, bool, int, str]:
        spelling = file.spelling
        return spelling not in meant, not file.is_source, len(spelling), spelling

    first, *others = sorted(files, key=preference)
    if others and others[0].spelling == first.spelling and not first.is_source:
        what = f"the {first.split} text of {first.spelling}"
        raise same_text(first.path, others[0].path, what)
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


if __name__ == "__main__":
    from pipeline.cli import stage_main

    sys.exit(stage_main("import_tests"))
