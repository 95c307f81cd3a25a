"""The model of a report, and its two forms: Markdown and one self-contained HTML page.

A report is a title, facts and sections; a section has figures, tables and a list. No table is wider
than ``MAX_COLUMNS``: a wider one is split. Text from outside (names of systems, directories and
languages, translations, warnings) is escaped and appears literally. The page loads nothing and runs
nothing; its template is in ``templates/``.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from html import escape
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

NO_VALUE = "–"
MAX_COLUMNS = 12

Value = str | float | None


@dataclass(frozen=True)
class Cell:
    """A cell of a table or an item of a list."""

    value: Value  # a text, or a number to be printed by ``format``; None prints as a dash
    format: str = ","  # format specification of a number, for example ``.1f``
    note: str = ""  # text in smaller print after the value, for example an interval
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

    @property
    def texts(self) -> tuple[str, ...]:
        """Return the values of all cells as printed."""
        return tuple(cell.text for cell in self.cells)


def row(*values: Cell | Value) -> Row:
    """Return a row; values that are no cells get the usual format."""
    return Row(tuple(value if isinstance(value, Cell) else Cell(value) for value in values))


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
        others = len(self.headings) - 1
        if others < MAX_COLUMNS:
            return [self]
        count = -(-others // (MAX_COLUMNS - 1))
        size = -(-others // count)
        found = []
        for number in range(count):
            columns = slice(1 + number * size, 1 + (number + 1) * size)
            shown = (self.headings[0], *self.headings[columns])
            rows = (Row((line.cells[0], *line.cells[columns])) for line in self.rows)
            title = f"{self.title} ({number + 1} of {count})".strip()
            found.append(Table(title, shown, tuple(rows)))
        return found


@dataclass(frozen=True)
class Figure:
    """A chart for the HTML page."""

    svg: str
    title: str = ""
    note: str = ""


@dataclass(frozen=True)
class ReportSection:
    """A section of a report; a section that has only a title and a lead is not shown."""

    title: str
    lead: str = ""  # introduction of the section, one paragraph
    figures: tuple[Figure, ...] = ()
    tables: tuple[Table, ...] = ()
    items: tuple[Cell, ...] = ()  # items of a list


def section_of_notes(title: str, texts: Iterable[str]) -> ReportSection:
    """Return a section that is a list of texts."""
    return ReportSection(title, items=tuple(map(Cell, texts)))


@dataclass(frozen=True)
class Report:
    """A whole report."""

    title: str
    imprint: str
    facts: tuple[str, ...]
    sections: tuple[ReportSection, ...]
    generator: str  # name of the command that wrote the page


# Numbers


def score_cell(value: float | None, *, decimals: int, note: str = "", bold: bool = False) -> Cell:
    """Return a score with so many decimals."""
    return Cell(value, f".{decimals}f", note=note, bold=bold)


def format_large(value: float | None) -> str:
    """Return a number as three digits and a unit: ``940``, ``18.4 M``, ``2.35 P``."""
    if value is None:
        return NO_VALUE
    for unit in ("", " k", " M", " G", " T", " P", " E"):
        if value < 999.5:
            return f"{value:.3g}{unit}" if value % 1 or value > 999 or unit else f"{value:.0f}"
        value /= 1000
    return f"{value:.3g} Z"


# HTML

_NOT_IN_HTML = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def escape_html(text: str) -> str:
    """Return a text as HTML that shows it literally."""
    return escape(replace_forbidden(text))


def replace_forbidden(text: str) -> str:
    """Replace characters that HTML cannot hold by a replacement character."""
    return _NOT_IN_HTML.sub("\ufffd", text)


def style_sheet() -> str:
    """Return the style sheet of pages and pictures."""
    return resources.files("pipeline.evaluation").joinpath("report.css").read_text("utf-8")


@cache
def _page() -> Environment:
    def finalize(value: Any) -> Any:
        """Replace characters that HTML cannot hold; autoescape does the rest."""
        is_plain = isinstance(value, str) and not isinstance(value, Markup)
        return replace_forbidden(value) if is_plain else value

    return Environment(
        loader=PackageLoader("pipeline.evaluation"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=finalize,
        autoescape=True,
    )


def render_html(report: Report) -> str:
    """Return a report as one HTML page."""
    sections = [
        section for section in report.sections if section.figures or section.tables or section.items
    ]
    template = _page().get_template("report.html.j2")
    return template.render(report=report, sections=sections, style=style_sheet())


# Markdown

_SPECIAL = re.compile(
    r"""[\\`*\[\]~|$]             # code, emphasis, links, strikethrough, cells, formulae
    | (?<![^\W_])_ | _(?![^\W_])  # emphasis; between letters and digits it has no meaning
    | ^[\#=] | ^[+-](?!\d)        # headings, lists, rules; signed numbers are none
    """,
    re.VERBOSE,
)
_BLANK = re.compile(r"[\s\x00-\x1f\x7f-\x9f]+")


def render_markdown(report: Report) -> str:
    """Return a report as Markdown, which shows tables and lists but no figures."""
    facts = (report.imprint, " · ".join(report.facts))
    blocks = [f"# {escape_markdown(report.title)}", *map(escape_markdown, facts)]
    for section in report.sections:
        if not section.tables and not section.items:
            continue
        blocks.append(f"## {escape_markdown(section.title)}")
        blocks += [escape_markdown(section.lead)] if section.lead else []
        blocks += [render_tables(section.tables)] if section.tables else []
        blocks += ["\n".join(f"- {_markdown(one)}" for one in section.items)]
    return "\n\n".join(filter(None, blocks)) + "\n"


def render_tables(tables: Iterable[Table]) -> str:
    """Return tables as Markdown."""
    return "\n\n".join(block for table in tables for part in table.parts for block in _table(part))


def _table(table: Table) -> Iterator[str]:
    if table.title:
        yield f"### {escape_markdown(table.title)}"
    rows = (
        [_markdown(Cell(heading.title, note=heading.note)) for heading in table.headings],
        ["---:" if heading.is_number else "---" for heading in table.headings],
        *([*map(_markdown, line.cells)] for line in table.rows),
    )
    yield "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def _markdown(cell: Cell) -> str:
    text = _code_span(cell.text) if cell.code else escape_markdown(cell.text)
    note = f" ({escape_markdown(cell.note)})" if cell.note else ""
    return f"**{text}**{note}" if cell.bold else f"{text}{note}"


def escape_markdown(text: str) -> str:
    """Return a text as one line of Markdown that shows it literally.

    White space becomes a space. Bare web and mail addresses are left for the renderer to link: they
    still show literally.
    """
    line = re.sub(r"[\ud800-\udfff]", "\ufffd", _BLANK.sub(" ", text)).strip()
    escaped = _SPECIAL.sub(lambda found: f"\\{found.group()}", line)
    escaped = re.sub(r"^(\d+)([.)])(?=\s|$)", r"\1\\\2", escaped)
    return escape(escaped, quote=False)


def _code_span(text: str) -> str:
    """Return a code span, with a fence longer than any run of backticks within it."""
    text = _BLANK.sub(" ", text)
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{text}{fence}" if fence == "`" else f"{fence} {text} {fence}"
