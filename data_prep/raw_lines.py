"""Check and repair raw lines; list those that are not text in the quarantine."""

import codecs
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Self, TextIO

from data_prep.readers.section import RawLine, Source
from pipeline.errors import DataError
from pipeline.terminal import listed

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

    def note(
        self,
        repairs: Sequence["Repair | None"],
        sources: Sequence[Source],
        *,
        number: int,
        quarantine: "Quarantine",
    ) -> bool:
        """Count the defects of a line and return whether all its sides are text.

        Args:
            repairs: Repair of each side; None if it is plain.
            sources: Source of each side.
            number: Line in its sources.
            quarantine: List that takes the sides that are not text.
        """
        is_text = True
        for side, repair in enumerate(repairs):
            if repair is None:
                continue
            self.byte_order_marks += repair.had_byte_order_mark
            self.carriage_returns += repair.had_carriage_return
            self.separators += repair.had_separators
            self.without_text[side] += repair.is_blank
            if repair.reason is not None:
                self.no_text[side][repair.reason] += 1
                quarantine.add(sources[side], line=number, reason=repair.reason)
                is_text = False
        self.quarantined += not is_text
        return is_text


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


@dataclass(frozen=True)
class Quarantine:
    """List of lines that are not text: file, line number from 1, and reason."""

    stream: TextIO

    def add(self, source: Source, *, line: int, reason: str) -> None:
        """Write one line of the list."""
        record = {"file": source.name, "line": line, "reason": reason}
        self.stream.write(json.dumps(record, ensure_ascii=False) + "\n")


class _NotPlain(Exception):
    """Signals a line that needs a second look."""


def good_lines(
    lines: Iterable[RawLine],
    sources: Sequence[Source],
    *,
    limit: int | None,
    max_line_bytes: int,
    quarantine: Quarantine,
    counts: LineCounts,
    to_the_end: bool = True,
) -> Iterator[list[str]]:
    """Yield the lines that are text on all sides, at most ``limit`` of them.

    Args:
        lines: Raw lines, with as many sides as ``counts`` is made for.
        sources: Source of each side.
        limit: Most lines to yield; None for all.
        max_line_bytes: Longest side, in bytes.
        quarantine: List that takes the other lines.
        counts: Counts to add to.
        to_the_end: Whether to read and count the lines beyond the limit.

    Raises:
        DataError: The lines cannot be read, or too many are not text.
    """
    for number, raws, is_malformed in lines:
        if limit is not None and counts.kept >= limit:
            if not to_the_end:
                break
            counts.over_limit += 1
            continue
        if is_malformed:
            set_aside(sources, number=number, quarantine=quarantine, counts=counts)
            continue
        try:
            # Nearly all lines are plain; the slow path handles the others.
            texts = [_plain(raw, max_line_bytes=max_line_bytes) for raw in raws]
        except (_NotPlain, UnicodeDecodeError):
            repairs = [
                _repair(raw, is_first=number == 1, max_line_bytes=max_line_bytes) for raw in raws
            ]
            if not counts.note(repairs, sources, number=number, quarantine=quarantine):
                continue
            texts = [repair.text for repair in repairs]
        counts.kept += 1
        yield texts
    refuse_damaged(sources, counts)


def checked(raw: bytes, *, is_first: bool, max_line_bytes: int) -> str | Repair:
    """Return a text if it is plain; else its repair."""
    try:
        return _plain(raw, max_line_bytes=max_line_bytes)
    except (_NotPlain, UnicodeDecodeError):
        return _repair(raw, is_first=is_first, max_line_bytes=max_line_bytes)


def set_aside(
    sources: Sequence[Source], *, number: int, quarantine: Quarantine, counts: LineCounts
) -> None:
    """Quarantine a malformed record, once if all sides are in one file."""
    for source in dict.fromkeys(source._replace(place="") for source in sources):
        quarantine.add(source, line=number, reason="malformed")
    for side in counts.no_text:
        side["malformed"] += 1
    counts.quarantined += 1


def _plain(raw: bytes, *, max_line_bytes: int) -> str:
    """Return a line that is text as it stands; raise an error for any other."""
    text = raw.decode()
    # str.splitlines splits at each of _SEPARATORS.
    if text.splitlines() != [text] or "\0" in text or text[0] == "\ufeff" or text.isspace():
        raise _NotPlain
    if len(raw) > max_line_bytes:
        raise _NotPlain
    return text


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
    found.is_blank = not found.text or found.text.isspace()
    return found


def refuse_damaged(sources: Sequence[Source], counts: LineCounts) -> None:
    """Refuse files of which too many lines are not text.

    Raises:
        DataError: Names the files, and why their lines are not text.
    """
    bad, lines = counts.quarantined, counts.kept + counts.quarantined
    is_other_form = not counts.kept and any(side["malformed"] for side in counts.no_text)
    if bad <= max(QUARANTINED_LINES, QUARANTINED_SHARE * lines) and not is_other_form:
        return
    damaged = [source.place for source, side in zip(sources, counts.no_text, strict=True) if side]
    reasons = sorted({reason for side in counts.no_text for reason in side})
    raise DataError(
        f"{listed(damaged)}: {bad} of {lines} lines are not UTF-8 text of at "
        f"most 1 MiB ({', '.join(reasons)}). {_suggested_fix(reasons)}."
    )


def _suggested_fix(reasons: Sequence[str]) -> str:
    match reasons:
        case ["too_long"]:
            return "Split them into sentences"
        case ["malformed"]:
            return "Correct their columns, or fetch the file again"
        case _:
            return "Convert the files to UTF-8 or fetch them again"
