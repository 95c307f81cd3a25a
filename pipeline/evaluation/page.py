"""The report of an evaluation as one self-contained HTML page.

It has no script and loads nothing: the style sheet (``report.css``) and the charts are part of the
page, and light or dark follows the reader's settings.
"""

from collections.abc import Sequence
from importlib import resources

from pipeline.evaluation.budget_table import trained_for
from pipeline.evaluation.comparison_tables import TableSection, comparison_sections
from pipeline.evaluation.curves import curve_figures
from pipeline.evaluation.history import History
from pipeline.evaluation.html_parts import (
    bar,
    bullet_list,
    escape_html,
    section,
    series_style,
    two_columns,
)
from pipeline.evaluation.page_tables import (
    apart_sections,
    averages_section,
    budgets_section,
    direction_label,
    directions_section,
    stages_section,
    summaries_section,
    text_sections,
)
from pipeline.evaluation.score_slot import Column
from pipeline.evaluation.scores import Evaluation, Interval
from pipeline.evaluation.tables import (
    AverageColumn,
    Imprint,
    Sample,
    average_columns,
    comparison_of_average,
    directions_by_family,
    family_title,
    format_count,
    format_score,
    notes,
    signatures,
)


def html_report(
    evaluation: Evaluation,
    history: History,
    samples: Sequence[Sample],
    *,
    imprint: Imprint,
    further: Sequence[TableSection] = (),
) -> str:
    """The whole report as one page; ``further`` sections stand behind those of the scores."""
    title = f"Translation quality of {format_count(len(evaluation.systems), 'system')}"
    folder = resources.files("pipeline.evaluation")
    style = folder.joinpath("report.css").read_text(encoding="utf-8")
    sections = [
        _header(evaluation, title, imprint),
        _overview(evaluation, history),
        _warnings(evaluation),
        averages_section(evaluation, history),
        budgets_section(history),
        *apart_sections(evaluation, history),
        *text_sections([*comparison_sections(evaluation), *further]),
        _curves(evaluation, history),
        _samples(evaluation, samples),
        directions_section(evaluation),
        summaries_section(history),
        stages_section(evaluation, history),
        _method(evaluation, history),
    ]
    body = "\n".join(section for section in sections if section)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="color-scheme" content="light dark">\n<title>{title}</title>\n'
        f"<style>\n{style}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


# Header and overview


def _header(evaluation: Evaluation, title: str, imprint: Imprint) -> str:
    targets = {one.direction.target for one in evaluation.directions}
    lines = sum(one.test_lines for one in evaluation.directions)
    kinds = [
        f"{len(profiles):,} {family_title(evaluation, family)}"
        for family, profiles in directions_by_family(evaluation).items()
    ]
    facts = [
        f"{format_count(len(evaluation.directions), 'direction')} ({', '.join(kinds)})",
        format_count(len(targets), "target language"),
        format_count(lines, "test line"),
    ]
    return (
        f'<header><p class="eyebrow">Evaluation report, {escape_html(imprint.text)}</p>'
        f'<h1>{title}</h1><p class="facts">{escape_html(" · ".join(facts))}</p></header>'
    )


def _overview(evaluation: Evaluation, history: History) -> str:
    columns = [column for column in reversed(evaluation.main_columns) if column.out_of_100]
    if not columns:
        return ""
    panels = "".join(
        _panel(evaluation, history, average, columns)
        for average in average_columns(evaluation)
        if average.group == "all"
    )
    titles = " and ".join(column.heading for column in columns)
    return section(
        "At a glance",
        f'<div class="panels">{panels}</div>',
        lead=f"Mean {titles} over the directions of each kind. All bars run from 0 to 100; "
        "the mark at the end of one is the middle 95 % of resampled test lines. Beside each name "
        "stands what the system was trained for in all.",
    )


def _panel(
    evaluation: Evaluation, history: History, average: AverageColumn, columns: Sequence[Column]
) -> str:
    title = escape_html(family_title(evaluation, average.family))
    bars = "".join(_bars(evaluation, history, average, column) for column in columns)
    return f'<div class="panel"><h3>{title} <small>{average.note}</small></h3>{bars}</div>'


def _bars(evaluation: Evaluation, history: History, average: AverageColumn, column: Column) -> str:
    """Empty where no direction of the family has the score."""
    compared = comparison_of_average(evaluation, average, column)
    bars = ""
    for place, system in enumerate(evaluation.systems):
        score = system.averages[average.family]["all"].get(column.name)
        if score is None:
            return ""
        bars += (
            '<div class="bar-row"><span class="bar-label"><span>'
            f"{escape_html(system.name)}</span> "
            f"<small>{escape_html(trained_for(history, system.name))}</small></span>"
            + bar(
                score / 100.0,
                text=format_score(score, decimals=column.decimals),
                style=series_style(place),
                spread=_share(None if compared is None else compared.intervals[system.name]),
            )
            + "</div>"
        )
    return f'<h4>{escape_html(column.heading)}</h4><div class="bars">{bars}</div>'


def _share(interval: Interval | None) -> tuple[float, float] | None:
    return None if interval is None else (interval.low / 100.0, interval.high / 100.0)


def _warnings(evaluation: Evaluation) -> str:
    if not evaluation.warnings:
        return ""
    return (
        f'<aside class="warnings"><h2>Worth knowing</h2>{bullet_list(evaluation.warnings)}</aside>'
    )


# Curves, samples, method


def _curves(evaluation: Evaluation, history: History) -> str:
    places = {one.name: place for place, one in enumerate(evaluation.systems)}
    figures = curve_figures(history, places=places)
    if not figures:
        return ""
    return section(
        "Loss while training",
        f'<div class="charts">{"".join(figures)}</div>',
        lead="Of the last training run of each system; what its weights had cost before counts "
        "along the axis. A ring marks the lowest validation loss.",
    )


def _samples(evaluation: Evaluation, samples: Sequence[Sample]) -> str:
    parts = []
    for family in directions_by_family(evaluation):
        members = [one for one in samples if one.profile.family == family]
        if members:
            title = escape_html(family_title(evaluation, family))
            cards = "".join(_sample(evaluation, one) for one in members)
            parts.append(f'<h3>{title}</h3><div class="samples">{cards}</div>')
    if not parts:
        return ""
    return section(
        "Sample translations",
        "".join(parts),
        lead="Test lines drawn by the evaluation's seed, not by hand.",
    )


def _sample(evaluation: Evaluation, sample: Sample) -> str:
    direction = sample.profile.direction
    lines = [
        _sample_line("source", sample.source, code=direction.source, style="given"),
        _sample_line("reference", sample.reference, code=direction.target, style="given"),
    ]
    for place, system in enumerate(evaluation.systems):
        text = sample.translations[system.name]
        lines.append(
            _sample_line(system.name, text, code=direction.target, style=series_style(place))
        )
    return (
        f'<article class="sample"><h4>{direction_label(evaluation, direction)}'
        f"<small>line {sample.line:,}</small></h4><dl>{''.join(lines)}</dl></article>"
    )


def _sample_line(name: str, text: str, *, code: str, style: str) -> str:
    shown = escape_html(text) if text.strip() else '<em class="empty">empty</em>'
    return (
        f'<dt class="{style}">{escape_html(name)}</dt>'
        f'<dd class="{style}" lang="{escape_html(code)}" dir="auto">{shown}</dd>'
    )


def _method(evaluation: Evaluation, history: History) -> str:
    listed = bullet_list(notes(evaluation, missing=history.missing))
    found = [
        (f"<code>{escape_html(text)}</code>", escape_html(where))
        for text, where in signatures(evaluation)
    ]
    shown = two_columns(("Signature", "Applies to"), found) if found else ""
    return section("How to read this", listed + shown)
