"""Parts of a page as HTML text: what they are given as text they escape.

Colours and layout are the style sheet's (``report.css``).
"""

import re
from collections.abc import Sequence
from html import escape

from pipeline.evaluation.tables import Row, format_interval, format_score

SERIES_COLOURS = 8
"""Colours of the style sheet; further series repeat them with another marker."""

_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def escape_html(text: str) -> str:
    """The text as it stands; characters that HTML cannot hold become a replacement character."""
    return escape(_CONTROL.sub("\ufffd", text))


def section(title: str, content: str, *, lead: str = "") -> str:
    """A section of the page; ``lead`` says what is seen."""
    introduction = f'<p class="lead">{escape_html(lead)}</p>' if lead else ""
    return f"<section><h2>{escape_html(title)}</h2>{introduction}{content}</section>"


def table(head: str, body: str, *, tall: bool = False) -> str:
    """A table that scrolls sideways within its frame; ``tall``: downwards too."""
    frame = "scroll tall" if tall else "scroll"
    return (
        f'<div class="{frame}" tabindex="0"><table><thead>{head}</thead><tbody>{body}</tbody>'
        "</table></div>"
    )


def two_columns(titles: tuple[str, str], rows: Sequence[tuple[str, str]]) -> str:
    """A table of HTML cells, the first of each row its heading."""
    head = "".join(f'<th scope="col">{title}</th>' for title in titles)
    body = "".join(f'<tr><th scope="row">{name}</th><td>{cell}</td></tr>' for name, cell in rows)
    return table(f"<tr>{head}</tr>", body)


def group_heading(title: str, *, span: int) -> str:
    """The heading over several columns."""
    return f'<th colspan="{span}" scope="colgroup" class="group">{escape_html(title)}</th>'


def score_cells(row: Row, *, starts: Sequence[bool]) -> str:
    """The scores of a row; ``starts``: whether each begins a group of columns."""
    cells = []
    figures = zip(row.values, row.intervals, row.decimals, strict=True)
    for place, (value, interval, decimals) in enumerate(figures):
        text = format_score(value, decimals=decimals)
        shown = f"<b>{text}</b>" if place in row.best else text
        between = "" if interval is None else format_interval(interval, decimals=decimals)
        spread = f"<small>{between}</small>" if between else ""
        cells.append(f"<td{css_class('start', starts[place])}>{shown}{spread}</td>")
    return "".join(cells)


def bar(share: float, *, text: str, style: str, spread: tuple[float, float] | None = None) -> str:
    """A bar over a share of its track; ``spread``: the interval drawn on it, in shares too."""
    whisker = (
        ""
        if spread is None
        else f'<span class="whisker" style="left:{spread[0]:.2%};'
        f'width:{spread[1] - spread[0]:.2%}"></span>'
    )
    return (
        f'<span class="track"><span class="bar {style}" style="width:{share:.2%}"></span>{whisker}'
        f'</span><span class="bar-value">{text}</span>'
    )


def bullet_list(items: Sequence[str]) -> str:
    """A list of texts."""
    return f"<ul>{''.join(f'<li>{escape_html(item)}</li>' for item in items)}</ul>"


def css_class(name: str, given: bool) -> str:
    """The attribute, or nothing."""
    return f' class="{name}"' if given else ""


def series_style(place: int) -> str:
    """The class of the colour of a system."""
    return f"s{place % SERIES_COLOURS}"
