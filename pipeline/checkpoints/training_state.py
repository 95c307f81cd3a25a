"""Describe the progress of a training run: everything but tensors that resuming needs."""

from dataclasses import asdict, dataclass
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.manifest import how_to_restore
from pipeline.config.settings import shown
from pipeline.errors import CheckpointError

PROGRESS_FILE = "progress.json"

Whole = Annotated[int, Field(ge=0, lt=2**63)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Sum = Annotated[float, Field(allow_inf_nan=False)]


@dataclass(frozen=True)
class LossScale:
    """The state of fp16's dynamic loss scale, by DeepSpeed's counters."""

    scale: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    steps: Whole
    """Attempted updates so far, including skipped ones."""
    last_overflow: Annotated[int, Field(ge=-1, lt=2**63)]
    """Number of attempts before the last overflow; -1: there was none."""
    hysteresis: Annotated[int, Field(ge=1, lt=2**63)]
    """Number of further overflows after which the scale is reduced."""


@dataclass(frozen=True)
class Position:
    """The progress of a training run: everything but tensors that resuming needs."""

    update: Whole = 0
    cursor: tuple[Whole, Whole] = (0, 0)
    """Next step of the batch plan: (window, step within the window)."""
    validated: Whole = 0
    """Last update that was validated."""
    best_perplexity: Sum | None = None
    best_update: Whole | None = None
    validations_since_best: Whole = 0
    """Consecutive validations without a lower perplexity."""
    seconds: Seconds = 0.0
    interval: Annotated[tuple[Sum, ...], Field(min_length=4)] = (0.0,) * 5
    """Sums over all ranks since the last line of metrics (``training/metrics.py``). Earlier
    versions have four, without source tokens, or five, without the routes to experts."""
    overflows: Whole = 0
    """Attempted updates that overflowed fp16 and were repeated at a smaller loss scale."""
    loss_scale: LossScale | None = None
    """None: the run has no dynamic loss scale."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Any) -> "Position":
        """Return the position of JSON fields; raise ValidationError if they are invalid."""
        return TypeAdapter(cls).validate_python(values)


def read_position(state: Artifact) -> Position:
    """Return the position of a training state; raise CheckpointError if its file is invalid."""
    path = state.file(PROGRESS_FILE)
    try:
        return Position.from_json(state.read_json(PROGRESS_FILE))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(shown(str(part)) for part in first["loc"]) or "the file"
        raise CheckpointError(
            f"{path} describes no progress of a run ({where}: {first['msg']}). "
            f"{how_to_restore(state.directory)}."
        ) from error
