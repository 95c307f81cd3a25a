"""Forecast an update on several GPUs, and choose the expert-parallel size.

Nodes have 8 GPUs, with NVLink inside and an adapter per GPU to other nodes, as in NVIDIA's DGX. An
exchange takes a call and its bytes over the slower link. Routing is even, nothing overlaps, and
reading data, validation and saving are left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from pipeline.batching.world_sizes import check_ranks, expert_parallel_size, expert_parallel_sizes
from pipeline.config.recipe import Recipe
from pipeline.errors import ConfigError
from pipeline.estimates.activations import FLOAT32
from pipeline.estimates.devices import DataSheet
from pipeline.estimates.memory import ZeroSettings, estimate, optimizer_groups, shape_of
from pipeline.estimates.passes import count_training
from pipeline.estimates.step_time import COPY_SHARE, DEFAULT_SHARE, StepTime, step_time
from pipeline.kernels.products import meta_stands_for

GPUS_PER_NODE = 8
LINK_SHARE, CALL_SECONDS = 0.77, 20e-6
"""Share of a link's bandwidth that an exchange reaches, and its time besides: assumptions."""
MEMORY_SHARE = 0.9
"""Share of a GPU's memory that a run can use. CUDA, NCCL and fragmentation take the rest."""
SUMMED_BYTES = 14
"""Bytes per parameter and pass to add a 16-bit gradient to a float32 sum, copies included."""
UPDATED_BYTES = 42
"""Bytes per parameter of a rank's share and update: norm, AdamW, 16-bit copy, sum set to zero."""


def choices(
    recipe: Recipe, device: DataSheet, *, ds_config: Mapping[str, Any], most: int, **sizes: int
) -> tuple[list[dict[str, Any]], dict[int, str]]:
    """Return the fastest choice that fits into memory for 1, 2, 4, … GPUs up to ``most``.

    Also return the numbers of GPUs that cannot serve, with the reason. A choice has ``ranks``,
    ``expert_parallel_size``, ``bytes`` of a rank, ``seconds`` of an update, and its ``time`` by
    term. ``sizes`` are the sizes of the model that the data decides.
    """
    forecast = _Forecast(recipe, device, ds_config, sizes)
    found: list[dict[str, Any]] = []
    refused: dict[int, str] = {}
    for ranks in (2**power for power in range(most.bit_length())):
        try:
            found.append(forecast.best(ranks))
        except ConfigError as error:
            refused[ranks] = str(error)
    return found, refused


def at_size(recipe: Recipe, size: int) -> Recipe:
    """Return a recipe at another expert-parallel size."""
    training = recipe.training.model_copy(update={"expert_parallel_size": size})
    return recipe.model_copy(update={"training": training})


@dataclass(frozen=True, eq=False)
class _Forecast:
    recipe: Recipe
    device: DataSheet
    ds_config: Mapping[str, Any]
    sizes: Mapping[str, int]

    def best(self, ranks: int) -> dict[str, Any]:
        """Return the fastest choice for a number of GPUs; ConfigError if none can serve."""
        check_ranks(self.recipe, ranks=ranks)
        usable = MEMORY_SHARE * self.device.memory
        expert_sizes = [expert_parallel_size(self.recipe, ranks=ranks)]
        if self.recipe.model.moe is not None:
            expert_sizes = expert_parallel_sizes(self.recipe, ranks=ranks)
        given: dict[str, Any] = {"processes": ranks, "ds_config": self.ds_config, **self.sizes}
        needed = {
            size: estimate(at_size(self.recipe, size), **given).device_bytes
            for size in expert_sizes
        }
        if min(needed.values()) > usable:
            raise ConfigError(
                f"A GPU would need at least {min(needed.values()) / 2**30:.1f} GiB, and "
                f"{usable / 2**30:.1f} GiB are usable. Use more GPUs, or smaller batches.tokens."
            )
        times = {size: self.update_time(ranks, size) for size in needed if needed[size] <= usable}
        fastest = min(times, key=lambda size: sum(times[size].values()))
        return {
            "ranks": ranks,
            "expert_parallel_size": fastest,
            "bytes": needed[fastest],
            "seconds": sum(times[fastest].values()),
            "time": times[fastest],
        }

    @cache  # noqa: B019  # lives as long as one command
    def _pass(self, size: int, per_pass: int, value: int) -> StepTime:
        dtype = torch.float32 if value == FLOAT32 else torch.bfloat16
        spread = at_size(self.recipe, size)
        with meta_stands_for(self.device.capability):
            counted = count_training(spread, per_pass=per_pass, dtype=dtype, **self.sizes)
        return step_time(counted, self.device)

    def update_time(self, ranks: int, size: int) -> dict[str, float]:
        """Return the seconds of an update by term."""
        spread = at_size(self.recipe, size)
        zero = ZeroSettings.of(spread, self.ds_config, processes=ranks)
        step = self._pass(size, zero.per_pass, zero.value)
        groups = optimizer_groups(shape_of(spread, **self.sizes), spread, processes=ranks)
        summed = zero.passes * SUMMED_BYTES * sum(group.values for group in groups)
        moved = summed + UPDATED_BYTES * sum(group.share for group in groups)
        reduced = zero.passes * zero.sent if zero.stage == 2 else zero.accumulated
        strides = [1] + (len(groups) - 1) * [size]  # the groups of experts come after the first
        reduce, gather = (
            sum(
                gather_seconds(self.device, width * each.values, ranks=each.ranks, stride=stride)
                for each, stride in zip(groups, strides, strict=True)
            )
            for width in (reduced, zero.value)
        )
        sent = step.counted.exchanged
        rows = sum(all_to_all_seconds(self.device, each, ranks=size) for each in sent)
        again, rows_again = (4 / 3, 3 / 2) if spread.training.recompute_layers else (1, 1)
        return {
            "passes": zero.passes * again * step.seconds,
            "all-to-all": zero.passes * rows_again * rows,
            "optimizer": moved / (COPY_SHARE * DEFAULT_SHARE * self.device.bandwidth),
            "reduce": reduce,
            "gather": gather,
        }


def gather_seconds(device: DataSheet, size: float, *, ranks: int, stride: int = 1) -> float:
    """Return the time to gather ``size`` bytes from ranks, or to reduce and scatter them.

    ``stride`` is the distance of the ranks: the groups in between use their adapters as well.
    """
    if ranks == 1:
        return 0.0
    per_node = max(GPUS_PER_NODE // stride, 1)
    between = min(device.nvlink, per_node * device.adapter)
    link = device.nvlink if ranks <= per_node else between
    return CALL_SECONDS + (ranks - 1) / ranks * size / (LINK_SHARE * link)


def all_to_all_seconds(device: DataSheet, size: float, *, ranks: int) -> float:
    """Return the time in which each of consecutive ranks sends ``size`` bytes, evenly to all."""
    if ranks == 1:
        return 0.0
    near = min(ranks, GPUS_PER_NODE)
    within = size * (near - 1) / ranks / device.nvlink
    between = size * (ranks - near) / ranks / device.adapter
    return CALL_SECONDS + max(within, between) / LINK_SHARE
