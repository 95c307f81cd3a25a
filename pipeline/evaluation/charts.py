"""Charts as inline SVG or as SVG files, legible at a width of 300 pixels and more.

The style sheet of the page (``report.css``) sets colors, dashes and type. Every element has a class
for it (``grid``, ``axis``, ``tick``, ``label``, ``line``, ``band``, ``lead``, ``begin``,
``marker``, ``dot``, ``upright``, ``fill``, ``cell``, ``outline``); elements of a series also have
the class of its color. Series differ in color, dashes and markers, so that readers can follow them
where they overlap or print in gray.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources

WIDTH, HEIGHT = 360, 260
LEFT, RIGHT, TOP, FLOOR = 46.0, 332.0, 10.0, 212.0
"""Size of a chart and edges of its plot area, in SVG units. Half a tick label fits to the right of
the area, and a short one to the left."""
CHARACTER = 8.4
"""Width of a digit in the widest font of the page; other letters are no wider on average."""
Y_LABEL = 12.0
"""Horizontal position of the label of the vertical axis."""
BAR_ROW = 17.0
"""Height of a row of a bar chart or heat map."""
VALUE_SHARE = 0.12
"""Share of the axis beyond the last tick that is kept for the value of a bar."""
MAX_POINTS = 300
MARKERS_PER_LINE = 8
SERIES_COLORS = 8
"""Colors of the style sheet; further series repeat them with another marker."""
MARKERS = (
    "M-3-3H3V3H-3Z",
    "M0-3.8L3.6 3H-3.6Z",
    "M0-4L4 0L0 4L-4 0Z",
    "M-3-3L3 3M3-3L-3 3",
    "M0 3.8L3.6-3H-3.6Z",
    "M-4 0H4M0-4V4",
    "M-3.5-2L0-4L3.5-2V2L0 4L-3.5 2Z",
)
"""Shapes around the origin: seven, with eight colors, make 56 series that look different."""
ROW = 20
"""Height of a line of a picture's legend, in SVG units."""
_BEGIN = re.compile(r'<svg viewBox="0 0 (\d+) (\d+)"')
_NOT_IN_HTML = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")

Point = tuple[float, float]


def replace_forbidden(text: str) -> str:
    """Replace characters that HTML cannot hold by a replacement character."""
    return _NOT_IN_HTML.sub("\ufffd", text)


def escape_html(text: str) -> str:
    """Return a text as HTML that shows it as it stands."""
    return escape(replace_forbidden(text))


def style_sheet() -> str:
    """Return the style sheet of pages and pictures."""
    return resources.files("pipeline.evaluation").joinpath("report.css").read_text("utf-8")


def series_style(place: int) -> str:
    """Return the class of the color of a series."""
    return f"s{place % SERIES_COLORS}"


@dataclass(frozen=True)
class Series:
    """A line of a chart."""

    name: str
    points: tuple[Point, ...]
    place: int
    """Number that chooses color, dashes and marker."""
    begin: float = 0.0
    """Position on the horizontal axis where the line begins; a dotted line leads there from 0."""
    upright: float | None = None
    """Position of a vertical line in the color of the series, such as its mean."""
    low: tuple[Point, ...] = ()
    high: tuple[Point, ...] = ()
    """Edges of a band around the line, such as the range over runs; empty: none."""
    outline: tuple[tuple[Point, Point], ...] = ()
    """Segments of lines around the points of a scatter chart, such as those of equal density."""

    @property
    def style(self) -> str:
        """Return the class of the color."""
        return series_style(self.place)


@dataclass(frozen=True)
class Bar:
    """A row of a bar chart."""

    name: str
    value: float
    place: int = 0
    """Number that chooses the color."""


@dataclass(frozen=True)
class Frame:
    """Conversion of data to the coordinates of a chart, in SVG units."""

    x_range: tuple[float, float]
    y_range: tuple[float, float]
    left: float = LEFT
    """The left edge of the drawn area."""

    def x(self, value: float) -> float:
        """Return the horizontal coordinate of a value."""
        low, high = self.x_range
        return self.left + (value - low) / (high - low) * (RIGHT - self.left)

    @property
    def middle(self) -> float:
        """Return the horizontal center of the drawn area."""
        return (self.left + RIGHT) / 2

    def y(self, value: float) -> float:
        """Return the vertical coordinate of a value."""
        low, high = self.y_range
        return FLOOR - (value - low) / (high - low) * (FLOOR - TOP)


def line_chart(
    series: Sequence[Series], *, title: str, x_label: str, y_label: str, mark_lowest: bool = False
) -> str:
    """Return an SVG line chart with axes, ticks and grid; :func:`legend` is separate.

    Args:
        series: lines, at least one of them with points; lines without points are left out.
        title: text for screen readers.
        x_label: label of the horizontal axis.
        y_label: label of the vertical axis.
        mark_lowest: whether to draw a ring around the lowest point of each line.
    """
    drawn = [one for one in series if one.points]
    xs = [x for one in drawn for x, _ in one.points]
    ys = [y for one in drawn for _, y in (*one.points, *one.low, *one.high)]
    x_ticks, y_ticks = nice_ticks(0.0, max(xs), about=4), nice_ticks(min(ys), max(ys))
    # Lines end where the data ends, at the right edge; there is always a tick beyond zero.
    x_high = max(max(xs), x_ticks[1])
    left = _left_edge(map(_tick_text, y_ticks), before=Y_LABEL + 6)
    frame = Frame(x_range=(0.0, x_high), y_range=(y_ticks[0], y_ticks[-1]), left=left)
    x_ticks = [tick for tick in x_ticks if tick <= x_high]
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape_html(title)}">'
        f"{_axes(frame, x_ticks, y_ticks, x_label=x_label, y_label=y_label)}"
        f"{''.join(_line(frame, one, mark_lowest=mark_lowest) for one in drawn)}</svg>"
    )


def scatter_chart(series: Sequence[Series], *, title: str) -> str:
    """Return an SVG chart of the points of series, and of their outlines, without axes.

    :func:`legend` is separate.

    Args:
        series: at least one point among them.
        title: text for screen readers.
    """
    drawn = [
        point
        for one in series
        for point in (*one.points, *(end for segment in one.outline for end in segment))
    ]
    xs, ys = zip(*drawn, strict=True)
    middle = (min(xs) + max(xs)) / 2, (min(ys) + max(ys)) / 2
    width, height = RIGHT - LEFT, FLOOR - TOP
    # One unit is as long on both axes, since distances are what the chart shows.
    unit = max((max(xs) - min(xs)) / width, (max(ys) - min(ys)) / height) / 2 or 1.0
    frame = Frame(
        x_range=(middle[0] - unit * width, middle[0] + unit * width),
        y_range=(middle[1] - unit * height, middle[1] + unit * height),
    )
    markers = "".join(
        _marker(one, x=frame.x(x), y=frame.y(y)) for one in series for x, y in one.points
    )
    outlines = "".join(_outline(frame, one) for one in series if one.outline)
    return (
        f'<svg viewBox="0 0 {WIDTH} {FLOOR + TOP:.0f}" role="img" '
        f'aria-label="{escape_html(title)}">{markers}{outlines}</svg>'
    )


def _outline(frame: Frame, series: Series) -> str:
    path = "".join(
        f"M{frame.x(x):.1f} {frame.y(y):.1f}L{frame.x(to_x):.1f} {frame.y(to_y):.1f}"
        for (x, y), (to_x, to_y) in series.outline
    )
    return f'<path class="outline {series.style}" d="{path}"/>'


def bar_chart(bars: Sequence[Bar], *, title: str, x_label: str, low: float = 0.0) -> str:
    """Return an SVG chart of horizontal bars with their values.

    Args:
        bars: at least one.
        title: text for screen readers.
        x_label: label of the horizontal axis.
        low: value at the left edge; no bar may be below it.
    """
    ticks = nice_ticks(low, max(max(bar.value for bar in bars), low), about=4)
    high = ticks[-1] + VALUE_SHARE * (ticks[-1] - low)
    left = _left_edge(bar.name for bar in bars)
    frame = Frame(x_range=(low, high), y_range=(0.0, 1.0), left=left)
    floor = TOP + BAR_ROW * len(bars)
    rows = "".join(_bar(frame, bar, y=TOP + BAR_ROW * place) for place, bar in enumerate(bars))
    axis = "".join(
        _rule("grid", x=(x, x), y=(TOP, floor)) + _text("tick", _tick_text(tick), x=x, y=floor + 16)
        for tick in ticks
        if tick >= low
        for x in [frame.x(tick)]
    )
    label = _text("label", x_label, x=frame.middle, y=floor + 36)
    return (
        f'<svg viewBox="0 0 {WIDTH} {floor + 44:.0f}" role="img" '
        f'aria-label="{escape_html(title)}">{axis}{rows}{label}</svg>'
    )


def heat_map(
    rows: Mapping[str, Sequence[float]],
    columns: Sequence[str],
    *,
    title: str,
    x_label: str,
    low: float,
    high: float,
) -> str:
    """Return an SVG heat map, whose cells show their values when pointed at.

    Args:
        rows: name → values, one per column; at least one row.
        columns: names, of which as many are printed as fit.
        title: text for screen readers.
        x_label: label of the horizontal axis.
        low: value of the palest cell.
        high: value of the strongest cell.
    """
    left = _left_edge(rows)
    width = (RIGHT - left) / len(columns)
    floor = TOP + BAR_ROW * len(rows)
    cells = "".join(
        f'<rect class="cell" x="{left + width * place:.1f}" y="{TOP + BAR_ROW * number:.1f}" '
        f'width="{width:.1f}" height="{BAR_ROW:.1f}" fill-opacity="{_strength(value, low, high)}">'
        f"<title>{escape_html(name)}, {escape_html(column)}: {value:.3g}</title></rect>"
        for number, (name, values) in enumerate(rows.items())
        for place, (column, value) in enumerate(zip(columns, values, strict=True))
    )
    names = "".join(
        _text("tick", name, x=left - 5, y=TOP + BAR_ROW * (number + 0.5) + 4, anchor="end")
        for number, name in enumerate(rows)
    )
    step = math.ceil(CHARACTER * (max(map(len, columns)) + 0.5) / width)
    ticks = "".join(
        _text("tick", column, x=left + width * (place + 0.5), y=floor + 16)
        for place, column in enumerate(columns)
        if place % step == 0
    )
    label = _text("label", x_label, x=(left + RIGHT) / 2, y=floor + 36)
    return (
        f'<svg viewBox="0 0 {WIDTH} {floor + 44:.0f}" role="img" '
        f'aria-label="{escape_html(title)}">{cells}{names}{ticks}{label}</svg>'
    )


def _strength(value: float, low: float, high: float) -> str:
    share = (value - low) / (high - low) if high > low else 1.0
    return f"{min(max(share, 0.0), 1.0):.3f}"


def _left_edge(texts: Iterable[str], *, before: float = 0.0) -> float:
    """Return the left edge of the drawn area, so that the longest of the texts fits beside it."""
    return max(LEFT, before + CHARACTER * max(map(len, texts)) + 7.0)


def _bar(frame: Frame, bar: Bar, *, y: float) -> str:
    x, right = frame.left, frame.x(bar.value)
    return (
        f'<rect class="fill {series_style(bar.place)}" x="{x:.1f}" y="{y + 2:.1f}" '
        f'width="{max(right - x, 0.5):.1f}" height="{BAR_ROW - 4:.1f}">'
        f"<title>{escape_html(bar.name)}: {bar.value:,.4g}</title></rect>"
        + _text("tick", bar.name, x=x - 5, y=y + BAR_ROW / 2 + 4, anchor="end")
        + _text("tick", f"{bar.value:,.4g}", x=right + 4, y=y + BAR_ROW / 2 + 4, anchor="start")
    )


def legend(series: Sequence[Series]) -> str:
    """Return the legend of the lines that have points, as an HTML list."""
    items = "".join(
        f'<li><svg class="key" viewBox="0 0 36 12" aria-hidden="true">'
        f'<path class="line {one.style}" d="M1 6H35"/>{_marker(one, x=18, y=6)}</svg>'
        f"<span>{escape_html(one.name)}</span></li>"
        for one in series
        if one.points
    )
    return f'<ul class="legend">{items}</ul>'


def thin_out(points: Sequence[Point], *, limit: int = MAX_POINTS) -> tuple[Point, ...]:
    """Return at most ``limit`` points: means over runs of neighbors, each at its last x."""
    if len(points) <= limit:
        return tuple(points)
    size = math.ceil(len(points) / limit)
    runs = [points[start : start + size] for start in range(0, len(points), size)]
    return tuple((run[-1][0], sum(y for _, y in run) / len(run)) for run in runs)


# Ticks


def nice_ticks(low: float, high: float, *, about: int = 5) -> list[float]:
    """Return round values that enclose a range, 1, 2 or 5 times a power of ten apart."""
    span = high - low if high > low else max(abs(high), 1.0)
    rough = span / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(step * place, 10) for place in range(first, max(last, first + 1) + 1)]


def _tick_text(value: float) -> str:
    if abs(value) >= 10_000:
        return f"{value / 1000:,.4g}k"
    return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


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
        _rule("grid", x=(frame.left, RIGHT), y=(y, y))
        + _text("tick", _tick_text(tick), x=frame.left - 7, y=y + 4, anchor="end")
        for tick, y in zip(y_ticks, map(frame.y, y_ticks), strict=True)
    )
    vertical = "".join(
        _rule("axis", x=(x, x), y=(FLOOR, FLOOR + 4))
        + _text("tick", _tick_text(tick), x=x, y=FLOOR + 18)
        for tick, x in zip(x_ticks, map(frame.x, x_ticks), strict=True)
    )
    return (
        f"{horizontal}{_rule('axis', x=(frame.left, RIGHT), y=(FLOOR, FLOOR))}{vertical}"
        f"{_text('label', x_label, x=frame.middle, y=HEIGHT - 8)}"
        f'<text class="label" text-anchor="middle" transform="translate({Y_LABEL:.0f} '
        f'{(TOP + FLOOR) / 2:.1f}) rotate(-90)">{escape_html(y_label)}</text>'
    )


def _rule(style: str, *, x: tuple[float, float], y: tuple[float, float]) -> str:
    return (
        f'<line class="{style}" x1="{x[0]:.1f}" x2="{x[1]:.1f}" y1="{y[0]:.1f}" y2="{y[1]:.1f}"/>'
    )


def _text(style: str, text: str, *, x: float, y: float, anchor: str = "middle") -> str:
    return (
        f'<text class="{style}" text-anchor="{anchor}" x="{x:.1f}" y="{y:.1f}">'
        f"{escape_html(text)}</text>"
    )


def _line(frame: Frame, series: Series, *, mark_lowest: bool) -> str:
    points = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in series.points)
    parts = [
        _band(frame, series),
        _lead(frame, series),
        _upright(frame, series),
        f'<polyline class="line {series.style}" points="{points}"/>',
        *(_marker(series, x=frame.x(x), y=frame.y(y)) for x, y in _marked(series)),
    ]
    if mark_lowest:
        x, y = min(series.points, key=lambda point: (point[1], point[0]))
        parts.append(
            f'<circle class="dot {series.style}" cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" '
            f'r="5.5"><title>{escape_html(series.name)}: {y:.3f} at {_tick_text(x)}</title>'
            "</circle>"
        )
    return "".join(parts)


def _band(frame: Frame, series: Series) -> str:
    edge = (*series.low, *reversed(series.high))
    if not edge:
        return ""
    points = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in edge)
    return f'<polygon class="band {series.style}" points="{points}"/>'


def _lead(frame: Frame, series: Series) -> str:
    """Draw a line from zero to where a series begins, at the height of its first point."""
    if series.begin <= 0:
        return ""
    x, y = frame.x(series.begin), frame.y(series.points[0][1])
    return (
        f'<line class="lead {series.style}" x1="{frame.left:.1f}" x2="{x:.1f}" y1="{y:.1f}" '
        f'y2="{y:.1f}"/><line class="begin {series.style}" x1="{x:.1f}" x2="{x:.1f}" '
        f'y1="{y - 6:.1f}" y2="{y + 6:.1f}"/>'
    )


def _upright(frame: Frame, series: Series) -> str:
    if series.upright is None:
        return ""
    x = frame.x(series.upright)
    return _rule(f"upright {series.style}", x=(x, x), y=(TOP, FLOOR))


def _marked(series: Series) -> list[Point]:
    """Return a few points, which differ from series to series, and the last one."""
    step = math.ceil(len(series.points) / MARKERS_PER_LINE)
    last = len(series.points) - 1
    return [
        point
        for place, point in enumerate(series.points)
        if place == last or (place + series.place) % step == 0
    ]


def _marker(series: Series, *, x: float, y: float) -> str:
    shape = MARKERS[series.place % len(MARKERS)]
    return (
        f'<path class="marker {series.style}" transform="translate({x:.1f} {y:.1f})" d="{shape}"/>'
    )


# Files


def picture(chart: str, series: Sequence[Series] = ()) -> str:
    """Return a chart as an SVG document with its style and the names of its lines below."""
    size = _BEGIN.match(chart)
    assert size is not None, "a chart begins with its size"
    width, height = map(int, size.groups())
    named = [one for one in series if one.points]
    rows = "".join(_row(one, y=height + ROW * place + 8) for place, one in enumerate(named))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} '
        f'{height + ROW * len(named)}" font-family="sans-serif" font-size="13" '
        'style="background:var(--paper)"'
    )
    inner = chart[size.end() :].removesuffix("</svg>")
    attributes, _, drawn = inner.partition(">")
    return (
        '<?xml version="1.0" encoding="utf-8"?>\n'
        f"{head}{attributes}><style>{escape_html(style_sheet())}</style>{drawn}{rows}</svg>\n"
    )


def _row(series: Series, *, y: int) -> str:
    shape = MARKERS[series.place % len(MARKERS)]
    return (
        f'<path class="line {series.style}" d="M46 {y}H80"/>'
        f'<path class="marker {series.style}" transform="translate(63 {y})" d="{shape}"/>'
        f'<text class="label" x="88" y="{y + 4}">{escape_html(series.name)}</text>'
    )
