"""GPUs by their data sheets, and what fits: passes of training on a GPU, stages in a job.

Only what computes memory loads DeepSpeed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pipeline.config.ds_config import (
    MAX_PER_PASS,
    PER_PASS,
    asks_for_largest_passes,
    even_per_pass,
    passes_per_update,
    precision_of,
)
from pipeline.config.recipe import Recipe, load_recipe
from pipeline.distributed.world import gather_objects, world_size
from pipeline.errors import ConfigError, no_such
from pipeline.estimates.disk import sizes
from pipeline.jobs.plan import Task, num_bytes
from pipeline.jobs.site import Allocation
from pipeline.model.spec import ModelSpec
from pipeline.stage import StageCall
from pipeline.terminal import size_text


@dataclass(frozen=True)
class DataSheet:
    """A GPU by its data sheet, without sparsity; bytes, and bytes or operations per second."""

    memory: float
    bandwidth: float  # of memory
    half: float  # operations in bfloat16; a multiply-add counts as two
    float32: float  # operations in float32
    multiprocessors: int
    nvlink: float  # that a GPU sends to others of its node
    adapter: float  # that a GPU sends to other nodes, in NVIDIA's DGX
    capability: tuple[int, int]  # CUDA's number of its architecture, by which kernels choose


DEVICES = {  # by NVIDIA's data sheets of SXM modules: A100 of 80 GB, H100, H200
    "a100": DataSheet(80e9, 2.039e12, 312e12, 19.5e12, 108, 300e9, 25e9, (8, 0)),
    "h100": DataSheet(80e9, 3.35e12, 989e12, 67e12, 132, 450e9, 50e9, (9, 0)),
    "h200": DataSheet(141e9, 4.8e12, 989e12, 67e12, 132, 450e9, 50e9, (9, 0)),
}


def device_named(name: str) -> DataSheet:
    """Return a GPU of :data:`DEVICES`; ConfigError if it has none of that name."""
    if name not in DEVICES:
        raise no_such("There is no device", name, [*DEVICES, "cpu"])
    return DEVICES[name]


def peak_operations(ds_config: Mapping[str, Any]) -> float | None:
    """Return the peak of this rank's GPU, in operations per second, in a ds_config's precision.

    None on a CPU, and for GPUs that are not in the table.
    """
    if not torch.cuda.is_available():
        return None
    words = torch.cuda.get_device_name().lower().replace("-", " ").split()
    if {"pcie", "nvl", "mig"} & {*words}:  # slower than the whole SXM modules of the same name
        return None
    sheet = next((sheet for name, sheet in DEVICES.items() if name in words), None)
    if sheet is None:
        return None
    return sheet.float32 if precision_of(ds_config) == "fp32" else sheet.half


SHARE_OF_MEMORY = 0.85
"""Share of a GPU's memory that a pass may need by the estimate, which leaves fragments out."""

ENOUGH_TOKENS, OF_WIDTH = 32_768, 1024
"""Tokens of a side with which a model of this width fills a GPU. Others need as many products of
(tokens × width) with (width × width) in proportion to the square of their width."""


def micro_batches_that_fit(call: StageCall, spec: ModelSpec) -> int | None:
    """Return the micro-batches of a pass on this machine's GPUs; all ranks call this.

    None if the ds_config names a number, and on CPU.
    """
    if not (torch.cuda.is_available() and asks_for_largest_passes(call.ds_config)):
        return None
    card = torch.cuda.get_device_properties(torch.cuda.current_device())
    memory = min(gather_objects(card.total_memory))
    return most_per_pass(spec, call.recipe, call.ds_config, ranks=world_size(), memory=memory)


def most_per_pass(
    spec: ModelSpec, recipe: Recipe, ds_config: Mapping[str, Any], *, ranks: int, memory: int
) -> int:
    """Return the most micro-batches of a pass that fit and that fill a GPU; at least 1.

    Passes of an update are of the same size, up to one micro-batch. ``memory`` is the number of
    bytes of the GPU with the least memory.
    """
    from pipeline.estimates.memory import estimate

    turns = passes_per_update(recipe, ranks=ranks)
    enough = ENOUGH_TOKENS * OF_WIDTH**2 // spec.model.width**2
    number = min(max(enough // recipe.batches.tokens, 1), turns, MAX_PER_PASS)
    while (number := even_per_pass(turns, most=number)) > 1:
        needed = estimate(
            recipe,
            processes=ranks,
            ds_config={**ds_config, PER_PASS: number},
            vocabulary_size=spec.vocabulary_size,
            num_groups=spec.num_groups,
            num_languages=len(spec.languages),
        )
        if needed.device_bytes <= SHARE_OF_MEMORY * memory:
            break
        number -= 1
    return number


# Jobs of a cluster

_FEWER_BYTES = (
    "Use more processes, fewer per node, smaller micro-batches (batches.tokens) or "
    "training.recompute_layers; `mmnmt estimate` shows what takes it."
)


def refuse_unfit(task: Task, allocation: Allocation) -> None:
    """Raise ConfigError if a training stage does not fit its number of ranks or their memory.

    It is asked at submission, before a job has waited for days.
    """
    if not {"model", "batches"} <= set(task.stage.sections):
        return
    from pipeline.training.engine import merge_ds_config

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
    from pipeline.estimates.memory import estimate

    needed = estimate(
        recipe,
        **sizes(recipe),
        processes=allocation.tasks,
        ds_config=task.config["ds_config"],
        device="cuda" if on_gpu else "cpu",
    )
    if gpu is not None and needed.device_bytes > gpu:
        raise ConfigError(
            f"a rank needs {size_text(needed.device_bytes)} at its peak, where a GPU has "
            f"{size_text(gpu)}. {_FEWER_BYTES}"
        )
    on_host = needed.host_bytes + (0 if on_gpu else needed.device_bytes)
    on_node = allocation.tasks_per_node * on_host
    if host is not None and on_node > host:
        raise ConfigError(
            f"{allocation.tasks_per_node} ranks need {size_text(on_node)} of a node's memory, "
            f"where it has {size_text(host)}. {_FEWER_BYTES}"
        )
