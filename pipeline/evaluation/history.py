"""The runs behind the systems of an evaluation: stages, wall times, loss curves, budgets."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.artifacts.artifact import Artifact, Lineage
from pipeline.evaluation.budgets import (
    Spent,
    SystemTraining,
    is_number,
    read_metrics,
    tokens_by_update,
    trace_training,
)


@dataclass(frozen=True)
class CurvePoint:
    """Losses in nats per token after an update, and what the run had taken up to there."""

    update: int
    seconds: float
    loss: float
    resources: Mapping[str, float] = field(default_factory=dict)
    """Resource group → validation loss."""
    target_tokens: int | None = None
    """Between two lines of training metrics, in proportion to the updates."""


@dataclass(frozen=True)
class Curve:
    """Losses of the last training run of a system; points count from the run's own start."""

    system: str
    training: tuple[CurvePoint, ...]
    validation: tuple[CurvePoint, ...]
    before: Spent | None = field(default_factory=Spent)
    """What the runs it rests on had taken; None where that cannot be told any more."""


@dataclass(frozen=True)
class StageRun:
    """One stage that a system rests on."""

    stage: str
    folder: str
    wall_seconds: float
    systems: tuple[str, ...]
    summary: tuple[str, ...] = ()
    """What the stage said of its counts."""


@dataclass(frozen=True)
class History:
    """The runs behind the systems, inputs before what was made from them."""

    stages: tuple[StageRun, ...] = ()
    curves: tuple[Curve, ...] = ()
    missing: tuple[str, ...] = ()
    """Folders that are no longer there, or have changed since."""
    trainings: tuple[SystemTraining, ...] = ()
    """One per system, in their order."""

    def training_of(self, system: str) -> SystemTraining | None:
        return next((one for one in self.trainings if one.system == system), None)

    def wall_seconds_of(self, system: str) -> float:
        """Of all stages a system rests on, each once."""
        return sum(one.wall_seconds for one in self.stages if system in one.systems)


def trace_history(systems: Mapping[str, Artifact]) -> History:
    """Follow the systems' manifests back to the raw text."""
    runs: dict[Path, Artifact] = {}
    users: dict[Path, list[str]] = {}
    curves: list[Curve] = []
    trainings: list[SystemTraining] = []
    missing: set[str] = set()
    for name, translations in systems.items():
        behind = Lineage()
        behind.add(translations, follow=lambda record: record.kind != "raw")
        missing |= behind.missing
        for path, artifact in behind.found.items():
            runs.setdefault(path, artifact)
            users.setdefault(path, []).append(name)
        training, checkpoint = trace_training(name, translations)
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
    )


def read_curve(training: SystemTraining, checkpoint: Artifact) -> Curve:
    """The losses of a run; one that was not finite stands as null and leaves a gap."""
    metrics = read_metrics(checkpoint)
    tokens = tokens_by_update(metrics)
    points: dict[str, list[CurvePoint]] = {"train": [], "validation": []}
    for entry in metrics:
        if entry.get("kind") in ("train", "validation") and is_number(entry.get("loss")):
            points[entry["kind"]].append(_point(entry, tokens))
    return Curve(
        system=training.system,
        training=tuple(points["train"]),
        validation=tuple(points["validation"]),
        before=training.spent_before if training.complete else None,
    )


def _point(entry: Mapping[str, Any], tokens: Sequence[tuple[int, int]]) -> CurvePoint:
    resources = entry.get("resources")
    found = resources.items() if isinstance(resources, dict) else ()
    return CurvePoint(
        update=entry["update"],
        seconds=entry["seconds"],
        loss=entry["loss"],
        resources={group: loss for group, loss in found if is_number(loss)},
        target_tokens=_tokens_at(entry["update"], tokens),
    )


def _tokens_at(update: int, tokens: Sequence[tuple[int, int]]) -> int | None:
    if not tokens:
        return None
    updates, counts = zip((0, 0), *tokens, strict=True)
    return round(float(np.interp(update, updates, counts)))
