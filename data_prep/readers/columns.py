"""Parquet, JSON lines and CSV with a column of text per language, in streams of rows.

The languages are those of ``corpus.columns`` (``{ de = "source", en = "target" }``), else the pair
in the name of the file or its folder: ``de-en/train-00000-of-00001.parquet`` as in a local copy of
OPUS-100, ``train.de-en.jsonl``. Without ``corpus.columns``, a column ``translation`` holds the text
of both, or each has a column that is named by its code.
"""

import codecs
import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from data_prep.readers.multiway import MultiwayFile, Record, pair_up
from data_prep.readers.raw_files import RawFile, find_files
from data_prep.readers.section import RawText
from data_prep.readers.text_files import iterate_raw_lines
from pipeline.artifacts.corpus import Split
from pipeline.artifacts.raw_input import RawInput
from pipeline.artifacts.settings import CorpusConfig
from pipeline.errors import ConfigError, DataError, Interrupted, UserError
from pipeline.terminal import listed

ENDINGS = ("parquet", "jsonl", "json", "csv")
TRANSLATION = "translation"

_BATCH_ROWS = 1000
"""Rows of a Parquet file that are held at a time; a group of them stays packed."""
_JSON_BYTES = 12
"""In JSON, a side's byte may be an escape of six, and its row has other columns."""


class Row(NamedTuple):
    """A row of any of the forms; ``cells`` is None where it is malformed."""

    line: int
    """Where it begins; of a Parquet file the number of the row."""
    cells: Mapping[str, Any] | None


def read_columns(raw: RawInput | None, config: CorpusConfig) -> RawText:
    """All pairs of the languages that the files have columns for.

    Raises:
        ConfigError: nothing is given, a package is missing, or a wanted language is in no pair.
        DataError: a file lacks a column, or nothing says which languages it has.
    """
    files, left_out = find_files(raw, source="columns", endings=ENDINGS)
    opened = [open_columns(file, file.split(), config) for file in files]
    return pair_up(opened, config, left_out=left_out)


def open_columns(
    file: RawFile, split: Split, config: CorpusConfig, *, pair: tuple[str, str] | None = None
) -> MultiwayFile:
    """A file with the languages of ``corpus.columns``, else of ``pair``, else of its name.

    Raises:
        ConfigError: a package is missing.
        DataError: the first row lacks a column, or nothing says the languages.
    """
    languages = tuple(config.columns) or pair or file.pair()
    if languages is None or len(languages) < 2:
        raise DataError(
            f"Nothing says which languages {file.path} has: set corpus.columns, for instance "
            '{ de = "source", en = "target" }, or put the file into a folder named like de-en.'
        )
    columns = {language: config.columns.get(language, language) for language in languages}
    first = next(_rows(file, columns.values(), max_line_bytes=config.max_line_bytes), None)
    if first is not None:
        _require_columns(file, first, columns)
    return MultiwayFile(
        file=file,
        split=split,
        together=(frozenset(languages),),
        records=lambda: iterate_records(file, columns, max_line_bytes=config.max_line_bytes),
    )


def iterate_records(
    file: RawFile, columns: Mapping[str, str], *, max_line_bytes: int
) -> Iterator[Record]:
    """The rows of a file with the texts that are not blank.

    Args:
        file: one of ``ENDINGS``.
        columns: language → column.
        max_line_bytes: of a text; a row that is much longer is malformed.
    """
    for row in _rows(file, columns.values(), max_line_bytes=max_line_bytes):
        texts = None if row.cells is None else _texts(row.cells, columns)
        yield Record(row.line, texts or {}, is_malformed=texts is None)


def _texts(cells: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, bytes] | None:
    """Language → text; None where a cell is neither a text nor missing."""
    nested = cells.get(TRANSLATION)
    within = nested if isinstance(nested, dict) else cells
    found = {}
    for language, column in columns.items():
        text = within.get(column)
        if isinstance(text, str):
            if text and not text.isspace():
                found[language] = text.encode("utf-8", "surrogatepass")
        elif text is not None:
            return None
    return found


def _require_columns(file: RawFile, first: Row, columns: Mapping[str, str]) -> None:
    if first.cells is None:
        raise DataError(
            f"{file.path}, line {first.line}, is no row of a .{file.ending} file: rename the file "
            "to what it is, or correct the line."
        )
    nested = first.cells.get(TRANSLATION)
    present = nested if isinstance(nested, dict) else first.cells
    missing = [column for column in columns.values() if column not in present]
    if missing:
        raise DataError(
            f"{file.path} has no column {listed(missing)} (it has {listed(present) or 'none'}): "
            "set corpus.columns, language = column."
        )


def _rows(file: RawFile, columns: Iterable[str], *, max_line_bytes: int) -> Iterator[Row]:
    match file.ending:
        case "parquet":
            return _parquet_rows(file, {*columns, TRANSLATION})
        case "csv":
            return _csv_rows(file, max_line_bytes=max_line_bytes)
        case _:
            return _json_rows(file, max_line_bytes=max_line_bytes)


def _json_rows(file: RawFile, *, max_line_bytes: int) -> Iterator[Row]:
    longest = _JSON_BYTES * max_line_bytes
    for number, line in enumerate(iterate_raw_lines(file.path, max_line_bytes=longest), start=1):
        yield Row(number, _json_object(line) if len(line) <= longest else None)


def _json_object(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(_decoded(line.removeprefix(codecs.BOM_UTF8)))
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _csv_rows(file: RawFile, *, max_line_bytes: int) -> Iterator[Row]:
    """Rows below the header; a field in quotation marks may hold line ends."""
    raws = iterate_raw_lines(file.path, max_line_bytes=2 * max_line_bytes)
    reader = csv.reader((f"{_decoded(raw)}\n" for raw in raws), strict=True)
    cells = _next_cells(reader)
    if cells is None:
        return
    header = [cell.removeprefix("\ufeff").strip() for cell in cells]
    line = reader.line_num + 1
    while (cells := _next_cells(reader)) is not None:
        is_row = len(cells) == len(header)
        yield Row(line, dict(zip(header, cells, strict=True)) if is_row else None)
        line = reader.line_num + 1


def _next_cells(reader: Iterator[list[str]]) -> list[str] | None:
    """The next row, an empty one where it breaks the rules of quoting; None at the end."""
    try:
        return next(reader, None)
    except csv.Error:
        return []


def _decoded(raw: bytes) -> str:
    """What is no UTF-8 stays so when it is encoded again, for the quarantine."""
    return raw.decode("utf-8", "surrogateescape")


def _parquet_rows(file: RawFile, columns: set[str]) -> Iterator[Row]:
    with _told(file):
        import pyarrow.parquet

        with pyarrow.parquet.ParquetFile(file.path) as table:
            present = [name for name in table.schema_arrow.names if name in columns]
            number = 0
            for batch in table.iter_batches(batch_size=_BATCH_ROWS, columns=present):
                for cells in batch.to_pylist():
                    number += 1
                    yield Row(number, cells)


@contextmanager
def _told(file: RawFile) -> Iterator[None]:
    """What pyarrow raises becomes one sentence; its errors have no class in common."""
    try:
        yield
    except (UserError, Interrupted):
        raise
    except ImportError as error:
        raise ConfigError(
            f"{file.path} is a Parquet file, which needs the package pyarrow ({error}): "
            "run pip install 'mmnmt[parquet]'."
        ) from error
    except Exception as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise DataError(
            f"{file.path} is no complete Parquet file ({reason}): fetch it again."
        ) from error
