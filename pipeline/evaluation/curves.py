"""Loss curves of the systems, by updates and resource tier (MMNMT, Figures 1 and 5).

The horizontal axis counts all training behind a system's weights: the curve of a model that was
assembled or trained further begins where the earlier runs ended. A system with several runs has one
curve, their mean, in a band that is their range. Losses into and out of the pivot are means over
directions, since ``metrics.jsonl`` does not have their tokens.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, TypeGuard, get_args

from pipeline.artifacts.artifact import Artifact, open_recorded
from pipeline.artifacts.corpus import Resource, imported_lines, pair_name, resource_of
from pipeline.config.documents import read_json_lines
from pipeline.errors import UserError
from pipeline.evaluation.averages import group_runs
from pipeline.evaluation.charts import Series, line_chart
from pipeline.evaluation.directions import Family, pivot_of, title_of_family
from pipeline.evaluation.tables import Cell, Figure, ReportSection, Row, Table, headings, row
from pipeline.terminal import counted

MAX_POINTS = 300
PIVOT_SIDES: tuple[Family, ...] = ("into_pivot", "out_of_pivot")


@dataclass(frozen=True)
class CurvePoint:
    """Losses in nats per token after an update."""

    update: int
    losses: Mapping[str, float]
    """``all``, a resource tier or, for example, ``high/into_pivot`` → loss."""


@dataclass(frozen=True)
class Curve:
    """Validation losses of the last training run of a system, counted from its start."""

    system: str
    validation: tuple[CurvePoint, ...]
    before: int | None = 0
    """Updates of the earlier runs; None if some of them can no longer be found."""
    pivot: str | None = None
    directions: Mapping[str, float] = field(default_factory=dict)
    """Direction (``de-en``) → its loss at the last validation."""


def read_metrics(checkpoint: Artifact) -> list[dict[str, Any]]:
    """Return the metrics of a run that have an update and a time; none if the file is damaged."""
    try:
        entries = [*read_json_lines(checkpoint.file("metrics.jsonl"))]
    except UserError:
        return []
    return [one for one in entries if is_number(one.get("seconds")) and is_count(one.get("update"))]


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a JSON value is a number that a float can hold; booleans are none."""
    is_plain = isinstance(value, int | float) and not isinstance(value, bool)
    return is_plain and abs(value) <= sys.float_info.max  # type: ignore[arg-type]


def is_count(value: object) -> TypeGuard[int]:
    """Return whether a JSON value is a number of things."""
    return isinstance(value, int) and is_number(value) and value >= 0


def read_curve(system: str, checkpoint: Artifact, *, before: int | None) -> Curve:
    """Return the losses of a run; a loss that was not finite leaves a gap."""
    pivot, tiers = read_tiers(checkpoint)
    points, last = list[CurvePoint](), dict[str, float]()
    for entry in read_metrics(checkpoint):
        if entry.get("kind") != "validation" or not is_number(entry.get("loss")):
            continue
        resources, directions = entry.get("resources"), entry.get("directions")
        losses = {"all": entry["loss"], **(resources if isinstance(resources, dict) else {})}
        if isinstance(directions, dict):
            losses |= mean_losses(directions, pivot=pivot, tiers=tiers)
            last = {name: loss for name, loss in directions.items() if is_number(loss)}
        losses = {key: loss for key, loss in losses.items() if is_number(loss)}
        points.append(CurvePoint(entry["update"], losses))
    return Curve(system, tuple(points), before, pivot, last)


def read_tiers(checkpoint: Artifact) -> tuple[str | None, dict[str, Resource]]:
    """Return the pivot of a training and the tier of each of its pairs, if its shards are there."""
    record = checkpoint.manifest.inputs.get("shards")
    shards = None if record is None else open_recorded(record)
    training: Any = checkpoint.manifest.config.get("training")
    found: Any = training.get("resource_thresholds") if isinstance(training, dict) else None
    is_usable = isinstance(found, list) and len(found) in (2, 3)
    if shards is None or not is_usable or not all(isinstance(one, int) for one in found):
        return None, {}
    try:
        lines = imported_lines(shards)
        tiers = {pair: resource_of(lines[pair], thresholds=tuple(found)) for pair in lines}
        return pivot_of(shards), tiers
    except UserError:
        return None, {}


def mean_losses(
    losses: Mapping[str, object], *, pivot: str | None, tiers: Mapping[str, Resource]
) -> dict[str, float]:
    """Return mean losses of directions by tier and side of the pivot, if all are numbers."""
    found: dict[str, list[object]] = {}
    for direction, loss in losses.items():
        source, _, target = direction.partition("-")
        tier = tiers.get(pair_name(source, target))
        if tier is not None and pivot in (source, target):
            found.setdefault(f"{tier}/{PIVOT_SIDES[target != pivot]}", []).append(loss)
    numbers = {
        key: [member for member in members if is_number(member)] for key, members in found.items()
    }
    return {key: fmean(known) for key, known in numbers.items() if len(known) == len(found[key])}


def _by_system(curves: Sequence[Curve]) -> dict[str, list[Curve]]:
    by_run = {curve.system: curve for curve in curves}
    return {system: [by_run[run] for run in runs] for system, runs in group_runs(by_run).items()}


def _title(tier: str) -> str:
    return f"{tier.replace('_', ' ')} resource"


def losses_section(curves: Sequence[Curve]) -> ReportSection:
    """Return the lowest and last validation loss of every system, and the tiers at the lowest."""
    every = _by_system(curves)
    known = {key for curve in curves for point in curve.validation for key in point.losses}
    tiers = [tier for tier in get_args(Resource) if tier in known]
    rows, without = list[Row](), list[str]()
    for name, runs in every.items():
        if not all(run.validation for run in runs):
            without.append(name)
            continue
        best = [min(run.validation, key=lambda one: one.losses["all"]) for run in runs]
        last = [run.validation[-1] for run in runs]
        cells: list[Cell | str] = [
            *(_mean_cell(best, "all"), _updates(best), _mean_cell(last, "all"), _updates(last)),
            *(_mean_cell(best, tier) for tier in tiers),
        ]
        rows.append(row(name, len(runs), *cells))
    titles = ("System", "Runs", "Lowest", "At update", "Last", "At update")
    tier_titles = (_title(tier).capitalize() for tier in tiers)
    note = f"Left out, since a run of them has no validation loss: {', '.join(without)}."
    return ReportSection(
        "Validation losses",
        "Nats per token in the last training of each system; its updates count from its start. "
        "Means over the runs, with their range; the tiers at the lowest loss.",
        tables=(Table("", headings(*titles, *tier_titles), tuple(rows)),) if rows else (),
        items=(Cell(note),) if rows and without else (),
    )


def _mean_cell(points: Sequence[CurvePoint], key: str) -> Cell:
    """Return the mean over runs with their range; a dash if a run lacks the loss."""
    known = [point.losses[key] for point in points if key in point.losses]
    if len(known) < len(points):
        return Cell(None)
    note = f"{min(known):.3f}–{max(known):.3f}" if len(known) > 1 else ""
    return Cell(fmean(known), ".3f", note=note)


def _updates(points: Sequence[CurvePoint]) -> str:
    ends = sorted({point.update for point in points})
    return "–".join(f"{update:,}" for update in dict.fromkeys((ends[0], ends[-1])))


def curves_section(curves: Sequence[Curve], places: Mapping[str, int]) -> ReportSection:
    """Return the loss curves; ``places`` has the number of the color of every run's system."""
    pivots = {curve.pivot for curve in curves if curve.pivot is not None}
    pivot = pivots.pop() if len(pivots) == 1 else None
    titles = {"all": "Validation"}
    for tier in get_args(Resource):
        titles[tier] = f"Validation, {_title(tier)}"
        for side in PIVOT_SIDES:
            titles[f"{tier}/{side}"] = f"{titles[tier]}, {title_of_family(side, pivot=pivot)}"
    found = [_figure(title, curves, places, key) for key, title in titles.items()]
    return ReportSection(
        "Loss curves",
        "Losses of the last training of each system, which begins where the trainings before it "
        "end. Lines of systems with several runs are means at the updates that all of them "
        "reached, bands their range. Losses into and out of a pivot are means over directions.",
        figures=tuple(one for one in found if one is not None),
    )


def _figure(
    title: str, curves: Sequence[Curve], places: Mapping[str, int], key: str
) -> Figure | None:
    series, left_out = [], []
    for system, runs in _by_system(curves).items():
        losses = [
            {point.update: point.losses[key] for point in run.validation if key in point.losses}
            for run in runs
        ]
        shared = [at for at in losses[0] if all(at in one for one in losses)]
        before = [run.before for run in runs if run.before is not None]
        if len(before) < len(runs) or (all(losses) and not shared):
            left_out.append(system)
        elif shared:
            place, begin = places[runs[0].system], fmean(before)
            series.append(_mean_series(system, losses, shared, begin=begin, place=place))
    if not series:
        return None
    title = f"{title} by updates"
    chart = line_chart(series, title=title, x_label="updates", y_label="nats per token")
    note = f"Left out, since the beginning or common points are not known: {', '.join(left_out)}."
    return Figure(chart, title=title, note=note if left_out else "")


def _mean_series(
    system: str,
    runs: Sequence[Mapping[int, float]],
    updates: Sequence[int],
    *,
    begin: float,
    place: int,
) -> Series:
    step = -(-len(updates) // MAX_POINTS)
    kept = updates[step - 1 :: step]

    def line(summary: Callable[[list[float]], float]) -> tuple[tuple[float, float], ...]:
        return tuple((begin + at, summary([run[at] for run in runs])) for at in kept)

    if len(runs) == 1:
        return Series(system, line(fmean), place)
    name = f"{system} ({counted(len(runs), 'run')})"
    return Series(name, line(fmean), place, low=line(min), high=line(max))
