"""What the training of a system took: updates, tokens, arithmetic and hours.

A system's budget is that of the training runs its weights come from: its own, and before it those
of every checkpoint it was assembled from or trained on from, each once. A run counts whole, though
only a part of its weights may have been taken. Trainings that gave no weights but the language
groups are named and not counted.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard

from pipeline.artifacts.artifact import Artifact, InputRecord, Lineage, json_digest, open_recorded
from pipeline.checkpoints.checkpoint import stated_spec
from pipeline.config.documents import read_json_lines
from pipeline.errors import UserError
from pipeline.model.parameters import PerToken, count_multiplied, count_parameters_of
from pipeline.model.spec import ModelSpec

OPERATIONS_PER_PARAMETER = 6
"""Floating-point operations of one token and one parameter that multiplies it: a multiplication
and an addition going forward, twice as many going back (Kaplan et al. 2020, §2.1)."""

TRAINING_STAGES = ("pretrain", "finetune")
TokenSide = Literal["source", "target"]
SIDES: tuple[TokenSide, ...] = ("source", "target")


@dataclass(frozen=True)
class Spent:
    """What training took; None where it was not recorded."""

    updates: int = 0
    target_tokens: int | None = 0
    operations: float | None = 0.0
    """OPERATIONS_PER_PARAMETER · passes · (parameters of the source side · source tokens + those of
    the target side · target tokens): an estimate."""
    seconds: float | None = 0.0
    """Wall time, on however many processes."""
    source_tokens: int | None = 0


@dataclass(frozen=True)
class TrainingRun:
    """One run of a training stage."""

    folder: str
    stage: str
    spent: Spent


@dataclass(frozen=True)
class Parameters:
    """Of a model, and of those the ones that one token meets."""

    total: int
    active: int


@dataclass(frozen=True)
class SystemTraining:
    """The training a system rests on."""

    system: str
    parameters: Parameters | None
    own: TrainingRun | None
    """The last run; None where the weights were assembled and not trained since."""
    before: tuple[TrainingRun, ...]
    """The runs behind it, earliest first."""
    complete: bool
    """Whether everything could still be found."""
    groups_from: tuple[str, ...] = ()
    """Folders of trainings that gave nothing but the language groups; not counted."""

    @property
    def is_trained(self) -> bool:
        """Whether any training is known of; baselines have none."""
        return self.own is not None or bool(self.before)

    @property
    def spent_before(self) -> Spent:
        return add_up(run.spent for run in self.before)

    @property
    def total(self) -> Spent:
        """Own and before; less than was spent where something could not be found."""
        own = [] if self.own is None else [self.own.spent]
        return add_up([self.spent_before, *own])


def add_up(parts: Iterable[Spent]) -> Spent:
    """The sum; of what is not known of every part, nothing."""
    found = list(parts)
    tokens = [one.target_tokens for one in found]
    source = [one.source_tokens for one in found]
    operations = [one.operations for one in found]
    seconds = [one.seconds for one in found]
    return Spent(
        updates=sum(one.updates for one in found),
        target_tokens=None if None in tokens else sum(one or 0 for one in tokens),
        operations=None if None in operations else sum(one or 0.0 for one in operations),
        seconds=None if None in seconds else sum(one or 0.0 for one in seconds),
        source_tokens=None if None in source else sum(one or 0 for one in source),
    )


def trace_training(system: str, translations: Artifact) -> tuple[SystemTraining, Artifact | None]:
    """A system's training, and the checkpoint that holds the curves of its last run."""
    record = translations.manifest.inputs.get("checkpoint")
    checkpoint = None if record is None else open_recorded(record)
    if checkpoint is None:
        return SystemTraining(system, None, None, (), complete=record is None), None
    lineage = Lineage()
    lineage.add(checkpoint, follow=_gives_weights)
    runs: dict[str, list[Artifact]] = {}
    for artifact in lineage.found.values():
        if artifact.manifest.stage in TRAINING_STAGES:
            runs.setdefault(_run_identity(artifact), []).append(artifact)
    runs = dict(sorted(runs.items(), key=lambda item: item[1][0].manifest.run.started))
    own = _last_run(checkpoint)
    described = {identity: describe_run(members) for identity, members in runs.items()}
    return SystemTraining(
        system=system,
        parameters=read_parameters(checkpoint),
        own=described.get(own or ""),
        before=tuple(run for identity, run in described.items() if identity != own),
        complete=not lineage.missing,
        groups_from=_groups_from(lineage, {run.folder for run in described.values()}),
    ), _with_metrics(runs.get(own or "", []))


def _gives_weights(record: InputRecord) -> bool:
    return record.kind in ("checkpoint", "training_state")


def _run_identity(artifact: Artifact) -> str:
    """The same for all checkpoints and training states of one run."""
    manifest = artifact.manifest
    inputs = {name: record.digest for name, record in manifest.inputs.items()}
    return json_digest([manifest.stage, manifest.config, inputs])


def _last_run(checkpoint: Artifact) -> str | None:
    """The run a checkpoint came out of, or was averaged or cut from; None if of several runs."""
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
    """One training run, from what there is of its checkpoints and training states."""
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
    per_token = _read_multiplied(run)
    if source is None or target is None or per_token is None:
        return None
    of_pass = per_token.source * source + per_token.target * target
    return float(OPERATIONS_PER_PARAMETER) * count_passes(run) * of_pass


def count_passes(run: Artifact) -> int:
    """Return how often a training run takes each batch through the model."""
    loss = run.manifest.config.get("loss")
    objective = loss.get("objective") if isinstance(loss, dict) else None
    return 2 if objective == "fuse_distillation" else 1


def _updates(artifact: Artifact) -> int:
    """The last update of the run that an artifact knows of; a checkpoint may be of an earlier."""
    found = artifact.statistics.get("updates") or artifact.statistics.get("update")
    return found if isinstance(found, int) else 0


def _with_metrics_first(members: Sequence[Artifact]) -> list[Artifact]:
    return sorted(members, key=lambda one: not one.has("metrics.jsonl"))


def _with_metrics(members: Sequence[Artifact]) -> Artifact | None:
    return next((one for one in members if one.has("metrics.jsonl")), None)


def read_metrics(checkpoint: Artifact) -> list[dict[str, Any]]:
    """The lines of metrics of a run that say an update and a time; none where they are broken."""
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
    """Whether a value of JSON is a number that a float can hold; truth values are none."""
    is_plain = isinstance(value, int | float) and not isinstance(value, bool)
    return is_plain and abs(value) <= sys.float_info.max  # type: ignore[arg-type]


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and is_number(value) and value >= 0


def tokens_by_update(
    metrics: Iterable[Mapping[str, Any]], *, side: TokenSide = "target"
) -> list[tuple[int, int]]:
    """(update, tokens of a side up to there) at every line of training metrics.

    Empty where some line does not count them: runs of earlier versions did not.
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
    """Tokens of a side of a whole run, None where they were not counted."""
    counted = tokens_by_update(metrics, side=side)
    return counted[-1][1] if counted else None


def read_parameters(checkpoint: Artifact) -> Parameters | None:
    """From the shape a checkpoint states; None where that cannot be read."""
    spec = _readable_spec(checkpoint)
    if spec is None:
        return None
    counts = count_parameters_of(spec)
    return Parameters(total=counts["total"], active=counts["active"])


def _read_multiplied(checkpoint: Artifact) -> PerToken | None:
    spec = _readable_spec(checkpoint)
    return None if spec is None else count_multiplied(spec)


def _readable_spec(checkpoint: Artifact) -> ModelSpec | None:
    try:
        return stated_spec(checkpoint)
    except (UserError, OSError, ValueError):
        return None
