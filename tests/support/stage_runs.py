"""Run a stage in this process, and open what it makes."""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from pipeline.artifacts.artifact import Artifact, open_artifact
from pipeline.artifacts.raw_input import RawInput
from pipeline.config.recipe import Recipe
from pipeline.registry import STAGES
from pipeline.stage import StageCall


def run_stage(
    name: str,
    out_dir: Path,
    artifacts: Mapping[str, Artifact],
    recipe: Recipe | None = None,
    *,
    raw: RawInput | None = None,
    processes: int = 1,
    **sections: Any,
) -> Artifact:
    """Return what a stage makes of its inputs, by a recipe or by sections of one."""
    stage = STAGES[name]
    chosen = recipe or Recipe.model_validate({"name": "test", **sections})
    call = StageCall(
        stage=stage,
        recipe=chosen,
        artifacts=artifacts,
        raw={} if raw is None else {"raw": raw},
        out_dir=out_dir,
        records={},
        config=chosen.sections(stage.sections),
        processes=processes,
    )
    import_module(stage.module).run(call)
    return open_artifact(out_dir, kind=stage.makes)
