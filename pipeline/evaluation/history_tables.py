"""Sections of reports about the runs behind the systems: budgets, losses, loss curves and stages.

The horizontal axis of a loss curve counts all training behind a system's weights. The curve of a
model that was assembled or trained further begins where the earlier runs ended; a dotted line leads
there. A system with several runs has one curve: their mean at each update, in a band that is their
range.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import get_args

from pipeline.artifacts.corpus import Resource
from pipeline.evaluation.charts import Point, Series, legend, line_chart, thin_out
from pipeline.evaluation.history import (
    Curve,
    CurvePoint,
    History,
    Spent,
    SystemTraining,
)
from pipeline.evaluation.repeated_runs import group_runs
from pipeline.evaluation.score_tables import title_of_family
from pipeline.evaluation.tables import (
    NO_VALUE,
    BulletList,
    Cell,
    Figure,
    Heading,
    ReportSection,
    Table,
    bullets,
    format_duration,
    format_large,
    headings,
    joined,
    row,
)
from pipeline.evaluation.validation_tiers import SIDES
from pipeline.model.parameters import OPERATIONS_PER_PARAMETER
from pipeline.terminal import counted

# Budgets

SPENT_COLUMNS = ("updates", "source tokens", "target tokens", "FLOP", "wall time")


def trained_for(history: History, system: str) -> str:
    """Return the training of a system in a few words: ``2,100 updates (3.0 ×), 700 new``.

    The factor is relative to the least trained system; it is left out if there is but one.
    """
    training = history.training_of(system)
    if training is None:
        return NO_VALUE
    if not training.is_trained:
        return "no training" if training.complete else "training not found"
    updates = training.total.updates
    text = counted(updates, "update")
    new = "" if training.new is None else f", {training.new.updates:,} new"
    if not training.complete:
        return f"at least {text}{new}"
    least = _least_updates(history)
    return f"{text} ({updates / least:.1f} ×){new}" if least else f"{text}{new}"


def _least_updates(history: History) -> int | None:
    """Return the updates of the least trained system; None with fewer than two to compare."""
    found = [one.total.updates for one in history.trainings if one.is_trained and one.complete]
    return min(found) if len(found) > 1 else None


def budgets_section(history: History) -> ReportSection | None:
    """Return parameters and training cost of every system, baselines without training included."""
    if not history.trainings:
        return None
    columns = (
        *(Heading(title, group="Parameters") for title in ("total", "active")),
        *(
            Heading(title, group=group)
            for group in (
                "Last training",
                "All trainings",
                *(["New"] if history.given else []),
            )
            for title in SPENT_COLUMNS
        ),
        *(
            Heading(title, group="Translation")
            for title in (("lines", "lines per second") if _has_translations(history) else ())
        ),
    )
    rows = (
        row(
            training.system,
            *_parameters(training),
            *_spent(None if training.own is None else training.own.spent),
            *_sums(training, training.total),
            *(_sums(training, training.new) if history.given else ()),
            *(_translation(training) if _has_translations(history) else ()),
        )
        for training in history.trainings
    )
    return ReportSection(
        "Training budgets",
        "Scores are comparable only beside the training that led to them.",
        tables=(Table("", (*headings("System"), *columns), tuple(rows)),),
        lists=bullets(_budget_notes(history)),
    )


def _has_translations(history: History) -> bool:
    return any(one.translation is not None for one in history.trainings)


def _translation(training: SystemTraining) -> tuple[Cell, Cell]:
    found = training.translation
    if found is None:
        return Cell(None), Cell(None)
    return Cell(found.lines), Cell(found.lines_per_second, ",.1f")


def _parameters(training: SystemTraining) -> tuple[Cell, Cell]:
    found = training.parameters
    if found is None:
        return Cell(None), Cell(None)
    return _large(found.total), _large(found.active)


def _large(value: float | None) -> Cell:
    return Cell(format_large(value), order=value)


def _spent(spent: Spent | None) -> tuple[Cell, ...]:
    if spent is None:
        return (Cell(None),) * len(SPENT_COLUMNS)
    seconds = spent.seconds
    return (
        Cell(f"{spent.updates:,}", order=spent.updates),
        _large(spent.source_tokens),
        _large(spent.target_tokens),
        _large(spent.operations),
        Cell(None) if seconds is None else Cell(format_duration(seconds), order=seconds),
    )


def _sums(training: SystemTraining, spent: Spent | None) -> tuple[Cell, ...]:
    """Return sums over the runs of a system, as lower bounds if some runs are missing."""
    if not training.is_trained:
        return _spent(None)
    cells = _spent(spent)
    if training.complete:
        return cells
    return tuple(
        cell if cell.rank is None else replace(cell, value=f"≥ {cell.text}") for cell in cells
    )


def _budget_notes(history: History) -> Iterator[str]:
    """Yield how budgets are counted, and which runs each of them includes."""
    if _has_translations(history):
        yield (
            "Lines per second are the translated test lines by the wall time of their stage, on "
            "any number of processes, with the time of starting it and of loading the model."
        )
    if not any(one.is_trained for one in history.trainings):
        return
    yield (
        "All trainings of a system are its last one and, each once and whole, those of every "
        "checkpoint that it was assembled from or trained further from."
    )
    yield (
        f"FLOP is an estimate: {OPERATIONS_PER_PARAMETER} for each token and each parameter that "
        "multiplies it. Source tokens pass through the encoder, target tokens through the decoder "
        "and the output layer; of the experts of a layer, only those count that a token meets. "
        "Fuse distillation takes every batch through the model twice, and both passes count. Wall "
        "times are of the training stages, on any number of processes."
    )
    if history.given:
        yield (
            f"New is what a system has cost where {joined(history.given)} existed already: all its "
            "trainings without those that given weights come from, too. Of a training that the "
            "system used for more updates than what was given, the further ones are new."
        )
    if _least_updates(history):
        yield (
            "× compares the updates of a system with those of the least trained one: where it is "
            "not 1.0, a better score may be due to longer training."
        )
    for training in history.trainings:
        yield from _notes_of(training)


def _notes_of(training: SystemTraining) -> Iterator[str]:
    if training.before:
        runs = [f"{run.folder} ({counted(run.spent.updates, 'update')})" for run in training.before]
        yield f"{training.system} rests on {joined(runs)}."
    if training.groups_from:
        yield (
            f"{training.system}: the embeddings of {joined(training.groups_from)} decided its "
            "language groups; that training gave no weights and is not counted."
        )
    if not training.complete:
        yield (
            f"{training.system}: some of the trainings behind it can no longer be found; the "
            "figures are lower bounds."
        )


# Stages


def summaries_section(history: History) -> ReportSection | None:
    """Return the counts that the stages behind the systems reported."""
    lists = tuple(
        BulletList(tuple(map(Cell, run.summary)), f"{run.folder} ({run.stage})")
        for run in history.stages
        if run.summary
    )
    return ReportSection("Stage summaries", lists=lists) if lists else None


def stages_section(history: History, systems: Sequence[str]) -> ReportSection | None:
    """Return the wall times of all stages behind the systems, and their sums per system."""
    if not history.stages:
        return None
    longest = max(run.wall_seconds for run in history.stages)
    rows = [
        row(
            run.stage,
            run.folder,
            Cell(
                format_duration(run.wall_seconds),
                bar=run.wall_seconds / longest if longest else 0.0,
            ),
            ", ".join(run.systems),
        )
        for run in history.stages
    ]
    totals = [
        row("all stages", "", format_duration(history.wall_seconds_of(name)), name)
        for name in systems
    ]
    titles = headings("Stage", "Folder", "Wall time", "Systems", words=["Folder", "Systems"])
    return ReportSection(
        "Stages and wall times",
        "Every stage that the systems rest on, inputs first. A full bar is the longest stage, "
        f"{format_duration(longest)}.",
        tables=(Table("", titles, (*rows, *totals)),),
    )


# Loss curves

Loss = Callable[[CurvePoint], float | None]


@dataclass(frozen=True)
class Axis:
    """The quantity on the horizontal axis of a chart."""

    label: str
    of_point: Callable[[CurvePoint], float | None]
    of_spent: Callable[[Spent], float | None]
    unit: float = 1.0
    """Divisor of the counts."""


UPDATES = Axis("updates", lambda point: point.update, lambda spent: spent.updates)


def losses_section(history: History) -> ReportSection | None:
    """Return the lowest and last validation loss of every system whose runs have any."""
    systems = _curves_by_system(history.curves)
    validated = {name: runs for name, runs in systems.items() if all(map(_validation, runs))}
    if not validated:
        return None
    best = {
        name: [min(run.validation, key=_loss) for run in runs] for name, runs in validated.items()
    }
    groups = [
        group
        for group in get_args(Resource)
        if any(group in point.resources for points in best.values() for point in points)
    ]
    titles = ("System", "runs", "lowest", "at update", "last", "at update")
    columns = (
        *headings(*titles),
        *(Heading(_tier(group), group="At the lowest") for group in groups),
    )
    rows = (
        row(
            name,
            len(runs),
            _mean_cell(map(_loss, best[name])),
            _updates_cell(best[name]),
            _mean_cell(run.validation[-1].loss for run in runs),
            _updates_cell([run.validation[-1] for run in runs]),
            *(_mean_cell(point.resources.get(group) for point in best[name]) for group in groups),
        )
        for name, runs in validated.items()
    )
    without = [name for name in systems if name not in validated]
    notes = [f"Left out, since a run of them has no validation loss: {', '.join(without)}."]
    return ReportSection(
        "Validation losses",
        "Nats per token in the last training of each system, whose updates count from its start. "
        "Of systems with several runs: means over the runs, with the range below.",
        tables=(Table("", columns, tuple(rows)),),
        lists=bullets(notes if without else []),
    )


def _curves_by_system(curves: Sequence[Curve]) -> dict[str, list[Curve]]:
    """Return the curves of the runs of every system."""
    by_run = {curve.system: curve for curve in curves}
    return {system: [by_run[run] for run in runs] for system, runs in group_runs(by_run).items()}


def _validation(curve: Curve) -> tuple[CurvePoint, ...]:
    return curve.validation


def _loss(point: CurvePoint) -> float:
    return point.loss


def _mean_cell(losses: Iterable[float | None]) -> Cell:
    """Return the mean over runs with their range; a dash if a run lacks the loss."""
    found = list(losses)
    known = [loss for loss in found if loss is not None]
    if len(known) < len(found):
        return Cell(None)
    note = f"{min(known):.3f}–{max(known):.3f}" if len(known) > 1 else ""
    return Cell(fmean(known), ".3f", note=note)


def _updates_cell(points: Sequence[CurvePoint]) -> Cell:
    updates = sorted({point.update for point in points})
    return Cell(
        "–".join(f"{update:,}" for update in dict.fromkeys((updates[0], updates[-1]))),
        order=updates[0],
    )


def curves_section(history: History, places: Mapping[str, int]) -> ReportSection | None:
    """Return the loss curves.

    Args:
        history: runs behind the systems.
        places: run → number of the color of its system.
    """
    figures = curve_figures(history, places=places)
    if not figures:
        return None
    return ReportSection(
        "Loss curves",
        "Losses of the last training of each system. Its axis begins with the trainings before "
        "it. A ring marks the lowest validation loss. Losses into and out of a pivot are means "
        "over directions, all others over tokens.",
        figures=tuple(figures),
    )


def curve_figures(history: History, *, places: Mapping[str, int]) -> list[Figure]:
    """Return all charts that have a curve.

    Args:
        history: runs behind the systems.
        places: run → number of the color of its system.
    """
    curves = history.curves
    pivots = {curve.pivot for curve in curves if curve.pivot is not None}
    pivot = pivots.pop() if len(pivots) == 1 else None
    figures = [
        *(
            _figure("Validation, all directions", curves, places, axis, lambda one: one.loss)
            for axis in (
                UPDATES,
                _tokens_axis(curves),
                _operations_axis(curves),
                _time_axis(curves),
            )
        ),
        *(
            _figure(
                f"Validation, {_tier(group)} resource",
                curves,
                places,
                UPDATES,
                _loss_of_resource(group),
            )
            for group in get_args(Resource)
        ),
        *(
            _figure(
                f"Validation, {_tier(group)} resource, {title_of_family(side, pivot=pivot)}",
                curves,
                places,
                UPDATES,
                _loss_of_side(side, group),
            )
            for group in get_args(Resource)
            for side in SIDES
        ),
        _figure("Training", curves, places, UPDATES, lambda one: one.loss, training=True),
    ]
    return [figure for figure in figures if figure is not None]


def _tier(group: str) -> str:
    return group.replace("_", " ")


def _loss_of_resource(group: str) -> Loss:
    return lambda point: point.resources.get(group)


def _loss_of_side(side: str, group: str) -> Loss:
    return lambda point: point.sides.get(side, {}).get(group)


def _figure(
    title: str,
    curves: Sequence[Curve],
    places: Mapping[str, int],
    axis: Axis,
    loss: Loss,
    *,
    training: bool = False,
) -> Figure | None:
    series, left_out, apart = [], [], []
    for system, runs in _curves_by_system(curves).items():
        placed = [place_curve(run, axis=axis, loss=loss, training=training) for run in runs]
        known = [one for one in placed if one is not None]
        if len(known) < len(placed):
            left_out.append(system)
        elif found := _shared_updates(known):
            place = places[runs[0].system]
            series.append(_series_of_runs(system, known, found, place=place))
        elif all(one.points for one in known):
            apart.append(system)
    if not series:
        return None
    subtitle = f"by {axis.label}"
    chart = line_chart(
        series,
        title=f"{title}, {subtitle}",
        x_label=axis.label,
        y_label="nats per token",
        mark_lowest=not training,
    )
    notes = tuple(_curve_notes(series, left_out, apart, axis))
    return Figure(chart + legend(series), title=title, subtitle=subtitle, notes=notes)


@dataclass(frozen=True)
class PlacedCurve:
    """The curve of a run along an axis."""

    begin: float
    """Position where the run begins."""
    points: Mapping[int, Point]
    """Update of the run → position and loss."""


def place_curve(
    curve: Curve, *, axis: Axis, loss: Loss, training: bool = False
) -> PlacedCurve | None:
    """Return a curve along an axis; None if its position on the axis is not known."""
    begin = None if curve.before is None else axis.of_spent(curve.before)
    if begin is None:
        return None
    found: dict[int, Point] = {}
    for point in curve.training if training else curve.validation:
        x, y = axis.of_point(point), loss(point)
        if x is None:
            return None
        if y is not None:
            found[point.update] = ((begin + x) / axis.unit, y)
    return PlacedCurve(begin / axis.unit, found)


def _shared_updates(runs: Sequence[PlacedCurve]) -> list[int]:
    """Return the updates at which all runs have a loss: a mean over fewer would jump there."""
    return [update for update in runs[0].points if all(update in run.points for run in runs)]


def _series_of_runs(
    system: str, runs: Sequence[PlacedCurve], updates: Sequence[int], *, place: int
) -> Series:
    """Return the mean of the runs of a system at these updates, and the range of several."""
    at = [[run.points[update] for run in runs] for update in updates]
    means = [fmean(x for x, _ in points) for points in at]

    def line(of_losses: Callable[[list[float]], float]) -> tuple[Point, ...]:
        losses = (of_losses([y for _, y in points]) for points in at)
        return thin_out(list(zip(means, losses, strict=True)))

    is_one = len(runs) == 1
    return Series(
        system if is_one else f"{system} ({counted(len(runs), 'run')})",
        line(fmean),
        place=place,
        begin=fmean(run.begin for run in runs),
        low=() if is_one else line(min),
        high=() if is_one else line(max),
    )


def _curve_notes(
    series: Sequence[Series], left_out: Sequence[str], apart: Sequence[str], axis: Axis
) -> Iterator[str]:
    assembled = [one.name for one in series if one.begin > 0]
    if assembled:
        yield (
            "A dotted line stands for the trainings that a model was made from "
            f"({', '.join(assembled)}): its own curve begins where they end."
        )
    if any(one.low for one in series):
        yield (
            "Lines of systems with several runs are means at the updates that all of them reached, "
            "bands their range."
        )
    if left_out:
        yield (
            f"Left out, since their {axis.label} were not recorded or cannot be found any more: "
            f"{', '.join(left_out)}."
        )
    if apart:
        yield f"Left out, since their runs have no update in common: {', '.join(apart)}."


def _tokens_axis(curves: Sequence[Curve]) -> Axis:
    """Return the axis of target tokens, in a unit that fits the longest run."""
    prefixes = (("billion ", 1e9), ("million ", 1e6), ("", 1.0))
    axes = [
        Axis(
            f"{prefix}target tokens",
            lambda point: point.target_tokens,
            lambda spent: spent.target_tokens,
            unit,
        )
        for prefix, unit in prefixes
    ]
    return _fitting(axes, curves)


def _operations_axis(curves: Sequence[Curve]) -> Axis:
    """Return the axis of estimated arithmetic, in a unit that fits the longest run."""
    prefixes = (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("", 1.0))
    axes = [
        Axis(
            f"{prefix}FLOP",
            lambda point: point.operations,
            lambda spent: spent.operations,
            unit,
        )
        for prefix, unit in prefixes
    ]
    return _fitting(axes, curves)


def _time_axis(curves: Sequence[Curve]) -> Axis:
    """Return the axis of wall time, in a unit that fits the longest run."""
    units = (("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))
    axes = [
        Axis(f"{name} of training", lambda point: point.seconds, lambda spent: spent.seconds, unit)
        for name, unit in units
    ]
    return _fitting(axes, curves)


def _fitting(axes: Sequence[Axis], curves: Sequence[Curve]) -> Axis:
    """Return the axis of the largest unit of which the longest run has two; else the last axis."""
    last = axes[-1]
    longest = max(
        (
            (last.of_point(curve.validation[-1]) or 0.0) + (last.of_spent(curve.before) or 0.0)
            for curve in curves
            if curve.validation and curve.before is not None
        ),
        default=0.0,
    )
    return next((axis for axis in axes if longest >= 2 * axis.unit), last)
