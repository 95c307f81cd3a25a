"""The report of an evaluation as Markdown; and the tables that the command line prints.

Text from outside (names of systems, folders and languages, translations, warnings) is escaped, so
that it reads in the rendered report as it stands: no markup, no HTML, no new table cell or line.
"""

import re
from collections.abc import Sequence

from pipeline.evaluation.budget_table import BUDGET_GROUPS, budget_notes, budget_rows, trained_for
from pipeline.evaluation.comparison_tables import TableSection, comparison_sections
from pipeline.evaluation.history import History
from pipeline.evaluation.scores import Evaluation, Interval
from pipeline.evaluation.tables import (
    NOT_DECIDED,
    AverageTable,
    Imprint,
    Row,
    Sample,
    direction_row,
    directions_by_family,
    family_title,
    format_duration,
    format_interval,
    format_score,
    kind_of,
    notes,
    score_tables,
    section_tables,
    signatures,
)

_SPECIAL = re.compile(
    r"""[\\`*\[\]~|$]             # code, emphasis, links, strikethrough, cells, formulae
    | (?<![^\W_])_ | _(?![^\W_])  # emphasis; between letters and digits it has no meaning
    | ^[\#+=-]                   # headings, lists, rules
    """,
    re.VERBOSE,
)
_NUMBERED = re.compile(r"^(\d+)([.)])(?=\s|$)")
_HTML = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
_BLANK = re.compile(r"[\s\x00-\x1f\x7f-\x9f]+")
_SURROGATE = re.compile(r"[\ud800-\udfff]")


def escape_markdown(text: str) -> str:
    """The text as one line of Markdown that shows it as it stands; white space becomes a space.

    Bare web and mail addresses are left for the renderer to link: they show as they stand.
    """
    line = _SURROGATE.sub("\ufffd", _BLANK.sub(" ", text)).strip()
    escaped = _SPECIAL.sub(lambda found: f"\\{found.group()}", line)
    escaped = _NUMBERED.sub(r"\1\\\2", escaped)
    return re.sub("[&<>]", lambda found: _HTML[found.group()], escaped)


def markdown_summary(evaluation: Evaluation, history: History) -> str:
    """The tables of averages of the main scores, with what each system was trained for."""
    return "\n\n".join(
        f"{escape_markdown(table.title)}, averages over directions\n\n"
        f"{_averages(evaluation, table, history)}"
        for table in score_tables(evaluation)
    )


def markdown_report(
    evaluation: Evaluation,
    history: History,
    samples: Sequence[Sample] = (),
    *,
    imprint: Imprint,
    further: Sequence[TableSection] = (),
) -> str:
    """The whole report as Markdown; ``further`` sections stand behind those of the scores."""
    sections = {
        "# Evaluation": f"{escape_markdown(imprint.text)}\n\n"
        f"{markdown_summary(evaluation, history)}".rstrip(),
        "## Warnings": _bullets(evaluation.warnings),
        "## Systems and what their training took": _budgets(history),
        **{
            f"## {escape_markdown(section.title)}": "\n\n".join(
                f"{escape_markdown(table.title)}\n\n{_averages(evaluation, table, history)}"
                for table in tables
            )
            for section, tables in section_tables(evaluation).items()
        },
        **{
            f"## {escape_markdown(one.title)}": _text_tables(one)
            for one in [*comparison_sections(evaluation), *further]
        },
        "## Sample translations": _samples(evaluation, samples),
        "## All directions": _directions(evaluation),
        "## What each stage kept and dropped": _summaries(history),
        "## Stages and wall times": _stages(evaluation, history),
        "## Notes": _bullets(notes(evaluation, missing=history.missing)),
        "## Signatures": "\n".join(
            f"- {_code(text)} ({escape_markdown(where)})" for text, where in signatures(evaluation)
        ),
    }
    shown = [f"{title}\n\n{content}" for title, content in sections.items() if content]
    return "\n\n".join(shown) + "\n"


# Sections


def _averages(evaluation: Evaluation, table: AverageTable, history: History) -> str:
    titles = [
        escape_markdown(
            f"{family_title(evaluation, one.family)} {one.group_title} ({one.directions}"
            f"{'' if one.decided else NOT_DECIDED})"
        )
        for one in table.columns
    ]
    body = [
        [escape_markdown(row.name), _trained_for(history, row), *_scores(row)] for row in table.rows
    ]
    return _table(["System", "Trained for", *titles], body)


def _trained_for(history: History, row: Row) -> str:
    return "" if row.ceiling else escape_markdown(trained_for(history, row.name))


def _budgets(history: History) -> str:
    rows = budget_rows(history)
    if not rows:
        return ""
    titles = [
        f"{group}: {title.lower() if title != 'FLOP' else title}"
        for group, columns in BUDGET_GROUPS.items()
        for title in columns
    ]
    body = [[escape_markdown(row.name), *map(escape_markdown, row.cells)] for row in rows]
    return f"{_table(['System', *titles], body)}\n\n{_bullets(budget_notes(history))}".rstrip()


def _samples(evaluation: Evaluation, samples: Sequence[Sample]) -> str:
    parts = []
    for family in directions_by_family(evaluation):
        body: list[list[str]] = []
        for sample in (one for one in samples if one.profile.family == family):
            place = f"{sample.profile.direction}, line {sample.line:,}"
            texts = {"source": sample.source, "reference": sample.reference, **sample.translations}
            body += [
                [escape_markdown(place), escape_markdown(name), escape_markdown(text) or "(empty)"]
                for name, text in texts.items()
            ]
        if body:
            title = escape_markdown(family_title(evaluation, family))
            parts.append(f"{title}\n\n{_table(['Line', 'From', 'Text'], body, numbers=False)}")
    return "\n\n".join(parts)


def _directions(evaluation: Evaluation) -> str:
    if not evaluation.main_columns:
        return ""
    titles = [
        f"{system.name} {column.heading}"
        for system in evaluation.systems
        for column in evaluation.main_columns
    ]
    body = []
    for profiles in directions_by_family(evaluation).values():
        for profile in profiles:
            row = direction_row(evaluation, profile)
            name = escape_markdown(_language_names(evaluation, row.name))
            kind = escape_markdown(kind_of(evaluation, profile))
            body.append([name, kind, f"{profile.training_lines:,}", *_scores(row)])
    header = ["Direction", "Kind", "Training lines", *map(escape_markdown, titles)]
    return _table(header, body)


def _language_names(evaluation: Evaluation, direction: str) -> str:
    source, target = direction.split("-")
    names = evaluation.language_names
    return f"{direction} ({names[source]} → {names[target]})"


def _summaries(history: History) -> str:
    return "\n".join(
        "\n".join(
            [
                f"- {escape_markdown(f'{run.folder} ({run.stage})')}",
                *(f"  - {escape_markdown(line)}" for line in run.summary),
            ]
        )
        for run in history.stages
        if run.summary
    )


def _stages(evaluation: Evaluation, history: History) -> str:
    if not history.stages:
        return ""
    body = [
        [
            escape_markdown(run.stage),
            escape_markdown(run.folder),
            escape_markdown(format_duration(run.wall_seconds)),
            escape_markdown(", ".join(run.systems)),
        ]
        for run in history.stages
    ]
    body += [
        [
            "all stages",
            "",
            escape_markdown(format_duration(history.wall_seconds_of(one.name))),
            name,
        ]
        for one in evaluation.systems
        for name in [escape_markdown(one.name)]
    ]
    return _table(["Stage", "Folder", "Wall time", "Systems"], body)


def _text_tables(section: TableSection) -> str:
    parts = [escape_markdown(section.lead)]
    for one in section.tables:
        rows = [[*map(escape_markdown, row)] for row in one.rows]
        parts.append(escape_markdown(one.title))
        parts.append(_table([*map(escape_markdown, one.head)], rows))
    return "\n\n".join(parts)


# Layout


def _scores(row: Row) -> list[str]:
    return [
        _score(value, interval, decimals=decimals, bold=place in row.best)
        for place, (value, interval, decimals) in enumerate(
            zip(row.values, row.intervals, row.decimals, strict=True)
        )
    ]


def _score(value: float | None, interval: Interval | None, *, decimals: int, bold: bool) -> str:
    text = format_score(value, decimals=decimals)
    shown = f"**{text}**" if bold else text
    if interval is None:
        return shown
    return f"{shown} ({format_interval(interval, decimals=decimals)})"


def _table(header: Sequence[str], body: Sequence[Sequence[str]], *, numbers: bool = True) -> str:
    """Cells are Markdown already; columns after the first are aligned to the right as numbers."""
    rule = ["---", *("---:" if numbers else "---" for _ in header[1:])]
    return "\n".join(f"| {' | '.join(line)} |" for line in [header, rule, *body])


def _code(text: str) -> str:
    """A code span; its fence is longer than any run of backticks within."""
    text = _BLANK.sub(" ", text)
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{text}{fence}" if fence == "`" else f"{fence} {text} {fence}"


def _bullets(items: Sequence[str]) -> str:
    return "\n".join(f"- {escape_markdown(item)}" for item in items)
