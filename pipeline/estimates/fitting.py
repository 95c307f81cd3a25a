"""Compare a plan with the memory of its jobs and with the disk, before a job has waited for days.

Weights and states are in float32 (``training/engine.py``): a state holds a parameter and its two
moments. The size of corpora and shards depends on the raw text and is not counted.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.config.recipe import Recipe, load_recipe
from pipeline.errors import ConfigError
from pipeline.estimates.memory import estimate
from pipeline.jobs.plan import ResolvedPlan, Task, num_bytes
from pipeline.jobs.site import Allocation
from pipeline.model.parameters import count_parameters
from pipeline.training.engine import merge_ds_config

_FEWER_BYTES = (
    "Use more processes, fewer per node, smaller micro-batches (batches.tokens) or "
    "training.recompute_layers; `mmnmt estimate` shows what takes it."
)


def refuse_unfit(task: Task, allocation: Allocation) -> None:
    """Raise ConfigError if a training stage does not fit its number of ranks or their memory."""
    if not {"model", "batches"} <= set(task.stage.sections):
        return
    recipe = load_recipe(task.recipe, task.overrides)
    try:
        merge_ds_config(task.config["ds_config"], recipe, world_size=allocation.tasks)
        _refuse_size(task, recipe, allocation)
    except ConfigError as error:
        raise ConfigError(f"Stage {task.name}: {error}") from error


def _refuse_size(task: Task, recipe: Recipe, allocation: Allocation) -> None:
    node = allocation.queue.node
    on_gpu = allocation.gpus_per_node > 0
    host = num_bytes(allocation.memory or node.memory)
    gpu = num_bytes(node.gpu_memory) if on_gpu else None
    if host is None and gpu is None:
        return
    needed = estimate(
        recipe,
        **sizes(recipe),
        processes=allocation.tasks,
        ds_config=task.config["ds_config"],
        device="cuda" if on_gpu else "cpu",
    )
    if gpu is not None and needed.device_bytes > gpu:
        raise ConfigError(
            f"a rank needs {_gib(needed.device_bytes)} at its peak, where a GPU has {_gib(gpu)}. "
            f"{_FEWER_BYTES}"
        )
    on_host = needed.host_bytes + (0 if on_gpu else needed.device_bytes)
    on_node = allocation.tasks_per_node * on_host
    if host is not None and on_node > host:
        raise ConfigError(
            f"{allocation.tasks_per_node} ranks need {_gib(on_node)} of a node's memory, where it "
            f"has {_gib(host)}. {_FEWER_BYTES}"
        )


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB"


WEIGHT_BYTES, STATE_BYTES = 4, 3 * 4
STAGES = ("pretrain", "upcycle", "finetune")
"""Stages that write a model of ``[model]``."""


@dataclass(frozen=True)
class DiskSpace:
    """Bytes of one stage: the most while it runs, and those that stay."""

    peak: int
    kept: int


def disk_space(recipe: Recipe, *, parameters: int, trains: bool) -> DiskSpace:
    """Return the space of a stage that makes a model."""
    # A new state is complete before the oldest is removed, and so are new weights.
    weights, state = WEIGHT_BYTES * parameters, STATE_BYTES * parameters
    if not trains:
        return DiskSpace(weights, weights)
    training = recipe.training
    states = max(training.keep_last, training.average_last)
    mean = weights if training.average_last else 0
    left = {"none": 0, "last": 1, "all": states}[recipe.saving.keep_states]
    return DiskSpace(peak=(states + 1) * state + 2 * weights + mean, kept=weights + left * state)


def plan_space(resolved: ResolvedPlan, recipes: Mapping[str, Recipe]) -> tuple[int, int]:
    """Return the most bytes that stages take one after another, and the bytes that stay.

    Args:
        resolved: the plan; finished stages are left out.
        recipes: stage of the plan → its recipe.
    """
    peak = kept = 0
    for task in resolved.tasks:
        if task.stage.name in STAGES and not task.is_made:
            recipe = recipes[task.name]
            count = count_parameters(
                recipe.model, output_size=recipe.tokenizer.output_ids, **sizes(recipe)
            )
            space = disk_space(recipe, parameters=count["total"], trains=task.stage.trains)
            peak = max(peak, space.peak - space.kept)
            kept += space.kept
    return kept + peak, kept


def sizes(recipe: Recipe) -> dict[str, int]:
    """Return sizes that the data decides, as far as the recipe tells, else their least."""
    moe, modules = recipe.model.moe, recipe.model.language_modules
    groups = 0
    if moe is not None and moe.decoder_router == "language_group":
        groups = moe.num_groups or 2
    languages = 1 if modules is None or modules.languages is None else len(modules.languages)
    return {
        "vocabulary_size": recipe.tokenizer.ids,
        "num_groups": groups,
        "num_languages": languages,
    }
