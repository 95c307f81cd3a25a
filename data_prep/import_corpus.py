"""Stage import_corpus: turn raw text of any supported form into a corpus.

Reads raw text through the reader of ``corpus.source``, one module of ``readers/`` and one case of
:func:`read_raw`. Makes a corpus (``pipeline/artifacts/corpus.py``), with ``quarantine.jsonl`` for
every line that is not text. Characters that some tools take for line ends become spaces.

Memory is constant. Pairs of files are imported by several worker processes, whose number does not
change the result; other sources by one process. A file with text in several languages is read once
for all of its pairs (``one_pass.py``).
"""

import os
import shutil
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from data_prep.one_pass import PairOfFile, blocks_of
from data_prep.raw_lines import REASONS, LineCounts, Quarantine, good_lines, refuse_damaged
from data_prep.readers.cldr import read_phrases
from data_prep.readers.file_pairs import read_moses, read_trees
from data_prep.readers.hub import read_hub
from data_prep.readers.listed import read_listed
from data_prep.readers.multiway import MultiwayFile, MultiwayText
from data_prep.readers.raw_files import FilesInStep
from data_prep.readers.section import SPLITS, RawText, Section
from data_prep.readers.tables import read_columns, read_tsv
from data_prep.readers.tmx import read_tmx
from data_prep.settings import CorpusConfig
from data_prep.side_languages import EvenSample, are_swapped, code_warning, script_of_language
from pipeline.artifacts.artifact import ArtifactWriter
from pipeline.artifacts.corpus import Split, pair_name, text_name
from pipeline.config.settings import shown
from pipeline.distributed.workers import open_pool, with_shared
from pipeline.errors import DataError
from pipeline.languages import count_scripts
from pipeline.stage import StageCall
from pipeline.terminal import Progress, counted, listed, tallied, track

QUARANTINE_NAME = "quarantine.jsonl"


@dataclass
class Tally:
    """Counts of lines read and written, for the statistics and the summary."""

    pairs: dict[str, dict[Split, int]] = field(default_factory=dict)
    characters: dict[str, dict[Split, dict[str, int]]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    ignored: dict[str, list[str]] = field(default_factory=dict)
    """Statistic (``files_ignored`` and so on) → names."""
    trained: set[str] = field(default_factory=set)
    """Pairs that came with training text, even an empty file."""
    empty_sides: set[str] = field(default_factory=set)
    """Sides that have lines but no text, as ``de-en train de``."""
    no_text: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(Reason, language) → lines that are not text."""
    swapped: list[str] = field(default_factory=list)
    """Accepted sections that look swapped, as ``de-en train``."""
    scripts: dict[str, Counter[str]] = field(default_factory=dict)
    """Language → script → letters of a sample."""
    spellings: dict[str, set[str]] = field(default_factory=dict)
    """Language → its spellings in the raw text."""

    def add(
        self, split: Split, languages: Sequence[str], *, lines: int, characters: Sequence[int]
    ) -> None:
        """Record lines of one split of a pair, and characters per side without line ends."""
        pair = pair_name(*languages)
        counts = self.pairs.setdefault(pair, dict.fromkeys(SPLITS, 0))
        counts[split] += lines
        sides = self.characters.setdefault(pair, {}).setdefault(split, dict.fromkeys(languages, 0))
        for code, number in zip(languages, characters, strict=True):
            sides[code] += number
        if split == "train":
            self.trained.add(pair)

    @property
    def emptied(self) -> set[str]:
        """Return the pairs that came with training text but have no training line."""
        return {pair for pair in self.trained if not self.pairs[pair]["train"]}

    def include(self, other: "Tally") -> None:
        """Add the counts of another tally, of other sections."""
        for pair, counts in other.pairs.items():
            known = self.pairs.setdefault(pair, dict.fromkeys(SPLITS, 0))
            for split, number in counts.items():
                known[split] += number
        for pair, splits in other.characters.items():
            for split, sides in splits.items():
                known_sides = self.characters.setdefault(pair, {}).setdefault(split, {})
                for code, number in sides.items():
                    known_sides[code] = known_sides.get(code, 0) + number
        self.counts.update(other.counts)
        self.trained |= other.trained
        self.empty_sides |= other.empty_sides
        self.no_text.update(other.no_text)
        self.swapped += other.swapped
        for code, letters in other.scripts.items():
            self.scripts.setdefault(code, Counter()).update(letters)
        for code, spellings in other.spellings.items():
            self.spellings.setdefault(code, set()).update(spellings)

    def lines(self, split: Split, languages: Sequence[str]) -> int:
        """Return the number of lines of a split of a pair so far."""
        return self.pairs.get(pair_name(*languages), {}).get(split, 0)

    def add_lines(self, split: Split, languages: Sequence[str], found: LineCounts) -> None:
        """Record the defects found in the lines of a section."""
        self.counts += Counter(
            {
                "lines_read": found.read,
                "quarantined": found.quarantined,
                "lines_over_limit": found.over_limit,
                "byte_order_marks": found.byte_order_marks,
                "carriage_returns": found.carriage_returns,
                "lines_with_inner_separator": found.separators,
                "lines_without_text": sum(found.without_text),
                "lines_with_nul": sum(side["nul"] for side in found.no_text),
                "lines_with_invalid_utf8": sum(side["invalid_utf8"] for side in found.no_text),
                "lines_too_long": sum(side["too_long"] for side in found.no_text),
                "lines_malformed": max(side["malformed"] for side in found.no_text),
            }
        )
        for side, code in enumerate(languages):
            for reason, number in found.no_text[side].items():
                self.no_text[reason, code] += number
            if found.kept and found.without_text[side] >= found.kept:
                self.empty_sides.add(f"{pair_name(*languages)} {split} {code}")

    def add_sample(self, sample: EvenSample, section: Section) -> None:
        """Record the letters of a sample of a section."""
        for side, code in enumerate(section.languages):
            self.spellings.setdefault(code, set()).add(section.spellings[side])
            letters = self.scripts.setdefault(code, Counter())
            letters.update(count_scripts("".join(sample.side(side))))


@dataclass(frozen=True)
class Importing:
    """Input of all groups, sent to a worker once."""

    writer: ArtifactWriter
    config: CorpusConfig


@dataclass(frozen=True)
class SectionGroup:
    """Input of a worker: all sections of one split of one pair."""

    sections: list[Section]
    quarantine_path: Path


def run(call: StageCall) -> None:
    """Import the raw text of the recipe's source."""
    config = call.recipe.corpus
    with call.new_artifact() as writer:
        raw = read_raw(call)
        can_spread = all(isinstance(section.lines, FilesInStep) for section in raw.sections)
        with _quarantine_path(writer, raw).open("w", encoding="utf-8", newline="\n") as stream:
            if isinstance(raw, MultiwayText):
                tally = import_multiway(raw, writer, stream, config=config)
            elif (call.processes > 1 or call.mpi) and can_spread:
                tally = import_spread(
                    raw, writer, stream, config=config, processes=call.processes, mpi=call.mpi
                )
            else:
                tally = Tally()
                for section in track(raw.sections, label="import"):
                    import_one(section, writer, stream, config=config, tally=tally, raw=raw)
        tally.counts += raw.left_out
        tally.ignored |= raw.left_out.names
        writer.statistics |= statistics(tally)
        writer.summary += summary(tally)


def import_multiway(
    raw: MultiwayText, writer: ArtifactWriter, quarantine: TextIO, *, config: CorpusConfig
) -> Tally:
    """Import files with text in several languages; the quarantine keeps the order of sections."""
    parts: dict[int, Tally] = {}
    kept: Counter[tuple[str, Split]] = Counter()
    with Progress("import records") as records:
        for file in raw.files:
            pairs = pairs_of_file(file, raw, writer, config=config, kept=kept)
            read_pairs(file, pairs.values(), records, max_line_bytes=config.max_line_bytes)
            for number, pair in pairs.items():
                section = pair.section
                kept[section.pair, section.split] += pair.counts.kept
                parts[number] = tally_of(pair, config=config)
    tally = Tally()
    for number in sorted(parts):
        tally.include(parts[number])
        append_quarantine(_part_path(writer, number), quarantine)
    return tally


def pairs_of_file(
    file: MultiwayFile,
    raw: MultiwayText,
    writer: ArtifactWriter,
    *,
    config: CorpusConfig,
    kept: Counter[tuple[str, Split]],
) -> dict[int, PairOfFile]:
    """Return number of a section of a file → its pair, of which nothing is read yet.

    Args:
        file: File.
        raw: All sections.
        writer: Corpus, which takes the lines.
        config: Settings.
        kept: Lines of each pair and split from earlier files.
    """
    pairs = {}
    for number, section, lines in raw.of_file(file):
        limit = _limit(config, section.split, section.languages)
        pairs[number] = PairOfFile(
            section,
            lines,
            paths=_text_paths(writer, section.split, section.languages),
            quarantine_path=_part_path(writer, number),
            limit=None if limit is None else limit - kept[section.pair, section.split],
        )
    return pairs


def read_pairs(
    file: MultiwayFile, pairs: Collection[PairOfFile], records: Progress, *, max_line_bytes: int
) -> None:
    """Read a file in one pass for all of its pairs; not at all for none."""
    languages = {spellings for pair in pairs for spellings in pair.lines.spellings}
    if not languages:
        return
    for block in blocks_of(file.records(), languages, max_line_bytes=max_line_bytes):
        for pair in pairs:
            pair.take(block)
        records.advance(len(block.numbers))


def tally_of(pair: PairOfFile, *, config: CorpusConfig) -> Tally:
    """Return the counts of a section, unless too many of its lines are damaged.

    Raises:
        DataError: Too many lines are not text, or each side reads as the other's language.
    """
    section, counts, tally = pair.section, pair.counts, Tally()
    refuse_damaged(section.sources, counts)
    tally.add(section.split, section.languages, lines=counts.kept, characters=pair.characters)
    tally.add_lines(section.split, section.languages, counts)
    look_at_sides(section, pair.sample, config=config, tally=tally)
    return tally


def append_quarantine(part_path: Path, quarantine: TextIO) -> None:
    """Move a part of the quarantine to its end; parts without a line may be missing."""
    if part_path.exists():
        with part_path.open(encoding="utf-8") as part:
            shutil.copyfileobj(part, quarantine)
        part_path.unlink()


def import_spread(
    raw: RawText,
    writer: ArtifactWriter,
    quarantine: TextIO,
    *,
    config: CorpusConfig,
    processes: int,
    mpi: bool,
) -> Tally:
    """Import pairs of files with workers; the quarantine keeps the order of sections."""
    groups = section_groups(raw.sections, writer)
    tally, importing = Tally(), Importing(writer, config)
    with open_pool(min(processes, max(len(groups), 1)), mpi=mpi, shared=importing) as pool:
        found = [pool.submit(with_shared(import_group), group) for group in groups]
        for group, future in track(
            zip(groups, found, strict=True), label="import", total=len(groups)
        ):
            tally.include(future.result())
            append_quarantine(group.quarantine_path, quarantine)
    return tally


def section_groups(sections: Iterable[Section], writer: ArtifactWriter) -> list[SectionGroup]:
    """Group the sections that are written to one file, those of one split and pair."""
    found: dict[tuple[str, Split], list[Section]] = {}
    for section in sections:
        found.setdefault((section.pair, section.split), []).append(section)
    return [
        SectionGroup(group, _part_path(writer, number))
        for number, group in enumerate(found.values())
    ]


def import_group(importing: Importing, group: SectionGroup) -> Tally:
    """Import the sections of a group in order."""
    writer, config, tally = importing.writer, importing.config, Tally()
    raw = RawText(group.sections)
    with group.quarantine_path.open("w", encoding="utf-8", newline="\n") as stream:
        for section in group.sections:
            import_one(section, writer, stream, config=config, tally=tally, raw=raw)
    return tally


def import_one(
    section: Section,
    writer: ArtifactWriter,
    quarantine: TextIO,
    *,
    config: CorpusConfig,
    tally: Tally,
    raw: RawText,
) -> None:
    """Import a section, and check the languages of its sides unless the text was made here."""
    sample = import_section(
        section, writer, config=config, quarantine=Quarantine(quarantine), tally=tally
    )
    if raw.is_found:
        look_at_sides(section, sample, config=config, tally=tally)


def read_raw(call: StageCall) -> RawText:
    """Read the raw text of the recipe's source; a new reader is one more case."""
    config, raw = call.recipe.corpus, call.raw.get("raw")
    match config.source:
        case "tree":
            return read_trees(raw, config)
        case "cldr":
            return read_phrases(config)
        case "hub":
            return read_hub(raw, config)
        case "tmx":
            return read_tmx(raw, config)
        case "tsv":
            return read_tsv(raw, config)
        case "moses":
            return read_moses(raw, config)
        case "columns":
            return read_columns(raw, config)
        case "listed":
            return read_listed(raw, config)


def import_section(
    section: Section,
    writer: ArtifactWriter,
    *,
    config: CorpusConfig,
    quarantine: Quarantine,
    tally: Tally,
) -> EvenSample:
    """Append the lines that are text to their split and pair, and return a sample of them.

    Raises:
        DataError: The lines cannot be read, or too many are not text.
    """
    split, languages = section.split, section.languages
    first, second = (
        path.open("a", encoding="utf-8", newline="\n")
        for path in _text_paths(writer, split, languages)
    )
    found, sample, characters = LineCounts(), EvenSample(), [0, 0]
    limit = _limit(config, split, languages)
    with first, second:
        for one, other in good_lines(
            section.lines,
            section.sources,
            limit=None if limit is None else limit - tally.lines(split, languages),
            max_line_bytes=config.max_line_bytes,
            quarantine=quarantine,
            counts=found,
            to_the_end=section.to_the_end,
        ):
            first.write(one + "\n")
            second.write(other + "\n")
            characters[0] += len(one)
            characters[1] += len(other)
            sample.offer(one, other)
    tally.add(split, languages, lines=found.kept, characters=characters)
    tally.add_lines(split, languages, found)
    return sample


def look_at_sides(
    section: Section, sample: EvenSample, *, config: CorpusConfig, tally: Tally
) -> None:
    """Record the letters of both sides, and refuse swapped ones.

    Raises:
        DataError: Each side reads as the other's language.
    """
    tally.add_sample(sample, section)
    if are_swapped(sample, section.spellings):
        if config.swapped_sides == "refuse":
            raise DataError(_swapped(section))
        tally.swapped.append(f"{section.pair} {section.split}")


def statistics(tally: Tally) -> dict[str, object]:
    """Return lines and characters per pair and split, counts of defects, and the languages."""
    return {
        "pairs": tally.pairs,
        "characters": tally.characters,
        "counts": dict(sorted(tally.counts.items())),
        "emptied": sorted(tally.emptied),
        "languages": {
            code: {
                "spellings": sorted(spellings),
                "script": script_of_language(tally.scripts[code], spellings),
            }
            for code, spellings in sorted(tally.spellings.items())
        },
    }


def summary(tally: Tally) -> list[str]:
    """Summarize lines read, kept, left out and changed, missing splits, and suspicious text."""
    kept = {split: sum(counts[split] for counts in tally.pairs.values()) for split in SPLITS}
    lines = [
        f"read {counted(tally.counts['lines_read'], 'line')} of {counted(len(tally.pairs), 'pair')}"
        f", kept {sum(kept.values()):,} ("
        + ", ".join(f"{split} {number:,}" for split, number in kept.items())
        + ")"
    ]
    parts = [_left_out(tally), _changed(tally), _lacking(tally), _looks_wrong(tally)]
    return lines + [part for part in parts if part]


def _left_out(tally: Tally) -> str:
    counts, parts = tally.counts, []
    if counts["quarantined"]:
        sides = {
            f"{reason} in {code}": tally.no_text[reason, code]
            for reason in REASONS
            for code in sorted(tally.spellings)
            if tally.no_text[reason, code]
        }
        listing = listed(tallied({name: number}) for name, number in sides.items())
        pairs = counted(counts["quarantined"], "line")
        parts.append(f"{pairs} and their counterparts into {QUARANTINE_NAME} ({listing})")
    if counts["lines_over_limit"]:
        parts.append(f"{counts['lines_over_limit']:,} beyond the lines wanted per pair")
    for name, noun in (
        ("pairs_not_selected", "pair of other languages"),
        ("folders_repeated", "folder with the same text"),
        ("folders_ignored", "folder not named like a pair"),
        ("files_ignored", "file of another form"),
        ("records_one_sided", "record without text in one of its languages"),
    ):
        if counts[name]:
            first, *rest = noun.split(" ")
            names = f"({listed(map(shown, tally.ignored[name]))})" if name in tally.ignored else ""
            parts.append(" ".join(filter(None, [counted(counts[name], first), *rest, names])))
    return f"left out: {'; '.join(parts)}" if parts else ""


def _changed(tally: Tally) -> str:
    names = {
        "lines_with_inner_separator": "odd separators made spaces in",
        "carriage_returns": "carriage returns removed from",
        "byte_order_marks": "byte order marks removed from",
        "lines_without_text": "no text (kept) in",
    }
    parts = [
        f"{text} {counted(tally.counts[name], 'line')}"
        for name, text in names.items()
        if tally.counts[name]
    ]
    return ", ".join(parts)


def _lacking(tally: Tally) -> str:
    """Summarize pairs and sides without usual parts; pairs for tests alone may lack training."""
    trained = [pair for pair, counts in tally.pairs.items() if counts["train"]]
    lacking = {
        "no training data left": sorted(tally.emptied),
        "no validation set": [pair for pair in trained if not tally.pairs[pair]["valid"]],
        "no test lines": [pair for pair in trained if not tally.pairs[pair]["test"]],
        "no lines at all": [
            pair for pair, counts in tally.pairs.items() if not any(counts.values())
        ],
        "only empty lines": sorted(tally.empty_sides),
    }
    parts = [f"{what}: {listed(pairs)}" for what, pairs in lacking.items() if pairs]
    if not trained:
        parts.insert(0, "no pair has training lines")
    return "; ".join(parts)


def _looks_wrong(tally: Tally) -> str:
    warnings = [
        warning
        for code, spellings in sorted(tally.spellings.items())
        if (warning := code_warning(tally.scripts[code], spellings))
    ]
    if tally.swapped:
        warnings.append(f"sides look swapped in {listed(tally.swapped)}")
    merged = [
        f"{code} ({listed(sorted(spellings))})"
        for code, spellings in sorted(tally.spellings.items())
        if len(spellings) > 1
    ]
    if merged:
        warnings.append(f"several spellings are one language: {listed(merged)}")
    return f"look at: {'; '.join(warnings)}" if warnings else ""


def _swapped(section: Section) -> str:
    first, second = section.spellings
    one, other = section.sources
    return (
        f"{one.place} reads as {second} and {other.place} as {first}. Exchange the names of the "
        "two files, or set corpus.swapped_sides to 'accept' if they are right."
    )


def _quarantine_path(writer: ArtifactWriter, raw: RawText) -> Path:
    """Return the path of the quarantine; text made here has no bad lines to list."""
    return writer.path(QUARANTINE_NAME) if raw.is_found else Path(os.devnull)


def _part_path(writer: ArtifactWriter, number: int) -> Path:
    """Return the path of a part of the quarantine, until it is appended to the whole."""
    return writer.path(f"{QUARANTINE_NAME}.{number}")


def _text_paths(
    writer: ArtifactWriter, split: Split, languages: tuple[str, str]
) -> tuple[Path, Path]:
    """Return the text files of both sides, to which sections are appended in their order."""
    first, second = (
        writer.path(text_name(split, pair_name(*languages), code)) for code in languages
    )
    return first, second


def _limit(config: CorpusConfig, split: Split, languages: tuple[str, str]) -> int | None:
    if split == "test" and set(config.untested) & set(languages):
        return 0
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
