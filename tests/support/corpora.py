"""Artifacts that tests write by hand, corpora of a few lines, and stages run on them."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from importlib import import_module
from pathlib import Path
from typing import Any

from pipeline.artifacts.artifact import (
    Artifact,
    ArtifactWriter,
    Kind,
    new_artifact,
    open_artifact,
)
from pipeline.artifacts.corpus import Split, text_name
from pipeline.config.recipe import Recipe
from pipeline.registry import STAGES
from pipeline.stage import StageCall

Texts = Mapping[Split, Mapping[str, Mapping[str, list[str]]]]


def writing(
    directory: Path, kind: Kind, stage: str = "test"
) -> AbstractContextManager[ArtifactWriter]:
    """Write an artifact without settings and inputs."""
    return new_artifact(directory, kind=kind, stage=stage, config={}, inputs={})


def make_corpus(directory: Path, texts: Texts) -> Artifact:
    """A corpus from split → pair → language → lines."""
    pairs: dict[str, dict[str, int]] = {}
    with writing(directory, "corpus", "clean") as writer:
        for split, by_pair in texts.items():
            for pair, sides in by_pair.items():
                for code, lines in sides.items():
                    text = "".join(f"{line}\n" for line in lines)
                    writer.path(text_name(split, pair, code)).write_bytes(text.encode())
                    pairs.setdefault(pair, {})[split] = len(lines)
        writer.statistics["pairs"] = pairs
    return open_artifact(directory, kind="corpus")


def run_stage(
    name: str, recipe: Recipe, artifacts: Mapping[str, Artifact], out_dir: Path, **options: Any
) -> Artifact:
    """Run a stage that reads no raw text, with options of ``StageCall``, and open its output."""
    stage = STAGES[name]
    call = StageCall(
        stage=stage,
        recipe=recipe,
        artifacts=artifacts,
        raw={},
        out_dir=out_dir,
        records={},
        config=recipe.sections(stage.sections),
        **options,
    )
    import_module(stage.module).run(call)
    return open_artifact(out_dir, kind=stage.makes)
