"""Tab-separated tables: a pair in two columns, or a column for each of many languages.

Where the file's name says no pair, its first line names the columns: those named by a language code
are read, as in the table of TED talks in 59 languages (``talk_name en es pt-br …``), columns of
other names are left alone. Of a file that is named for a pair, ``train.de-en.tsv``, the columns
``de`` and ``en`` are read if its first line names them; else every row has these two, in this
order. A cell that is blank or ``__NULL__`` is missing. There is no quoting: a row is a line.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from data_prep.readers.multiway import MultiwayFile, Record, is_language, pair_up
from data_prep.readers.raw_files import RawFile, find_files
from data_prep.readers.section import RawText
from data_prep.readers.text_files import iterate_raw_lines
from pipeline.artifacts.corpus import Split
from pipeline.artifacts.raw_input import RawInput
from pipeline.artifacts.settings import CorpusConfig
from pipeline.errors import DataError

MISSING = b"__NULL__"
"""How the TED talks mark what is not translated."""

_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Columns:
    """Which columns of a table are text."""

    spellings: dict[int, str]
    """Column, from 0 → language."""
    width: int
    """Cells of a row."""
    has_header: bool


def read_tsv(raw: RawInput | None, config: CorpusConfig) -> RawText:
    """All pairs of the languages that the tables have.

    Raises:
        ConfigError: nothing is given, or a wanted language is in no pair of wanted languages.
        DataError: a table says nowhere which languages it has.
    """
    files, left_out = find_files(raw, source="tsv", endings=("tsv",))
    tables = [open_table(file, file.split(), config) for file in files]
    return pair_up(tables, config, left_out=left_out)


def open_table(
    file: RawFile, split: Split, config: CorpusConfig, *, pair: tuple[str, str] | None = None
) -> MultiwayFile:
    """A table with the languages of its header, else of ``pair``, else of the file's name.

    Raises:
        DataError: there is none of these, or the file cannot be read.
    """
    columns = _find_columns(file, pair or file.pair(), max_line_bytes=config.max_line_bytes)
    return MultiwayFile(
        file=file,
        split=split,
        together=(frozenset(columns.spellings.values()),),
        records=lambda: iterate_rows(file, columns, max_line_bytes=config.max_line_bytes),
    )


def iterate_rows(file: RawFile, columns: Columns, *, max_line_bytes: int) -> Iterator[Record]:
    """The rows of a table by line; one with more or fewer cells than its columns is malformed.

    So is one that is longer than its cells may be together, the cut one among them.
    """
    longest = max_line_bytes * columns.width + columns.width
    lines = enumerate(iterate_raw_lines(file.path, max_line_bytes=longest), start=1)
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


def _is_text(cell: bytes) -> bool:
    return bool(cell) and cell != MISSING and not cell.isspace()


def _find_columns(file: RawFile, pair: tuple[str, str] | None, *, max_line_bytes: int) -> Columns:
    """Those of the header, of which only a pair's where one is known; else a pair's two."""
    first = next(iterate_raw_lines(file.path, max_line_bytes=max_line_bytes), b"")
    cells = _cells_of_header(first)
    wanted = {spelling.lower() for spelling in pair or ()}
    named = {
        column: spelling
        for column, spelling in enumerate(cells)
        if (spelling.lower() in wanted if wanted else is_language(spelling))
    }
    if len({spelling.lower() for spelling in named.values()}) > 1:
        return Columns(named, width=len(cells), has_header=True)
    if pair is None:
        raise DataError(
            f"{file.path}, line 1, names fewer than two languages, and the file's name no pair: "
            "name the columns (de, en, …), or the file like train.de-en.tsv."
        )
    return Columns(dict(enumerate(pair)), width=2, has_header=False)


def _cells_of_header(line: bytes) -> Sequence[str]:
    text = line.removeprefix(_BOM).decode("utf-8", "replace")
    return [cell.strip() for cell in text.split("\t")]
