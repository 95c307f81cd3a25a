"""Stage import_tests: turn external test sets into a corpus of validation and test lines.

Reads a folder in one of the layouts of ``readers/outside_tests.py``. Makes a corpus without
training lines, and ``quarantine.jsonl``. Files of one language each are joined into pairs, with the
pivot or each with each. A line that is not text in one file is left out of all files aligned with
it.
"""

import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from data_prep.import_corpus import QUARANTINE_NAME
from data_prep.raw_lines import REASONS, LineCounts, Quarantine, good_lines
from data_prep.readers.outside_tests import AlignedFiles, OutsideTests, find_tests
from data_prep.readers.raw_files import FilesInStep, source_of
from data_prep.readers.section import SPLITS
from pipeline.artifacts.artifact import ArtifactWriter
from pipeline.artifacts.corpus import Split, pair_name, text_name
from pipeline.errors import DataError
from pipeline.stage import StageCall
from pipeline.terminal import counted, listed, tallied, track


@dataclass
class Tally:
    """Counts of lines written and set aside, for the statistics and the summary."""

    pairs: dict[str, dict[Split, int]] = field(default_factory=dict)
    characters: dict[str, dict[Split, dict[str, int]]] = field(default_factory=dict)
    lines: Counter[Split] = field(default_factory=Counter)
    """Lines of each split; for pairs of files, the sum over all of them."""
    counts: Counter[str] = field(default_factory=Counter)
    no_text: Counter[str] = field(default_factory=Counter)
    """``invalid_utf8 in de`` → lines."""


def run(call: StageCall) -> None:
    """Write the lines of every language once per pair that it is in."""
    root, config = call.raw["raw"].only_path(), call.recipe.tests
    tests = find_tests(root, config)
    tally = Tally()
    with call.new_artifact() as writer:
        with writer.path(QUARANTINE_NAME).open("w", encoding="utf-8", newline="\n") as stream:
            quarantine = Quarantine(stream)
            for files in track(tests.aligned, label="import"):
                import_aligned(
                    files,
                    root,
                    writer,
                    max_line_bytes=config.max_line_bytes,
                    quarantine=quarantine,
                    tally=tally,
                )
        if not tally.lines["test"] and not tally.lines["valid"]:
            raise DataError(f"{root} has no lines. Fetch its files again.")
        writer.statistics |= statistics(tests, tally)
        writer.summary += summary(tests, tally)


def import_aligned(
    files: AlignedFiles,
    root: Path,
    writer: ArtifactWriter,
    *,
    max_line_bytes: int,
    quarantine: Quarantine,
    tally: Tally,
) -> None:
    """Read aligned files once, in step, and copy their good lines to all their pairs.

    Raises:
        DataError: The files have different numbers of lines, or are damaged.
    """
    languages = sorted({code for pair in files.pairs for code in pair})
    paths = [files.paths[code] for code in languages]
    found, characters = LineCounts.for_sides(len(languages)), Counter[str]()
    with folder_for_now(writer.directory / "languages") as folder:
        with ExitStack() as stack:
            streams = [stack.enter_context(_open_text(folder / code)) for code in languages]
            for texts in good_lines(
                FilesInStep(tuple(paths), max_line_bytes),
                [source_of(path, root) for path in paths],
                limit=None,
                max_line_bytes=max_line_bytes,
                quarantine=quarantine,
                counts=found,
                setting="tests.max_line_bytes",
            ):
                for code, stream, text in zip(languages, streams, texts, strict=True):
                    stream.write(text + "\n")
                    characters[code] += len(text)
        for pair in files.pairs:
            for code in pair:
                path = writer.path(text_name(files.split, pair_name(*pair), code))
                shutil.copyfile(folder / code, path)
    _tally(files, found, languages=languages, characters=characters, tally=tally)


@contextmanager
def folder_for_now(folder: Path) -> Iterator[Path]:
    """Make a folder that is removed at the end of the block."""
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def statistics(tests: OutsideTests, tally: Tally) -> dict[str, object]:
    """Return lines and characters per pair and split, and counts of defects."""
    return {
        "pairs": tally.pairs,
        "characters": tally.characters,
        "counts": dict(sorted(tally.counts.items())),
        "languages": {code: {"spellings": [s]} for code, s in sorted(tests.spellings.items())},
        "layout": tests.layout,
        "other_versions": list(tests.other_versions),
    }


def summary(tests: OutsideTests, tally: Tally) -> list[str]:
    """Summarize the layout and lines read, the lines set aside, and the files not read."""
    directions = sum(1 for counts in tally.pairs.values() if counts["test"]) * 2
    lines = [
        f"{tests.layout}: {counted(tally.lines['test'], 'test line')} and "
        f"{counted(tally.lines['valid'], 'valid line')} of "
        f"{counted(len(tests.spellings), 'language')}, in {counted(len(tally.pairs), 'pair')} "
        f"({counted(directions, 'test direction')})"
    ]
    if tally.counts["quarantined"]:
        number = counted(tally.counts["quarantined"], "line")
        lines.append(
            f"left out: {number} in all languages, into {QUARANTINE_NAME} "
            f"({tallied(dict(sorted(tally.no_text.items())))})"
        )
    if tally.counts["lines_without_text"]:
        lines.append(f"no text (kept) in {counted(tally.counts['lines_without_text'], 'line')}")
    if tests.other_versions:
        lines.append(
            f"not read, since another file of the same language is: {listed(tests.other_versions)}"
        )
    if tests.ignored or tests.not_wanted:
        parts = {"of other languages": tests.not_wanted, "of other names": tests.ignored}
        lines.append(f"files not read: {tallied(parts)}")
    return lines


def _open_text(path: Path) -> TextIO:
    return path.open("w", encoding="utf-8", newline="\n")


def _tally(
    files: AlignedFiles,
    found: LineCounts,
    *,
    languages: list[str],
    characters: Counter[str],
    tally: Tally,
) -> None:
    for pair in files.pairs:
        name = pair_name(*pair)
        tally.pairs.setdefault(name, dict.fromkeys(SPLITS, 0))[files.split] = found.kept
        sides = {code: characters[code] for code in pair}
        tally.characters.setdefault(name, {})[files.split] = sides
    tally.lines[files.split] += found.kept
    tally.counts["lines_read"] += found.read
    tally.counts["quarantined"] += found.quarantined
    tally.counts["byte_order_marks"] += found.byte_order_marks
    tally.counts["carriage_returns"] += found.carriage_returns
    tally.counts["lines_with_inner_separator"] += found.separators
    tally.counts["lines_without_text"] += sum(found.without_text)
    for code, of_side in zip(languages, found.no_text, strict=True):
        for reason in REASONS:
            tally.no_text[f"{reason} in {code}"] += of_side[reason]


if __name__ == "__main__":
    from pipeline.cli import stage_main

    sys.exit(stage_main("import_tests"))
