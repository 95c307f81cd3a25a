"""Forecast how long counted launches take on a GPU, and an update on several.

The GPU takes the sum of its kernels, the host the sum of its launches, and a step the longer:

- a matrix product: the waves of its tiles over the multiprocessors, with its inner dimension split
  if that is faster
- grouped products: their arithmetic, or reading their weights
- flash attention: the waves of its thread blocks
- any other kernel: its bytes, at the share of the bandwidth that its kind reaches

The shares and block times were set for an H100 and compared with passes measured on an H200
(``tests/estimates/test_step_time.py``). They are assumed to hold for an A100 as well.

Nodes have 8 GPUs, with NVLink inside and an adapter per GPU to other nodes, as in NVIDIA's DGX. An
exchange takes a call and its bytes over the slower link. Routing is even, nothing overlaps, and
reading data, validation and saving are left out. :func:`choices` compares expert-parallel sizes.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import ceil
from typing import Any

import torch

from pipeline.config.ds_config import (
    PER_PASS,
    asks_for_largest_passes,
    check_ranks,
    expert_parallel_size,
    expert_parallel_sizes,
)
from pipeline.config.recipe import Recipe
from pipeline.errors import ConfigError
from pipeline.estimates.activations import FLOAT32
from pipeline.estimates.devices import DataSheet, most_per_pass
from pipeline.estimates.launches import Counted, Launch, count_training
from pipeline.estimates.memory import ZeroSettings, estimate, optimizer_groups, shape_of
from pipeline.kernels.products import meta_stands_for
from pipeline.terminal import size_text

LAUNCH_SECONDS = 31.9e-3 / 1471
"""Host time of an operator: a pass of dense_opus100 took 31.9 ms of it on an H200's machine."""
PRODUCT_SHARE = 0.81
"""Share of the peak that a large product holds."""
GROUPED_SHARE, GROUPED_ROWS = 0.7, 170
"""Share of the peak that a grouped product of many rows per matrix holds, and rows for half of it.

They were set from products of 4 and 32 matrices, with 256 to 8,192 rows of each, on an H100.
"""
COPY_SHARE = 0.9
"""Share of the bandwidth that a large copy reaches; the following are shares of this one."""
DEFAULT_SHARE = 0.85
SHARES = {"sum": 0.35, "norm": 0.45, "softmax": 0.7, "dropout": 0.75, "gather or scatter": 0.6}
TILES = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.86), (64, 256, 0.75), (64, 64, 0.6))
"""Rows and columns of a tile of a product, and its speed relative to the fastest."""
SPLITS = (1, 2, 4, 8)
LEAST_INNER = 128
"""Inner length below which a product is not split further."""
START_SECONDS = {"product": 4e-6, "grouped product": 6e-6}
"""Time of a kernel on the GPU besides its work."""
DEFAULT_START, LEAST_SECONDS = 0.7e-6, 1.8e-6
SPLIT_SECONDS, SPLIT_SHARE = 2e-6, 0.55
"""Time of adding the parts of a split product besides its bytes, and its share of the bandwidth."""
FORWARD_BLOCK, BACKWARD_BLOCK, ATTENTION_START = 5e-6, 9.5e-6, 3e-6
"""Time of a thread block of flash attention, of which two run at once forward, and its start."""
GRADIENT_ENDS, ENDS_BLOCKS = 16e-6, 1024
"""Time of the two kernels around attention's backward pass, for up to this many blocks."""


def kernel_seconds(launch: Launch, device: DataSheet) -> float:
    """Return the forecast time of one launch on the GPU."""
    share = SHARES.get(launch.kind, DEFAULT_SHARE)
    start = START_SECONDS.get(launch.kind, DEFAULT_START)
    moving = launch.bytes / (COPY_SHARE * device.bandwidth * share)
    peak = device.half if launch.dtype.itemsize < torch.float32.itemsize else device.float32
    if launch.kind == "attention":
        return _attention_seconds(launch, device)
    if launch.kind == "grouped product":
        share = _grouped_share(launch)
        return max(2 * launch.multiply_adds / (share * peak), moving) + start
    if launch.product is None:
        return max(moving, LEAST_SECONDS) + start
    return max(_product_seconds(*launch.product, peak=peak, device=device), moving)


def _grouped_share(launch: Launch) -> float:
    """Return the share of the peak by the rows of a matrix; weights' gradients sum over them."""
    assert launch.product is not None
    height, _, inner = launch.product
    rows = max(height, inner) / max(launch.blocks, 1)
    return GROUPED_SHARE * rows / (rows + GROUPED_ROWS)


@cache
def _product_seconds(
    rows: int, columns: int, inner: int, *, peak: float, device: DataSheet
) -> float:
    """Return the time of a product by its fastest tile and split."""
    of_one = PRODUCT_SHARE * peak / device.multiprocessors
    least = float("inf")
    for height, width, speed in TILES:
        tiles = ceil(rows / height) * ceil(columns / width)
        for split in SPLITS:
            if split > 1 and inner // split < LEAST_INNER:
                break
            waves = ceil(tiles * split / device.multiprocessors)
            seconds = waves * 2 * height * width * (inner / split) / (of_one * speed)
            if split > 1:  # the parts are float32 sums, which another kernel adds
                written = rows * columns * torch.float32.itemsize * split
                seconds += SPLIT_SECONDS + 2 * written / (SPLIT_SHARE * device.bandwidth)
            least = min(least, seconds)
    return least + START_SECONDS["product"]


def _attention_seconds(launch: Launch, device: DataSheet) -> float:
    if launch.operator.endswith("backward"):
        ends = GRADIENT_ENDS * max(1.0, launch.blocks / ENDS_BLOCKS)
        return ceil(launch.blocks / device.multiprocessors) * BACKWARD_BLOCK + ends
    return ceil(launch.blocks / (2 * device.multiprocessors)) * FORWARD_BLOCK + ATTENTION_START


@dataclass(frozen=True)
class StepTime:
    """Forecast time of a step."""

    counted: Counted
    kernels: dict[str, float]
    """Kind of kernel → seconds on the GPU."""

    @property
    def kernel_seconds(self) -> float:
        """Return the time of all kernels."""
        return sum(self.kernels.values())

    @property
    def host_seconds(self) -> float:
        """Return the time in which the host launches them."""
        return LAUNCH_SECONDS * (1 if self.counted.is_graph else len(self.counted.launches))

    @property
    def seconds(self) -> float:
        """Return the longer of both."""
        return max(self.kernel_seconds, self.host_seconds)

    def to_json(self) -> dict[str, Any]:
        """Return the step as a JSON object."""
        return {
            "launches": len(self.counted.launches),
            "kinds": self.counted.kinds,
            "host_waits": list(self.counted.host_waits),
            "exchanged_bytes": sum(self.counted.exchanged),
            "kernel_seconds": self.kernel_seconds,
            "host_seconds": self.host_seconds,
            "seconds": self.seconds,
        }


def step_time(counted: Counted, device: DataSheet) -> StepTime:
    """Return the forecast time of a step on a GPU."""
    kernels: dict[str, float] = defaultdict(float)
    for launch in counted.launches:
        kernels[launch.kind] += kernel_seconds(launch, device)
    return StepTime(counted, dict(kernels))


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
        given: dict[str, Any] = {"processes": ranks, **self.sizes}
        needed = {
            size: estimate(
                at_size(self.recipe, size), ds_config=self._on_device(ranks, size), **given
            ).device_bytes
            for size in expert_sizes
        }
        if min(needed.values()) > usable:
            raise ConfigError(
                f"A GPU would need at least {size_text(min(needed.values()))}, and "
                f"{size_text(usable)} are usable. Use more GPUs, or smaller batches.tokens."
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
    def _on_device(self, ranks: int, size: int) -> Mapping[str, Any]:
        """Return the ds_config with the passes that training would choose on these GPUs."""
        if not asks_for_largest_passes(self.ds_config):
            return self.ds_config
        spread, memory = at_size(self.recipe, size), int(self.device.memory)
        spec = shape_of(spread, **self.sizes).spec
        number = most_per_pass(spec, spread, self.ds_config, ranks=ranks, memory=memory)
        return {**self.ds_config, PER_PASS: number}

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
        zero = ZeroSettings.of(spread, self._on_device(ranks, size), processes=ranks)
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
