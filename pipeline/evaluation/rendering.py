"""Reports as one self-contained HTML page, by the template of this package, and as Markdown.

Text from outside (names of systems, directories and languages, translations, warnings) is escaped
and appears literally. The page loads nothing and runs nothing.
"""

import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from pipeline.evaluation.charts import replace_forbidden, style_sheet
from pipeline.evaluation.tables import Cell, Report, ReportSection, Table

_SPECIAL = re.compile(
    r"""[\\`*\[\]~|$]             # code, emphasis, links, strikethrough, cells, formulae
    | (?<![^\W_])_ | _(?![^\W_])  # emphasis; between letters and digits it has no meaning
    | ^[\#=] | ^[+-](?!\d)        # headings, lists, rules; signed numbers are none
    """,
    re.VERBOSE,
)
_HTML = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
_BLANK = re.compile(r"[\s\x00-\x1f\x7f-\x9f]+")


@cache
def _page() -> Environment:
    def finalize(value: Any) -> Any:
        """Replace characters that HTML cannot hold; autoescape does the rest."""
        is_plain = isinstance(value, str) and not isinstance(value, Markup)
        return replace_forbidden(value) if is_plain else value

    found = Environment(
        loader=PackageLoader("pipeline.evaluation"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=finalize,
        autoescape=True,
    )
    found.globals["style"] = style_sheet()
    return found


def render_html(report: Report) -> str:
    """Return a report as one HTML page."""
    return _page().get_template("report.html.j2").render(report=report)


def render_markdown(report: Report) -> str:
    """Return a report as Markdown."""
    head = [f"# {escape_markdown(report.title)}"] if report.title else []
    facts = [report.imprint, " · ".join(report.facts)]
    blocks = [*head, *(escape_markdown(one) for one in facts if one)]
    for section in report.sections:
        if not section.is_page_only:
            blocks += _section(section)
    return "\n\n".join(blocks) + "\n"


def render_tables(tables: tuple[Table, ...]) -> str:
    """Return only tables as Markdown, for the terminal."""
    return render_markdown(Report("", "", (), (ReportSection("", tables=tables),))).strip()


def _section(section: ReportSection) -> Iterator[str]:
    if section.title:
        yield f"## {escape_markdown(section.title)}"
    if section.lead:
        yield escape_markdown(section.lead)
    for table in (part for one in section.tables for part in one.parts):
        if table.title:
            yield f"### {escape_markdown(table.title)}"
        yield "\n".join(
            [
                _row(_markdown(Cell(one.title, note=one.note)) for one in table.headings),
                _row("---:" if one.is_number else "---" for one in table.headings),
                *(_row(map(_markdown, one.cells)) for one in table.rows),
            ]
        )
    if section.items:
        yield "\n".join(f"- {_markdown(one)}" for one in section.items)


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _markdown(cell: Cell) -> str:
    text = markdown_code(cell.text) if cell.code else escape_markdown(cell.text)
    note = f" ({escape_markdown(cell.note)})" if cell.note else ""
    return f"**{text}**{note}" if cell.bold else f"{text}{note}"


def escape_markdown(text: str) -> str:
    """Return a text as one line of Markdown that shows it as it stands.

    White space becomes a space. Bare web and mail addresses are left for the renderer to link: they
    show as they stand.
    """
    line = re.sub(r"[\ud800-\udfff]", "\ufffd", _BLANK.sub(" ", text)).strip()
    escaped = _SPECIAL.sub(lambda found: f"\\{found.group()}", line)
    escaped = re.sub(r"^(\d+)([.)])(?=\s|$)", r"\1\\\2", escaped)
    return re.sub("[&<>]", lambda found: _HTML[found.group()], escaped)


def markdown_code(text: str) -> str:
    """Return a code span, with a fence longer than any run of backticks within it."""
    text = _BLANK.sub(" ", text)
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{text}{fence}" if fence == "`" else f"{fence} {text} {fence}"
