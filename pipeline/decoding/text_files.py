"""Read files of text to translate, in chunks of bounded memory.

A line ends at a line feed or at the end of its file. A byte order mark and a carriage return before
a line feed are dropped. In a ``.jsonl`` file, a line is a JSON object and one field has the text.
In a Parquet file, and in an Arrow file of a data set that Hugging Face's ``save_to_disk`` wrote, a
line is a row and the field a column. A line that cannot be read is an error, because output line n
must translate input line n.
"""

import codecs
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
    RawPaths,
    iterate_raw_lines,
    named_files,
    plain_name,
    table_rows,
)
from pipeline.artifacts.spelling import is_blank
from pipeline.config.documents import MAX_JSON_BYTES, parse_json
from pipeline.decoding.incoming_lines import MAX_LINE_BYTES, without_line_breaks
from pipeline.errors import DataError, hint
from pipeline.terminal import listed

CHUNK_LINES = 2**14
"""Most translations of a chunk. More lines make batches of more similar lengths."""
CHUNK_CHARACTERS = 2**22
"""Characters to translate at which a chunk ends."""

TEXT, RECORDS = ".txt", ".jsonl"
TABLES = (PARQUET, ARROW)
PACKED = (".gz", ".zst")


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
        """Name of its translations: ``a/b.jsonl.gz`` → ``a/b.txt``."""
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
        record = parse_json(raw, what=what, error=DataError, fix="correct that line")
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
    paths = raw.paths if isinstance(raw, RawPaths) else (raw.only_path(),)
    files = [TextFile(path, name, field) for name, path in named_files(paths)]
    endings = (TEXT, RECORDS, *PACKED, *TABLES)
    texts = [file for file in files if _has_text(file.path, endings) or file.path in paths]
    if not texts:
        raise DataError(
            f"{listed(raw.values)} holds no file that ends in {listed(endings)}. Name a folder "
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


def _has_text(path: Path, endings: tuple[str, ...]) -> bool:
    is_cache = path.suffix == ARROW and path.name.startswith("cache-")
    return path.name.endswith(endings) and not is_cache


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

    Args:
        files: Files to read.
        copies: Languages that each line is translated into.

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
