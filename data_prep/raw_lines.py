"""Check and repair raw lines; list those that are not text in the quarantine."""

import codecs
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self, TypeAlias

from data_prep.readers.raw_text import LineSource, RawLine
from pipeline.artifacts.spelling import is_blank
from pipeline.errors import DataError
from pipeline.terminal import counted, listed

QUARANTINE_NAME = "quarantine.jsonl"
QUARANTINED_LINES, QUARANTINED_SHARE = 10, 0.05
"""Lines and share in the quarantine; files above both are refused as damaged, as are tables without
a single valid row."""

REASONS = ("too_long", "nul", "invalid_utf8", "malformed")
"""Why a line is not text; ``malformed``: its record does not have the form of its file."""

_SEPARATORS = re.compile("[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")
"""Characters that some tools take for line ends. A newline cannot be in a line of a text file, but
in a line of another source it can."""


@dataclass
class LineCounts:
    """Counts of lines and their defects, with two sides unless made for more."""

    kept: int = 0
    quarantined: int = 0
    """Pairs of lines (or rows of all sides) with a side that is not text."""
    over_limit: int = 0
    """Pairs of lines beyond the number wanted."""
    byte_order_marks: int = 0
    carriage_returns: int = 0
    """Lines that ended in CR LF."""
    separators: int = 0
    """Lines in which separators became spaces."""
    without_text: list[int] = field(default_factory=lambda: [0, 0])
    """Empty or blank lines, per side."""
    no_text: tuple[Counter[str], ...] = field(default_factory=lambda: (Counter(), Counter()))
    """Reason → lines that are not text, per side."""

    @classmethod
    def for_sides(cls, number: int) -> Self:
        """Return zero counts for this many sides."""
        return cls(without_text=[0] * number, no_text=tuple(Counter() for _ in range(number)))

    @property
    def read(self) -> int:
        """Return the number of pairs of lines read."""
        return self.kept + self.quarantined + self.over_limit

    def statistics(self) -> Counter[str]:
        """Return the counts under their names in the statistics of a corpus."""
        return Counter(
            lines_read=self.read,
            quarantined=self.quarantined,
            lines_over_limit=self.over_limit,
            byte_order_marks=self.byte_order_marks,
            carriage_returns=self.carriage_returns,
            lines_with_inner_separator=self.separators,
            lines_without_text=sum(self.without_text),
            lines_with_nul=sum(side["nul"] for side in self.no_text),
            lines_with_invalid_utf8=sum(side["invalid_utf8"] for side in self.no_text),
            lines_too_long=sum(side["too_long"] for side in self.no_text),
            lines_malformed=max(side["malformed"] for side in self.no_text),
        )


@dataclass
class Repair:
    """A text after repair, and what was wrong with it."""

    text: str = ""
    reason: str | None = None
    """Why it is not text, if it is not."""
    had_byte_order_mark: bool = False
    had_carriage_return: bool = False
    had_separators: bool = False
    is_blank: bool = False


Checked: TypeAlias = str | Repair
"""Text that was plain, or the repair of another."""
CheckedLine: TypeAlias = tuple[int, Sequence[Checked]]
"""Line number in its sources, and the text of every side."""
MALFORMED = Repair(reason="malformed")
"""Side of a record that does not have the form of its file."""


def checked_lines(lines: Iterable[RawLine], *, max_line_bytes: int) -> Iterator[CheckedLine]:
    """Yield raw lines, each side decoded, checked and if necessary repaired."""
    for number, raws, is_malformed in lines:
        is_first = number == 1
        yield (
            number,
            [MALFORMED] * len(raws)
            if is_malformed
            else [checked(raw, is_first=is_first, max_line_bytes=max_line_bytes) for raw in raws],
        )


def checked(raw: bytes, *, is_first: bool, max_line_bytes: int) -> Checked:
    """Return a text as it stands if it is plain, as nearly all are; else its repair."""
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return _repair(raw, is_first=is_first, max_line_bytes=max_line_bytes)
    # str.splitlines splits at each of _SEPARATORS.
    if text.splitlines() != [text] or "\0" in text or text[0] == "\ufeff" or is_blank(text):
        return _repair(raw, is_first=is_first, max_line_bytes=max_line_bytes)
    return text if len(raw) <= max_line_bytes else Repair(reason="too_long")


def _repair(raw: bytes, *, is_first: bool, max_line_bytes: int) -> Repair:
    """Decode and repair one text, or say why it is none."""
    found = Repair()
    if len(raw) > max_line_bytes:
        found.reason = "too_long"
        return found
    if is_first and raw.startswith(codecs.BOM_UTF8):
        raw = raw.removeprefix(codecs.BOM_UTF8)
        found.had_byte_order_mark = True
    if raw.endswith(b"\r"):
        raw = raw.rstrip(b"\r")
        found.had_carriage_return = True
    if b"\0" in raw:
        found.reason = "nul"
        return found
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        found.reason = "invalid_utf8"
        return found
    found.had_separators = _SEPARATORS.search(text) is not None
    found.text = _SEPARATORS.sub(" ", text)
    found.is_blank = is_blank(found.text)
    return found


def good_lines(
    lines: Iterable[CheckedLine],
    sources: Sequence[LineSource],
    *,
    counts: LineCounts,
    quarantine_path: Path,
    limit: int | None = None,
    to_the_end: bool = True,
    rest: Iterable[object] | None = None,
) -> Iterator[Sequence[str]]:
    """Yield the lines that are text on all sides.

    Args:
        lines: Lines, with as many sides as ``counts`` is made for.
        sources: Source of each side.
        counts: Counts to add to.
        quarantine_path: List that the other lines are appended to: file, line number from 1, and
            reason. It is made with the first.
        limit: Most lines to keep, with those counted before; None for all.
        to_the_end: Whether to read and count the lines beyond the limit.
        rest: Lines beyond the limit, unchecked, which saves the time of a check; None: ``lines``.

    Raises:
        DataError: The lines cannot be read.
    """
    wanted = math.inf if limit is None else limit
    lines = iter(lines)
    for number, texts in lines:
        if counts.kept >= wanted:
            if to_the_end:
                counts.over_limit += 1 + sum(1 for _ in (lines if rest is None else rest))
            return
        if Repair in map(type, texts):  # nearly all lines are plain: the others take longer
            bad = _count_defects(texts, sources, counts)
            if bad:
                with quarantine_path.open("a", encoding="utf-8", newline="\n") as stream:
                    for name, reason in bad:
                        record = {"file": name, "line": number, "reason": reason}
                        stream.write(json.dumps(record, ensure_ascii=False) + "\n")
                continue
            texts = [text.text if isinstance(text, Repair) else text for text in texts]
        counts.kept += 1
        yield texts  # type: ignore[misc]  # no Repair is left


def _count_defects(
    texts: Sequence[Checked], sources: Sequence[LineSource], counts: LineCounts
) -> list[tuple[str, str]]:
    """Count the defects of a line; return file and reason of each side that is not text."""
    bad: dict[tuple[str, str], None] = {}
    for side, repair in enumerate(texts):
        if isinstance(repair, str):
            continue
        counts.byte_order_marks += repair.had_byte_order_mark
        counts.carriage_returns += repair.had_carriage_return
        counts.separators += repair.had_separators
        counts.without_text[side] += repair.is_blank
        if repair.reason is not None:
            counts.no_text[side][repair.reason] += 1
            bad[sources[side].name, repair.reason] = None  # once for two sides in one file
    counts.quarantined += bool(bad)
    return list(bad)


def refuse_damaged(sources: Sequence[LineSource], counts: LineCounts) -> None:
    """Refuse files of which too many lines are not text.

    Args:
        sources: Source of each side.
        counts: Counts of all lines.

    Raises:
        DataError: Names the files, and why their lines are not text.
    """
    bad, lines = counts.quarantined, counts.kept + counts.quarantined
    is_other_form = not counts.kept and any(side["malformed"] for side in counts.no_text)
    if bad <= max(QUARANTINED_LINES, QUARANTINED_SHARE * lines) and not is_other_form:
        return
    damaged = [source.place for source, side in zip(sources, counts.no_text, strict=True) if side]
    reasons = sorted({reason for side in counts.no_text for reason in side})
    fixes = {
        "too_long": "Split them into sentences",
        "malformed": "Correct their columns, or fetch the file again",
    }
    suggested_fix = fixes.get(", ".join(reasons), "Convert the files to UTF-8 or fetch them again")
    raise DataError(
        f"{listed(damaged)}: {bad} of {counted(lines, 'line')} "
        f"cannot be read as text ({', '.join(reasons)}). {suggested_fix}."
    )
