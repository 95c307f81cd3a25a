"""The table model of every report, and how its figures are printed.

A report is a title, facts and sections; a section has figures, tables and a list. Sections
are built once; ``rendering`` turns them into Markdown and HTML. No table is wider than
``MAX_COLUMNS``: a wider one is split.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

NO_VALUE = "–"
MAX_COLUMNS = 12

Value = str | float | None


@dataclass(frozen=True)
class Cell:
    """A cell of a table or an item of a list."""

    value: Value  # A text, or a number to be printed by ``format``; None prints as a dash
    format: str = ","  # format specification of a number, as in ``f"{value:.1f}"``
    note: str = ""  # text in smaller print after the value, such as a confidence interval
    bold: bool = False
    code: bool = False  # print in a fixed-width font

    @property
    def text(self) -> str:
        """Return the value as printed."""
        if self.value is None:
            return NO_VALUE
        return self.value if isinstance(self.value, str) else format(self.value, self.format)


@dataclass(frozen=True)
class Row:
    """A row of a table; the first cell names it."""

    cells: tuple[Cell, ...]
    is_ceiling: bool = False  # whether the row shows an upper bound instead of a system

    @property
    def texts(self) -> tuple[str, ...]:
        """Return the values of all cells as printed."""
        return tuple(cell.text for cell in self.cells)


def row(*values: Cell | Value, is_ceiling: bool = False) -> Row:
    """Return a row; values that are no cells get the usual format."""
    cells = (value if isinstance(value, Cell) else Cell(value) for value in values)
    return Row(tuple(cells), is_ceiling=is_ceiling)


@dataclass(frozen=True)
class Heading:
    """The heading of a column."""

    title: str
    note: str = ""
    is_number: bool = True
    """Whether the column holds numbers, which are aligned to the right; texts may wrap."""


def headings(*titles: str, words: Iterable[str] = ()) -> tuple[Heading, ...]:
    """Return one heading per title; the first column and the columns in ``words`` hold texts."""
    texts = {titles[0], *words}
    return tuple(Heading(title, is_number=title not in texts) for title in titles)


@dataclass(frozen=True)
class Table:
    """A table with a heading for every column."""

    title: str
    headings: tuple[Heading, ...]
    rows: tuple[Row, ...]

    @property
    def parts(self) -> list["Table"]:
        """Return the table, split by columns if it is too wide; all parts have the first column."""
        width = len(self.headings)
        if width <= MAX_COLUMNS:
            return [self]
        count = -(-(width - 1) // (MAX_COLUMNS - 1))
        size = -(-(width - 1) // count)
        starts = range(1, width, size)
        return [
            Table(
                f"{self.title} ({number} of {count})".strip(),
                (self.headings[0], *self.headings[start : start + size]),
                tuple(
                    replace(one, cells=(one.cells[0], *one.cells[start : start + size]))
                    for one in self.rows
                ),
            )
            for number, start in enumerate(starts, start=1)
        ]


def bullets(texts: Iterable[str]) -> tuple[Cell, ...]:
    """Return texts as the items of a list."""
    return tuple(map(Cell, texts))


@dataclass(frozen=True)
class Figure:
    """A chart for the HTML page."""

    svg: str  # the chart and its legend, as HTML
    title: str = ""
    note: str = ""


@dataclass(frozen=True)
class ReportSection:
    """A section of a report."""

    title: str
    lead: str = ""  # introduction of the section, one paragraph
    figures: tuple[Figure, ...] = ()
    tables: tuple[Table, ...] = ()
    items: tuple[Cell, ...] = ()  # items of a list

    @property
    def is_empty(self) -> bool:
        """Return whether there is nothing to show."""
        return not self.figures and self.is_page_only

    @property
    def is_page_only(self) -> bool:
        """Return whether the section has nothing that Markdown can show."""
        return not (self.tables or self.items)


EMPTY = ReportSection("")


@dataclass(frozen=True)
class Report:
    """A whole report."""

    title: str
    imprint: str
    facts: tuple[str, ...]
    sections: tuple[ReportSection, ...]
    generator: str = ""  # name of the command that wrote the page


# Figures


def score_cell(value: float | None, *, decimals: int, note: str = "", bold: bool = False) -> Cell:
    """Return a score with so many decimals."""
    return Cell(value, f".{decimals}f", note=note, bold=bold)


def format_duration(seconds: float) -> str:
    """Return a duration in at most two units: ``2 h 5 min``, ``3 min 20 s``, ``4.2 s``."""
    if seconds < 0.05:
        return "< 0.1 s" if seconds > 0 else "0 s"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    if seconds < 3599.5:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours:,} h {minutes} min"


def format_large(value: float | None) -> str:
    """Return a number as three digits and a unit: ``940``, ``18.4 M``, ``2.35 P``."""
    if value is None:
        return NO_VALUE
    for unit in ("", " k", " M", " G", " T", " P", " E"):
        if value < 999.5:
            return f"{value:.3g}{unit}" if value % 1 or value > 999 or unit else f"{value:.0f}"
        value /= 1000
    return f"{value:.3g} Z"


def joined(items: Sequence[str]) -> str:
    """Return ``a``, ``a and b`` or ``a, b and c``."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"
