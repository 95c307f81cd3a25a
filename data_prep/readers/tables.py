"""Read tables with a column of text per language: TSV, Parquet, JSON lines and CSV.

TSV: the first line has the columns that ``corpus.columns`` names. Without that, and without a pair
in the file's name, the first line names the columns; those with the name of a language are read, as
in the table of TED talks in 59 languages (``talk_name en es pt-br …``). For a file with a pair in
its name, ``train.de-en.tsv``, the columns ``de`` and ``en`` are read if the first line names them;
otherwise every row has these two, in this order. A blank cell or ``__NULL__`` is missing. There is
no quoting: a row is a line.

Others: the languages are named by ``corpus.columns`` (``{ de = "source", en = "target" }``), else
by the pair in the name of the file or its folder: ``de-en/train-00000-of-00001.parquet``,
``train.de-en.jsonl``. Without ``corpus.columns``, a column ``translation`` holds the text of both
languages, or each has a column with its code as the name.
"""

import codecs
import csv
import json
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from data_prep.readers.raw_text import (
    COLUMNS_IGNORED,
    MultiwayFile,
    RawFile,
    RawText,
    Record,
    SkippedText,
    find_files,
    is_language,
    pair_up,
)
from data_prep.settings import CorpusConfig
from pipeline.artifacts.corpus import Split
from pipeline.artifacts.raw_input import (
    RawInput,
    iterate_blocks,
    iterate_raw_lines,
    several_columns,
    table_rows,
)
from pipeline.artifacts.spelling import is_blank
from pipeline.config.documents import as_object
from pipeline.config.settings import shown
from pipeline.errors import DataError
from pipeline.languages import find_code
from pipeline.terminal import listed

TSV_ENDINGS, COLUMN_ENDINGS = ("tsv",), ("parquet", "jsonl", "json", "csv")
MISSING = b"__NULL__"
"""Mark of missing translations in the TED talks."""


@dataclass(frozen=True)
class Columns:
    """Columns of a TSV table that hold text."""

    spellings: dict[int, str]
    """Column, from 0 → language."""
    width: int
    """Cells of a row."""
    has_header: bool


def read_tables(raw: RawInput | None, config: CorpusConfig) -> RawText:
    """Read all pairs of the languages that tables have: TSV for ``tsv``, others for ``columns``."""
    endings = TSV_ENDINGS if config.source == "tsv" else COLUMN_ENDINGS
    files, left_out = find_files(raw, source=config.source, endings=endings)
    tables = [open_table(file, file.split(), config, left_out=left_out) for file in files]
    return pair_up(tables, config, left_out=left_out)


def open_table(
    file: RawFile,
    split: Split,
    config: CorpusConfig,
    *,
    left_out: SkippedText,
    pair: tuple[str, str] | None = None,
) -> MultiwayFile:
    """Open a table with the languages of ``corpus.columns``, else of its header (TSV).

    Otherwise it has the languages of ``pair``, or of its name. ``left_out`` counts the columns that
    the header of a TSV table does not name like a language.

    Raises:
        DataError: Nothing says the languages, or the first rows lack a column of them.
    """
    records: Callable[[], Iterator[Record]]
    if file.ending in TSV_ENDINGS:
        columns = _find_columns(file, pair or file.pair(), config, left_out)
        languages = tuple(columns.spellings.values())
        records = partial(iterate_rows, file, columns)
    else:
        names = _column_names(file, tuple(config.columns) or pair or file.pair(), config)
        languages = tuple(names)
        records = partial(iterate_records, file, names)
    return MultiwayFile(
        file=file,
        split=split,
        together=(frozenset(languages),),
        is_surveyed=False,
        records=records,
    )


def iterate_rows(file: RawFile, columns: Columns) -> Iterator[Record]:
    """Yield the rows of a TSV table; a row with a wrong number of cells, or too long, is malformed.

    A row is too long if it is longer than its cells may be together; such a row may be cut.
    """
    longest = (CorpusConfig.max_line_bytes + 1) * columns.width
    lines = _numbered_lines(file, longest=longest)
    for number, line in islice(lines, int(columns.has_header), None):
        cells = line.removesuffix(b"\r").split(b"\t")
        if len(cells) != columns.width or len(line) > longest:
            yield Record(number, {}, is_malformed=True)
        else:
            yield Record(
                number,
                {
                    spelling: cells[column]
                    for column, spelling in columns.spellings.items()
                    if _is_text(cells[column])
                },
            )


def _numbered_lines(file: RawFile, *, longest: int | None = None) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not blank with their numbers, from 1."""
    longest = longest or CorpusConfig.max_line_bytes
    for number, line in enumerate(iterate_raw_lines(file.path, max_line_bytes=longest), 1):
        if b"\t" in line or not is_blank(line.decode(errors="replace")):  # a tab makes a row
            yield number, line


def _is_text(cell: bytes) -> bool:
    return cell != MISSING and not is_blank(cell.decode(errors="replace"))


def _find_columns(
    file: RawFile, pair: tuple[str, str] | None, config: CorpusConfig, left_out: SkippedText
) -> Columns:
    """Return the recipe's columns, else the header's, limited to ``pair``, else the pair's two."""
    _, first = next(_numbered_lines(file), (1, b""))
    text = first.removeprefix(codecs.BOM_UTF8).decode("utf-8", "replace")
    cells = [cell.strip() for cell in text.split("\t")]
    if config.columns and first:
        if missing := [name for name in config.columns.values() if name not in cells]:
            raise _no_column(file, missing, cells)
        _refuse_repeated(file, cells, config.columns.values())
        spellings = {cells.index(column): code for code, column in config.columns.items()}
        return Columns(spellings, width=len(cells), has_header=True)
    languages = {cell for cell in cells if is_language(cell)}
    wanted = {find_code(spelling, languages) for spelling in pair} if pair else languages
    named = {column: cell for column, cell in enumerate(cells) if cell in wanted}
    if len({spelling.lower() for spelling in named.values()}) > 1:
        _refuse_repeated(file, cells, named.values())
        names = {cell or f"column {number}": cell for number, cell in enumerate(cells, start=1)}
        known = left_out.names.get(COLUMNS_IGNORED, ())  # of other files
        others = [name for name in names if not is_language(names[name]) and name not in known]
        left_out.ignore(COLUMNS_IGNORED, others)
        return Columns(named, width=len(cells), has_header=True)
    if pair is None:
        raise DataError(
            f"{file.path}, line 1, names fewer than two languages, and the file's name no pair. "
            "Name the columns (de, en, …), or the file like train.de-en.tsv."
        )
    return Columns(dict(enumerate(pair)), width=2, has_header=False)


def _refuse_repeated(file: RawFile, header: Sequence[str], wanted: Iterable[str]) -> None:
    """Refuse a header with several columns of a wanted name."""
    for name in wanted:
        if header.count(name) > 1:
            raise several_columns(file.path, name)


TRANSLATION = "translation"
ROWS_WITH_COLUMNS = 1000
"""First rows of a file, which must have every column: a row may lack a text."""
_JSON_BYTES = 12
"""Bytes of a JSON row per byte of a side, which may be an escape of six; a row has other
columns."""


class TableRow(NamedTuple):
    """Row of a table."""

    line: int
    """Line at which it begins; in a Parquet file, the number of the row."""
    cells: Mapping[str, Any] | None
    """Column → cell; None if the row is malformed."""


def _column_names(
    file: RawFile, languages: tuple[str, ...] | None, config: CorpusConfig
) -> dict[str, str]:
    """Return language → column, after a look at the first rows."""
    if languages is None or len(languages) < 2:
        raise DataError(
            f"Nothing says which languages {file.path} has. Set corpus.columns, for instance "
            '{ de = "source", en = "target" }, or name the file like '
            f"train.de-en.{file.ending}."
        )
    begin = next(iterate_blocks(file.path), b"").removeprefix(codecs.BOM_UTF8).lstrip()
    if file.ending.startswith("json") and begin.startswith(b"["):
        raise DataError(
            f"{file.path} is one JSON array. Write an object per line, for example by jq -c '.[]'."
        )
    if file.ending.startswith("csv"):
        _, header = next(_numbered_lines(file), (1, b""))
        marks = [mark for mark in (";", "\t", "|") if mark.encode() in header]
        if marks and b"," not in header:
            raise DataError(
                f"{file.path} has {marks[0]!r} between its columns. Save it with commas."
            )
    columns = {language: config.columns.get(language, language) for language in languages}
    rows = _rows(file, columns.values())
    _require_columns(file, islice(rows, ROWS_WITH_COLUMNS), columns)
    return columns


def iterate_records(file: RawFile, columns: Mapping[str, str]) -> Iterator[Record]:
    """Yield the rows of a file with the texts that are not blank; ``columns`` is by language."""
    for row in _rows(file, columns.values()):
        texts = None if row.cells is None else _texts(row.cells, columns)
        yield Record(row.line, texts or {}, is_malformed=texts is None)


def _texts(cells: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, bytes] | None:
    """Return language → text; None if a cell is neither text nor missing."""
    nested = cells.get(TRANSLATION)
    within = nested if isinstance(nested, dict) else cells
    found = {}
    for language, column in columns.items():
        text = within.get(column)
        if isinstance(text, str):
            if not is_blank(text):
                found[language] = text.encode("utf-8", "surrogatepass")
        elif text is not None:
            return None
    return found


def _require_columns(file: RawFile, rows: Iterable[TableRow], columns: Mapping[str, str]) -> None:
    """Refuse a file if a column is in none of these rows, each of which may lack some text."""
    present: dict[str, None] = {}
    line = 0
    for row in rows:
        line = line or row.line
        cells = row.cells or {}
        nested = cells.get(TRANSLATION)
        present |= dict.fromkeys(nested if isinstance(nested, dict) else cells)
        if present.keys() >= {*columns.values()}:
            return
    if line and not present:
        raise DataError(
            f"{file.path}, line {line}, is not a row of a .{file.ending} file. Rename the file to "
            "its form, or correct the line."
        )
    if line:
        missing = [column for column in columns.values() if column not in present]
        raise _no_column(file, missing, present)


def _no_column(file: RawFile, missing: Sequence[str], present: Iterable[str]) -> DataError:
    return DataError(
        f"{file.path} has no column {listed(missing)} (it has {shown(listed(present))}). Set "
        "corpus.columns, language = column."
    )


def _rows(file: RawFile, columns: Iterable[str]) -> Iterator[TableRow]:
    match file.ending:
        case "parquet":
            rows = table_rows(file.path, {*columns, TRANSLATION})
            return (TableRow(number, dict(cells)) for number, cells in enumerate(rows, start=1))
        case "csv":
            return _csv_rows(file, {*columns})
        case _:
            return _json_rows(file)


def _json_rows(file: RawFile) -> Iterator[TableRow]:
    longest = _JSON_BYTES * CorpusConfig.max_line_bytes
    for number, line in _numbered_lines(file, longest=longest):
        yield TableRow(number, _json_object(line) if len(line) <= longest else None)


def _json_object(line: bytes) -> dict[str, Any] | None:
    try:
        text = _decoded(line.removeprefix(codecs.BOM_UTF8))
        found = json.loads(text, object_pairs_hook=as_object)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _csv_rows(file: RawFile, columns: Collection[str]) -> Iterator[TableRow]:
    """Yield the rows below the header; a quoted field may hold line ends.

    Of a damaged record, only the first line is malformed, and the others are read again: a quote
    that is never closed would otherwise hide every line up to the next quote.
    """
    longest = 2 * CorpusConfig.max_line_bytes
    csv.field_size_limit(longest + 2)  # by default 131,072 characters
    raws = iterate_raw_lines(file.path, max_line_bytes=longest)
    fresh = (f"{_decoded(raw)}\n" for raw in raws)
    again = deque[str]()
    record: list[str] = []

    def take() -> Iterator[str]:
        while (line := again.popleft() if again else next(fresh, None)) is not None:
            if header is None:
                line = line.removeprefix("\ufeff")  # a quote behind it would be text
            record.append(line)
            yield line

    reader = csv.reader(take(), strict=True)
    header: list[str] | None = None
    number, damaged_until = 1, 0
    while (cells := _next_cells(reader)) is not None:
        if is_blank(record[0]):
            number += 1
            record.clear()
            continue
        # A line with an odd quote may be the end of a text, as in '(3)"x,three': it is no row.
        is_end = number <= damaged_until and "".join(record).count('"') % 2 == 1
        if is_row := bool(cells) and not is_end and len(cells) == len(header or cells):
            texts = dict(zip(header or cells, cells, strict=True))
        else:
            damaged_until = max(damaged_until, number + len(record) - 1)
            again.extendleft(reversed(record[1:]))
            del record[1:]
            reader = csv.reader(take(), strict=True)
        if header is None and is_row:
            header = [cell.strip() for cell in cells]
            _refuse_repeated(file, header, columns)
        else:
            yield TableRow(number, texts if is_row else None)
            if header is None:
                return
        number += len(record)
        record.clear()


def _next_cells(reader: Iterator[list[str]]) -> list[str] | None:
    """Return the next row; an empty one if its quoting is broken; None at the end."""
    try:
        return next(reader, None)
    except csv.Error:
        return []


def _decoded(raw: bytes) -> str:
    """Decode text; invalid UTF-8 survives encoding, for the quarantine."""
    return raw.decode("utf-8", "surrogateescape")
