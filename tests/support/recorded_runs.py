"""Manifests of training runs, of what was made from them and of translations, without weights."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from pipeline.artifacts.artifact import Artifact, Kind, new_artifact, open_artifact
from pipeline.artifacts.artifact import to_json as as_json
from pipeline.model.spec import ModelSpec
from support.tiny_models import tiny_spec

TOKENS_PER_UPDATE = 100
SOURCE_TOKENS_PER_UPDATE = 150


def artifact(
    path: Path,
    kind: Kind,
    stage: str,
    inputs: Mapping[str, Artifact] | None = None,
    *,
    files: Mapping[str, str] | None = None,
    statistics: Mapping[str, object] | None = None,
    wall_seconds: float = 1.0,
    summary: Sequence[str] = (),
    config: Mapping[str, object] | None = None,
) -> Artifact:
    """An artifact with these files; its settings hold its folder's name, so that no two agree."""
    with new_artifact(
        path,
        kind=kind,
        stage=stage,
        config={"name": path.name, **(config or {})},
        inputs={name: one.as_input for name, one in (inputs or {}).items()},
        wall_seconds=wall_seconds,
    ) as writer:
        for name, text in (files or {}).items():
            writer.path(name).write_text(text, encoding="utf-8")
        writer.statistics.update(statistics or {})
        writer.summary += summary
    return open_artifact(path, kind=kind)


def metrics(
    losses: Sequence[float | None], *, tokens: bool = True, source_tokens: bool = True
) -> str:
    """A line of training and one of validation per update, two seconds each."""
    lines: list[dict[str, object]] = []
    for update, loss in enumerate(losses, start=1):
        entry: dict[str, object] = {"update": update, "seconds": 2.0 * update, "loss": loss}
        counted: dict[str, object] = {}
        if tokens:
            counted["target_tokens"] = TOKENS_PER_UPDATE
        if tokens and source_tokens:
            counted["source_tokens"] = SOURCE_TOKENS_PER_UPDATE
        lines.append({"kind": "train", "balance": 1.0, **counted, **entry})
        lines.append({"kind": "validation", "resources": {"high": loss, "low": None}, **entry})
    lines.append({"kind": "routing", "update": 1})
    return "".join(json.dumps(line) + "\n" for line in lines)


def training_run(
    path: Path,
    losses: Sequence[float | None],
    inputs: Mapping[str, Artifact] | None = None,
    *,
    stage: str = "pretrain",
    spec: ModelSpec | None = None,
    tokens: bool = True,
    source_tokens: bool = True,
    wall_seconds: float = 60.0,
    config: Mapping[str, object] | None = None,
) -> Artifact:
    """The checkpoint of a run of so many updates, its best one the first."""
    return artifact(
        path,
        "checkpoint",
        stage,
        inputs,
        files={
            "metrics.jsonl": metrics(losses, tokens=tokens, source_tokens=source_tokens),
            "model.json": as_json((spec or tiny_spec()).model_dump(mode="json")),
        },
        statistics={"update": 1, "updates": len(losses), "perplexity": 2.0},
        wall_seconds=wall_seconds,
        config=config,
    )


def translated(path: Path, checkpoint: Artifact | None = None) -> Artifact:
    """Translations, by a checkpoint or without any."""
    return artifact(
        path, "translations", "translate", {} if checkpoint is None else {"checkpoint": checkpoint}
    )
