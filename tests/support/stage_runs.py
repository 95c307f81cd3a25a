"""Calls of stages in this process."""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

from pipeline.artifacts.artifact import Artifact, open_artifact
from pipeline.artifacts.raw_input import RawInput
from pipeline.config.recipe import Recipe
from pipeline.distributed import workers
from pipeline.registry import STAGES
from pipeline.stage import StageCall, stage_config


def make_call(
    stage_name: str,
    recipe: Recipe,
    artifacts: Mapping[str, Artifact],
    out_dir: Path,
    *,
    raw: RawInput | None = None,
    processes: int = 1,
    overwrite: bool = False,
    ds_config: str = "cpu_fp32",
) -> StageCall:
    stage = STAGES[stage_name]
    return StageCall(
        stage=stage,
        recipe=recipe,
        artifacts=artifacts,
        raw={} if raw is None else {"raw": raw},
        out_dir=out_dir,
        records={name: artifact.as_input for name, artifact in artifacts.items()},
        config=stage_config(stage, recipe=recipe, ds_config=ds_config),
        processes=processes,
        overwrite=overwrite,
    )


def run_stage(
    name: str,
    out_dir: Path,
    artifacts: Mapping[str, Artifact],
    recipe: Recipe | None = None,
    *,
    raw: RawInput | None = None,
    processes: int = 1,
    overwrite: bool = False,
    **sections: Any,
) -> Artifact:
    """Return what a stage makes of its inputs, by a recipe or by sections of one."""
    chosen = recipe or Recipe.model_validate({"name": "test", **sections})
    options: dict[str, Any] = {"raw": raw, "processes": processes, "overwrite": overwrite}
    call = make_call(name, chosen, artifacts, out_dir, **options)
    run = import_module(call.stage.module).run
    if processes == 1:
        run(call)
    else:
        from support.forked import forking  # loads torch

        # Spawned workers would take seconds to import the code.
        with mock.patch.object(workers, "get_context", return_value=forking()):
            run(call)
    return open_artifact(out_dir, kind=call.stage.makes)
