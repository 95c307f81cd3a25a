"""Read text to translate: lines of standard input as they arrive, and files in chunks.

:class:`IncomingLines` reads a file, a pipe or a terminal. Lines that have arrived are returned
together. It waits only while it has no line to return, so a process that writes one line and waits
gets its translation. Memory is bounded: at most one batch of lines or ``AHEAD_BYTES`` is read
ahead, and a line longer than ``max_bytes`` is discarded.

:class:`TextFile` reads a file. In a ``.jsonl`` file, a line is a JSON object and one field has the
text. In a Parquet file, and in an Arrow file of a data set that Hugging Face's ``save_to_disk``
wrote, a line is a row and the field a column. A line that cannot be read is an error, because
output line n must translate input line n.

A line ends at a line feed or at the end of its input. A byte order mark and a carriage return
before a line feed are dropped. Input with carriage returns as its only line ends is refused.
"""

import codecs
import os
import re
import select
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.artifacts.corpus import scores_name
from pipeline.artifacts.manifest import describe_name, fold_name
from pipeline.artifacts.raw_input import (
    ARROW,
    PARQUET,
    RawInput,
    iterate_raw_lines,
    named_files,
    plain_name,
    refuse_old_line_ends,
    refuse_utf16,
    table_rows,
)
from pipeline.artifacts.spelling import is_blank
from pipeline.config.documents import MAX_JSON_BYTES, parse_json
from pipeline.errors import DataError, hint
from pipeline.terminal import listed

READ_BYTES = 64 * 1024
AHEAD_BYTES = 1024 * 1024
"""Size of complete lines at which no more is read ahead."""
MAX_LINE_BYTES = 1024 * 1024
PAUSE_SECONDS = 0.02
"""Time that a batch that is not full waits for another line."""

_LINE_BREAKS = re.compile("[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")

CHUNK_LINES = 2**14
"""Most translations of a chunk. More lines make batches of more similar lengths."""
CHUNK_CHARACTERS = 2**22
"""Characters to translate at which a chunk ends."""

TEXT, RECORDS = ".txt", ".jsonl"
TABLES = (PARQUET, ARROW)
PACKED = (".gz", ".zst")
ENDINGS = (TEXT, RECORDS, *PACKED, *TABLES)


@dataclass(frozen=True)
class IncomingLine:
    """A line without its end; an unreadable one has a problem and an empty text."""

    number: int
    """Line number, counted from 1."""
    text: str
    problem: str = ""
    """Reason why the line is unreadable, for example "is not UTF-8"."""


class IncomingLines:
    """Reader of the lines of a file descriptor."""

    def __init__(self, descriptor: int, *, max_bytes: int = MAX_LINE_BYTES) -> None:
        self._descriptor, self._max_bytes = descriptor, max_bytes
        self._complete: deque[bytes | None] = deque()
        """Lines not yet returned; None for one that is too long."""
        self._complete_bytes = 0
        self._begun = bytearray()
        """Beginning of the line whose end has not arrived."""
        self._too_long = False
        self._ended = False
        self._given = 0

    def take(self, most: int) -> list[IncomingLine]:
        """Return the next 1 to ``most`` lines; wait for the first of them.

        Returns:
            The lines; [] at the end of the input.

        Raises:
            DataError: the descriptor cannot be read, it is UTF-16, or carriage returns end its
                lines.
        """
        while not self._is_enough(most) and self._wait(PAUSE_SECONDS if self._complete else None):
            self._read()
        return [self._give() for _ in range(min(most, len(self._complete)))]

    def _is_enough(self, most: int) -> bool:
        return self._ended or len(self._complete) >= most or self._complete_bytes >= AHEAD_BYTES

    def _wait(self, seconds: float | None) -> bool:
        """Wait at most so many seconds; return whether there is input to read, or its end."""
        try:
            return bool(select.select([self._descriptor], [], [], seconds)[0])
        except (OSError, ValueError) as error:
            raise _unreadable(error) from error

    def _read(self) -> None:
        try:
            chunk = os.read(self._descriptor, READ_BYTES)
        except BlockingIOError:  # another process has read it
            return
        except OSError as error:
            raise _unreadable(error) from error
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            self._continue(end)
            self._end_line()
        self._continue(rest)
        if not chunk:
            self._ended = True
            if not (self._given or self._complete):
                refuse_old_line_ends("Standard input", bytes(self._begun))
            if self._begun or self._too_long:
                self._end_line()

    def _continue(self, piece: bytes) -> None:
        self._begun += piece
        if self._too_long or len(self._begun) > self._max_bytes:
            self._too_long = True  # its rest is read as well, and not kept
            self._begun.clear()

    def _end_line(self) -> None:
        self._complete.append(None if self._too_long else bytes(self._begun))
        self._complete_bytes += len(self._begun)
        self._begun.clear()
        self._too_long = False

    def _give(self) -> IncomingLine:
        raw = self._complete.popleft()
        self._given += 1
        if raw is None:
            return IncomingLine(self._given, "", f"is longer than {self._max_bytes:,} bytes")
        self._complete_bytes -= len(raw)
        if self._given == 1:
            refuse_utf16("Standard input", raw)
            raw = raw.removeprefix(codecs.BOM_UTF8)
        try:
            return IncomingLine(self._given, raw.removesuffix(b"\r").decode())
        except UnicodeDecodeError as error:
            reason = f"is not UTF-8 ({error.reason} at byte {error.start})"
            return IncomingLine(self._given, "", reason)


def without_line_breaks(text: str) -> str:
    """Replace every character that some reader takes for a line end by a space."""
    return _LINE_BREAKS.sub(" ", text)


def _unreadable(error: OSError | ValueError) -> DataError:
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return DataError(
        f"Standard input cannot be read ({reason}). Give the lines by a pipe, or with < FILE."
    )


@dataclass(frozen=True)
class TextFile:
    """File with text, and the field of its records that holds it."""

    path: Path
    name: str
    """Name that does not depend on where the text lies."""
    field: str

    @property
    def has_records(self) -> bool:
        """Whether its lines are JSON objects."""
        return plain_name(self.name).endswith(RECORDS)

    @property
    def is_table(self) -> bool:
        """Whether its lines are rows of a table."""
        return self.name.endswith(TABLES)

    @property
    def output(self) -> str:
        """Name of its translations, for example ``a/b.txt`` for ``a/b.jsonl.gz``."""
        name = plain_name(self.name)
        if self.has_records or self.is_table:
            return name[: name.rindex(".")] + TEXT
        return name

    def lines(self) -> Iterator[str]:
        """Yield the text of every line, without any character that could be taken for a line end.

        Raises:
            ConfigError: The package for Zstandard or for tables is missing.
            DataError: The file cannot be read, or a line of it is no text; names both.
        """
        yield from map(without_line_breaks, self._rows() if self.is_table else self._raw_lines())

    def _rows(self) -> Iterator[str]:
        for number, row in enumerate(table_rows(self.path, (self.field,)), start=1):
            yield self._text_of_record(row, what=f"{self.path}, row {number}")

    def _raw_lines(self) -> Iterator[str]:
        longest = MAX_JSON_BYTES if self.has_records else MAX_LINE_BYTES
        raws = iterate_raw_lines(self.path, max_line_bytes=longest)
        for number, raw in enumerate(raws, start=1):
            what = f"{self.path}, line {number}"
            if len(raw) > longest:
                raise DataError(f"{what}: it is longer than {longest:,} bytes. Split it.")
            if number == 1:
                raw = raw.removeprefix(codecs.BOM_UTF8)
            raw = raw.removesuffix(b"\r")
            yield self._text_of(raw, what=what) if self.has_records else _decoded(raw, what=what)

    def _text_of(self, raw: bytes, *, what: str) -> str:
        """Return the text of a line with a record; a blank line is an empty text."""
        if is_blank(raw.decode(errors="replace")):
            return ""
        fix = "correct that line"
        record = parse_json(raw, what=what, error=DataError, fix=fix, unique=True)
        if not isinstance(record, dict):
            raise DataError(f"{what}: it is no JSON object. Correct that line.")
        return self._text_of_record(record, what=what)

    def _text_of_record(self, record: Mapping[str, Any], *, what: str) -> str:
        """Return the text of a record; null is an empty text."""
        if self.field not in record:
            raise DataError(
                f"{what}: text.field is {self.field!r}, and the record has no such field"
                f"{hint(self.field, [*record])}"
            )
        text = record[self.field]
        if not isinstance(text, str | None):
            raise DataError(
                f"{what}: the field {self.field!r} is no text. Correct it, or set text.field."
            )
        return text or ""


def _decoded(raw: bytes, *, what: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{what}: it is not UTF-8 ({error.reason} at byte {error.start}). Convert the file to "
            "UTF-8."
        ) from error


def find_texts(raw: RawInput, *, field: str) -> tuple[list[TextFile], list[str]]:
    """Return the files with text, by name, and the names of the files that are left out.

    Within a folder, text is in ``.txt`` and ``.jsonl`` files, in packed ones and in tables, except
    the caches that Hugging Face's library leaves next to a data set. A file that is named itself is
    read whatever its ending.

    Raises:
        ConfigError: The input is a data set of the hub.
        DataError: A path does not exist, there is no text, or two files would have one output.
    """
    paths = raw.paths or (raw.only_path(),)
    files = [TextFile(path, name, field) for name, path in named_files(paths)]
    texts = [file for file in files if _has_text(file.path) or file.path in paths]
    if not texts:
        raise DataError(
            f"{listed(raw.values)} holds no file that ends in {listed(ENDINGS)}. Name a folder "
            "that does, or the files themselves."
        )
    outputs: dict[str, TextFile] = {}
    for file in texts:
        first = outputs.setdefault(fold_name(file.output), file)
        if first is not file:
            raise DataError(
                f"{first.path} and {file.path} would both be translated to {file.output}. Rename "
                "one of them, or move it to another folder."
            )
        if problem := describe_name(scores_name("xx", file.output)):
            raise DataError(f"{file.path} has a name that {problem}. Rename it.")
    chosen = {file.name for file in texts}
    return texts, [file.name for file in files if file.name not in chosen]


def _has_text(path: Path) -> bool:
    is_cache = path.suffix == ARROW and path.name.startswith("cache-")
    return path.name.endswith(ENDINGS) and not is_cache


@dataclass
class Chunk:
    """Consecutive lines, of one file or of several."""

    number: int
    first: int
    """Number of lines before it."""
    files: list[tuple[str, int]] = field(default_factory=list)
    """Output of every file with its lines in the chunk, in order; files without lines, too."""
    texts: list[str] = field(default_factory=list)


def chunks(files: Sequence[TextFile], *, copies: int) -> Iterator[Chunk]:
    """Yield all lines in order, in chunks that depend on nothing but the files and ``copies``.

    ``copies`` is the number of languages that each line is translated into.

    Raises:
        ConfigError, DataError: As :meth:`TextFile.lines`.
    """
    chunk, characters = Chunk(number=0, first=0), 0
    for file in files:
        before = len(chunk.texts)
        for text in file.lines():
            chunk.texts.append(text)
            characters += len(text)
            if copies * len(chunk.texts) >= CHUNK_LINES or copies * characters >= CHUNK_CHARACTERS:
                chunk.files.append((file.output, len(chunk.texts) - before))
                yield chunk
                chunk = Chunk(chunk.number + 1, first=chunk.first + len(chunk.texts))
                before = characters = 0
        chunk.files.append((file.output, len(chunk.texts) - before))
    yield chunk
