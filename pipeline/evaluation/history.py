"""Runs behind systems, followed through manifests: training budgets and loss curves.

A system is an artifact of translations, or a checkpoint by itself. Its budget is the sum over the
training runs that its weights come from, each once and whole. Its new cost leaves out, run by run,
the training of given checkpoints, which the user had already. A figure that a run did not record is
None, and so is every sum with it.

Loss curves are drawn by updates and resource tier (MMNMT, Figures 1 and 5). Their horizontal axis
counts all training behind a system's weights: the curve of a model that was assembled or trained
further begins where the earlier runs ended. A system with several runs has one curve, their mean,
in a band that is their range. Losses into and out of the pivot are means over directions, since
``metrics.jsonl`` does not have their tokens.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, TypeGuard, get_args

from pipeline.artifacts.artifact import (
    Artifact,
    InputRecord,
    Lineage,
    Manifest,
    json_digest,
    open_recorded,
)
from pipeline.artifacts.corpus import Resource, pair_name, tiers_of
from pipeline.checkpoints.checkpoint import stated_spec
from pipeline.config.documents import is_count, read_json_lines
from pipeline.config.ds_config import UNDECIDING_KEYS
from pipeline.config.recipe import DECIDE_NOTHING, without_settings
from pipeline.errors import UserError
from pipeline.evaluation.averages import group_runs
from pipeline.evaluation.charts import Series, line_chart
from pipeline.evaluation.scores import Family, pivot_of, title_of_family
from pipeline.evaluation.tables import (
    NO_VALUE,
    Cell,
    Figure,
    ReportSection,
    Row,
    Table,
    format_large,
    headings,
    row,
)
from pipeline.model.parameters import (
    OPERATIONS_PER_PARAMETER,
    count_multiplied,
    count_parameters_of,
)
from pipeline.model.spec import ModelSpec
from pipeline.terminal import clock_text, counted
from pipeline.training.settings import passes_of

# Loss curves

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
    """Direction (for example ``de-en``) → its loss at the last validation."""


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
    shards = None if record is None else open_recorded(record, of=checkpoint)
    training: Any = checkpoint.manifest.config.get("training")
    found: Any = training.get("resource_thresholds") if isinstance(training, dict) else None
    is_usable = isinstance(found, list) and len(found) in (2, 3)
    if shards is None or not is_usable or not all(isinstance(one, int) for one in found):
        return None, {}
    try:
        return pivot_of(shards), tiers_of(shards, thresholds=tuple(found))
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
    kept = updates[::-step][::-1]  # the last one, too

    def line(summary: Callable[[list[float]], float]) -> tuple[tuple[float, float], ...]:
        return tuple((begin + at, summary([run[at] for run in runs])) for at in kept)

    if len(runs) == 1:
        return Series(system, line(fmean), place)
    name = f"{system} ({counted(len(runs), 'run')})"
    return Series(name, line(fmean), place, low=line(min), high=line(max))


# Runs behind systems

TRAINING_STAGES = ("pretrain", "finetune")


@dataclass(frozen=True)
class Spent:
    """Cost of training: estimated floating-point operations, wall time on any processes."""

    updates: int = 0
    source_tokens: int | None = 0
    target_tokens: int | None = 0
    operations: float | None = 0.0
    seconds: float | None = 0.0


@dataclass(frozen=True)
class SystemTraining:
    """Training that a system's weights come from."""

    system: str
    total: Spent = field(default_factory=Spent)
    """Cost of all runs, a lower bound if some could not be found."""
    runs: tuple[str, ...] = ()  # directories of the runs, earliest first; baselines have none
    complete: bool = True  # whether all runs could still be found
    new: Spent | None = None  # cost beyond the given checkpoints; None if none is given
    parameters: tuple[int, int] | None = None  # number of parameters, in total and active per token
    lines_per_second: float | None = None  # of the stage that translated


@dataclass(frozen=True)
class History:
    """Runs behind the systems."""

    curves: tuple[Curve, ...] = ()
    missing: tuple[str, ...] = ()  # directories that are gone or have changed since
    trainings: tuple[SystemTraining, ...] = ()
    """Trainings of the systems in their order; of a system with several runs, of each run."""
    given: tuple[str, ...] = ()  # directories of the given checkpoints


def checkpoint_of(system: Artifact) -> Artifact | None:
    """Return a checkpoint itself, or the checkpoint behind translations; None if it is gone."""
    if system.manifest.kind == "checkpoint":
        return system
    record = system.manifest.inputs.get("checkpoint")
    return None if record is None else open_recorded(record, of=system)


def trace_history(systems: Mapping[str, Artifact], *, given: Sequence[Artifact] = ()) -> History:
    """Follow the manifests of systems, or of their runs, back to their first trainings.

    ``given`` are checkpoints that existed already, if new costs are asked for.
    """
    traced = [trace_training(name, system, given=given) for name, system in systems.items()]
    return History(
        curves=tuple(curve for _, curve, _ in traced if curve is not None),
        missing=tuple(sorted({name for *_, missing in traced for name in missing})),
        trainings=tuple(training for training, *_ in traced),
        given=tuple(checkpoint.directory.name for checkpoint in given),
    )


def trace_training(
    name: str, system: Artifact, *, given: Sequence[Artifact] = ()
) -> tuple[SystemTraining, Curve | None, set[str]]:
    """Return the training of a system, the losses of its last run, and missing directories."""
    lines = system.statistics.get("lines")
    seconds = system.manifest.run.wall_seconds if system.manifest.kind == "translations" else 0.0
    speed = lines / seconds if is_count(lines) and lines and seconds > 0 else None
    checkpoint = checkpoint_of(system)
    if checkpoint is None:
        record = system.manifest.inputs.get("checkpoint")
        missing = set() if record is None else {Path(record.path).name}
        return SystemTraining(name, complete=not missing, lines_per_second=speed), None, missing
    runs, missing = _runs_behind([checkpoint])
    existing, _ = _runs_behind(given)
    spent = {identity: spent_by(members) for identity, members in runs.items()}
    new = (
        beyond(one, spent_by(existing[identity])) if identity in existing else one
        for identity, one in spent.items()
    )
    spec, last = _readable_spec(checkpoint), _last_run(checkpoint)
    counts = None if spec is None else count_parameters_of(spec)
    training = SystemTraining(
        system=name,
        total=add_up(spent.values()),
        runs=tuple(_published(members).directory.name for members in runs.values()),
        complete=not missing,
        new=add_up(new) if given else None,
        parameters=None if counts is None else (counts["total"], counts["active"]),
        lines_per_second=speed,
    )
    if last not in runs:
        return training, None, missing
    shown = _published(runs[last])
    if not read_metrics(shown):
        return training, None, missing | {shown.directory.name}
    before = training.total.updates - spent[last].updates
    curve = read_curve(name, shown, before=before if training.complete else None)
    return training, curve, missing


def _runs_behind(checkpoints: Sequence[Artifact]) -> tuple[dict[str, list[Artifact]], set[str]]:
    """Return the artifacts of every run behind checkpoints, earliest first, and missing inputs."""
    lineage, runs = Lineage(), dict[str, list[Artifact]]()
    for checkpoint in checkpoints:
        lineage.add(checkpoint, follow=_gives_weights)
    for artifact in lineage.found.values():
        if artifact.manifest.stage in TRAINING_STAGES:
            runs.setdefault(_run_identity(artifact), []).append(artifact)
    ordered = sorted(runs.items(), key=lambda item: item[1][0].manifest.run.started)
    return dict(ordered), lineage.missing


def _gives_weights(record: InputRecord) -> bool:
    return record.kind in ("checkpoint", "training_state")


def _run_identity(artifact: Artifact) -> str:
    """Return a digest that all checkpoints and training states of one run share.

    A run may go on with settings that change no update, and to another number of updates.
    """
    manifest = artifact.manifest
    inputs = {name: record.digest for name, record in manifest.inputs.items()}
    config = without_settings(manifest.config, _MAY_CHANGE)
    return json_digest([manifest.stage, config, _first_planned(manifest), inputs])


_MAY_CHANGE = (
    *DECIDE_NOTHING,
    *(f"ds_config.{key}" for key in UNDECIDING_KEYS),
    "training.updates",
)


def _first_planned(manifest: Manifest) -> object:
    """Return the number of updates that a run began with."""
    changes, training = manifest.statistics.get("replanned"), manifest.config.get("training")
    if isinstance(changes, list) and changes and isinstance(changes[0], dict):
        return changes[0].get("from")
    return training.get("updates") if isinstance(training, dict) else None


def _last_run(checkpoint: Artifact) -> str:
    """Return the run that a checkpoint comes from; empty if it comes from several runs."""
    if checkpoint.manifest.stage in TRAINING_STAGES:
        return _run_identity(checkpoint)
    records = filter(_gives_weights, checkpoint.manifest.inputs.values())
    parents = [open_recorded(record, of=checkpoint) for record in records]
    found = {"" if parent is None else _last_run(parent) for parent in parents}
    return found.pop() if len(found) == 1 else ""


def _published(members: Sequence[Artifact]) -> Artifact:
    """Return the last checkpoint of a run; if it is gone, an artifact with metrics or any other."""

    def rank(one: Artifact) -> tuple[bool, bool, int]:
        return "updates" in one.statistics, one.has("metrics.jsonl"), _updates_of(one)

    return max(members, key=rank)


def _updates_of(member: Artifact) -> int:
    found: Any = member.statistics.get("updates") or member.statistics.get("update")
    return found if isinstance(found, int) else 0


# Cost of runs


def add_up(parts: Iterable[Spent]) -> Spent:
    """Return the sums; None for a figure that some part lacks."""
    columns: Any = zip(*map(astuple, (Spent(), *parts)), strict=True)
    sums: Any = (None if None in column else sum(column) for column in columns)
    return Spent(*sums)


def beyond(spent: Spent, given: Spent) -> Spent:
    """Return the cost of a run after the updates of it that are given."""
    if given.updates >= spent.updates:
        return Spent()
    pairs: Any = zip(astuple(spent), astuple(given), strict=True)
    rest: Any = (None if None in pair else max(pair[0] - pair[1], 0) for pair in pairs)
    return Spent(*rest)


def spent_by(members: Sequence[Artifact]) -> Spent:
    """Return the cost of a training run, read from its remaining checkpoints and states."""
    shown, updates = _published(members), max(map(_updates_of, members))
    is_last = _updates_of(shown) == updates  # else the run went on after it
    metrics = read_metrics(shown) if is_last else []
    source, target = (_sum_tokens(metrics, side) for side in ("source", "target"))
    operations, spec, loss = None, _readable_spec(shown), shown.manifest.config.get("loss")
    if spec is not None and source is not None and target is not None:
        passes = passes_of(loss.get("objective") if isinstance(loss, dict) else None)
        per_token = count_multiplied(spec)
        multiplied = per_token.source * source + per_token.target * target
        operations = float(OPERATIONS_PER_PARAMETER * passes * multiplied)
    return Spent(
        updates or max((entry["update"] for entry in metrics), default=0),
        source,
        target,
        operations,
        shown.manifest.run.wall_seconds if is_last and shown.has("metrics.jsonl") else None,
    )


def _sum_tokens(metrics: Iterable[Mapping[str, Any]], side: str) -> int | None:
    """Return the tokens of a side in all updates; None if some update lacks its count."""
    counts = [entry.get(f"{side}_tokens") for entry in metrics if entry.get("kind") == "train"]
    known = [count for count in counts if is_count(count)]
    return sum(known) if counts and len(known) == len(counts) else None


def _readable_spec(checkpoint: Artifact) -> ModelSpec | None:
    """Return the model that a checkpoint states; None if it is unreadable."""
    try:
        return stated_spec(checkpoint)
    except (UserError, OSError, ValueError):
        return None


# Sections


def trained_for(history: History, system: str) -> str:
    """Return the training of a system in a few words: ``2,100 updates (3.0 ×), 700 new``.

    The factor is relative to the least trained system; it is left out if there is no other system.
    """
    training = next((training for training in history.trainings if training.system == system), None)
    if training is None:
        return NO_VALUE
    if not training.runs:
        return "no training" if training.complete else "training not found"
    text = counted(training.total.updates, "update")
    new = "" if training.new is None else f", {training.new.updates:,} new"
    if not training.complete:
        return f"at least {text}{new}"
    known = [
        training.total.updates
        for training in history.trainings
        if training.runs and training.complete
    ]
    is_compared = len(known) > 1 and min(known)
    return f"{text}{f' ({training.total.updates / min(known):.1f} ×)' if is_compared else ''}{new}"


def budgets_section(history: History) -> ReportSection:
    """Return parameters and training cost of every system, baselines without training included."""
    costs = ("Updates", "Source tokens", "Target tokens", "FLOP", "Wall time, h:min:s")
    rows = (
        row(
            *(training.system, *map(format_large, training.parameters or (None, None))),
            *_costs(training, training.total),
            Cell(training.lines_per_second, ",.1f"),
        )
        for training in history.trainings
    )
    titles = headings("System", "Parameters", "Active", *costs, "Translated lines per second")
    tables = [Table("All trainings", titles, tuple(rows))] if history.trainings else []
    if history.given:
        rows = (
            row(training.system, *_costs(training, training.new or Spent()))
            for training in history.trainings
        )
        title = f"New cost, where {', '.join(history.given)} existed already"
        tables.append(Table(title, headings("System", *costs), tuple(rows)))
    return ReportSection(
        "Training budgets",
        "Scores are comparable only together with the training behind them. All trainings of a "
        "system are its last one and, each once and whole, the trainings of every checkpoint that "
        "it was assembled from or trained further from. FLOP is an estimate: "
        f"{OPERATIONS_PER_PARAMETER} for each token and each parameter that multiplies it. Wall "
        "times are of whole stages, on any number of processes.",
        tables=tuple(tables),
        items=tuple(map(Cell, _notes(history))),
    )


def _costs(training: SystemTraining, spent: Spent) -> Iterator[str]:
    """Yield costs, as lower bounds if some runs are missing."""
    least = "" if training.complete else "≥ "
    counts = (spent.source_tokens, spent.target_tokens, spent.operations)
    seconds = NO_VALUE if spent.seconds is None else clock_text(spent.seconds)
    for text in (f"{spent.updates:,}", *map(format_large, counts), seconds):
        yield f"{least}{text}" if training.runs and text != NO_VALUE else NO_VALUE


def _notes(history: History) -> Iterator[str]:
    if history.missing:
        yield f"Runs that have moved, changed or lost metrics: {', '.join(history.missing)}."
    for one in history.trainings:
        if len(one.runs) > 1:
            yield f"{one.system} rests on {', '.join(one.runs)}."
        if not one.complete:
            yield f"{one.system}: some trainings can no longer be found; figures are lower bounds."
