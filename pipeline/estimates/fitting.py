"""Refuse a training stage that its job cannot hold, before the job has waited for days."""

from pipeline.config.recipe import Recipe, load_recipe
from pipeline.errors import ConfigError
from pipeline.estimates.disk import sizes
from pipeline.estimates.memory import estimate
from pipeline.jobs.plan import Task, num_bytes
from pipeline.jobs.site import Allocation
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
    host = num_bytes(allocation.memory) or num_bytes(node.memory)  # --mem=0: all of a node's
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
