"""Runs behind systems: training budgets, stages, wall times and loss curves.

A system is an artifact of translations, or a checkpoint by itself.

The budget of a system covers the training runs that its weights come from: its own and, each once,
those of every checkpoint that it was assembled from or trained further from. A run counts whole,
even if only some of its weights were used. Trainings that only gave the language groups are named
but not counted.

The new cost of a system is its budget without what led to given checkpoints, which the user had
already: run by run, what the system's weights have spent beyond those of the checkpoints.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeGuard, TypeVar

import numpy as np

from pipeline.artifacts.artifact import (
    Artifact,
    InputRecord,
    Lineage,
    json_digest,
    open_recorded,
)
from pipeline.checkpoints.checkpoint import stated_spec
from pipeline.config.documents import read_json_lines
from pipeline.errors import UserError
from pipeline.evaluation.validation_tiers import PairTiers, read_tiers
from pipeline.model.parameters import (
    OPERATIONS_PER_PARAMETER,
    PerToken,
    count_multiplied,
    count_parameters_of,
)
from pipeline.model.spec import ModelSpec
from pipeline.training.settings import passes_of

TRAINING_STAGES = ("pretrain", "finetune")
TokenSide = Literal["source", "target"]
SIDES: tuple[TokenSide, ...] = ("source", "target")
Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class Spent:
    """Cost of training; None where it was not recorded."""

    updates: int = 0
    target_tokens: int | None = 0
    operations: float | None = 0.0
    """Estimated floating-point operations: OPERATIONS_PER_PARAMETER · passes · (parameters of the
    source side · source tokens + parameters of the target side · target tokens)."""
    seconds: float | None = 0.0
    """Wall time, on any number of processes."""
    source_tokens: int | None = 0


@dataclass(frozen=True)
class TrainingRun:
    """One run of a training stage."""

    folder: str
    stage: str
    spent: Spent


@dataclass(frozen=True)
class Parameters:
    """Number of parameters of a model, in total and active per token."""

    total: int
    active: int


@dataclass(frozen=True)
class Translation:
    """Lines that a system translated, and the wall time of that stage."""

    lines: int
    seconds: float

    @property
    def lines_per_second(self) -> float:
        """Return the speed, with the time of starting and of loading the model."""
        return self.lines / self.seconds


@dataclass(frozen=True)
class SystemTraining:
    """Training runs that a system's weights come from."""

    system: str
    parameters: Parameters | None
    own: TrainingRun | None
    """Last run; None if the weights were assembled and not trained since."""
    before: tuple[TrainingRun, ...]
    """Earlier runs, earliest first."""
    complete: bool
    """Whether all runs could still be found."""
    groups_from: tuple[str, ...] = ()
    """Directories of trainings that gave the language groups alone; not counted."""
    new: Spent | None = None
    """Cost beyond the given checkpoints; None if none is given."""
    translation: Translation | None = None
    """Lines translated with the weights; None for a checkpoint by itself."""

    @property
    def is_trained(self) -> bool:
        """Return whether any training is known; baselines have none."""
        return self.own is not None or bool(self.before)

    @property
    def spent_before(self) -> Spent:
        """Return the cost of the earlier runs."""
        return add_up(run.spent for run in self.before)

    @property
    def total(self) -> Spent:
        """Return the cost of all runs, a lower bound if some could not be found."""
        own = [] if self.own is None else [self.own.spent]
        return add_up([self.spent_before, *own])


def add_up(parts: Iterable[Spent]) -> Spent:
    """Return the sums; None for what is not known of every part."""
    found = list(parts)
    return Spent(
        updates=sum(one.updates for one in found),
        target_tokens=_total([one.target_tokens for one in found], 0),
        operations=_total([one.operations for one in found], 0.0),
        seconds=_total([one.seconds for one in found], 0.0),
        source_tokens=_total([one.source_tokens for one in found], 0),
    )


def beyond(spent: Spent, given: Spent) -> Spent:
    """Return what a run has spent after the updates of it that are given."""
    if given.updates >= spent.updates:
        return Spent()
    return Spent(
        updates=spent.updates - given.updates,
        target_tokens=_difference(spent.target_tokens, given.target_tokens),
        operations=_difference(spent.operations, given.operations),
        seconds=_difference(spent.seconds, given.seconds),
        source_tokens=_difference(spent.source_tokens, given.source_tokens),
    )


def _difference(whole: Number | None, part: Number | None) -> Number | None:
    return None if whole is None or part is None else max(whole - part, 0)


def _total(counts: Sequence[Number | None], zero: Number) -> Number | None:
    known = [one for one in counts if one is not None]
    return sum(known, zero) if len(known) == len(counts) else None


def checkpoint_of(system: Artifact) -> Artifact | None:
    """Return a checkpoint itself, or the one behind translations; None if it is not there."""
    if system.manifest.kind == "checkpoint":
        return system
    record = system.manifest.inputs.get("checkpoint")
    return None if record is None else open_recorded(record)


def trace_training(
    name: str, system: Artifact, *, given: Sequence[Artifact] = ()
) -> tuple[SystemTraining, Artifact | None]:
    """Return the training of a system, and the checkpoint with the metrics of its last run.

    Args:
        name: of the system.
        system: its translations or checkpoint.
        given: checkpoints that existed already; empty: the new cost is not asked for.
    """
    checkpoint, translation = checkpoint_of(system), _translation_of(system)
    if checkpoint is None:
        is_baseline = "checkpoint" not in system.manifest.inputs
        nothing = SystemTraining(
            name, None, None, (), complete=is_baseline, translation=translation
        )
        return nothing, None
    lineage, runs = _trace_runs([checkpoint])
    own = _last_run(checkpoint)
    described = {identity: describe_run(members) for identity, members in runs.items()}
    return SystemTraining(
        system=name,
        parameters=read_parameters(checkpoint),
        own=described.get(own or ""),
        before=tuple(run for identity, run in described.items() if identity != own),
        complete=not lineage.missing,
        groups_from=_groups_from(lineage, {run.folder for run in described.values()}),
        new=_new_cost(described, given) if given else None,
        translation=translation,
    ), _with_metrics(runs.get(own or "", []))


def _translation_of(system: Artifact) -> Translation | None:
    lines, seconds = system.statistics.get("lines"), system.manifest.run.wall_seconds
    if system.manifest.kind != "translations" or not _is_count(lines) or not lines or seconds <= 0:
        return None
    return Translation(lines, seconds)


def _trace_runs(
    checkpoints: Sequence[Artifact],
) -> tuple[Lineage, dict[str, list[Artifact]]]:
    """Return what the weights of checkpoints come from, and the artifacts of every run in it."""
    lineage = Lineage()
    for checkpoint in checkpoints:
        lineage.add(checkpoint, follow=_gives_weights)
    runs: dict[str, list[Artifact]] = {}
    for artifact in lineage.found.values():
        if artifact.manifest.stage in TRAINING_STAGES:
            runs.setdefault(_run_identity(artifact), []).append(artifact)
    return lineage, dict(sorted(runs.items(), key=lambda item: item[1][0].manifest.run.started))


def _new_cost(described: Mapping[str, TrainingRun], given: Sequence[Artifact]) -> Spent:
    """Return what the runs of a system have spent beyond those of given checkpoints."""
    _, runs = _trace_runs(given)
    before = {identity: describe_run(members).spent for identity, members in runs.items()}
    return add_up(
        beyond(run.spent, before[identity]) if identity in before else run.spent
        for identity, run in described.items()
    )


def _gives_weights(record: InputRecord) -> bool:
    return record.kind in ("checkpoint", "training_state")


def _run_identity(artifact: Artifact) -> str:
    """Return a digest that all checkpoints and training states of one run share."""
    manifest = artifact.manifest
    inputs = {name: record.digest for name, record in manifest.inputs.items()}
    return json_digest([manifest.stage, manifest.config, inputs])


def _last_run(checkpoint: Artifact) -> str | None:
    """Return the run that a checkpoint comes from; None if it comes from several runs."""
    if checkpoint.manifest.stage in TRAINING_STAGES:
        return _run_identity(checkpoint)
    records = filter(_gives_weights, checkpoint.manifest.inputs.values())
    parents = [open_recorded(record) for record in records]
    found = {None if parent is None else _last_run(parent) for parent in parents}
    return found.pop() if len(found) == 1 else None


def _groups_from(lineage: Lineage, counted: set[str]) -> tuple[str, ...]:
    found: dict[str, None] = {}
    for artifact in lineage.found.values():
        for record in artifact.manifest.inputs.values():
            groups = open_recorded(record) if record.kind == "groups" else None
            for source in groups.manifest.inputs.values() if groups else ():
                if source.kind == "checkpoint":
                    found[source.path.rstrip("/").rsplit("/", 1)[-1]] = None
    return tuple(name for name in found if name not in counted)


# One run


def describe_run(members: Sequence[Artifact]) -> TrainingRun:
    """Return a training run, read from its remaining checkpoints and training states."""
    published = [one for one in members if "updates" in one.statistics]
    shown = (published or _with_metrics_first(members))[0]
    metrics = read_metrics(shown)
    source, target = (count_tokens(metrics, side=side) for side in SIDES)
    return TrainingRun(
        folder=shown.directory.name,
        stage=shown.manifest.stage,
        spent=Spent(
            updates=max(_updates(one) for one in members)
            or max((entry["update"] for entry in metrics), default=0),
            target_tokens=target,
            operations=_operations(shown, source=source, target=target),
            seconds=shown.manifest.run.wall_seconds if shown.has("metrics.jsonl") else None,
            source_tokens=source,
        ),
    )


def _operations(run: Artifact, *, source: int | None, target: int | None) -> float | None:
    """Estimate the arithmetic of a run; None where its tokens or its model are not known."""
    return _operations_of(_read_per_token(run), source=source, target=target)


def _operations_of(
    per_token: PerToken | None, *, source: int | None, target: int | None
) -> float | None:
    if source is None or target is None or per_token is None:
        return None
    return float(per_token.source * source + per_token.target * target)


def count_passes(run: Artifact) -> int:
    """Return how often a training run takes each batch through the model."""
    loss = run.manifest.config.get("loss")
    objective = loss.get("objective") if isinstance(loss, dict) else None
    return passes_of(objective)


def _updates(artifact: Artifact) -> int:
    """Return the last update that an artifact records; the run may have gone on."""
    found = artifact.statistics.get("updates") or artifact.statistics.get("update")
    return found if isinstance(found, int) else 0


def _with_metrics_first(members: Sequence[Artifact]) -> list[Artifact]:
    return sorted(members, key=lambda one: not one.has("metrics.jsonl"))


def _with_metrics(members: Sequence[Artifact]) -> Artifact | None:
    return next((one for one in members if one.has("metrics.jsonl")), None)


def read_metrics(checkpoint: Artifact) -> list[dict[str, Any]]:
    """Return the metrics of a run that have an update and a time; none if the file is damaged."""
    if not checkpoint.has("metrics.jsonl"):
        return []
    try:
        entries = list(read_json_lines(checkpoint.file("metrics.jsonl")))
    except UserError:
        return []
    return [
        one for one in entries if is_number(one.get("seconds")) and _is_count(one.get("update"))
    ]


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a JSON value is a number that a float can hold; booleans are none."""
    is_plain = isinstance(value, int | float) and not isinstance(value, bool)
    return is_plain and abs(value) <= sys.float_info.max  # type: ignore[arg-type]


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and is_number(value) and value >= 0


def tokens_by_update(
    metrics: Iterable[Mapping[str, Any]], *, side: TokenSide = "target"
) -> list[tuple[int, int]]:
    """Return (update, tokens of a side up to it) for every line of training metrics.

    The list is empty if some line has no count, as in runs of earlier versions.
    """
    found: list[tuple[int, int]] = []
    tokens = 0
    for entry in metrics:
        if entry.get("kind") == "train":
            count = entry.get(f"{side}_tokens")
            if not _is_count(count):
                return []
            tokens += count
            found.append((entry["update"], tokens))
    return found


def count_tokens(metrics: Iterable[Mapping[str, Any]], *, side: TokenSide = "target") -> int | None:
    """Return the tokens of a side of a whole run; None if they were not counted."""
    counted = tokens_by_update(metrics, side=side)
    return counted[-1][1] if counted else None


def read_parameters(checkpoint: Artifact) -> Parameters | None:
    """Return the parameters of the model that a checkpoint states; None if it is unreadable."""
    spec = _readable_spec(checkpoint)
    if spec is None:
        return None
    counts = count_parameters_of(spec)
    return Parameters(total=counts["total"], active=counts["active"])


def _read_per_token(run: Artifact) -> PerToken | None:
    """Return the operations of training per token of each side; None if the model is unreadable."""
    spec = _readable_spec(run)
    if spec is None:
        return None
    of_pass, factor = count_multiplied(spec), OPERATIONS_PER_PARAMETER * count_passes(run)
    return PerToken(source=factor * of_pass.source, target=factor * of_pass.target)


def _readable_spec(checkpoint: Artifact) -> ModelSpec | None:
    try:
        return stated_spec(checkpoint)
    except (UserError, OSError, ValueError):
        return None


@dataclass(frozen=True)
class CurvePoint:
    """Losses in nats per token after an update, and the cost of the run up to it."""

    update: int
    seconds: float
    loss: float
    resources: Mapping[str, float] = field(default_factory=dict)
    """Resource group → validation loss."""
    target_tokens: int | None = None
    """Tokens up to the update, interpolated between two lines of training metrics."""
    operations: float | None = None
    """Estimated floating-point operations up to the update, by its tokens."""
    sides: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Family of directions, into or out of the pivot → resource group → mean validation loss over
    directions."""


@dataclass(frozen=True)
class Curve:
    """Losses of the last training run of a system; points count from the start of this run."""

    system: str
    training: tuple[CurvePoint, ...]
    validation: tuple[CurvePoint, ...]
    before: Spent | None = field(default_factory=Spent)
    """Cost of the earlier runs; None if some of them can no longer be found."""
    pivot: str | None = None
    """Language of the sides of its points; None: they have none."""


@dataclass(frozen=True)
class StageRun:
    """A run of a stage that a system was made by."""

    stage: str
    folder: str
    wall_seconds: float
    systems: tuple[str, ...]
    summary: tuple[str, ...] = ()
    """Counts that the stage reported."""


@dataclass(frozen=True)
class History:
    """Runs behind the systems; inputs precede what was made from them."""

    stages: tuple[StageRun, ...] = ()
    curves: tuple[Curve, ...] = ()
    missing: tuple[str, ...] = ()
    """Directories that are gone or have changed since."""
    trainings: tuple[SystemTraining, ...] = ()
    """Trainings of the systems, in their order; of a system with several runs, of each run."""
    given: tuple[str, ...] = ()
    """Directories of the given checkpoints."""

    def training_of(self, system: str) -> SystemTraining | None:
        """Return the training of a system, if it is known."""
        return next((one for one in self.trainings if one.system == system), None)

    def wall_seconds_of(self, system: str) -> float:
        """Return the wall time of all stages that a system rests on, each once."""
        return sum(one.wall_seconds for one in self.stages if system in one.systems)


def trace_history(systems: Mapping[str, Artifact], *, given: Sequence[Artifact] = ()) -> History:
    """Follow the manifests of systems, or of their runs, back to the raw text.

    Args:
        systems: name → translations or checkpoint.
        given: checkpoints that existed already, if new costs are asked for.
    """
    runs: dict[Path, Artifact] = {}
    users: dict[Path, list[str]] = {}
    curves: list[Curve] = []
    trainings: list[SystemTraining] = []
    missing: set[str] = set()
    for name, system in systems.items():
        behind = Lineage()
        behind.add(system, follow=lambda record: record.kind != "raw")
        missing |= behind.missing
        for path, artifact in behind.found.items():
            runs.setdefault(path, artifact)
            users.setdefault(path, []).append(name)
        training, checkpoint = trace_training(name, system, given=given)
        trainings.append(training)
        if checkpoint is not None and not read_metrics(checkpoint):
            missing.add(checkpoint.directory.name)
        elif checkpoint is not None:
            curves.append(read_curve(training, checkpoint))
    return History(
        stages=tuple(
            StageRun(
                stage=artifact.manifest.stage,
                folder=path.name,
                wall_seconds=artifact.manifest.run.wall_seconds,
                systems=tuple(users[path]),
                summary=artifact.manifest.summary,
            )
            for path, artifact in runs.items()
        ),
        curves=tuple(curves),
        missing=tuple(sorted(missing)),
        trainings=tuple(trainings),
        given=tuple(one.directory.name for one in given),
    )


def read_curve(training: SystemTraining, checkpoint: Artifact) -> Curve:
    """Return the losses of a run; a loss that was not finite is null and leaves a gap."""
    metrics = read_metrics(checkpoint)
    source, target = (tokens_by_update(metrics, side=side) for side in SIDES)
    per_token, tiers = _read_per_token(checkpoint), read_tiers(checkpoint)
    points: dict[str, list[CurvePoint]] = {"train": [], "validation": []}
    for entry in metrics:
        if entry.get("kind") in ("train", "validation") and is_number(entry.get("loss")):
            at = entry["update"]
            tokens = {"source": _tokens_at(at, source), "target": _tokens_at(at, target)}
            operations = _operations_of(per_token, **tokens)
            points[entry["kind"]].append(_point(entry, tokens["target"], operations, tiers))
    return Curve(
        system=training.system,
        training=tuple(points["train"]),
        validation=tuple(points["validation"]),
        before=training.spent_before if training.complete else None,
        pivot=None if tiers is None else tiers.pivot,
    )


def _point(
    entry: Mapping[str, Any],
    tokens: int | None,
    operations: float | None,
    tiers: PairTiers | None,
) -> CurvePoint:
    resources = _losses(entry.get("resources"))
    return CurvePoint(
        update=entry["update"],
        seconds=entry["seconds"],
        loss=entry["loss"],
        resources={group: loss for group, loss in resources.items() if loss is not None},
        sides={} if tiers is None else tiers.mean_losses(_losses(entry.get("directions"))),
        target_tokens=tokens,
        operations=operations,
    )


def _losses(found: object) -> dict[str, float | None]:
    """Return the losses of an object of a line of metrics; None for those that are not finite."""
    items = found.items() if isinstance(found, dict) else ()
    return {name: loss if is_number(loss) else None for name, loss in items}


def _tokens_at(update: int, tokens: Sequence[tuple[int, int]]) -> int | None:
    if not tokens:
        return None
    updates, counts = zip((0, 0), *tokens, strict=True)
    return round(float(np.interp(update, updates, counts)))
