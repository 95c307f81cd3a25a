"""Charts as inline SVG, or as SVG files; ``report.css`` has their colors and dashes."""

import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from pipeline.evaluation.tables import escape_html, format_large, style_sheet

WIDTH, LEFT, RIGHT, TOP, FLOOR = 360, 60.0, 336.0, 18.0, 212.0
ROW, BAR_ROW = 17.0, 34.0  # heights of a row of a heat map, and of a bar with its name above
CHARACTER = 8.4  # width of a digit in the widest font of the page
NARROWEST = 8.0  # width of the cells of a heat map below which its names stand above its rows
KEY, NAME_CHARACTERS = 42.0, 32  # width of a line of the legend, and most characters behind it
SERIES_COLORS = 8
Point = tuple[float, float]
Grid = Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Series:
    """A line of a chart, or the points of a scatter chart."""

    name: str
    points: tuple[Point, ...]
    place: int  # chooses color and dashes
    upright: float | None = None  # position of a vertical line, for example the mean
    low: tuple[Point, ...] = ()
    high: tuple[Point, ...] = ()  # edges of a band around the line; empty: none
    outline: tuple[tuple[Point, Point], ...] = ()  # segments around the points of a scatter chart


@dataclass(frozen=True)
class Bar:
    """A row of a bar chart."""

    name: str
    value: float
    place: int = 0  # chooses the color
    interval: Point | None = None


def line_chart(
    series: Sequence[Series], *, title: str, x_label: str, y_label: str, joined: bool = True
) -> str:
    """Return a line chart, or its points if they are not joined; at least one series has points."""
    ys = [y for line in series for _, y in (*line.points, *line.low, *line.high)]
    x_ticks = nice_ticks(0.0, max(x for line in series for x, _ in line.points), about=4)
    y_ticks = nice_ticks(min(ys), max(ys))
    x, y = _scale(0.0, x_ticks[-1], LEFT, RIGHT), _scale(y_ticks[0], y_ticks[-1], FLOOR, TOP)
    parts = [_text("label", y_label, LEFT, TOP - 2, "start")]
    for at in y_ticks:
        parts.append(_rule("grid", LEFT, y(at), RIGHT, y(at)))
        parts.append(_text("tick", _tick(at), LEFT - 6, y(at) + 4, "end"))
    parts += [_text("tick", _tick(at), x(at), FLOOR + 18) for at in x_ticks]
    parts.append(_text("label", x_label, (LEFT + RIGHT) / 2, FLOOR + 40))
    for one in (one for one in series if one.points):
        edges = ((*one.low, *reversed(one.high)), one.points)
        band, line = (" ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in edge) for edge in edges)
        parts += [f'<polygon class="band {_color(one)}" points="{band}"/>'] if band else []
        if one.upright is not None:
            at = x(one.upright)
            parts.append(_rule(f"upright {_color(one)}", at, TOP, at, FLOOR))
        parts += [f'<polyline class="line {_color(one)}" points="{line}"/>'] if joined else []
        parts += [
            _dot(one, x(a), y(b)) for a, b in one.points if not joined or len(one.points) == 1
        ]
    return _svg(title, FLOOR + 48, parts, legend=series)


def scatter_chart(series: Sequence[Series], *, title: str) -> str:
    """Return the points and outlines of series, at least one point, on axes of one unit."""
    ends = [end for line in series for segment in line.outline for end in segment]
    drawn = [*ends, *(at for line in series for at in line.points)]
    (x_low, y_low), (x_high, y_high) = (tuple(map(f, zip(*drawn, strict=True))) for f in (min, max))
    # One unit is as long on both axes, since distances are what the chart shows.
    unit = max((x_high - x_low) / (RIGHT - LEFT), (y_high - y_low) / (FLOOR - TOP)) or 1.0
    x_half, y_half = unit * (RIGHT - LEFT) / 2, unit * (FLOOR - TOP) / 2
    x_middle, y_middle = (x_low + x_high) / 2, (y_low + y_high) / 2
    x = _scale(x_middle - x_half, x_middle + x_half, LEFT, RIGHT)
    y = _scale(y_middle - y_half, y_middle + y_half, FLOOR, TOP)
    parts = [_dot(line, x(a), y(b)) for line in series for a, b in line.points]
    for one in (one for one in series if one.outline):
        path = (f"M{x(a):.1f} {y(b):.1f}L{x(c):.1f} {y(d):.1f}" for (a, b), (c, d) in one.outline)
        parts.append(f'<path class="outline {_color(one)}" d="{"".join(path)}"/>')
    return _svg(title, FLOOR + TOP, parts, legend=series, has_lines=False)


def bar_chart(bars: Sequence[Bar], *, title: str, x_label: str, low: float = 0.0) -> str:
    """Return horizontal bars with names and values; no bar is below ``low``."""
    ends = [end for bar in bars for end in (bar.value, *(bar.interval or ()))]
    ticks = nice_ticks(low, max(*ends, low), about=4)
    x, floor = _scale(low, ticks[-1], TOP, RIGHT - 60), TOP + BAR_ROW * len(bars)
    parts = []
    for at in (at for at in ticks if at >= low):
        parts.append(_rule("grid", x(at), TOP, x(at), floor))
        parts.append(_text("tick", _tick(at), x(at), floor + 16))
    for place, bar in enumerate(bars):
        y, length = TOP + BAR_ROW * place, max(x(bar.value) - TOP, 0.5)
        parts.append(_text("tick", bar.name, TOP, y + 13, "start"))
        parts.append(_rect(f"fill {_color(bar)}", TOP, y + 18, length, 10))
        start, end = (x(max(one, low)) for one in bar.interval or (bar.value, bar.value))
        if bar.interval is not None:
            parts.append(_rule("whisker", start, y + 23, end, y + 23))
        right = max(x(bar.value), end) + 4
        parts.append(_text("tick", f"{bar.value:,.4g}", right, y + 28, "start"))
    parts.append(_text("label", x_label, (TOP + RIGHT) / 2, floor + 34))
    return _svg(title, floor + 42, parts)


def heat_map(
    rows: Grid, columns: Sequence[str] = (), *, title: str, x_label: str, high: float
) -> str:
    """Return a heat map of values from 0 to ``high``; columns have names, or numbers from 0.

    Cells show their values when pointed at, and names of columns print as they fit. With many
    columns, names of rows stand above them.
    """
    left = max(LEFT, CHARACTER * max(map(len, rows)) + 7.0)
    columns = columns or [*map(str, range(max(map(len, rows.values()))))]
    is_above = (RIGHT - left) / len(columns) < NARROWEST
    left, height = (TOP, BAR_ROW) if is_above else (left, ROW)
    width, floor, parts = (RIGHT - left) / len(columns), TOP + height * len(rows), list[str]()
    for number, (name, values) in enumerate(rows.items()):
        y = TOP + height * (number + 1) - ROW
        if is_above:
            parts.append(_text("tick", name, left, y - 4, "start"))
        else:
            parts.append(_text("tick", name, left - 5, y + 13, "end"))
        for place, value in enumerate(values):
            tip = f"<title>{escape_html(f'{name}, {columns[place]}')}: {value:.3g}</title>"
            shade = min(max(value / high, 0.0), 1.0) if high > 0 else 1.0
            parts.append(_rect("cell", left + width * place, y, width, ROW, shade, tip))
    step = math.ceil(CHARACTER * (max(map(len, columns)) + 0.5) / width)
    for place in range(0, len(columns), step):
        parts.append(_text("tick", columns[place], left + width * (place + 0.5), floor + 16))
    parts.append(_text("label", x_label, (left + RIGHT) / 2, floor + 34))
    return _svg(title, floor + 42, parts)


def picture(chart: str) -> str:
    """Return a chart as an SVG document with its style."""
    start, _, drawn = chart.partition(">")
    attributes = 'xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="13"'
    return (
        f'<?xml version="1.0" encoding="utf-8"?>\n{start} {attributes} '
        f'style="background:var(--paper)"><style>{escape_html(style_sheet())}</style>{drawn}\n'
    )


def nice_ticks(low: float, high: float, *, about: int = 5) -> list[float]:
    """Return round values that enclose a range, 1, 2 or 5 times a power of ten apart."""
    rough = (high - low if high > low else max(abs(high), 1.0)) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(step * place, 10) for place in range(first, max(last, first + 1) + 1)]


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    return lambda value: start + (value - low) / (high - low) * (end - start)


def _tick(value: float) -> str:
    return format_large(value) if value >= 10_000 else f"{value:,.4g}"


def _color(one: Series | Bar) -> str:
    return f"s{one.place % SERIES_COLORS}"


def _rule(style: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{style}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _rect(
    style: str, x: float, y: float, width: float, height: float, shade: float = 1.0, tip: str = ""
) -> str:
    at = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect class="{style}" {at} fill-opacity="{shade:.3f}">{tip}</rect>'


def _text(style: str, text: str, x: float, y: float, anchor: str = "middle") -> str:
    at = f'text-anchor="{anchor}" x="{x:.1f}" y="{y:.1f}"'
    return f'<text class="{style}" {at}>{escape_html(text)}</text>'


def _dot(one: Series, x: float, y: float) -> str:
    return f'<circle class="marker {_color(one)}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>'


def _svg(
    title: str,
    height: float,
    parts: Iterable[str],
    *,
    legend: Sequence[Series] = (),
    has_lines: bool = True,
) -> str:
    """Return an SVG element; the legend below the chart names the series that have points."""
    drawn = "".join(parts)
    for one in (one for one in legend if one.points):
        line = f'<path class="line {_color(one)}" d="M4 {height + 8:.1f}h34"/>'
        drawn += line if has_lines else _dot(one, KEY / 2, height + 8)
        for part in textwrap.wrap(one.name, NAME_CHARACTERS) or [one.name]:
            height += 20
            drawn += _text("name", part, KEY, height - 8, "start")
    label = f'role="img" aria-label="{escape_html(title)}"'
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" {label}>{drawn}</svg>'
