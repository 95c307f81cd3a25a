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


@dataclass(frozen=True)
class Quarantine:
    """List of lines that are not text: file, line number from 1, and reason."""

    stream: TextIO

    def add(self, source: Source, *, line: int, reason: str) -> None:
        """Write one line of the list."""
        record = {"file": source.name, "line": line, "reason": reason}
        self.stream.write(json.dumps(record, ensure_ascii=False) + "\n")


class _NoText(Exception):
    """Signals a line that cannot be a sentence; the argument is the reason."""


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
    setting: str = "corpus.max_line_bytes",
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
        setting: Name of the setting behind ``max_line_bytes``, for messages.
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
            _set_aside(sources, number=number, quarantine=quarantine, counts=counts)
            continue
        try:
            # Nearly all lines are plain; the slow path handles the others.
            texts = [_plain(raw, max_line_bytes=max_line_bytes) for raw in raws]
        except (_NotPlain, UnicodeDecodeError):
            texts = _look_again(
                raws,
                sources,
                number=number,
                max_line_bytes=max_line_bytes,
                quarantine=quarantine,
                counts=counts,
            )
        if len(texts) == len(raws):
            counts.kept += 1
            yield texts
        else:
            counts.quarantined += 1
    _refuse_damaged(sources, counts, setting=setting)


def _set_aside(
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


def _look_again(
    raws: Sequence[bytes],
    sources: Sequence[Source],
    *,
    number: int,
    max_line_bytes: int,
    quarantine: Quarantine,
    counts: LineCounts,
) -> list[str]:
    """Return the texts of a line that needs repair, quarantining the sides that are not text."""
    texts = []
    for side, raw in enumerate(raws):
        try:
            if len(raw) > max_line_bytes:
                raise _NoText("too_long")
            texts.append(_decode(raw, side=side, is_first=number == 1, counts=counts))
        except _NoText as error:
            counts.no_text[side][str(error)] += 1
            quarantine.add(sources[side], line=number, reason=str(error))
    return texts


def _decode(raw: bytes, *, side: int, is_first: bool, counts: LineCounts) -> str:
    """Decode and repair one line; raise _NoText for a NUL or invalid UTF-8."""
    if is_first and raw.startswith(codecs.BOM_UTF8):
        raw = raw.removeprefix(codecs.BOM_UTF8)
        counts.byte_order_marks += 1
    if raw.endswith(b"\r"):
        raw = raw.rstrip(b"\r")
        counts.carriage_returns += 1
    if b"\0" in raw:
        raise _NoText("nul")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _NoText("invalid_utf8") from error
    if _SEPARATORS.search(text):
        counts.separators += 1
        text = _SEPARATORS.sub(" ", text)
    if not text or text.isspace():
        counts.without_text[side] += 1
    return text


def _refuse_damaged(sources: Sequence[Source], counts: LineCounts, *, setting: str) -> None:
    bad, lines = counts.quarantined, counts.kept + counts.quarantined
    is_other_form = not counts.kept and any(side["malformed"] for side in counts.no_text)
    if bad <= max(QUARANTINED_LINES, QUARANTINED_SHARE * lines) and not is_other_form:
        return
    damaged = [source.place for source, side in zip(sources, counts.no_text, strict=True) if side]
    reasons = sorted({reason for side in counts.no_text for reason in side})
    raise DataError(
        f"{listed(damaged)}: {bad} of {lines} lines are not UTF-8 text of at "
        f"most {setting} ({', '.join(reasons)}). {_suggested_fix(reasons, setting=setting)}."
    )


def _suggested_fix(reasons: Sequence[str], *, setting: str) -> str:
    match reasons:
        case ["too_long"]:
            return f"Raise {setting}, or split them into sentences"
        case ["malformed"]:
            return "Correct their columns, or fetch the file again"
        case _:
            return "Convert the files to UTF-8 or fetch them again"
