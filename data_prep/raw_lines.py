"""Raw text line by line: what a line is, which are sentences, and where the others are listed.

Files used: plain and gzip files of unknown origin. Whatever they hold, memory is bounded by
``corpus.max_line_bytes`` and one block: a longer line is skipped to its end, a compressed file is
unpacked block by block.
"""

import codecs
import gzip
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import BinaryIO, Self, TextIO

from pipeline.errors import DataError
from pipeline.summary import listed

BLOCK_BYTES = 2**18
"""Read at a time; a block of nothing but line ends is a list of as many empty lines."""

QUARANTINED_LINES, QUARANTINED_SHARE = 10, 0.05
"""Above both of these a pair of files is refused: it is damaged, or not UTF-8 at all."""

REASONS = ("too_long", "nul", "invalid_utf8")
"""Why a line is no text."""

_SEPARATORS = re.compile("[\r\v\f\x1c-\x1e\x85\u2028\u2029]")
"""What some tools take for the end of a line, but the newline."""


@dataclass
class LineCounts:
    """What was found in the lines of files that are read in step, a pair unless made for more."""

    kept: int = 0
    quarantined: int = 0
    """Pairs of lines one or both of which are no text (or as many lines as there are sides)."""
    over_limit: int = 0
    """Pairs of lines beyond the number wanted."""
    byte_order_marks: int = 0
    carriage_returns: int = 0
    """Lines that ended in CR LF."""
    separators: int = 0
    """Lines in which such characters became spaces."""
    without_text: list[int] = field(default_factory=lambda: [0, 0])
    """Lines that are empty or blank, per side."""
    no_text: tuple[Counter[str], ...] = field(default_factory=lambda: (Counter(), Counter()))
    """Reason → lines that are no text, per side."""

    @classmethod
    def for_sides(cls, number: int) -> Self:
        """Nothing yet, of so many files."""
        return cls(without_text=[0] * number, no_text=tuple(Counter() for _ in range(number)))

    @property
    def read(self) -> int:
        """Pairs of lines."""
        return self.kept + self.quarantined + self.over_limit


@dataclass(frozen=True)
class Quarantine:
    """Where lines that are no text are listed: file, line number from 1, and the rule broken."""

    stream: TextIO
    root: Path

    def add(self, path: Path, *, line: int, reason: str) -> None:
        record = {"file": path.relative_to(self.root).as_posix(), "line": line, "reason": reason}
        self.stream.write(json.dumps(record, ensure_ascii=False) + "\n")


class _NoText(Exception):
    """A line that cannot be a sentence; its argument is the rule it breaks."""


class _NotPlain(Exception):
    """A line that needs a second look."""


def iterate_raw_lines(path: Path, *, max_line_bytes: int) -> Iterator[bytes]:
    """Lines of a plain or gzip file without their ``\\n``; no other byte ends a line.

    Of a line that is longer than ``max_line_bytes`` come its first ``max_line_bytes + 1`` bytes:
    its length tells that it is one of these. Its rest is read over and not held.

    Raises:
        DataError: the file is cut off, damaged, or no gzip file.
    """
    try:
        with _open_bytes(path) as stream:
            yield from _lines_of(stream, longest=max_line_bytes + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{path} is no complete gzip file ({error}): fetch it again, or unpack it and remove "
            "the .gz from its name."
        ) from error
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): make it readable.") from error


def good_lines(
    paths: Sequence[Path],
    *,
    limit: int | None,
    max_line_bytes: int,
    quarantine: Quarantine,
    counts: LineCounts,
    setting: str = "corpus.max_line_bytes",
) -> Iterator[list[str]]:
    """At most ``limit`` lines of every file, all of them text; files are read to their ends.

    A line that is no text in one file is left out of all. ``counts`` are for as many sides;
    ``setting`` is where ``max_line_bytes`` comes from.

    Raises:
        DataError: one file has more lines, or too many lines are no text.
    """
    for number, raws in enumerate(in_step(paths, max_line_bytes=max_line_bytes), start=1):
        if limit is not None and counts.kept >= limit:
            counts.over_limit += 1
            continue
        try:
            # Nearly all lines are plain; the others are looked at again, more slowly.
            texts = [_plain(raw, max_line_bytes=max_line_bytes) for raw in raws]
        except (_NotPlain, UnicodeDecodeError):
            texts = _look_again(
                raws,
                paths,
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
    _refuse_damaged(paths, counts, setting=setting)


def in_step(paths: Sequence[Path], *, max_line_bytes: int) -> Iterator[tuple[bytes, ...]]:
    """Lines of all files; DataError with the counts of two of them where one is longer."""
    sides = [iterate_raw_lines(path, max_line_bytes=max_line_bytes) for path in paths]
    for number, raws in enumerate(zip_longest(*sides), start=1):
        if None in raws:
            short = raws.index(None)
            long = next(side for side, raw in enumerate(raws) if raw is not None)
            found = {short: number - 1, long: number + sum(1 for _ in sides[long])}
            first, second = sorted(found)
            raise DataError(
                f"{paths[first]} has {found[first]} lines and {paths[second]} has "
                f"{found[second]}: line n of one must translate line n of the other, so fetch or "
                "align them again."
            )
        yield raws


def _open_bytes(path: Path) -> BinaryIO | gzip.GzipFile:
    if path.suffix == ".gz":
        return gzip.GzipFile(path, "rb")
    return path.open("rb")


def _lines_of(stream: BinaryIO | gzip.GzipFile, *, longest: int) -> Iterator[bytes]:
    """Lines of a stream, each cut to ``longest`` bytes; holds one such line and one block."""
    begun = b""
    while block := stream.read(BLOCK_BYTES):
        first, *others = block.split(b"\n")
        begun += first[: longest - len(begun)]
        if others:
            yield begun
            *whole, begun = others
            begun = begun[:longest]
            if len(block) <= longest:
                yield from whole
            else:
                yield from (line[:longest] for line in whole)
    if begun:
        yield begun


def _plain(raw: bytes, *, max_line_bytes: int) -> str:
    """A line that is text as it stands; raises what sends all others to ``_decode``."""
    text = raw.decode()
    # str.splitlines splits at every one of the separators.
    if text.splitlines() != [text] or "\0" in text or text[0] == "\ufeff" or text.isspace():
        raise _NotPlain
    if len(raw) > max_line_bytes:
        raise _NotPlain
    return text


def _look_again(
    raws: Sequence[bytes],
    paths: Sequence[Path],
    *,
    number: int,
    max_line_bytes: int,
    quarantine: Quarantine,
    counts: LineCounts,
) -> list[str]:
    """Those of the lines that are text; the others are put into the quarantine."""
    texts = []
    for side, raw in enumerate(raws):
        try:
            if len(raw) > max_line_bytes:
                raise _NoText("too_long")
            texts.append(_decode(raw, side=side, is_first=number == 1, counts=counts))
        except _NoText as error:
            counts.no_text[side][str(error)] += 1
            quarantine.add(paths[side], line=number, reason=str(error))
    return texts


def _decode(raw: bytes, *, side: int, is_first: bool, counts: LineCounts) -> str:
    """One line as text; raises _NoText for a NUL or invalid UTF-8."""
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


def _refuse_damaged(paths: Sequence[Path], counts: LineCounts, *, setting: str) -> None:
    bad, lines = counts.quarantined, counts.kept + counts.quarantined
    if bad <= max(QUARANTINED_LINES, QUARANTINED_SHARE * lines):
        return
    damaged = [path for path, side in zip(paths, counts.no_text, strict=True) if side]
    reasons = sorted({reason for side in counts.no_text for reason in side})
    remedy = (
        f"raise {setting}, or split them into sentences"
        if reasons == ["too_long"]
        else "convert the files to UTF-8 or fetch them again"
    )
    raise DataError(
        f"{listed(str(path) for path in damaged)}: {bad} of {lines} lines are not UTF-8 text of at "
        f"most {setting} ({', '.join(reasons)}): {remedy}."
    )
