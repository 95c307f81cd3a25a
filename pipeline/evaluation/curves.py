"""Loss curves of a page: which line stands on which axis, and where it begins.

A horizontal axis counts all that a system's weights rest on. The curve of a model that was
assembled or trained on begins where the trainings before it ended; a dotted line leads there.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from pipeline.artifacts.corpus import Resource
from pipeline.evaluation.budgets import Spent
from pipeline.evaluation.charts import Point, Series, legend, line_chart, thin_out
from pipeline.evaluation.history import Curve, CurvePoint, History
from pipeline.evaluation.html_parts import escape_html

Loss = Callable[[CurvePoint], float | None]


@dataclass(frozen=True)
class Axis:
    """What the horizontal axis of a chart counts."""

    label: str
    of_point: Callable[[CurvePoint], float | None]
    of_spent: Callable[[Spent], float | None]
    unit: float = 1.0
    """The counts are divided by this."""


UPDATES = Axis("updates", lambda point: point.update, lambda spent: spent.updates)


def curve_figures(history: History, *, places: Mapping[str, int]) -> list[str]:
    """All figures that have a line; ``places``: system → the place of its colour."""
    curves = history.curves
    figures = [
        _figure("Validation, all directions", curves, places, axis=axis, loss=lambda one: one.loss)
        for axis in (UPDATES, _tokens_axis(curves), _time_axis(curves))
    ]
    for group in get_args(Resource):
        figures.append(
            _figure(
                f"Validation, {group.replace('_', ' ')} resource",
                curves,
                places,
                axis=UPDATES,
                loss=_of_resource(group),
            )
        )
    figures.append(
        _figure("Training", curves, places, axis=UPDATES, loss=lambda one: one.loss, training=True)
    )
    return [figure for figure in figures if figure]


def _of_resource(group: str) -> Loss:
    return lambda point: point.resources.get(group)


def _figure(
    title: str,
    curves: Sequence[Curve],
    places: Mapping[str, int],
    *,
    axis: Axis,
    loss: Loss,
    training: bool = False,
) -> str:
    """A chart with its legend and what has to be said of it; nothing where there are no lines."""
    series, left_out = [], []
    for curve in curves:
        points = curve.training if training else curve.validation
        found = place_curve(curve, points, place=places[curve.system], axis=axis, loss=loss)
        if found is None:
            left_out.append(curve.system)
        elif found.points:
            series.append(found)
    if not series:
        return ""
    chart = line_chart(
        series,
        title=f"{title}, by {axis.label}",
        x_label=axis.label,
        y_label="nats per token",
        mark_lowest=not training,
    )
    notes = "".join(
        f'<p class="note">{escape_html(note)}</p>' for note in _notes(series, left_out, axis)
    )
    return (
        f"<figure><figcaption>{escape_html(title)} <small>by {escape_html(axis.label)}</small>"
        f"</figcaption>{chart}{legend(series)}{notes}</figure>"
    )


def place_curve(
    curve: Curve, points: Sequence[CurvePoint], *, place: int, axis: Axis, loss: Loss
) -> Series | None:
    """The curve along an axis; None where it cannot be told how much came before or within it."""
    begin = None if curve.before is None else axis.of_spent(curve.before)
    if begin is None:
        return None
    found: list[Point] = []
    for point in points:
        x, y = axis.of_point(point), loss(point)
        if x is None:
            return None
        if y is not None:
            found.append(((begin + x) / axis.unit, y))
    return Series(curve.system, thin_out(found), place=place, begin=begin / axis.unit)


def _notes(series: Sequence[Series], left_out: Sequence[str], axis: Axis) -> list[str]:
    found = []
    assembled = [one.name for one in series if one.begin > 0]
    if assembled:
        found.append(
            f"A dotted line stands for the trainings that a model was made from "
            f"({', '.join(assembled)}): its own curve begins where they end."
        )
    if left_out:
        found.append(
            f"Left out, since their {axis.label} were not recorded or cannot be found any more: "
            f"{', '.join(left_out)}."
        )
    return found


# Axes whose unit depends on the data


def _tokens_axis(curves: Sequence[Curve]) -> Axis:
    most = _largest(curves, lambda point: point.target_tokens, lambda spent: spent.target_tokens)
    name, unit = next(
        (name, unit)
        for name, unit in (("billion ", 1e9), ("million ", 1e6), ("", 1.0))
        if most >= 2 * unit or unit == 1.0
    )
    return Axis(
        f"{name}target tokens",
        lambda point: point.target_tokens,
        lambda spent: spent.target_tokens,
        unit,
    )


def _time_axis(curves: Sequence[Curve]) -> Axis:
    most = _largest(curves, lambda point: point.seconds, lambda spent: spent.seconds)
    name, unit = next(
        (name, unit)
        for name, unit in (("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))
        if most >= 2 * unit or unit == 1.0
    )
    return Axis(
        f"{name} of training", lambda point: point.seconds, lambda spent: spent.seconds, unit
    )


def _largest(
    curves: Sequence[Curve],
    of_point: Callable[[CurvePoint], float | None],
    of_spent: Callable[[Spent], float | None],
) -> float:
    return max(
        (
            (of_point(curve.validation[-1]) or 0.0) + (of_spent(curve.before) or 0.0)
            for curve in curves
            if curve.validation and curve.before is not None
        ),
        default=0.0,
    )
