"""Forecast an update on several GPUs, and choose how many, at which expert-parallel size.

Nodes have 8 GPUs, with NVLink inside and an adapter per GPU between nodes, as in NVIDIA's DGX. An
exchange takes a call and its bytes over the slower link. Routing is even, nothing overlaps, and
reading data, validation and saving are left out.

Legend: n ranks exchange; a rank that gathers or reduces S bytes sends (n − 1)/n of them.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch

from pipeline.batching.world_sizes import check_ranks, expert_parallel_size, expert_parallel_sizes
from pipeline.config.recipe import Recipe
from pipeline.errors import ConfigError
from pipeline.estimates.devices import Device
from pipeline.estimates.memory import ZeroSettings, estimate, optimizer_groups
from pipeline.estimates.passes import count_training
from pipeline.estimates.step_time import COPY_SHARE, DEFAULT_SHARE, StepTime, step_time
from pipeline.kernels.products import meta_stands_for
from pipeline.model.building import shape_of_model
from pipeline.model.spec import placeholder_spec

GPUS_PER_NODE = 8
LINK_SHARE = 0.77
"""Share of a link's bandwidth that an exchange reaches: an assumption."""
CALL_SECONDS = 20e-6
"""Time of an exchange besides its bytes: an assumption."""
MEMORY_SHARE = 0.9
"""Share of a GPU's memory that a run can use. CUDA, NCCL and fragmentation take the rest."""
SUMMED_BYTES = 14
"""Bytes per parameter and pass to add a 16-bit gradient to a float32 sum, copies included."""
UPDATED_BYTES = 42
"""Bytes per parameter of a rank's share and update: norm, AdamW, 16-bit copy, sum set to zero."""


@dataclass(frozen=True)
class Choice:
    """A way to train a recipe: number of GPUs, their memory, and the time of an update.

    Attributes:
        ranks: number of GPUs.
        expert_parallel_size: ranks that share one copy of the experts.
        bytes: peak memory of a rank.
        time: seconds of an update by term.
    """

    ranks: int
    expert_parallel_size: int
    bytes: int
    time: dict[str, float]

    @property
    def seconds(self) -> float:
        """Return the seconds of an update."""
        return sum(self.time.values())

    def gpu_hours(self, updates: int) -> float:
        """Return the hours of all GPUs together that a number of updates takes."""
        return self.ranks * self.seconds * updates / 3600

    def to_json(self) -> dict[str, Any]:
        """Return the choice as a JSON object."""
        return {**asdict(self), "seconds": self.seconds}


def choices(
    recipe: Recipe, device: Device, *, ds_config: Mapping[str, Any], most: int, **sizes: int
) -> tuple[list[Choice], dict[int, str]]:
    """Return the fastest choice of every power of two of GPUs up to ``most``.

    Also return the numbers of GPUs that cannot serve, with the reason. ``sizes`` are the sizes of
    the model that the data decides.
    """

    @cache
    def pass_time(size: int, per_pass: int, dtype: torch.dtype) -> StepTime:
        with meta_stands_for(device.capability):
            spread = at_size(recipe, size)
            return step_time(
                count_training(spread, **sizes, per_pass=per_pass, dtype=dtype), device
            )

    found: list[Choice] = []
    refused: dict[int, str] = {}
    usable = MEMORY_SHARE * device.memory
    for ranks in (2**power for power in range(most.bit_length())):
        try:
            check_ranks(recipe, ranks=ranks)
        except ConfigError as error:
            refused[ranks] = str(error)
            continue
        fitting = []
        least = float("inf")
        for size in _sizes(recipe, ranks):
            spread = at_size(recipe, size)
            needed = estimate(spread, **sizes, processes=ranks, ds_config=ds_config).device_bytes
            least = min(least, needed)
            if needed <= usable:
                zero = ZeroSettings.of(spread, ds_config, processes=ranks)
                step = pass_time(
                    size, zero.per_pass, torch.float32 if zero.value == 4 else torch.bfloat16
                )
                time = _update_time(spread, zero, step, device=device, ranks=ranks, sizes=sizes)
                fitting.append(Choice(ranks, size, needed, time))
        if fitting:
            found.append(min(fitting, key=lambda choice: choice.seconds))
        else:
            refused[ranks] = (
                f"a GPU would need at least {least / 2**30:.1f} GiB, and {usable / 2**30:.1f} GiB "
                "are usable. Use more GPUs, ZeRO 2 or smaller batches.tokens."
            )
    return found, refused


def _sizes(recipe: Recipe, ranks: int) -> list[int]:
    if recipe.model.moe is None:
        return [expert_parallel_size(recipe, ranks=ranks)]
    return expert_parallel_sizes(recipe, ranks=ranks)


def at_size(recipe: Recipe, size: int) -> Recipe:
    """Return a recipe at another expert-parallel size."""
    training = recipe.training.model_copy(update={"expert_parallel_size": size})
    return recipe.model_copy(update={"training": training})


def _update_time(
    recipe: Recipe,
    zero: ZeroSettings,
    step: StepTime,
    *,
    device: Device,
    ranks: int,
    sizes: Mapping[str, int],
) -> dict[str, float]:
    size = recipe.training.expert_parallel_size
    output_size = recipe.tokenizer.output_ids
    model = shape_of_model(placeholder_spec(recipe.model, **sizes, output_size=output_size))
    groups = optimizer_groups(model, recipe, processes=ranks)
    values, share = (sum(sum_of) for sum_of in zip(*((g.values, g.share) for g in groups)))
    moved = zero.passes * SUMMED_BYTES * values + UPDATED_BYTES * share
    reductions, width = (zero.passes, zero.sent) if zero.stage == 2 else (1, zero.accumulated)
    strides = [1 if index == 0 else size for index in range(len(groups))]

    def exchanged(bytes_per_value: int) -> float:
        return sum(
            gather_seconds(device, bytes_per_value * group.values, ranks=group.ranks, stride=stride)
            for group, stride in zip(groups, strides, strict=True)
        )

    rows = sum(all_to_all_seconds(device, sent, ranks=size) for sent in step.counted.exchanged)
    return {
        "passes": zero.passes * step.seconds,
        "all-to-all": zero.passes * rows,
        "optimizer": moved / (COPY_SHARE * DEFAULT_SHARE * device.bandwidth),
        "reduce": reductions * exchanged(width),
        "gather": exchanged(zero.value),
    }


def gather_seconds(device: Device, size: float, *, ranks: int, stride: int = 1) -> float:
    """Return the time to gather S bytes from n ranks, or to reduce and scatter them.

    Args:
        device: the GPU.
        size: S.
        ranks: n.
        stride: distance of the ranks; the groups in between use the adapters at the same time.
    """
    if ranks == 1:
        return 0.0
    per_node = max(GPUS_PER_NODE // stride, 1)
    between = min(device.nvlink, per_node * device.adapter)
    link = device.nvlink if ranks <= per_node else between
    return CALL_SECONDS + (ranks - 1) / ranks * size / (LINK_SHARE * link)


def all_to_all_seconds(device: Device, size: float, *, ranks: int) -> float:
    """Return the time in which every of n consecutive ranks sends S bytes, evenly to all."""
    if ranks == 1:
        return 0.0
    near = min(ranks, GPUS_PER_NODE)
    within = size * (near - 1) / ranks / device.nvlink
    between = size * (ranks - near) / ranks / device.adapter
    return CALL_SECONDS + max(within, between) / LINK_SHARE
