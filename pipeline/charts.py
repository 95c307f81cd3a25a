"""Line charts as inline SVG.

Colours, strokes and type are the page's: every element carries a class for its style sheet
(``grid``, ``axis``, ``tick``, ``label``, ``line``, ``dot``, ``leader``, ``name``), those of a line
its own as well.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, FLOOR = 46.0, 456.0, 12.0, 256.0
"""The chart and, within it, the edges of the drawn area, in SVG units; names stand to its right."""

MAX_POINTS = 300
LABEL_GAP = 13.0
LABEL_CHARACTERS = 13

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """A line of a chart; ``style`` is its class in the style sheet."""

    name: str
    points: tuple[Point, ...]
    style: str


@dataclass(frozen=True)
class Frame:
    """From data to the coordinates of a chart, in SVG units."""

    x_range: tuple[float, float]
    y_range: tuple[float, float]

    def x(self, value: float) -> float:
        low, high = self.x_range
        return LEFT + (value - low) / (high - low) * (RIGHT - LEFT)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return FLOOR - (value - low) / (high - low) * (FLOOR - TOP)


def line_chart(
    series: Sequence[Series], *, title: str, x_label: str, y_label: str, mark_lowest: bool = False
) -> str:
    """An SVG chart with axes, ticks, grid and a label at the end of each line.

    Args:
        series: lines, at least one with points; those without are left out.
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
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
        f"{_axes(frame, x_ticks, y_ticks, x_label=x_label, y_label=y_label)}"
        f"{''.join(_line(frame, one, mark_lowest=mark_lowest) for one in drawn)}"
        f"{_names(frame, drawn)}</svg>"
    )


def thin_out(points: Sequence[Point], *, limit: int = MAX_POINTS) -> tuple[Point, ...]:
    """At most ``limit`` points: means over runs of neighbours, each at its last x."""
    if len(points) <= limit:
        return tuple(points)
    size = math.ceil(len(points) / limit)
    runs = [points[start : start + size] for start in range(0, len(points), size)]
    return tuple((run[-1][0], sum(y for _, y in run) / len(run)) for run in runs)


# Ticks and labels


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


def _tick_text(value: float) -> str:
    if abs(value) >= 10_000:
        return f"{value / 1000:,.4g}k"
    return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def _shorten(name: str) -> str:
    return name if len(name) <= LABEL_CHARACTERS else f"{name[: LABEL_CHARACTERS - 1]}…"


# SVG


def _axes(
    frame: Frame,
    x_ticks: Sequence[float],
    y_ticks: Sequence[float],
    *,
    x_label: str,
    y_label: str,
) -> str:
    horizontal = "".join(
        _rule("grid", x=(LEFT, RIGHT), y=(y, y))
        + _text("tick", _tick_text(tick), x=LEFT - 8, y=y + 3.5, anchor="end")
        for tick, y in zip(y_ticks, map(frame.y, y_ticks), strict=True)
    )
    vertical = "".join(
        _rule("axis", x=(x, x), y=(FLOOR, FLOOR + 4))
        + _text("tick", _tick_text(tick), x=x, y=FLOOR + 17)
        for tick, x in zip(x_ticks, map(frame.x, x_ticks), strict=True)
    )
    return (
        f"{horizontal}{_rule('axis', x=(LEFT, RIGHT), y=(FLOOR, FLOOR))}{vertical}"
        f"{_text('label', x_label, x=(LEFT + RIGHT) / 2, y=HEIGHT - 6)}"
        f'<text class="label" text-anchor="middle" transform="translate(11 '
        f'{(TOP + FLOOR) / 2:.1f}) rotate(-90)">{escape(y_label)}</text>'
    )


def _rule(style: str, *, x: tuple[float, float], y: tuple[float, float]) -> str:
    return (
        f'<line class="{style}" x1="{x[0]:.1f}" x2="{x[1]:.1f}" y1="{y[0]:.1f}" y2="{y[1]:.1f}"/>'
    )


def _text(style: str, text: str, *, x: float, y: float, anchor: str = "middle") -> str:
    return (
        f'<text class="{style}" text-anchor="{anchor}" x="{x:.1f}" y="{y:.1f}">'
        f"{escape(text)}</text>"
    )


def _line(frame: Frame, series: Series, *, mark_lowest: bool) -> str:
    points = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in series.points)
    line = f'<polyline class="line {series.style}" points="{points}"/>'
    # A line of one point is invisible without its dot.
    if not mark_lowest and len(series.points) > 1:
        return line
    x, y = min(series.points, key=lambda point: (point[1], point[0]))
    return (
        f'{line}<circle class="dot {series.style}" cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" '
        f'r="3"><title>{escape(series.name)}: {y:.3f} at {_tick_text(x)}</title></circle>'
    )


def _names(frame: Frame, series: Sequence[Series]) -> str:
    ends = [(frame.x(one.points[-1][0]), frame.y(one.points[-1][1])) for one in series]
    heights = spread_labels([y for _, y in ends], gap=LABEL_GAP, low=TOP, high=FLOOR)
    return "".join(
        f'<path class="leader {one.style}" d="M{x + 3:.1f} {y:.1f}L{max(x, RIGHT) + 9:.1f} '
        f'{height:.1f}"/><text class="name {one.style}" x="{max(x, RIGHT) + 12:.1f}" '
        f'y="{height + 3.5:.1f}"><title>{escape(one.name)}</title>'
        f"{escape(_shorten(one.name))}</text>"
        for one, (x, y), height in zip(series, ends, heights, strict=True)
    )
