"""Reports as Markdown and as one self-contained HTML page, by the templates of this package.

Both escape text from outside (names of systems, directories and languages, translations, warnings),
so that it appears literally. The page loads nothing and runs nothing.
"""

import re
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from pipeline.evaluation.charts import SERIES_COLORS, replace_forbidden, style_sheet
from pipeline.evaluation.tables import Report, ReportSection, Table

_SPECIAL = re.compile(
    r"""[\\`*\[\]~|$]             # code, emphasis, links, strikethrough, cells, formulae
    | (?<![^\W_])_ | _(?![^\W_])  # emphasis; between letters and digits it has no meaning
    | ^[\#=] | ^[+-](?!\d)        # headings, lists, rules; signed numbers are none
    """,
    re.VERBOSE,
)
_NUMBERED = re.compile(r"^(\d+)([.)])(?=\s|$)")
_HTML = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
_BLANK = re.compile(r"[\s\x00-\x1f\x7f-\x9f]+")
_SURROGATE = re.compile(r"[\ud800-\udfff]")


def render_html(report: Report) -> str:
    """Return a report as one HTML page."""
    return _html().get_template("report.html.j2").render(report=report, style=style_sheet())


def render_markdown(report: Report) -> str:
    """Return a report as Markdown."""
    return _markdown().get_template("report.md.j2").render(report=report).rstrip() + "\n"


def render_tables(tables: tuple[Table, ...]) -> str:
    """Return only tables as Markdown, for the terminal."""
    return render_markdown(Report("", "", (), (ReportSection("", tables=tables),))).strip()


def escape_markdown(text: str) -> str:
    """Return a text as one line of Markdown that shows it as it stands.

    White space becomes a space. Bare web and mail addresses are left for the renderer to link: they
    show as they stand.
    """
    line = _SURROGATE.sub("\ufffd", _BLANK.sub(" ", text)).strip()
    escaped = _SPECIAL.sub(lambda found: f"\\{found.group()}", line)
    escaped = _NUMBERED.sub(r"\1\\\2", escaped)
    return re.sub("[&<>]", lambda found: _HTML[found.group()], escaped)


def markdown_code(text: str) -> Markup:
    """Return a code span, whose fence is longer than any run of backticks within it."""
    text = _BLANK.sub(" ", text)
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    return Markup(f"{fence}{text}{fence}" if fence == "`" else f"{fence} {text} {fence}")


@cache
def _html() -> Environment:
    def finalize(value: Any) -> Any:
        """Replace characters that HTML cannot hold; autoescape does the rest."""
        is_plain = isinstance(value, str) and not isinstance(value, Markup)
        return replace_forbidden(value) if is_plain else value

    return _environment(finalize=finalize, autoescape=True)


@cache
def _markdown() -> Environment:
    def finalize(value: Any) -> Any:
        return value if isinstance(value, Markup) else escape_markdown(str(value))

    environment = _environment(finalize=finalize, autoescape=False)
    environment.filters["code"] = markdown_code
    return environment


def _environment(**settings: Any) -> Environment:
    environment = Environment(
        loader=PackageLoader("pipeline.evaluation"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        **settings,
    )
    environment.globals["SERIES_COLORS"] = SERIES_COLORS
    return environment
