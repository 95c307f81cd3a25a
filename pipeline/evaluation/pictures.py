"""Charts as files of their own: with their style, and the names of their lines."""

import re
from collections.abc import Sequence
from importlib import resources

from pipeline.evaluation.charts import MARKERS, Series
from pipeline.evaluation.html_parts import escape_html

ROW = 20
"""Height of a name below the chart, in SVG units."""
_BEGIN = re.compile(r'<svg viewBox="0 0 (\d+) (\d+)"')


def picture(chart: str, series: Sequence[Series] = ()) -> str:
    """An SVG document of a chart of ``charts.py``, the names of its lines below."""
    size = _BEGIN.match(chart)
    assert size is not None, "charts begin so"
    width, height = map(int, size.groups())
    named = [one for one in series if one.points]
    rows = "".join(_row(one, y=height + ROW * place + 8) for place, one in enumerate(named))
    style = resources.files("pipeline.evaluation").joinpath("report.css").read_text("utf-8")
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} '
        f'{height + ROW * len(named)}" font-family="sans-serif" font-size="13" '
        'style="background:var(--paper)"'
    )
    inner = chart[size.end() :].removesuffix("</svg>")
    attributes, _, drawn = inner.partition(">")
    return (
        '<?xml version="1.0" encoding="utf-8"?>\n'
        f"{head}{attributes}><style>{escape_html(style)}</style>{drawn}{rows}</svg>\n"
    )


def _row(series: Series, *, y: int) -> str:
    shape = MARKERS[series.place % len(MARKERS)]
    return (
        f'<path class="line {series.style}" d="M46 {y}H80"/>'
        f'<path class="marker {series.style}" transform="translate(63 {y})" d="{shape}"/>'
        f'<text class="label" x="88" y="{y + 4}">{escape_html(series.name)}</text>'
    )
