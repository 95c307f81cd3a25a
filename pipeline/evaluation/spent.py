"""Cost of training runs, summed over the artifacts that their manifests name.

A figure that a run did not record is None, and so is every sum with it.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, Literal, TypeGuard

from pipeline.artifacts.artifact import Artifact
from pipeline.checkpoints.checkpoint import stated_spec
from pipeline.config.documents import read_json_lines
from pipeline.errors import UserError
from pipeline.model.parameters import OPERATIONS_PER_PARAMETER, PerToken, count_multiplied
from pipeline.model.spec import ModelSpec
from pipeline.training.settings import passes_of

TokenSide = Literal["source", "target"]
SIDES: tuple[TokenSide, ...] = ("source", "target")


@dataclass(frozen=True)
class Spent:
    """Cost of training: estimated floating-point operations, wall time on any processes."""

    updates: int = 0
    source_tokens: int | None = 0
    target_tokens: int | None = 0
    operations: float | None = 0.0
    seconds: float | None = 0.0


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
    shown = published(members)
    metrics = read_metrics(shown)
    by_side = [[*tokens_by_update(metrics, side=side).values()] for side in SIDES]
    source, target = (found[-1] if found else None for found in by_side)
    states: list[Any] = [
        one.statistics.get("updates") or one.statistics.get("update") for one in members
    ]
    updates = max(one if isinstance(one, int) else 0 for one in states)
    return Spent(
        updates or max((entry["update"] for entry in metrics), default=0),
        source,
        target,
        operations_of(read_per_token(shown), source=source, target=target),
        shown.manifest.run.wall_seconds if shown.has("metrics.jsonl") else None,
    )


def published(members: Sequence[Artifact]) -> Artifact:
    """Return the checkpoint of a run; if it is gone, an artifact with metrics or any other."""
    return max(members, key=lambda one: ("updates" in one.statistics, one.has("metrics.jsonl")))


def read_metrics(checkpoint: Artifact) -> list[dict[str, Any]]:
    """Return the metrics of a run that have an update and a time; none if the file is damaged."""
    try:
        entries = [*read_json_lines(checkpoint.file("metrics.jsonl"))]
    except UserError:
        return []
    return [one for one in entries if is_number(one.get("seconds")) and is_count(one.get("update"))]


def tokens_by_update(metrics: Iterable[Mapping[str, Any]], *, side: TokenSide) -> dict[int, int]:
    """Return update → tokens of a side up to it; empty if some update lacks its count."""
    found: dict[int, int] = {}
    tokens = 0
    for entry in (one for one in metrics if one.get("kind") == "train"):
        count = entry.get(f"{side}_tokens")
        if not is_count(count):
            return {}
        found[entry["update"]] = tokens = tokens + count
    return found


def operations_of(
    per_token: PerToken | None, *, source: float | None, target: float | None
) -> float | None:
    """Return the operations of training on so many tokens; None if anything is not known."""
    if source is None or target is None or per_token is None:
        return None
    return float(per_token.source * source + per_token.target * target)


def read_per_token(run: Artifact) -> PerToken | None:
    """Return the operations of training per token of each side; None if the model is unreadable."""
    spec, loss = readable_spec(run), run.manifest.config.get("loss")
    if spec is None:
        return None
    passes = passes_of(loss.get("objective") if isinstance(loss, dict) else None)
    of_pass, factor = count_multiplied(spec), OPERATIONS_PER_PARAMETER * passes
    return PerToken(source=factor * of_pass.source, target=factor * of_pass.target)


def readable_spec(checkpoint: Artifact) -> ModelSpec | None:
    """Return the model that a checkpoint states; None if it is unreadable."""
    try:
        return stated_spec(checkpoint)
    except (UserError, OSError, ValueError):
        return None


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a JSON value is a number that a float can hold; booleans are none."""
    is_plain = isinstance(value, int | float) and not isinstance(value, bool)
    return is_plain and abs(value) <= sys.float_info.max  # type: ignore[arg-type]


def is_count(value: object) -> TypeGuard[int]:
    """Return whether a JSON value is a number of things."""
    return isinstance(value, int) and is_number(value) and value >= 0
