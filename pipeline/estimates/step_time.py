"""Forecast how long counted launches take on a GPU.

The GPU takes the sum of its kernels, the host the sum of its launches, and a step the longer:

- a matrix product: the waves of its tiles over the multiprocessors, with its inner dimension split
  if that is faster
- grouped products: their arithmetic, or reading their weights
- flash attention: the waves of its thread blocks
- any other kernel: its bytes, at the share of the bandwidth that its kind reaches

The shares and block times were set for an H100 and compared with passes measured on an H200
(``tests/estimates/test_step_time.py``). They are assumed to hold for an A100 as well.
"""

from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from math import ceil
from typing import Any

import torch

from pipeline.estimates.devices import DataSheet
from pipeline.estimates.launches import Counted, Launch

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
