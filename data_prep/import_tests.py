"""Stage import_tests: turn external test sets into a corpus of validation and test lines.

Reads a folder in one of the layouts of ``readers/outside_tests.py``. Makes a corpus without
training lines, and ``quarantine.jsonl``. Files of one language each are joined into pairs, with the
pivot or each with each. A line that is not text in one file is left out of all files aligned with
it.
"""

import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from data_prep.raw_lines import (
    QUARANTINE_NAME,
    REASONS,
    LineCounts,
    checked_lines,
    good_lines,
    refuse_damaged,
)
from data_prep.readers.outside_tests import AlignedFiles, OutsideTests, find_tests
from data_prep.readers.raw_text import SPLITS, FilesInStep, source_of
from pipeline.artifacts.artifact import ArtifactWriter
from pipeline.artifacts.corpus import Split, pair_name, text_name
from pipeline.errors import DataError
from pipeline.stages.stage import StageCall
from pipeline.terminal import counted, listed, tallied, track

SETTING = "tests.max_line_bytes"


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
    root, max_line_bytes = call.raw["raw"].only_path(), call.recipe.tests.max_line_bytes
    tests = find_tests(root, call.recipe.tests)
    with call.new_artifact() as writer:
        writer.path(QUARANTINE_NAME).touch()
        found = [
            import_aligned(files, root, writer, max_line_bytes=max_line_bytes)
            for files in track(tests.aligned, label="import")
        ]
        if not any(one.counts.kept for one in found):
            raise DataError(f"{root} has no lines. Fetch its files again.")
        writer.statistics |= statistics(tests, found)
        writer.summary += summary(tests, found)


def import_aligned(
    files: AlignedFiles, root: Path, writer: ArtifactWriter, *, max_line_bytes: int
) -> ImportedFiles:
    """Read aligned files once, in step, and copy their good lines to all their pairs.

    Raises:
        DataError: The files have different numbers of lines, or are damaged.
    """
    sources = [source_of(path, root) for path in files.paths.values()]
    found = ImportedFiles(files, LineCounts.for_sides(len(sources)))
    lines = FilesInStep(tuple(files.paths.values()), max_line_bytes)
    with TemporaryDirectory(dir=writer.directory) as name:
        texts = {code: Path(name) / code for code in files.paths}
        with ExitStack() as stack:
            streams = [
                stack.enter_context(path.open("w", encoding="utf-8", newline="\n"))
                for path in texts.values()
            ]
            for line in good_lines(
                checked_lines(lines, max_line_bytes=max_line_bytes),
                sources,
                counts=found.counts,
                quarantine_path=writer.path(QUARANTINE_NAME),
            ):
                for code, stream, text in zip(texts, streams, line, strict=True):
                    stream.write(text + "\n")
                    found.characters[code] += len(text)
        refuse_damaged(sources, found.counts, setting=SETTING)
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
        "languages": {code: {"spellings": [s]} for code, s in sorted(tests.spellings.items())},
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


if __name__ == "__main__":
    from pipeline.cli import stage_main

    sys.exit(stage_main("import_tests"))
