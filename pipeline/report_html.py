"""The report of an evaluation as one self-contained HTML page.

It has no script and loads nothing: the style sheet (``report.css``) and the charts are part of the
page, and light or dark follows the reader's settings. Functions below return HTML; what they are
given as text they escape.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from typing import get_args

from pipeline.charts import Point, Series, line_chart, thin_out
from pipeline.corpus import Direction, Resource
from pipeline.metrics import DirectionProfile, Evaluation, Family
from pipeline.report import (
    NO_VALUE,
    SCORES,
    AverageColumn,
    History,
    Row,
    accuracy_tables,
    average_columns,
    direction_row,
    directions_by_family,
    family_title,
    format_duration,
    format_score,
    notes,
    score_tables,
    signatures,
)

SERIES_COLOURS = 8
"""Colours of the style sheet; further series repeat them with a dashed line."""


@dataclass(frozen=True)
class Sample:
    """One test line with every system's translation; lines count from 1."""

    direction: Direction
    family: Family
    line: int
    source: str
    reference: str
    translations: Mapping[str, str]


def html_report(evaluation: Evaluation, history: History, samples: Sequence[Sample]) -> str:
    """The whole report as one page."""
    title = f"Translation quality of {_count(len(evaluation.systems), 'system')}"
    style = resources.files("pipeline").joinpath("report.css").read_text(encoding="utf-8")
    sections = [
        _header(evaluation, title),
        _overview(evaluation),
        _warnings(evaluation),
        _score_averages(evaluation),
        _language_accuracy(evaluation),
        _curves(evaluation, history),
        _samples(evaluation, samples),
        _directions(evaluation),
        _stages(history),
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


def _header(evaluation: Evaluation, title: str) -> str:
    targets = {one.direction.target for one in evaluation.directions}
    lines = sum(one.test_lines for one in evaluation.directions)
    zero_shot = sum(one.family == "zero_shot" for one in evaluation.directions)
    facts = [
        _count(len(evaluation.directions), "direction"),
        f"{zero_shot} of them zero-shot" if zero_shot else "none of them zero-shot",
        _count(len(targets), "target language"),
        f"{lines:,} test lines",
    ]
    legend = "".join(
        f'<li><span class="swatch {_series_style(place)}"></span>{escape(system.name)}</li>'
        for place, system in enumerate(evaluation.systems)
    )
    return (
        f'<header><p class="eyebrow">Evaluation report</p><h1>{title}</h1>'
        f'<p class="facts">{" · ".join(facts)}</p><ul class="legend">{legend}</ul></header>'
    )


def _overview(evaluation: Evaluation) -> str:
    panels = "".join(
        _panel(evaluation, column)
        for column in average_columns(evaluation)
        if column.group == "all"
    )
    return _section(
        "At a glance",
        f'<div class="panels">{panels}</div>',
        lead="Mean chrF++ and BLEU over the directions of each kind, on one scale throughout.",
    )


def _panel(evaluation: Evaluation, column: AverageColumn) -> str:
    title = escape(family_title(evaluation, column.family))
    return (
        f'<div class="panel"><h3>{title} <small>{_count(column.directions, "direction")}</small>'
        f"</h3>{_bars(evaluation, column, 'chrF++')}{_bars(evaluation, column, 'BLEU')}</div>"
    )


def _bars(evaluation: Evaluation, column: AverageColumn, title: str) -> str:
    value = SCORES[title]
    largest = max(
        value(groups["all"]) for system in evaluation.systems for groups in system.averages.values()
    )
    found = [value(system.averages[column.family]["all"]) for system in evaluation.systems]
    bars = "".join(
        _bar(
            f'<span class="bar-label" title="{escape(system.name)}">{escape(system.name)}</span>',
            share=score / largest if largest else 0.0,
            text=format_score(score),
            style=_series_style(place),
        )
        for place, (system, score) in enumerate(zip(evaluation.systems, found, strict=True))
    )
    return f'<h4>{title}</h4><div class="bars">{bars}</div>'


def _warnings(evaluation: Evaluation) -> str:
    if not evaluation.warnings:
        return ""
    return f'<aside class="warnings"><h2>Worth knowing</h2>{_list(evaluation.warnings)}</aside>'


# Averages


def _score_averages(evaluation: Evaluation) -> str:
    return _section(
        "Averages by resource",
        _average_tables(evaluation, score_tables(evaluation)),
        lead="Arithmetic means over directions; the number of directions stands under each group, "
        "and the best value of a column is bold.",
    )


def _language_accuracy(evaluation: Evaluation) -> str:
    tables = accuracy_tables(evaluation)
    if not tables:
        return ""
    return _section(
        "Language accuracy",
        _average_tables(evaluation, tables),
        lead="Share of translations in the language that was asked for. The references' own value "
        "is the ceiling to expect: what the detector misses there it misses in any system.",
    )


def _average_tables(evaluation: Evaluation, tables: Mapping[str, Sequence[Row]]) -> str:
    columns = average_columns(evaluation)
    families = "".join(
        _group_heading(family_title(evaluation, family), span=span)
        for family, span in Counter(one.family for one in columns).items()
    )
    groups = "".join(
        f'<th scope="col"{_class("start", one.group == "all")}>{one.group}'
        f"<small>{one.directions}</small></th>"
        for one in columns
    )
    head = f'<tr><th rowspan="2" scope="col">System</th>{families}</tr><tr>{groups}</tr>'
    return "".join(
        f"<h3>{escape(title)}</h3>"
        + _table(head, "".join(_average_row(row, columns) for row in rows))
        for title, rows in tables.items()
    )


def _average_row(row: Row, columns: Sequence[AverageColumn]) -> str:
    cells = _cells(row, starts=[column.group == "all" for column in columns])
    return (
        f'<tr{_class("ceiling", row.ceiling)}><th scope="row">{escape(row.name)}</th>{cells}</tr>'
    )


# Directions


def _directions(evaluation: Evaluation) -> str:
    systems = "".join(_group_heading(system.name, span=2) for system in evaluation.systems)
    scores = '<th scope="col" class="start">BLEU</th><th scope="col">chrF++</th>'
    head = (
        '<tr><th rowspan="2" scope="col">Direction</th><th rowspan="2" scope="col">Training lines'
        f"</th>{systems}</tr><tr>{scores * len(evaluation.systems)}</tr>"
    )
    span = 2 + 2 * len(evaluation.systems)
    body = "".join(
        f'<tr class="family"><th colspan="{span}" scope="rowgroup">'
        f"{escape(family_title(evaluation, family))}</th></tr>"
        + "".join(_direction_row(evaluation, profile) for profile in profiles)
        for family, profiles in directions_by_family(evaluation).items()
    )
    return _section(
        "All directions",
        _table(head, body, tall=True),
        lead="The best BLEU and the best chrF++ of each direction are bold.",
    )


def _direction_row(evaluation: Evaluation, profile: DirectionProfile) -> str:
    cells = _cells(
        direction_row(evaluation, profile), starts=[True, False] * len(evaluation.systems)
    )
    lines = f"{profile.training_lines:,}" if profile.training_lines else NO_VALUE
    return (
        f'<tr><th scope="row">{_direction(evaluation, profile.direction)}</th>'
        f"<td>{lines}</td>{cells}</tr>"
    )


def _direction(evaluation: Evaluation, direction: Direction) -> str:
    names = evaluation.language_names
    long = f"{names[direction.source]} → {names[direction.target]}"
    return (
        f'<span class="code">{escape(direction.source)} → {escape(direction.target)}</span> '
        f'<span class="long">{escape(long)}</span>'
    )


# Samples


def _samples(evaluation: Evaluation, samples: Sequence[Sample]) -> str:
    if not samples:
        return ""
    parts = []
    for family in dict.fromkeys(sample.family for sample in samples):
        title = escape(family_title(evaluation, family))
        cards = "".join(
            _sample(evaluation, sample) for sample in samples if sample.family == family
        )
        parts.append(f'<h3>{title}</h3><div class="samples">{cards}</div>')
    return _section(
        "Sample translations",
        "".join(parts),
        lead="Test lines drawn by the evaluation's seed, not by hand.",
    )


def _sample(evaluation: Evaluation, sample: Sample) -> str:
    source, target = sample.direction.source, sample.direction.target
    lines = [
        _sample_line("source", sample.source, code=source, style="given"),
        _sample_line("reference", sample.reference, code=target, style="given"),
    ]
    for place, system in enumerate(evaluation.systems):
        text = sample.translations[system.name]
        lines.append(_sample_line(system.name, text, code=target, style=_series_style(place)))
    return (
        f'<article class="sample"><h4>{_direction(evaluation, sample.direction)}'
        f"<small>line {sample.line:,}</small></h4><dl>{''.join(lines)}</dl></article>"
    )


def _sample_line(name: str, text: str, *, code: str, style: str) -> str:
    shown = escape(text) if text.strip() else '<em class="empty">empty</em>'
    return (
        f'<dt class="{style}">{escape(name)}</dt>'
        f'<dd class="{style}" lang="{escape(code)}" dir="auto">{shown}</dd>'
    )


# Loss curves


def _curves(evaluation: Evaluation, history: History) -> str:
    if not any(curve.training or curve.validation for curve in history.curves):
        return ""
    styles = {one.name: _series_style(place) for place, one in enumerate(evaluation.systems)}
    figures = [*_validation_figures(history, styles), _training_figure(history, styles)]
    return _section(
        "Loss while training",
        f'<div class="charts">{"".join(figures)}</div>',
        lead="Of the run whose checkpoint each system translates with. A dot marks the lowest "
        "validation loss.",
    )


def _validation_figures(history: History, styles: Mapping[str, str]) -> list[str]:
    curves = {curve.system: curve.validation for curve in history.curves}
    unit, length = _time_unit(history)
    by_update = {
        name: [(point.update, point.loss) for point in points] for name, points in curves.items()
    }
    by_time = {
        name: [(point.seconds / length, point.loss) for point in points]
        for name, points in curves.items()
    }
    figures = [
        _figure("Validation, all directions", by_update, styles, x_label="updates"),
        _figure("Validation against wall time", by_time, styles, x_label=f"{unit} of training"),
    ]
    for group in get_args(Resource):
        of_group = {
            name: [
                (point.update, point.resources[group])
                for point in points
                if group in point.resources
            ]
            for name, points in curves.items()
        }
        figures.append(
            _figure(f"Validation, {group} resource", of_group, styles, x_label="updates")
        )
    return figures


def _training_figure(history: History, styles: Mapping[str, str]) -> str:
    losses = {
        curve.system: [(point.update, point.loss) for point in curve.training]
        for curve in history.curves
    }
    return _figure("Training", losses, styles, x_label="updates", mark_lowest=False)


def _figure(
    title: str,
    losses: Mapping[str, Sequence[Point]],
    styles: Mapping[str, str],
    *,
    x_label: str,
    mark_lowest: bool = True,
) -> str:
    """A chart of losses by system; nothing where there are none."""
    if not any(losses.values()):
        return ""
    chart = line_chart(
        [Series(name, thin_out(points), styles[name]) for name, points in losses.items()],
        title=title,
        x_label=x_label,
        y_label="nats per token",
        mark_lowest=mark_lowest,
    )
    return f"<figure><figcaption>{escape(title)}</figcaption>{chart}</figure>"


def _time_unit(history: History) -> tuple[str, float]:
    longest = max(
        (point.seconds for curve in history.curves for point in curve.validation), default=0.0
    )
    if longest >= 2 * 3600:
        return "hours", 3600.0
    return ("minutes", 60.0) if longest >= 2 * 60 else ("seconds", 1.0)


# Stages and method


def _stages(history: History) -> str:
    if not history.stages:
        return ""
    longest = max(run.wall_seconds for run in history.stages)
    bars = "".join(
        _bar(
            f'<span class="bar-label"><b>{escape(run.stage)}</b> {escape(run.folder)}</span>',
            share=run.wall_seconds / longest if longest else 0.0,
            text=format_duration(run.wall_seconds),
            style="stage",
        )
        for run in history.stages
    )
    totals = _two_columns(
        ("System", "All stages behind it"),
        [
            (escape(name), format_duration(seconds))
            for name, seconds in _system_seconds(history).items()
        ],
    )
    return _section(
        "Stages and wall times",
        f'<div class="bars stages">{bars}</div>{totals}',
        lead="Every stage that the systems rest on, once, inputs before what was made from them.",
    )


def _system_seconds(history: History) -> dict[str, float]:
    """System → wall seconds of all stages it rests on."""
    totals: dict[str, float] = {}
    for stage in history.stages:
        for system in stage.systems:
            totals[system] = totals.get(system, 0.0) + stage.wall_seconds
    return totals


def _method(evaluation: Evaluation, history: History) -> str:
    found = _two_columns(
        ("sacreBLEU signature", "Applies to"),
        [(f"<code>{escape(text)}</code>", escape(where)) for text, where in signatures(evaluation)],
    )
    return _section("How to read this", _list(notes(evaluation, history)) + found)


# What all sections are made of


def _section(title: str, content: str, *, lead: str = "") -> str:
    intro = f'<p class="lead">{escape(lead)}</p>' if lead else ""
    return f"<section><h2>{escape(title)}</h2>{intro}{content}</section>"


def _table(head: str, body: str, *, tall: bool = False) -> str:
    style = "scroll tall" if tall else "scroll"
    return (
        f'<div class="{style}" tabindex="0"><table><thead>{head}</thead><tbody>{body}</tbody>'
        "</table></div>"
    )


def _two_columns(titles: tuple[str, str], rows: Sequence[tuple[str, str]]) -> str:
    head = "".join(f'<th scope="col">{title}</th>' for title in titles)
    body = "".join(f'<tr><th scope="row">{name}</th><td>{cell}</td></tr>' for name, cell in rows)
    return _table(f"<tr>{head}</tr>", body)


def _group_heading(title: str, *, span: int) -> str:
    return f'<th colspan="{span}" scope="colgroup" class="group">{escape(title)}</th>'


def _cells(row: Row, *, starts: Sequence[bool]) -> str:
    """The scores of a row; ``starts``: whether each begins a group of columns."""
    texts = [format_score(value) for value in row.values]
    return "".join(
        f"<td{_class('start', start)}>{f'<b>{text}</b>' if place in row.best else text}</td>"
        for place, (text, start) in enumerate(zip(texts, starts, strict=True))
    )


def _bar(label: str, *, share: float, text: str, style: str) -> str:
    return (
        f'<div class="bar-row">{label}<span class="track"><span class="bar {style}" '
        f'style="width:{share:.2%}"></span></span><span class="bar-value">{text}</span></div>'
    )


def _list(items: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in items)}</ul>"


def _class(name: str, given: bool) -> str:
    return f' class="{name}"' if given else ""


def _series_style(place: int) -> str:
    dashed = " dashed" if place >= SERIES_COLOURS else ""
    return f"s{place % SERIES_COLOURS}{dashed}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
