"""Reports of an evaluation: Markdown, and one self-contained HTML page.

Pure functions from scores to text. The page has no script and loads nothing: style is inline CSS,
charts are inline SVG, and light or dark follows the reader's settings. Both reports show the
same tables; the page adds loss curves and sample translations.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from pipeline.corpus import Direction
from pipeline.metrics import (
    FAMILIES,
    GROUPS,
    DirectionProfile,
    Evaluation,
    Family,
    Group,
    LanguageAccuracy,
    Scores,
)

NO_VALUE = "–"
SERIES_COLOURS = 8
"""Colours of the style sheet; further series repeat them with a dashed line."""
MAX_CURVE_POINTS = 300


@dataclass(frozen=True)
class CurvePoint:
    """Losses in nats per token after an update, and the seconds of training up to there."""

    update: int
    seconds: float
    loss: float
    resources: Mapping[str, float] = field(default_factory=dict)
    """Resource group → validation loss."""


@dataclass(frozen=True)
class Curve:
    """Losses of the training run whose checkpoint a system translates with."""

    system: str
    training: tuple[CurvePoint, ...]
    validation: tuple[CurvePoint, ...]


@dataclass(frozen=True)
class StageRun:
    """One stage that a system rests on."""

    stage: str
    folder: str
    wall_seconds: float
    systems: tuple[str, ...]


@dataclass(frozen=True)
class History:
    """The runs behind the systems, inputs before what was made from them."""

    stages: tuple[StageRun, ...] = ()
    curves: tuple[Curve, ...] = ()
    missing: tuple[str, ...] = ()
    """Folders that are no longer there, or have changed since."""


@dataclass(frozen=True)
class Sample:
    """One test line with every system's translation; lines count from 1."""

    direction: Direction
    family: Family
    line: int
    source: str
    reference: str
    translations: Mapping[str, str]


# What both reports show


@dataclass(frozen=True)
class AverageColumn:
    """One column of the tables of averages."""

    family: Family
    group: Group
    directions: int


@dataclass(frozen=True)
class Row:
    """A name and its values, with the places of those to set in bold."""

    name: str
    values: tuple[float | None, ...]
    best: frozenset[int] = frozenset()
    ceiling: bool = False
    """Not a system: what the references themselves reach."""


def family_title(family: Family, *, pivot: str | None) -> str:
    """What a family of directions is called."""
    code = (pivot or "pivot").capitalize()
    match family:
        case "into_pivot":
            return f"Any → {code}"
        case "out_of_pivot":
            return f"{code} → Any"
        case "other":
            return "Other trained"
        case "zero_shot":
            return "Zero-shot"


def average_columns(evaluation: Evaluation) -> list[AverageColumn]:
    """The families and resource groups that have directions, in a fixed order."""
    found = []
    for family in FAMILIES:
        members = [one for one in evaluation.directions if one.family == family]
        for group in GROUPS:
            count = sum(group in ("all", one.resource) for one in members)
            if count:
                found.append(AverageColumn(family=family, group=group, directions=count))
    return found


def average_rows(evaluation: Evaluation, value: Callable[[Scores], float | None]) -> list[Row]:
    """One row per system over ``average_columns``, the best of each column marked."""
    columns = average_columns(evaluation)
    return mark_best(
        [
            Row(
                name=system.name,
                values=tuple(value(system.averages[one.family][one.group]) for one in columns),
            )
            for system in evaluation.systems
        ]
    )


def reference_row(evaluation: Evaluation, value: Callable[[LanguageAccuracy], float]) -> Row | None:
    """Language accuracy of the references over ``average_columns``."""
    if evaluation.references is None:
        return None
    values: list[float | None] = []
    for column in average_columns(evaluation):
        found = evaluation.references.averages.get(column.family, {}).get(column.group)
        values.append(None if found is None else value(found))
    return Row(name="References", values=tuple(values), ceiling=True)


def direction_row(evaluation: Evaluation, profile: DirectionProfile) -> Row:
    """BLEU and chrF++ of every system in turn, the best of either marked."""
    values: list[float | None] = []
    for system in evaluation.systems:
        scores = system.directions[str(profile.direction)].scores
        values += [scores.bleu, scores.chrf]
    best = frozenset(
        2 * place + offset for offset in (0, 1) for place in best_places(values[offset::2])
    )
    return Row(name=str(profile.direction), values=tuple(values), best=best)


def mark_best(rows: Sequence[Row]) -> list[Row]:
    """Mark the best value of each column; none where there is nothing to compare."""
    best: list[set[int]] = [set() for _ in rows]
    for column in range(len(rows[0].values)):
        for place in best_places([row.values[column] for row in rows]):
            best[place].add(column)
    return [
        Row(name=row.name, values=row.values, best=frozenset(places))
        for row, places in zip(rows, best, strict=True)
    ]


def best_places(values: Sequence[float | None]) -> list[int]:
    """Places of the largest value as printed; none if fewer than two values are there."""
    printed = [None if value is None else round(value, 1) for value in values]
    known = [value for value in printed if value is not None]
    if len(known) < 2:
        return []
    return [place for place, value in enumerate(printed) if value == max(known)]


def bleu_of(scores: Scores) -> float:
    return scores.bleu


def chrf_of(scores: Scores) -> float:
    return scores.chrf


def plain_accuracy_of(scores: Scores) -> float | None:
    return None if scores.language_accuracy is None else scores.language_accuracy.plain


def restricted_accuracy_of(scores: Scores) -> float | None:
    return None if scores.language_accuracy is None else scores.language_accuracy.restricted


def accuracy_rows(evaluation: Evaluation, *, prior: str) -> list[Row]:
    """Language accuracy of the references and of every system; ``prior``: plain, restricted."""
    if prior == "plain":
        ceiling = reference_row(evaluation, lambda found: found.plain)
        rows = average_rows(evaluation, plain_accuracy_of)
    else:
        ceiling = reference_row(evaluation, lambda found: found.restricted)
        rows = average_rows(evaluation, restricted_accuracy_of)
    return [] if ceiling is None else [ceiling, *rows]


def signatures(evaluation: Evaluation) -> list[tuple[str, str]]:
    """sacreBLEU's signatures and what each applies to."""
    targets: dict[str, set[str]] = {}
    for system in evaluation.systems:
        for direction, one in system.directions.items():
            targets.setdefault(f"BLEU|{one.bleu_signature}", set()).add(direction.split("-")[1])
            targets.setdefault(f"chrF++|{one.chrf_signature}", set()).add("all")
    return [
        (signature, "all targets" if "all" in codes else f"into {', '.join(sorted(codes))}")
        for signature, codes in sorted(targets.items())
    ]


def notes(evaluation: Evaluation, history: History) -> list[str]:
    """What a reader has to know to read the tables."""
    low, high = evaluation.thresholds
    found = [
        "Averages are arithmetic means over directions.",
        f"Resource groups go by the training lines of the pair: low up to {low:,}, high from "
        f"{high:,}, medium between; zero-shot pairs have none.",
    ]
    if evaluation.references is not None:
        found.append(
            "Language accuracy is the share of lines that langdetect assigns to the target "
            "language, plain and with its prior restricted to the languages of this corpus; its "
            "accuracy on the references is what a perfect system could expect."
        )
    if evaluation.undetectable:
        found.append(
            "langdetect does not know these target languages, which language accuracy leaves out: "
            f"{', '.join(evaluation.undetectable)}."
        )
    if history.missing:
        found.append(
            "Wall times leave out what is no longer where it was, or has changed since: "
            f"{', '.join(history.missing)}."
        )
    return found


def system_seconds(history: History) -> dict[str, float]:
    """System → wall seconds of all stages it rests on."""
    totals: dict[str, float] = {}
    for stage in history.stages:
        for system in stage.systems:
            totals[system] = totals.get(system, 0.0) + stage.wall_seconds
    return totals


def format_score(value: float | None) -> str:
    """A score as printed."""
    return NO_VALUE if value is None else f"{value:.1f}"


def format_duration(seconds: float) -> str:
    """Two units at most: ``2 h 5 min``, ``3 min 20 s``, ``4.2 s``."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    if seconds < 3599.5:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours:,} h {minutes} min"


# Markdown


def markdown_summary(evaluation: Evaluation) -> str:
    """The tables of averages: BLEU, then chrF++."""
    parts = [
        f"{title}, averages over directions\n\n{_markdown_averages(evaluation, rows)}"
        for title, rows in (
            ("BLEU", average_rows(evaluation, bleu_of)),
            ("chrF++", average_rows(evaluation, chrf_of)),
        )
    ]
    return "\n\n".join(parts)


def markdown_report(evaluation: Evaluation, history: History) -> str:
    """The whole report as Markdown."""
    parts = ["# Evaluation", markdown_summary(evaluation)]
    if evaluation.warnings:
        parts += ["## Warnings", _bullets(evaluation.warnings)]
    if evaluation.references is not None:
        parts += ["## Language accuracy"]
        for prior, title in _PRIORS:
            rows = accuracy_rows(evaluation, prior=prior)
            parts.append(f"{title}\n\n{_markdown_averages(evaluation, rows)}")
    parts += ["## All directions", _markdown_directions(evaluation)]
    if history.stages:
        parts += ["## Stages and wall times", _markdown_stages(history)]
    parts += ["## Notes", _bullets(notes(evaluation, history))]
    parts += [
        "## Signatures",
        _bullets([f"`{text}` ({where})" for text, where in signatures(evaluation)]),
    ]
    return "\n\n".join(parts) + "\n"


_PRIORS = (
    ("plain", "langdetect as it is, %"),
    ("restricted", "langdetect restricted to the languages of this corpus, %"),
)


def _markdown_averages(evaluation: Evaluation, rows: Sequence[Row]) -> str:
    titles = [
        f"{family_title(one.family, pivot=evaluation.pivot)} {one.group} ({one.directions})"
        for one in average_columns(evaluation)
    ]
    return _markdown_table(["System", *titles], [_markdown_cells(row) for row in rows])


def _markdown_directions(evaluation: Evaluation) -> str:
    header = ["Direction", "Training lines"]
    for system in evaluation.systems:
        header += [f"{system.name} BLEU", f"{system.name} chrF++"]
    body = []
    for family in FAMILIES:
        for profile in evaluation.directions:
            if profile.family == family:
                name, *cells = _markdown_cells(direction_row(evaluation, profile))
                body.append([name, f"{profile.training_lines:,}", *cells])
    return _markdown_table(header, body)


def _markdown_stages(history: History) -> str:
    body = [
        [run.stage, run.folder, format_duration(run.wall_seconds), ", ".join(run.systems)]
        for run in history.stages
    ]
    return _markdown_table(["Stage", "Folder", "Wall time", "Systems"], body)


def _markdown_cells(row: Row) -> list[str]:
    cells = [format_score(value) for value in row.values]
    return [
        row.name,
        *(f"**{cell}**" if place in row.best else cell for place, cell in enumerate(cells)),
    ]


def _markdown_table(header: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    rule = ["---", *("---:" for _ in header[1:])]
    lines = [header, rule, *body]
    return "\n".join(f"| {' | '.join(_markdown_escape(cell) for cell in line)} |" for line in lines)


def _markdown_escape(cell: str) -> str:
    return cell.replace("|", "\\|").replace("\n", " ")


def _bullets(items: Sequence[str]) -> str:
    return "\n".join(f"- {item}" for item in items)


# HTML


def html_report(evaluation: Evaluation, history: History, samples: Sequence[Sample]) -> str:
    """The whole report as one page."""
    sections = [
        _html_header(evaluation),
        _html_overview(evaluation),
        _html_warnings(evaluation),
        _html_averages(evaluation),
        _html_language_accuracy(evaluation),
        _html_curves(evaluation, history),
        _html_samples(evaluation, samples),
        _html_directions(evaluation),
        _html_stages(history),
        _html_method(evaluation, history),
    ]
    body = "\n".join(section for section in sections if section)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="color-scheme" content="light dark">\n<title>{_title(evaluation)}</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _title(evaluation: Evaluation) -> str:
    return escape(f"Translation quality of {_count(len(evaluation.systems), 'system')}")


def _html_header(evaluation: Evaluation) -> str:
    codes = {one.direction.target for one in evaluation.directions}
    lines = sum(one.test_lines for one in evaluation.directions)
    zero_shot = sum(one.family == "zero_shot" for one in evaluation.directions)
    facts = [
        _count(len(evaluation.directions), "direction"),
        f"{zero_shot} of them zero-shot" if zero_shot else "none of them zero-shot",
        _count(len(codes), "target language"),
        f"{lines:,} test lines",
    ]
    return (
        '<header><p class="eyebrow">Evaluation report</p>'
        f"<h1>{_title(evaluation)}</h1>"
        f'<p class="facts">{" · ".join(facts)}</p>{_html_legend(evaluation)}</header>'
    )


def _html_legend(evaluation: Evaluation) -> str:
    items = "".join(
        f'<li><span class="swatch {_series_class(place)}"></span>{escape(system.name)}</li>'
        for place, system in enumerate(evaluation.systems)
    )
    return f'<ul class="legend">{items}</ul>'


def _html_warnings(evaluation: Evaluation) -> str:
    if not evaluation.warnings:
        return ""
    return (
        f'<aside class="warnings"><h2>Worth knowing</h2>{_html_list(evaluation.warnings)}</aside>'
    )


def _html_overview(evaluation: Evaluation) -> str:
    panels = [
        _html_bar_panel(evaluation, family=column.family, directions=column.directions)
        for column in average_columns(evaluation)
        if column.group == "all"
    ]
    return _html_section(
        "At a glance",
        f'<div class="panels">{"".join(panels)}</div>',
        lead="Mean chrF++ and BLEU over the directions of each kind, on one scale throughout.",
    )


def _html_bar_panel(evaluation: Evaluation, *, family: Family, directions: int) -> str:
    averages = [
        groups["all"] for system in evaluation.systems for groups in system.averages.values()
    ]
    blocks = []
    for title, value in (("chrF++", chrf_of), ("BLEU", bleu_of)):
        largest = max(value(one) for one in averages)
        bars = [
            _html_bar(
                system.name,
                share=value(system.averages[family]["all"]) / largest if largest else 0.0,
                text=format_score(value(system.averages[family]["all"])),
                series=_series_class(place),
            )
            for place, system in enumerate(evaluation.systems)
        ]
        blocks.append(f'<h4>{title}</h4><div class="bars">{"".join(bars)}</div>')
    title = escape(family_title(family, pivot=evaluation.pivot))
    return (
        f'<div class="panel"><h3>{title} <small>{_count(directions, "direction")}</small></h3>'
        f"{''.join(blocks)}</div>"
    )


def _html_bar(label: str, *, share: float, text: str, series: str) -> str:
    return (
        f'<div class="bar-row"><span class="bar-label" title="{escape(label)}">{escape(label)}'
        f'</span><span class="track"><span class="bar {series}" style="width:{share:.2%}"></span>'
        f'</span><span class="bar-value">{escape(text)}</span></div>'
    )


def _html_averages(evaluation: Evaluation) -> str:
    tables = [
        f"<h3>{title}</h3>{_html_average_table(evaluation, average_rows(evaluation, value))}"
        for title, value in (("BLEU", bleu_of), ("chrF++", chrf_of))
    ]
    return _html_section(
        "Averages by resource",
        "".join(tables),
        lead="Arithmetic means over directions; the number of directions stands under each group, "
        "and the best value of a column is bold.",
    )


def _html_average_table(evaluation: Evaluation, rows: Sequence[Row]) -> str:
    columns = average_columns(evaluation)
    families = "".join(
        f'<th colspan="{sum(one.family == family for one in columns)}" scope="colgroup" '
        f'class="group">{escape(family_title(family, pivot=evaluation.pivot))}</th>'
        for family in dict.fromkeys(one.family for one in columns)
    )
    groups = "".join(
        f'<th scope="col"{_start(one.group == "all")}>{one.group}'
        f"<small>{one.directions}</small></th>"
        for one in columns
    )
    body = "".join(
        f'<tr{_row_class(row)}><th scope="row">{escape(row.name)}</th>'
        + "".join(
            _html_cell(value, best=place in row.best, start=columns[place].group == "all")
            for place, value in enumerate(row.values)
        )
        + "</tr>"
        for row in rows
    )
    return _html_table(
        f'<tr><th rowspan="2" scope="col">System</th>{families}</tr><tr>{groups}</tr>', body
    )


def _html_language_accuracy(evaluation: Evaluation) -> str:
    if evaluation.references is None:
        return ""
    tables = [
        f"<h3>{escape(title)}</h3>"
        + _html_average_table(evaluation, accuracy_rows(evaluation, prior=prior))
        for prior, title in _PRIORS
    ]
    return _html_section(
        "Language accuracy",
        "".join(tables),
        lead="Share of translations in the language that was asked for. The references' own value "
        "is the ceiling to expect: what the detector misses there it misses in any system.",
    )


def _html_directions(evaluation: Evaluation) -> str:
    systems = "".join(
        f'<th colspan="2" scope="colgroup" class="group">{escape(system.name)}</th>'
        for system in evaluation.systems
    )
    metrics = '<th scope="col" class="start">BLEU</th><th scope="col">chrF++</th>'
    head = (
        '<tr><th rowspan="2" scope="col">Direction</th><th rowspan="2" scope="col">Training lines'
        f"</th>{systems}</tr><tr>{metrics * len(evaluation.systems)}</tr>"
    )
    bodies = "".join(_html_family_rows(evaluation, family) for family in FAMILIES)
    return _html_section(
        "All directions",
        _html_table(head, bodies, tall=True),
        lead="The best BLEU and the best chrF++ of each direction are bold.",
    )


def _html_family_rows(evaluation: Evaluation, family: Family) -> str:
    members = [one for one in evaluation.directions if one.family == family]
    if not members:
        return ""
    span = 2 + 2 * len(evaluation.systems)
    title = escape(family_title(family, pivot=evaluation.pivot))
    rows = "".join(_html_direction_row(evaluation, profile) for profile in members)
    return f'<tr class="family"><th colspan="{span}" scope="rowgroup">{title}</th></tr>{rows}'


def _html_direction_row(evaluation: Evaluation, profile: DirectionProfile) -> str:
    row = direction_row(evaluation, profile)
    cells = "".join(
        _html_cell(value, best=place in row.best, start=place % 2 == 0)
        for place, value in enumerate(row.values)
    )
    lines = f"{profile.training_lines:,}" if profile.training_lines else NO_VALUE
    return (
        f'<tr><th scope="row">{_html_direction(evaluation, profile.direction)}</th>'
        f"<td>{lines}</td>{cells}</tr>"
    )


def _html_direction(evaluation: Evaluation, direction: Direction) -> str:
    names = evaluation.language_names
    long = f"{names[direction.source]} → {names[direction.target]}"
    return (
        f'<span class="code">{escape(direction.source)} → {escape(direction.target)}</span> '
        f'<span class="long">{escape(long)}</span>'
    )


def _html_samples(evaluation: Evaluation, samples: Sequence[Sample]) -> str:
    if not samples:
        return ""
    parts = []
    for family in dict.fromkeys(sample.family for sample in samples):
        title = escape(family_title(family, pivot=evaluation.pivot))
        cards = "".join(
            _html_sample(evaluation, sample) for sample in samples if sample.family == family
        )
        parts.append(f'<h3>{title}</h3><div class="samples">{cards}</div>')
    return _html_section(
        "Sample translations",
        "".join(parts),
        lead="Test lines drawn by the evaluation's seed, not by hand.",
    )


def _html_sample(evaluation: Evaluation, sample: Sample) -> str:
    source, target = sample.direction.source, sample.direction.target
    lines = [
        _html_sample_line("source", sample.source, code=source, style="given"),
        _html_sample_line("reference", sample.reference, code=target, style="given"),
        *(
            _html_sample_line(
                system.name,
                sample.translations[system.name],
                code=target,
                style=_series_class(place),
            )
            for place, system in enumerate(evaluation.systems)
        ),
    ]
    return (
        f'<article class="sample"><h4>{_html_direction(evaluation, sample.direction)}'
        f"<small>line {sample.line:,}</small></h4><dl>{''.join(lines)}</dl></article>"
    )


def _html_sample_line(name: str, text: str, *, code: str, style: str) -> str:
    shown = escape(text) if text.strip() else '<em class="empty">empty</em>'
    return (
        f'<dt class="{style}">{escape(name)}</dt>'
        f'<dd class="{style}" lang="{escape(code)}" dir="auto">{shown}</dd>'
    )


def _html_stages(history: History) -> str:
    if not history.stages:
        return ""
    longest = max(run.wall_seconds for run in history.stages)
    bars = "".join(
        f'<div class="bar-row"><span class="bar-label"><b>{escape(run.stage)}</b> '
        f'{escape(run.folder)}</span><span class="track"><span class="bar stage" '
        f'style="width:{run.wall_seconds / longest if longest else 0.0:.2%}"></span></span>'
        f'<span class="bar-value">{format_duration(run.wall_seconds)}</span></div>'
        for run in history.stages
    )
    totals = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{format_duration(seconds)}</td></tr>'
        for name, seconds in system_seconds(history).items()
    )
    head = '<tr><th scope="col">System</th><th scope="col">All stages behind it</th></tr>'
    return _html_section(
        "Stages and wall times",
        f'<div class="bars stages">{bars}</div>{_html_table(head, totals)}',
        lead="Every stage that the systems rest on, once, inputs before what was made from them.",
    )


def _html_method(evaluation: Evaluation, history: History) -> str:
    rows = "".join(
        f'<tr><th scope="row"><code>{escape(text)}</code></th><td>{escape(where)}</td></tr>'
        for text, where in signatures(evaluation)
    )
    head = '<tr><th scope="col">sacreBLEU signature</th><th scope="col">Applies to</th></tr>'
    return _html_section(
        "How to read this", _html_list(notes(evaluation, history)) + _html_table(head, rows)
    )


def _html_section(title: str, content: str, *, lead: str = "") -> str:
    intro = f'<p class="lead">{escape(lead)}</p>' if lead else ""
    return f"<section><h2>{escape(title)}</h2>{intro}{content}</section>"


def _html_table(head: str, body: str, *, tall: bool = False) -> str:
    style = "scroll tall" if tall else "scroll"
    return (
        f'<div class="{style}" tabindex="0"><table><thead>{head}</thead><tbody>{body}</tbody>'
        "</table></div>"
    )


def _html_cell(value: float | None, *, best: bool, start: bool) -> str:
    text = format_score(value)
    return f"<td{_start(start)}>{f'<b>{text}</b>' if best else text}</td>"


def _start(first_of_group: bool) -> str:
    return ' class="start"' if first_of_group else ""


def _row_class(row: Row) -> str:
    return ' class="ceiling"' if row.ceiling else ""


def _html_list(items: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in items)}</ul>"


def _series_class(place: int) -> str:
    dashed = " dashed" if place >= SERIES_COLOURS else ""
    return f"s{place % SERIES_COLOURS}{dashed}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


# Line charts


@dataclass(frozen=True)
class Series:
    """A line of a chart; ``style`` is its class in the style sheet."""

    name: str
    points: tuple[tuple[float, float], ...]
    style: str


@dataclass(frozen=True)
class Frame:
    """From data to the coordinates of a chart, in SVG units."""

    x_range: tuple[float, float]
    y_range: tuple[float, float]
    width: float = 560.0
    height: float = 300.0
    left: float = 46.0
    right: float = 104.0
    top: float = 12.0
    bottom: float = 44.0

    def x(self, value: float) -> float:
        low, high = self.x_range
        return self.left + (value - low) / (high - low) * (self.width - self.left - self.right)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return (
            self.height
            - self.bottom
            - (value - low) / (high - low) * (self.height - self.top - self.bottom)
        )


def nice_ticks(low: float, high: float, *, about: int = 5) -> list[float]:
    """Round values, one, two or five times a power of ten apart, that enclose a range."""
    span = high - low if high > low else max(abs(high), 1.0)
    rough = span / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(step * place, 10) for place in range(first, max(last, first + 1) + 1)]


def spread_labels(
    positions: Sequence[float], *, gap: float, low: float, high: float
) -> list[float]:
    """Move positions apart to at least ``gap``, keeping their order and staying within a range.

    Where the range is too short for all of them they overlap evenly.
    """
    order = sorted(range(len(positions)), key=lambda place: positions[place])
    gap = min(gap, (high - low) / max(len(positions) - 1, 1))
    placed = [0.0] * len(positions)
    previous = low - gap
    for place in order:
        previous = placed[place] = max(positions[place], previous + gap)
    limit = high
    for place in reversed(order):
        placed[place] = min(placed[place], limit)
        limit = placed[place] - gap
    return placed


def thin_out(
    points: Sequence[tuple[float, float]], *, limit: int = MAX_CURVE_POINTS
) -> tuple[tuple[float, float], ...]:
    """At most ``limit`` points: means over runs of neighbours, each at its last x."""
    if len(points) <= limit:
        return tuple(points)
    size = math.ceil(len(points) / limit)
    runs = [points[start : start + size] for start in range(0, len(points), size)]
    return tuple((run[-1][0], sum(y for _, y in run) / len(run)) for run in runs)


def line_chart(
    series: Sequence[Series], *, title: str, x_label: str, y_label: str, mark_lowest: bool = False
) -> str:
    """An SVG chart with axes, ticks, grid and a label at the end of each line.

    Args:
        series: lines; those without points are left out.
        title: read out by screen readers.
        mark_lowest: a dot at the lowest point of each line.
    """
    drawn = [one for one in series if one.points]
    xs = [x for one in drawn for x, _ in one.points]
    ys = [y for one in drawn for _, y in one.points]
    x_ticks, y_ticks = nice_ticks(0.0, max(xs)), nice_ticks(min(ys), max(ys))
    # Lines end where the data ends, at the right edge; there is always a tick beyond zero.
    x_high = max(max(xs), x_ticks[1])
    frame = Frame(x_range=(0.0, x_high), y_range=(y_ticks[0], y_ticks[-1]))
    x_ticks = [tick for tick in x_ticks if tick <= x_high]
    return (
        f'<svg viewBox="0 0 {frame.width:.0f} {frame.height:.0f}" role="img" '
        f'aria-label="{escape(title)}">'
        f"{_svg_axes(frame, x_ticks, y_ticks, x_label=x_label, y_label=y_label)}"
        f"{''.join(_svg_line(frame, one, mark_lowest=mark_lowest) for one in drawn)}"
        f"{_svg_labels(frame, drawn)}</svg>"
    )


def _svg_axes(
    frame: Frame,
    x_ticks: Sequence[float],
    y_ticks: Sequence[float],
    *,
    x_label: str,
    y_label: str,
) -> str:
    left, right = frame.left, frame.width - frame.right
    floor = frame.height - frame.bottom
    horizontal = "".join(
        f'<line class="grid" x1="{left:.1f}" x2="{right:.1f}" y1="{frame.y(tick):.1f}" '
        f'y2="{frame.y(tick):.1f}"/><text class="tick" text-anchor="end" x="{left - 8:.1f}" '
        f'y="{frame.y(tick) + 3.5:.1f}">{_tick_text(tick)}</text>'
        for tick in y_ticks
    )
    vertical = "".join(
        f'<line class="axis" x1="{frame.x(tick):.1f}" x2="{frame.x(tick):.1f}" y1="{floor:.1f}" '
        f'y2="{floor + 4:.1f}"/><text class="tick" text-anchor="middle" x="{frame.x(tick):.1f}" '
        f'y="{floor + 17:.1f}">{_tick_text(tick)}</text>'
        for tick in x_ticks
    )
    return (
        f'{horizontal}<line class="axis" x1="{left:.1f}" x2="{right:.1f}" y1="{floor:.1f}" '
        f'y2="{floor:.1f}"/>{vertical}'
        f'<text class="label" text-anchor="middle" x="{(left + right) / 2:.1f}" '
        f'y="{frame.height - 6:.1f}">{escape(x_label)}</text>'
        f'<text class="label" text-anchor="middle" transform="translate(11 '
        f'{(frame.top + floor) / 2:.1f}) rotate(-90)">{escape(y_label)}</text>'
    )


def _svg_line(frame: Frame, series: Series, *, mark_lowest: bool) -> str:
    points = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in series.points)
    line = f'<polyline class="line {series.style}" points="{points}"/>'
    if not mark_lowest and len(series.points) > 1:
        return line
    x, y = min(series.points, key=lambda point: (point[1], point[0]))
    return (
        f'{line}<circle class="dot {series.style}" cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" '
        f'r="3"><title>{escape(series.name)}: {y:.3f} at {_tick_text(x)}</title></circle>'
    )


def _svg_labels(frame: Frame, series: Sequence[Series]) -> str:
    ends = [(frame.x(one.points[-1][0]), frame.y(one.points[-1][1])) for one in series]
    heights = spread_labels(
        [y for _, y in ends], gap=13.0, low=frame.top, high=frame.height - frame.bottom
    )
    edge = frame.width - frame.right
    return "".join(
        f'<path class="leader {one.style}" d="M{x + 3:.1f} {y:.1f}L{max(x, edge) + 9:.1f} '
        f'{height:.1f}"/><text class="name {one.style}" x="{max(x, edge) + 12:.1f}" '
        f'y="{height + 3.5:.1f}"><title>{escape(one.name)}</title>'
        f"{escape(_shorten(one.name))}</text>"
        for one, (x, y), height in zip(series, ends, heights, strict=True)
    )


def _shorten(name: str) -> str:
    return name if len(name) <= 13 else f"{name[:12]}…"


def _tick_text(value: float) -> str:
    if abs(value) >= 10_000:
        return f"{value / 1000:,.4g}k"
    return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def _html_curves(evaluation: Evaluation, history: History) -> str:
    if not any(curve.training or curve.validation for curve in history.curves):
        return ""
    styles = {one.name: _series_class(place) for place, one in enumerate(evaluation.systems)}
    figures = [*_validation_figures(history, styles), _training_figure(history, styles)]
    return _html_section(
        "Loss while training",
        f'<div class="charts">{"".join(figures)}</div>',
        lead="Of the run whose checkpoint each system translates with. A dot marks the lowest "
        "validation loss.",
    )


def _validation_figures(history: History, styles: Mapping[str, str]) -> list[str]:
    unit, divisor = _time_unit(history)
    by_update = [
        _series(curve.system, styles, [(point.update, point.loss) for point in curve.validation])
        for curve in history.curves
    ]
    by_time = [
        _series(
            curve.system,
            styles,
            [(point.seconds / divisor, point.loss) for point in curve.validation],
        )
        for curve in history.curves
    ]
    figures = [
        _figure("Validation, all directions", by_update, x_label="updates"),
        _figure("Validation against wall time", by_time, x_label=f"{unit} of training"),
    ]
    for group in GROUPS:
        by_group = [
            _series(
                curve.system,
                styles,
                [
                    (point.update, point.resources[group])
                    for point in curve.validation
                    if group in point.resources
                ],
            )
            for curve in history.curves
        ]
        figures.append(_figure(f"Validation, {group} resource", by_group, x_label="updates"))
    return figures


def _training_figure(history: History, styles: Mapping[str, str]) -> str:
    series = [
        _series(curve.system, styles, [(point.update, point.loss) for point in curve.training])
        for curve in history.curves
    ]
    return _figure("Training", series, x_label="updates", mark_lowest=False)


def _series(name: str, styles: Mapping[str, str], points: Sequence[tuple[float, float]]) -> Series:
    return Series(name=name, points=thin_out(points), style=styles[name])


def _figure(title: str, series: Sequence[Series], *, x_label: str, mark_lowest: bool = True) -> str:
    if not any(one.points for one in series):
        return ""
    chart = line_chart(
        series, title=title, x_label=x_label, y_label="nats per token", mark_lowest=mark_lowest
    )
    return f"<figure><figcaption>{escape(title)}</figcaption>{chart}</figure>"


def _time_unit(history: History) -> tuple[str, float]:
    longest = max(
        (point.seconds for curve in history.curves for point in curve.validation), default=0.0
    )
    if longest >= 2 * 3600:
        return "hours", 3600.0
    return ("minutes", 60.0) if longest >= 2 * 60 else ("seconds", 1.0)


_STYLE = """
:root{--paper:#fbfbf9;--panel:#fff;--ink:#20242a;--soft:#667079;--line:#e4e4de;--rule:#cfcfc8;
--mark:#f6f1e4;--s0:#33658a;--s1:#c26a34;--s2:#4b8b5f;--s3:#86609f;--s4:#b34a5f;--s5:#3f8e97;
--s6:#8d7a2d;--s7:#747b83}
@media (prefers-color-scheme:dark){:root{--paper:#15181c;--panel:#1b1f24;--ink:#e3e5e8;
--soft:#98a1ab;--line:#2a2f36;--rule:#3b424b;--mark:#26241d;--s0:#7fb2da;--s1:#e39a68;
--s2:#83c196;--s3:#bb9bd3;--s4:#e3879a;--s5:#77c3cb;--s6:#cbb866;--s7:#a8b0b9}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.55 system-ui,-apple-system,
"Segoe UI",Roboto,"Noto Sans","Helvetica Neue",Arial,sans-serif}
main{max-width:1120px;margin:0 auto;padding:64px 28px 96px}
h1,h2,h3,h4{font-weight:600;line-height:1.25;margin:0;text-wrap:balance}
h1{font-size:34px;letter-spacing:-.018em}
h2{font-size:21px;letter-spacing:-.01em}
h3{font-size:15px;margin:26px 0 10px}
h4{font-size:12px;color:var(--soft);font-weight:500;margin:14px 0 6px}
small{font-weight:400;color:var(--soft)}
section{margin-top:60px;border-top:1px solid var(--line);padding-top:26px}
.eyebrow{margin:0 0 6px;color:var(--soft);font-size:13px;letter-spacing:.02em}
.facts{margin:10px 0 0;color:var(--soft)}
.lead{margin:6px 0 18px;color:var(--soft);max-width:68ch}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:6px 22px;margin:22px 0 0;padding:0;
font-size:14px}
.legend li{display:flex;align-items:center;gap:8px}
.swatch{width:18px;height:4px;border-radius:2px;background:var(--c)}
.swatch.dashed{background:repeating-linear-gradient(90deg,var(--c) 0 5px,transparent 5px 8px)}
.s0{--c:var(--s0)}.s1{--c:var(--s1)}.s2{--c:var(--s2)}.s3{--c:var(--s3)}.s4{--c:var(--s4)}
.s5{--c:var(--s5)}.s6{--c:var(--s6)}.s7{--c:var(--s7)}.stage{--c:var(--s7)}
.warnings{margin-top:32px;background:var(--mark);border-radius:8px;padding:16px 20px;
font-size:14px}
.warnings h2{font-size:14px}
ul{margin:8px 0;padding-left:20px}
.panels{display:grid;gap:20px;grid-template-columns:repeat(auto-fit,minmax(290px,1fr))}
.panel{background:var(--panel);border:1px solid var(--line);border-radius:10px;
padding:18px 20px 20px}
.panel h3{margin:0}
.panel h3 small{margin-left:6px;font-size:13px}
.bars{display:grid;gap:6px}
.bar-row{display:grid;grid-template-columns:minmax(72px,38%) 1fr 40px;gap:10px;align-items:center;
font-size:13px}
.bar-label{overflow:hidden;text-overflow:ellipsis;white-space:nowrap}
.track{height:10px;background:var(--line);border-radius:3px;overflow:hidden}
.bar{display:block;height:100%;background:var(--c);border-radius:3px;min-width:1px}
.bar.dashed{opacity:.6}
.bar-value{text-align:right;font-variant-numeric:tabular-nums}
.stages{margin-bottom:24px}
.stages .bar-row{grid-template-columns:minmax(150px,34%) 1fr 104px}
.stages .bar-label{color:var(--soft)}
.stages b{color:var(--ink);font-weight:500;margin-right:4px}
.scroll{overflow-x:auto;border:1px solid var(--line);border-radius:10px;background:var(--panel)}
.tall{max-height:620px;overflow-y:auto}
table{border-collapse:separate;border-spacing:0;width:100%;font-size:14px;
font-variant-numeric:tabular-nums}
th,td{padding:7px 14px;text-align:right;white-space:nowrap;font-weight:400;
border-bottom:1px solid var(--line)}
tbody tr:last-child>*{border-bottom:0}
th:first-child{text-align:left;position:sticky;left:0;background:var(--panel);z-index:1}
thead tr:last-child th:first-child{text-align:right;position:static}
thead tr:first-child:last-child th:first-child{text-align:left}
thead th{color:var(--soft);font-size:13px;vertical-align:bottom}
thead th.group{color:var(--ink);font-weight:500;text-align:left;border-bottom:0;padding-bottom:0;
padding-left:14px;border-left:1px solid var(--line)}
thead th small{display:block;font-size:11px;line-height:1.2}
.start{border-left:1px solid var(--line)}
td b{font-weight:700}
td:last-child:nth-child(2){width:40%}
tr.ceiling>*{color:var(--soft);font-style:italic}
tr.family th{position:static;font-weight:500;font-size:13px;padding-top:16px;
border-bottom-color:var(--rule)}
.tall thead{position:sticky;top:0;z-index:2;background:var(--panel)}
.code{font-weight:500;display:inline-block;min-width:62px}
.long{color:var(--soft);font-size:13px}
.charts{display:grid;gap:28px 24px;
grid-template-columns:repeat(auto-fit,minmax(min(460px,100%),1fr))}
figure{margin:0;background:var(--panel);border:1px solid var(--line);border-radius:10px;
padding:16px 12px 10px 14px}
figcaption{font-size:14px;font-weight:500;margin:0 0 8px 4px}
svg{display:block;width:100%;height:auto;font-size:11.5px}
svg text{fill:var(--soft)}
.grid{stroke:var(--line);stroke-width:1}
.axis{stroke:var(--rule);stroke-width:1}
.tick{font-variant-numeric:tabular-nums}
.line{fill:none;stroke:var(--c);stroke-width:1.75;stroke-linejoin:round;stroke-linecap:round}
.line.dashed,.leader.dashed{stroke-dasharray:5 4}
.dot{fill:var(--panel);stroke:var(--c);stroke-width:1.75}
.leader{fill:none;stroke:var(--c);stroke-width:.75;opacity:.5}
svg text.name{fill:var(--c);font-weight:500}
.samples{display:grid;gap:16px;grid-template-columns:repeat(auto-fit,minmax(min(420px,100%),1fr))}
.sample{background:var(--panel);border:1px solid var(--line);border-radius:10px;
padding:16px 20px}
.sample h4{margin:0 0 10px;font-size:14px;color:var(--ink);display:flex;gap:8px;
align-items:baseline}
.sample h4 small{margin-left:auto;font-size:12px}
.code{white-space:nowrap}
.sample .code{min-width:0}
dl{display:grid;grid-template-columns:minmax(74px,22%) 1fr;gap:6px 14px;margin:0;font-size:14px}
dt{color:var(--c);font-weight:500;font-size:13px;overflow:hidden;text-overflow:ellipsis;
white-space:nowrap}
dt.given{color:var(--soft);font-weight:400}
dd{margin:0;overflow-wrap:anywhere}
dd.given{color:var(--ink)}
.empty{color:var(--soft)}
code{font:12px/1.5 ui-monospace,"SF Mono",Menlo,Consolas,monospace}
section>ul{max-width:78ch;margin-bottom:20px;color:var(--soft);font-size:15px}
:focus-visible{outline:2px solid var(--s0);outline-offset:2px}
@media (max-width:640px){main{padding:36px 16px 64px}h1{font-size:26px}
.stages .bar-row{grid-template-columns:46% 1fr 92px}.long{display:none}
dl{grid-template-columns:1fr}dd{margin-bottom:6px}}
@media print{.tall{max-height:none}body{background:#fff}}
"""
