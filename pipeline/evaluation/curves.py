"""Loss curves of the systems, by updates, arithmetic and resource tier (MMNMT, Figures 1 and 5).

The horizontal axis counts all training behind a system's weights: the curve of a model that was
assembled or trained further begins where the earlier runs ended. A system with several runs has one
curve, their mean, in a band that is their range. Losses into and out of the pivot are means over
directions, since ``metrics.jsonl`` does not have their tokens.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, get_args

import numpy as np

from pipeline.artifacts.artifact import Artifact, open_recorded
from pipeline.artifacts.corpus import Resource, imported_lines, pair_name, resource_of
from pipeline.errors import UserError
from pipeline.evaluation.charts import Series, legend, line_chart
from pipeline.evaluation.directions import Family, pivot_of, title_of_family
from pipeline.evaluation.repeated_runs import group_runs
from pipeline.evaluation.spent import (
    SIDES,
    Spent,
    is_number,
    operations_of,
    read_metrics,
    read_per_token,
    tokens_by_update,
)
from pipeline.evaluation.tables import (
    Cell,
    Figure,
    ReportSection,
    Table,
    bullets,
    headings,
    row,
)
from pipeline.terminal import counted

MAX_POINTS = 300
PIVOT_SIDES: tuple[Family, ...] = ("into_pivot", "out_of_pivot")


@dataclass(frozen=True)
class CurvePoint:
    """Losses in nats per token after an update."""

    update: int
    loss: float
    resources: Mapping[str, float] = field(default_factory=dict)
    """Resource tier → validation loss."""
    operations: float | None = None
    """Estimated floating-point operations up to the update."""
    sides: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Into or out of the pivot → resource tier → mean validation loss over directions."""


@dataclass(frozen=True)
class Curve:
    """Losses of the last training run of a system; points count from the start of this run."""

    system: str
    training: tuple[CurvePoint, ...]
    validation: tuple[CurvePoint, ...]
    before: Spent | None = field(default_factory=Spent)
    """Cost of the earlier runs; None if some of them can no longer be found."""
    pivot: str | None = None


def read_curve(system: str, checkpoint: Artifact, *, before: Spent | None) -> Curve:
    """Return the losses of a run; a loss that was not finite leaves a gap."""
    metrics, per_token = read_metrics(checkpoint), read_per_token(checkpoint)
    pivot, tiers = read_tiers(checkpoint)
    tokens = {side: {0: 0} | tokens_by_update(metrics, side=side) for side in SIDES}
    points: dict[str, list[CurvePoint]] = {"train": [], "validation": []}
    for entry in metrics:
        if entry.get("kind") not in points or not is_number(entry.get("loss")):
            continue
        at = {
            side: float(np.interp(entry["update"], [*known], [*known.values()]))
            if len(known) > 1
            else None
            for side, known in tokens.items()
        }
        resources = _losses(entry.get("resources"))
        points[entry["kind"]].append(
            CurvePoint(
                update=entry["update"],
                loss=entry["loss"],
                resources={tier: loss for tier, loss in resources.items() if loss is not None},
                operations=operations_of(per_token, **at),
                sides=mean_losses(_losses(entry.get("directions")), pivot=pivot, tiers=tiers),
            )
        )
    return Curve(system, tuple(points["train"]), tuple(points["validation"]), before, pivot)


def _losses(found: object) -> dict[str, float | None]:
    """Return the losses of an object of a line of metrics; None for those that are not finite."""
    items = found.items() if isinstance(found, dict) else ()
    return {name: loss if is_number(loss) else None for name, loss in items}


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
    losses: Mapping[str, float | None], *, pivot: str | None, tiers: Mapping[str, Resource]
) -> dict[str, dict[str, float]]:
    """Return the mean losses of directions by side of the pivot and tier.

    Args:
        losses: direction → loss. A mean with one that is None is left out.
        pivot: language of the sides.
        tiers: pair → tier.
    """
    found: dict[str, dict[str, list[float | None]]] = {}
    for direction, loss in losses.items():
        source, _, target = direction.partition("-")
        tier = tiers.get(pair_name(source, target))
        if tier is not None and pivot in (source, target):
            side = PIVOT_SIDES[target != pivot]
            found.setdefault(side, {}).setdefault(tier, []).append(loss)
    return {
        side: {
            tier: fmean(loss for loss in members if loss is not None)
            for tier, members in of_side.items()
            if None not in members
        }
        for side, of_side in found.items()
    }


# Sections


def losses_section(curves: Sequence[Curve]) -> ReportSection | None:
    """Return the lowest and last validation loss of every system, and the tiers at the lowest."""
    systems = {name: runs for name, runs in _by_system(curves).items() if _validated(runs)}
    if not systems:
        return None
    best = {
        name: [min(run.validation, key=lambda one: one.loss) for run in runs]
        for name, runs in systems.items()
    }
    last = {name: [run.validation[-1] for run in runs] for name, runs in systems.items()}
    tiers = [
        tier
        for tier in get_args(Resource)
        if any(tier in one.resources for points in best.values() for one in points)
    ]
    titles = ("System", "Runs", "Lowest", "At update", "Last", "At update")
    rows = (
        row(
            name,
            len(runs),
            _mean_cell(one.loss for one in best[name]),
            _updates(best[name]),
            _mean_cell(one.loss for one in last[name]),
            _updates(last[name]),
            *(_mean_cell(one.resources.get(tier) for one in best[name]) for tier in tiers),
        )
        for name, runs in systems.items()
    )
    tier_titles = (f"{tier.replace('_', ' ').capitalize()} resource" for tier in tiers)
    without = [name for name in _by_system(curves) if name not in systems]
    notes = [f"Left out, since a run of them has no validation loss: {', '.join(without)}."]
    return ReportSection(
        "Validation losses",
        "Nats per token in the last training of each system, whose updates count from its start. "
        "Means over the runs, with their range; the tiers at the lowest loss.",
        tables=(Table("", headings(*titles, *tier_titles), tuple(rows)),),
        lists=bullets(notes if without else []),
    )


def _by_system(curves: Sequence[Curve]) -> dict[str, list[Curve]]:
    by_run = {curve.system: curve for curve in curves}
    return {system: [by_run[run] for run in runs] for system, runs in group_runs(by_run).items()}


def _validated(runs: Sequence[Curve]) -> bool:
    return all(run.validation for run in runs)


def _mean_cell(losses: Iterable[float | None]) -> Cell:
    """Return the mean over runs with their range; a dash if a run lacks the loss."""
    found = list(losses)
    known = [loss for loss in found if loss is not None]
    if len(known) < len(found):
        return Cell(None)
    note = f"{min(known):.3f}–{max(known):.3f}" if len(known) > 1 else ""
    return Cell(fmean(known), ".3f", note=note)


def _updates(points: Sequence[CurvePoint]) -> str:
    ends = sorted({point.update for point in points})
    return "–".join(f"{update:,}" for update in dict.fromkeys((ends[0], ends[-1])))


Loss = Callable[[CurvePoint], float | None]


def curves_section(curves: Sequence[Curve], places: Mapping[str, int]) -> ReportSection | None:
    """Return the loss curves; ``places`` has the number of the color of every run's system."""
    pivots = {curve.pivot for curve in curves if curve.pivot is not None}
    pivot = pivots.pop() if len(pivots) == 1 else None
    found = [
        _figure("Validation", curves, places, lambda one: one.loss),
        _figure("Validation", curves, places, lambda one: one.loss, by_operations=True),
    ]
    for tier in get_args(Resource):
        title = f"Validation, {tier.replace('_', ' ')} resource"
        found.append(_figure(title, curves, places, _of_tier(tier)))
        for side in PIVOT_SIDES:
            title_of_side = f"{title}, {title_of_family(side, pivot=pivot)}"
            found.append(_figure(title_of_side, curves, places, _of_side(side, tier)))
    found.append(_figure("Training", curves, places, lambda one: one.loss, training=True))
    figures = tuple(one for one in found if one is not None)
    if not figures:
        return None
    return ReportSection(
        "Loss curves",
        "Losses of the last training of each system, which begins where the trainings before it "
        "end. Lines of systems with several runs are means at the updates that all of them "
        "reached, bands their range. Losses into and out of a pivot are means over directions.",
        figures=figures,
    )


def _of_tier(tier: str) -> Loss:
    return lambda point: point.resources.get(tier)


def _of_side(side: str, tier: str) -> Loss:
    return lambda point: point.sides.get(side, {}).get(tier)


def _figure(
    title: str,
    curves: Sequence[Curve],
    places: Mapping[str, int],
    loss: Loss,
    *,
    training: bool = False,
    by_operations: bool = False,
) -> Figure | None:
    series, left_out = [], []
    for system, runs in _by_system(curves).items():
        placed = [_place(run, loss, training, by_operations) for run in runs]
        known = [one for one in placed if one is not None]
        shared = [x for x in known[0] if all(x in one for one in known)] if known else []
        if len(known) < len(runs) or (all(known) and not shared):
            left_out.append(system)
        elif shared:
            series.append(_mean_series(system, known, shared, places[runs[0].system]))
    if not series:
        return None
    axis = "FLOP" if by_operations else "updates"
    chart = line_chart(series, title=f"{title} by {axis}", x_label=axis, y_label="nats per token")
    note = (
        f"Left out, since the beginning or common points are not known: {', '.join(left_out)}.",
    )
    return Figure(
        chart + legend(series), title=f"{title} by {axis}", notes=note if left_out else ()
    )


def _place(
    curve: Curve, loss: Loss, training: bool, by_operations: bool
) -> dict[int, tuple[float, float]] | None:
    """Return update → position and loss; None if the positions are not known."""
    if curve.before is None:
        return None
    begin = curve.before.operations if by_operations else curve.before.updates
    if begin is None:
        return None
    found = {}
    for point in curve.training if training else curve.validation:
        x, y = point.operations if by_operations else point.update, loss(point)
        if x is None:
            return None
        if y is not None:
            found[point.update] = (begin + x, y)
    return found


def _mean_series(
    system: str,
    runs: Sequence[Mapping[int, tuple[float, float]]],
    updates: Sequence[int],
    place: int,
) -> Series:
    step = -(-len(updates) // MAX_POINTS)
    kept = updates[step - 1 :: step]
    xs = [fmean(run[at][0] for run in runs) for at in kept]

    def line(of_runs: Callable[[Iterator[float]], float]) -> tuple[tuple[float, float], ...]:
        return tuple(
            (x, of_runs(run[at][1] for run in runs)) for x, at in zip(xs, kept, strict=True)
        )

    if len(runs) == 1:
        return Series(system, line(fmean), place)
    name = f"{system} ({counted(len(runs), 'run')})"
    return Series(name, line(fmean), place, low=line(min), high=line(max))
