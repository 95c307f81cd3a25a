"""Stage import_corpus: turn raw text of any supported form into a corpus.

Reads raw text through the reader of ``corpus.source``, one module of ``readers/`` and one case of
:func:`read_raw`. Makes a corpus (``pipeline/artifacts/corpus.py``), with ``quarantine.jsonl`` for
every line that is not text. Characters that some tools take for line ends become spaces.

Pairs of files are imported by several worker processes; their number does not change the result;
other sources by one process. A file with text in several languages is read once, in blocks, for all
pairs of its languages: a text is checked once, whatever the number of pairs it is in. Memory holds
one block, and per section a sample of its lines.
"""

import shutil
import sys
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Self, TextIO

from data_prep.raw_lines import (
    MALFORMED,
    QUARANTINE_NAME,
    REASONS,
    Checked,
    CheckedLine,
    EvenSample,
    LineCounts,
    are_swapped,
    checked,
    checked_lines,
    code_warning,
    good_lines,
    refuse_damaged,
    script_of_language,
)
from data_prep.readers.cldr import read_phrases
from data_prep.readers.file_pairs import read_listed, read_moses, read_trees
from data_prep.readers.hub import read_hub
from data_prep.readers.raw_text import (
    COLUMNS_IGNORED,
    FILES_IGNORED,
    FOLDERS_IGNORED,
    FOLDERS_REPEATED,
    ONE_SIDED,
    REPEATED,
    SPLITS,
    UNTAGGED,
    FilesInStep,
    LinesOfPair,
    RawText,
    Record,
    RecordFile,
    Section,
    SkippedText,
    checked_text,
    misread,
    select_sections,
    unfit_source,
)
from data_prep.readers.tables import read_tables
from data_prep.readers.tmx import read_tmx
from data_prep.settings import CorpusConfig
from pipeline.artifacts.artifact import ArtifactWriter
from pipeline.artifacts.corpus import Split, text_name
from pipeline.config.settings import shown
from pipeline.distributed.process import track
from pipeline.distributed.workers import open_pool, with_shared
from pipeline.errors import DataError, without_case
from pipeline.languages import codes_of_setting, count_scripts, is_known, meant_code
from pipeline.stage import StageCall
from pipeline.terminal import counted, listed, tallied

BLOCK_RECORDS, BLOCK_BYTES = 2**13, 2**23
"""Records of a block, and bytes of their texts; a block ends with the record that reaches one."""

CHUNK_LINES = 32
"""Lines written at a time, each of which may have 1 MiB."""

Spellings = tuple[str, ...]
"""Spellings of one language in a file, by preference."""


def run(call: StageCall) -> None:
    """Import the raw text of the recipe's source."""
    with call.new_artifact() as writer:
        raw = checked_text(read_raw(call), call.recipe.corpus.source)
        raw = select_sections(raw, call.recipe.corpus)
        untested, absent = untested_of(call, raw)
        importing = Importing(writer, call.recipe.corpus, raw, untested=untested)
        found = import_all(importing, processes=call.processes, mpi=call.mpi)
        if raw.is_found:
            importing.join_quarantine()
        totals = Totals(raw.left_out)
        for number in range(len(raw.sections)):
            totals.add(found[number])
        writer.statistics |= statistics(totals)
        writer.summary += summary(totals)
        if absent:
            said = f"corpus.untested names {listed(absent)}, and the text has no such language"
            writer.summary.append(said)


READ_BY = {
    "columns": (("tsv", "columns", "listed"), "tsv, columns or listed"),
    "files": (("listed",), "listed"),
}
"""Setting of the corpus → sources that read it, which a new reader may join, and their names."""


def read_raw(call: StageCall) -> RawText:
    """Read the raw text of the recipe's source; a new reader is one more case."""
    config, raw = call.recipe.corpus, call.raw.get("raw")
    for name, (sources, others) in READ_BY.items():
        if config.source not in sources and getattr(config, name):
            problem = f"it does not read corpus.{name}. Leave that out, or choose {others}"
            raise unfit_source(config.source, problem)
    match config.source:
        case "tree":
            return read_trees(raw, config)
        case "cldr":
            if raw is not None:
                fix = "Leave --raw out, or choose a source that reads it"
                raise unfit_source("cldr", f"'cldr' makes its own text. {fix}")
            return read_phrases(config)
        case "hub":
            return read_hub(raw, config)
        case "tmx":
            return read_tmx(raw, config)
        case "tsv" | "columns":
            return read_tables(raw, config)
        case "moses":
            return read_moses(raw, config)
        case "listed":
            return read_listed(raw, config)
        case unknown:
            raise without_case("read_raw", unknown)


def untested_of(call: StageCall, raw: RawText) -> tuple[frozenset[str], list[str]]:
    """Return the languages of the raw text that ``corpus.untested`` means, and names of others.

    A recipe of many languages may import the text of a few, so others are no error.
    """
    names = call.recipe.corpus.untested
    present = {code for section in raw.sections for code in section.languages}
    absent = [one for one in names if is_known(one) and meant_code(one, present) not in present]
    among = [one for one in names if one not in absent]
    found = codes_of_setting(among, present, setting="corpus.untested", place="the text")
    return frozenset(found.values()), absent


@dataclass(frozen=True)
class ImportedSection:
    """Counts of a section, for the statistics and the summary."""

    section: Section
    """The section, without its lines."""
    counts: LineCounts
    characters: list[int]
    """Characters of each side, without line ends."""
    letters: list[Counter[str]]
    """Script → letters of a sample, per side; empty for text made here."""
    is_swapped: bool
    """Whether the sides look swapped, and this was accepted."""


@dataclass(frozen=True)
class Importing:
    """Input of all sections, sent to a worker once."""

    writer: ArtifactWriter
    config: CorpusConfig
    raw: RawText
    untested: frozenset[str]
    """Languages without test lines."""
    kept: Counter[tuple[str, Split]] = field(default_factory=Counter)
    """Pair and split → lines that this process has kept of its sections."""

    def limit(self, section: Section) -> int | None:
        """Return the most lines that a section may add to its pair and split; None for all."""
        config, split = self.config, section.split
        if split == "test" and self.untested.intersection(section.languages):
            return 0
        limits: dict[Split, int | None] = {
            "train": config.max_train_lines,
            "valid": config.max_valid_lines,
            "test": config.max_test_lines,
        }
        limit = limits[split]
        return None if limit is None else limit - self.kept[section.pair, split]

    def quarantine_path(self, number: int) -> Path:
        """Return the path of a section's quarantine, until all are joined."""
        return self.writer.path(f"{QUARANTINE_NAME}.{number}")

    def join_quarantine(self) -> None:
        """Join the quarantines of all sections in their order."""
        with self.writer.path(QUARANTINE_NAME).open("wb") as whole:
            for path in map(self.quarantine_path, range(len(self.raw.sections))):
                if path.exists():
                    with path.open("rb") as part:
                        shutil.copyfileobj(part, whole)
                    path.unlink()


class SectionImport:
    """A section while its lines are appended to the text of its pair and split."""

    def __init__(self, importing: Importing, number: int) -> None:
        self.number = number
        self.section = section = importing.raw.sections[number]
        self._importing, self._limit = importing, importing.limit(section)
        self._paths = [
            importing.writer.path(text_name(section.split, section.pair, code))
            for code in section.languages
        ]
        self._quarantine_path = importing.quarantine_path(number)
        self._streams: list[TextIO] = []
        self._counts, self._characters, self._sample = LineCounts(), [0, 0], EvenSample()

    def __enter__(self) -> Self:
        """Open the text files, to which several sections may append."""
        self._streams = [path.open("a", encoding="utf-8", newline="\n") for path in self._paths]
        return self

    def __exit__(self, *_: object) -> None:
        for stream in self._streams:
            stream.close()

    def add(self, lines: Iterable[CheckedLine], *, rest: Iterable[object] | None = None) -> None:
        """Append the lines that are text, and quarantine the others; ``rest`` as in good_lines."""
        good = good_lines(
            lines,
            self.section.sources,
            counts=self._counts,
            quarantine_path=self._quarantine_path,
            limit=self._limit,
            to_the_end=self.section.to_the_end,
            rest=rest,
        )
        while chunk := list(islice(good, CHUNK_LINES)):
            first, second = zip(*chunk, strict=True)
            self._append(first, second)

    def add_plain(self, first: Sequence[str], second: Sequence[str]) -> None:
        """Append the texts of two sides that were checked before, as far as they are wanted."""
        counts, lines = self._counts, len(first)
        room = lines if self._limit is None else min(max(self._limit - counts.kept, 0), lines)
        counts.kept += room
        counts.over_limit += lines - room
        if room:
            self._append(first[:room], second[:room])

    def _append(self, first: Sequence[str], second: Sequence[str]) -> None:
        for side, (stream, texts) in enumerate(zip(self._streams, (first, second), strict=True)):
            text = "\n".join(texts)
            stream.write(text + "\n")
            self._characters[side] += len(text) - (len(texts) - 1)
        self._sample.offer(first, second)

    def end(self) -> ImportedSection:
        """Return the counts.

        Raises:
            DataError: Too many lines are not text, or both sides of found text are swapped.
        """
        section, sample = self.section, self._sample
        refuse_damaged(section.sources, self._counts)
        is_swapped = self._importing.raw.is_found and are_swapped(sample, section.spellings)
        if is_swapped and self._importing.config.swapped_sides == "refuse":
            (first, second), (one, other) = section.spellings, section.sources
            names = "names of the two files" if one.name != other.name else "languages of its sides"
            raise DataError(
                f"{one.place} reads as {second} and {other.place} as {first}. Exchange the "
                f"{names}, or set corpus.swapped_sides to 'accept' if they are right."
            )
        self._importing.kept[section.pair, section.split] += self._counts.kept
        return ImportedSection(
            replace(section, lines=()),
            self._counts,
            characters=self._characters,
            letters=[
                count_scripts("".join(sample.side(side)))
                for side in (0, 1)
                if self._importing.raw.is_found
            ],
            is_swapped=is_swapped,
        )


def import_all(importing: Importing, *, processes: int, mpi: bool) -> dict[int, ImportedSection]:
    """Import all sections and return the counts of each by its number."""
    groups, found = section_groups(importing.raw), dict[int, ImportedSection]()
    can_spread = all(isinstance(one.lines, FilesInStep) for one in importing.raw.sections)
    if not groups or not can_spread or (processes == 1 and not mpi):
        for group in track(groups, label="import"):
            found |= import_group(importing, group)
        return found
    with open_pool(min(processes, len(groups)), mpi=mpi, shared=importing) as pool:
        results = pool.in_order(with_shared(import_group), groups)
        for of_group in track(results, label="import", total=len(groups)):
            found |= of_group
    return found


def section_groups(raw: RawText) -> list[list[int]]:
    """Return the numbers of sections by groups, which are imported in this order or by workers.

    A group has the sections of a file with text in several languages, or of one pair and split.
    """
    groups: dict[Hashable, list[int]] = {file: [] for file in raw.files}
    can_spread = all(isinstance(section.lines, FilesInStep) for section in raw.sections)
    for number, section in enumerate(raw.sections):
        lines = section.lines
        if isinstance(lines, LinesOfPair):
            groups.setdefault(lines.file, []).append(number)
        else:
            groups.setdefault((section.pair, section.split) if can_spread else number, []).append(
                number
            )
    return [group for group in groups.values() if group]


def import_group(importing: Importing, numbers: Sequence[int]) -> dict[int, ImportedSection]:
    """Import the sections of a group, in any process."""
    found = {}
    for number in numbers:
        lines = importing.raw.sections[number].lines
        if isinstance(lines, LinesOfPair):
            return import_records(importing, lines.file, numbers)
        with SectionImport(importing, number) as importer:
            raw = iter(lines)
            importer.add(checked_lines(raw, reader=importing.config.source), rest=raw)
        found[number] = importer.end()
    return found


def import_records(
    importing: Importing, file: RecordFile, numbers: Sequence[int]
) -> dict[int, ImportedSection]:
    """Read a file once for all pairs of its languages."""
    sides: dict[SectionImport, tuple[Spellings, Spellings]] = {}
    for number in numbers:
        with SectionImport(importing, number) as importer:  # without records, texts are empty
            lines = importer.section.lines
            assert isinstance(lines, LinesOfPair)
            sides[importer] = lines.spellings
    languages = {spellings for both in sides.values() for spellings in both}
    records = track(file.records(), label="import records")
    for block in blocks_of(records, languages, reader=importing.config.source):
        for importer, (first, second) in sides.items():
            block.give(importer, first, second)
        if not file.is_surveyed:
            importing.raw.left_out[ONE_SIDED] += block.num_one_sided
    return {importer.number: importer.end() for importer in sides}


@dataclass
class Block:
    """Records that follow each other, with their checked texts."""

    texts: dict[Spellings, list[Checked | None]]
    """Language → text in each record; None where it has none."""
    numbers: list[int] = field(default_factory=list)
    """Line of each record in the file."""
    num_one_sided: int = 0
    """Records with text in one language of a pair but not in the other, over the pairs read."""

    def give(self, importer: SectionImport, first: Spellings, second: Spellings) -> None:
        """Give records with text in both languages, and malformed records, to their section."""
        one, other = self.texts[first], self.texts[second]
        with importer:
            if self.is_plain[first] and self.is_plain[second]:
                importer.add_plain(one, other)  # type: ignore[arg-type]  # all are strings
                return
            sides = zip(one, other, strict=True)
            lines = [line for line in zip(self.numbers, sides, strict=True) if None not in line[1]]
            importer.add(lines)  # type: ignore[arg-type]  # None is among none of them
        num_texts = 2 * len(self.numbers) - one.count(None) - other.count(None)
        self.num_one_sided += num_texts - 2 * len(lines)

    @cached_property
    def is_plain(self) -> dict[Spellings, bool]:
        """Return language → whether every record has text in it that needed no repair."""
        return {name: {*map(type, texts)} == {str} for name, texts in self.texts.items()}


def blocks_of(
    records: Iterable[Record], languages: Collection[Spellings], *, reader: str
) -> Iterator[Block]:
    """Yield the records of a file in blocks, with the texts in these languages.

    Raises:
        ConfigError: The reader returned something else than records of bytes.
    """
    block, num_bytes = Block({spellings: [] for spellings in languages}), 0
    for record in records:
        try:
            if not isinstance(record.line, int):
                raise TypeError
            block.numbers.append(record.line)
            is_first = record.line == 1
            for spellings, texts in block.texts.items():
                raw = next((record.texts[name] for name in spellings if name in record.texts), None)
                if record.is_malformed:
                    texts.append(MALFORMED)
                elif raw is None:
                    texts.append(None)
                else:
                    texts.append(checked(raw, is_first=is_first))
                    num_bytes += len(raw)
        except (AttributeError, TypeError) as error:
            raise misread(reader, shown(repr(record)), "a Record of texts in bytes") from error
        if len(block.numbers) >= BLOCK_RECORDS or num_bytes >= BLOCK_BYTES:
            yield block
            block, num_bytes = Block({spellings: [] for spellings in languages}), 0
    if block.numbers:
        yield block


@dataclass
class Totals:
    """Sums over all sections, for the statistics and the summary."""

    left_out: SkippedText
    pairs: dict[str, dict[Split, int]] = field(default_factory=dict)
    characters: dict[str, dict[Split, Counter[str]]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    trained: set[str] = field(default_factory=set)
    """Pairs that came with training text, even an empty file."""
    empty_sides: set[str] = field(default_factory=set)
    """Sides that have lines but no text, as ``de-en train de``."""
    no_text: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(Reason, language) → lines that are not text."""
    swapped: list[str] = field(default_factory=list)
    """Accepted sections that look swapped, as ``de-en train``."""
    letters: dict[str, Counter[str]] = field(default_factory=dict)
    """Language → script → letters of a sample; no languages for text made here."""
    spellings: dict[str, set[str]] = field(default_factory=dict)
    """Language → its spellings in the raw text."""

    def __post_init__(self) -> None:
        self.counts += self.left_out

    def add(self, found: ImportedSection) -> None:
        """Add the counts of a section."""
        section, counts = found.section, found.counts
        pair, split = section.pair, section.split
        self.pairs.setdefault(pair, dict.fromkeys(SPLITS, 0))[split] += counts.kept
        self.counts += counts.statistics()
        if split == "train":
            self.trained.add(pair)
        if found.is_swapped:
            self.swapped.append(f"{pair} {split}")
        characters = self.characters.setdefault(pair, {}).setdefault(split, Counter())
        for side, code in enumerate(section.languages):
            characters[code] += found.characters[side]
            for reason, number in counts.no_text[side].items():
                self.no_text[reason, code] += number
            if counts.kept and counts.without_text[side] >= counts.kept:
                self.empty_sides.add(f"{pair} {split} {code}")
        for side, letters in enumerate(found.letters):
            code = section.languages[side]
            self.letters.setdefault(code, Counter()).update(letters)
            self.spellings.setdefault(code, set()).add(section.spellings[side])

    @property
    def emptied(self) -> list[str]:
        """Return the pairs that came with training text but have no training line."""
        return sorted(pair for pair in self.trained if not self.pairs[pair]["train"])


def statistics(totals: Totals) -> dict[str, object]:
    """Return lines and characters per pair and split, counts of defects, and the languages."""
    return {
        "pairs": totals.pairs,
        "characters": totals.characters,
        "counts": dict(sorted(totals.counts.items())),
        "emptied": totals.emptied,
        "languages": {
            code: {
                "spellings": sorted(spellings),
                "script": script_of_language(totals.letters[code], spellings),
            }
            for code, spellings in sorted(totals.spellings.items())
        },
    }


def summary(totals: Totals) -> list[str]:
    """Summarize lines read, kept, left out and changed, missing splits, and suspicious text."""
    kept = {split: sum(counts[split] for counts in totals.pairs.values()) for split in SPLITS}
    read = counted(totals.counts["lines_read"], "line")
    splits = ", ".join(f"{split} {number:,}" for split, number in kept.items())
    pairs = counted(len(totals.pairs), "pair")
    parts = [_left_out(totals), _changed(totals), _lacking(totals), _suspicious(totals)]
    return [
        f"read {read} of {pairs}, kept {sum(kept.values()):,} ({splits})",
        *filter(None, parts),
    ]


def _left_out(totals: Totals) -> str:
    counts, names_of, parts = totals.counts, totals.left_out.names, []
    if counts["quarantined"]:
        sides = {
            f"{reason} in {code}": totals.no_text[reason, code]
            for reason in REASONS
            for code in sorted(totals.spellings)
        }
        listing = listed(tallied({name: number}) for name, number in sides.items() if number)
        pairs = counted(counts["quarantined"], "line")
        parts.append(f"{pairs} and their counterparts into {QUARANTINE_NAME} ({listing})")
    if counts["lines_over_limit"]:
        parts.append(f"{counts['lines_over_limit']:,} beyond the lines wanted per pair")
    for name, noun, more in (
        ("pairs_not_selected", "pair", "of other languages"),
        (FOLDERS_IGNORED, "folder", "not named like a pair"),
        (FILES_IGNORED, "file", "of another form"),
        (COLUMNS_IGNORED, "column", "not named like a language"),
        (FOLDERS_REPEATED, "folder", "with the text of another"),
        (ONE_SIDED, "record", "without text in one of its languages"),
        (UNTAGGED, "segment", "without a language code, or with a private one (x-…)"),
        (REPEATED, "segment", "after another in the same language of one unit"),
    ):
        if counts[name]:
            names = f" ({listed(map(shown, names_of[name]))})" if name in names_of else ""
            parts.append(f"{counted(counts[name], noun)} {more}{names}")
    return f"left out: {'; '.join(parts)}" if parts else ""


def _changed(totals: Totals) -> str:
    names = {
        "lines_with_inner_separator": "odd separators made spaces in",
        "carriage_returns": "carriage returns removed from",
        "byte_order_marks": "byte order marks removed from",
        "lines_without_text": "no text (kept) in",
    }
    counts = totals.counts
    return ", ".join(
        f"{text} {counted(counts[name], 'line')}" for name, text in names.items() if counts[name]
    )


def _lacking(totals: Totals) -> str:
    """Summarize pairs and sides without usual parts; pairs for tests only may lack training."""
    trained = [pair for pair, counts in totals.pairs.items() if counts["train"]]
    lacking = {
        "no training data left": totals.emptied,
        "no validation set": [pair for pair in trained if not totals.pairs[pair]["valid"]],
        "no test lines": [pair for pair in trained if not totals.pairs[pair]["test"]],
        "no lines at all": [
            pair for pair, counts in totals.pairs.items() if not any(counts.values())
        ],
        "only empty lines": sorted(totals.empty_sides),
    }
    parts = [f"{name}: {listed(pairs)}" for name, pairs in lacking.items() if pairs]
    return "; ".join(parts if trained else ["no pair has training lines", *parts])


def _suspicious(totals: Totals) -> str:
    warnings = [
        warning
        for code, spellings in sorted(totals.spellings.items())
        if (warning := code_warning(totals.letters[code], spellings))
    ]
    if totals.swapped:
        warnings.append(f"sides look swapped in {listed(totals.swapped)}")
    merged = [
        f"{code} ({listed(sorted(spellings))})"
        for code, spellings in sorted(totals.spellings.items())
        if len(spellings) > 1
    ]
    if merged:
        warnings.append(f"several spellings are one language: {listed(merged)}")
    return f"look at: {'; '.join(warnings)}" if warnings else ""


if __name__ == "__main__":
    from pipeline.cli import stage_main

    sys.exit(stage_main("import_corpus"))
