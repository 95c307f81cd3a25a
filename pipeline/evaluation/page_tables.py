"""The tables of a page: averages, budgets, all directions, stages."""

from collections import Counter
from collections.abc import Sequence

from pipeline.artifacts.corpus import Direction
from pipeline.evaluation.budget_table import BUDGET_GROUPS, budget_notes, budget_rows, trained_for
from pipeline.evaluation.comparison_tables import TableSection, TextTable
from pipeline.evaluation.directions import DirectionProfile
from pipeline.evaluation.history import History
from pipeline.evaluation.html_parts import (
    bar,
    bullet_list,
    css_class,
    escape_html,
    group_heading,
    score_cells,
    section,
    table,
    two_columns,
)
from pipeline.evaluation.scores import Evaluation
from pipeline.evaluation.tables import (
    NO_VALUE,
    AverageColumn,
    AverageTable,
    Row,
    direction_row,
    directions_by_family,
    family_title,
    format_duration,
    is_decided,
    score_tables,
    section_tables,
)

LONGEST_FIGURE = 20
"""Characters of a cell; longer ones are words, and may be broken into lines."""

# Averages


def averages_section(evaluation: Evaluation, history: History) -> str:
    """The main scores, with what every system was trained for beside them."""
    tables = score_tables(evaluation)
    if not tables:
        return ""
    return section(
        "Averages by resource",
        "".join(_average_table(evaluation, one, history) for one in tables),
        lead="Arithmetic means over directions, whose number stands under each group. Bold is a "
        "score that is ahead of every other one in 95 % of the resampled test lines, where the "
        "system and the baseline translate; the interval below is the middle 95 % of the "
        "resamples.",
    )


def apart_sections(evaluation: Evaluation, history: History) -> list[str]:
    """The scores that stand apart from the main ones, where they were measured."""
    return [
        section(
            apart.title,
            "".join(_average_table(evaluation, one, history) for one in tables),
            lead=apart.lead,
        )
        for apart, tables in section_tables(evaluation).items()
    ]


def text_sections(sections: Sequence[TableSection]) -> list[str]:
    """The tables beside the averages: directions won, languages that came out."""
    return [
        section(one.title, _figures(one) + "".join(map(_text_table, one.tables)), lead=one.lead)
        for one in sections
    ]


def _figures(shown: TableSection) -> str:
    figures = "".join(f"<figure>{one}</figure>" for one in shown.figures)
    return f'<div class="charts">{figures}</div>' if figures else ""


def _text_table(shown: TextTable) -> str:
    head = "".join(f'<th scope="col">{escape_html(cell)}</th>' for cell in shown.head)
    body = "".join(
        f'<tr><th scope="row">{escape_html(name)}</th>'
        + "".join(
            f"<td{css_class('words', len(cell) > LONGEST_FIGURE)}>{escape_html(cell)}</td>"
            for cell in cells
        )
        + "</tr>"
        for name, *cells in shown.rows
    )
    return f"<h3>{escape_html(shown.title)}</h3>{table(f'<tr>{head}</tr>', body)}"


def _average_table(evaluation: Evaluation, shown: AverageTable, history: History) -> str:
    families = "".join(
        group_heading(family_title(evaluation, family), span=span)
        for family, span in Counter(one.family for one in shown.columns).items()
    )
    groups = "".join(
        f'<th scope="col"{css_class("start", one.group == "all")}>{one.group_title}'
        f"<small>{one.note}</small></th>"
        for one in shown.columns
    )
    head = (
        '<tr><th rowspan="2" scope="col">System</th><th rowspan="2" scope="col">Trained for</th>'
        f"{families}</tr><tr>{groups}</tr>"
    )
    body = "".join(_average_row(row, shown.columns, history) for row in shown.rows)
    return f"<h3>{escape_html(shown.title)}</h3>{table(head, body)}"


def _average_row(row: Row, columns: Sequence[AverageColumn], history: History) -> str:
    cells = score_cells(row, starts=[column.group == "all" for column in columns])
    training = "" if row.ceiling else trained_for(history, row.name)
    return (
        f'<tr{css_class("ceiling", row.ceiling)}><th scope="row">{escape_html(row.name)}</th>'
        f'<td class="trained">{escape_html(training)}</td>{cells}</tr>'
    )


# Budgets


def budgets_section(history: History) -> str:
    """Parameters of every system, and what its training took."""
    rows = budget_rows(history)
    if not rows:
        return ""
    groups = "".join(group_heading(name, span=len(one)) for name, one in BUDGET_GROUPS.items())
    starts = [place == 0 for one in BUDGET_GROUPS.values() for place in range(len(one))]
    columns = "".join(
        f'<th scope="col"{css_class("start", start)}>{escape_html(title)}</th>'
        for start, title in zip(
            starts, (title for one in BUDGET_GROUPS.values() for title in one), strict=True
        )
    )
    head = f'<tr><th rowspan="2" scope="col">System</th>{groups}</tr><tr>{columns}</tr>'
    body = "".join(
        f'<tr><th scope="row">{escape_html(row.name)}</th>'
        + "".join(
            f"<td{css_class('start', start)}>{escape_html(cell)}</td>"
            for start, cell in zip(starts, row.cells, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    notes = budget_notes(history)
    return section(
        "Systems and what their training took",
        table(head, body) + (bullet_list(notes) if notes else ""),
        lead="A score means little without what was spent on it.",
    )


# Directions


def directions_section(evaluation: Evaluation) -> str:
    """The main scores of every system in every direction."""
    columns = evaluation.main_columns
    if not columns:
        return ""
    systems = "".join(
        group_heading(system.name, span=len(columns)) for system in evaluation.systems
    )
    scores = "".join(
        f'<th scope="col"{css_class("start", place == 0)}>{escape_html(column.heading)}</th>'
        for place, column in enumerate(columns)
    )
    head = (
        '<tr><th rowspan="2" scope="col">Direction</th><th rowspan="2" scope="col">Training lines'
        f"</th>{systems}</tr><tr>{scores * len(evaluation.systems)}</tr>"
    )
    span = 2 + len(columns) * len(evaluation.systems)
    body = "".join(
        f'<tr class="family"><th colspan="{span}" scope="rowgroup">'
        f"{escape_html(family_title(evaluation, family))}</th></tr>"
        + "".join(_direction_row(evaluation, profile) for profile in profiles)
        for family, profiles in directions_by_family(evaluation).items()
    )
    return section(
        "All directions",
        table(head, body, tall=True),
        lead="Training lines are those of the pair; intervals and bold print as above.",
    )


def _direction_row(evaluation: Evaluation, profile: DirectionProfile) -> str:
    starts = [
        place == 0 for _ in evaluation.systems for place in range(len(evaluation.main_columns))
    ]
    cells = score_cells(direction_row(evaluation, profile), starts=starts)
    lines = f"{profile.training_lines:,}" if profile.training_lines else NO_VALUE
    undecided = "" if is_decided(evaluation, profile) else "<small>not decided</small>"
    return (
        f'<tr><th scope="row">{direction_label(evaluation, profile.direction)}{undecided}</th>'
        f"<td>{lines}</td>{cells}</tr>"
    )


def direction_label(evaluation: Evaluation, direction: Direction) -> str:
    """Codes and names of a direction's languages."""
    names = evaluation.language_names
    long = f"{names[direction.source]} → {names[direction.target]}"
    code = f"{direction.source} → {direction.target}"
    return (
        f'<span class="code">{escape_html(code)}</span> '
        f'<span class="long">{escape_html(long)}</span>'
    )


# Stages


def summaries_section(history: History) -> str:
    """What the stages behind the systems said of their counts."""
    told = [run for run in history.stages if run.summary]
    if not told:
        return ""
    parts = "".join(
        f"<h3>{escape_html(run.folder)} <small>{escape_html(run.stage)}</small></h3>"
        f"{bullet_list(run.summary)}"
        for run in told
    )
    return section("What each stage kept and dropped", f'<div class="summaries">{parts}</div>')


def stages_section(evaluation: Evaluation, history: History) -> str:
    """Wall times of all stages behind the systems, and their sums."""
    if not history.stages:
        return ""
    longest = max(run.wall_seconds for run in history.stages)
    bars = "".join(
        f'<div class="bar-row"><span class="bar-label"><b>{escape_html(run.stage)}</b> '
        f"{escape_html(run.folder)}</span>"
        + bar(
            run.wall_seconds / longest if longest else 0.0,
            text=escape_html(format_duration(run.wall_seconds)),
            style="stage",
        )
        + "</div>"
        for run in history.stages
    )
    totals = two_columns(
        ("System", "All stages behind it"),
        [
            (escape_html(one.name), escape_html(format_duration(history.wall_seconds_of(one.name))))
            for one in evaluation.systems
        ],
    )
    return section(
        "Stages and wall times",
        f'<div class="bars stages">{bars}</div>{totals}',
        lead="Every stage that the systems rest on, once, inputs before what was made from them. "
        f"A full bar is the longest, {format_duration(longest)}.",
    )
