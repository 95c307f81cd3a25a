"""How long a step takes on a GPU at least, by what was counted and what its vendor says of it.

Every part of a step has launches, bytes and arithmetic; it takes as long as the one of them that
takes longest, were the other two free. Real kernels reach neither the full bandwidth nor the peak,
so that this is a bound, not a forecast: not yet compared with a GPU.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from pipeline.estimates.operators import Counted, Launch

DeviceName = Literal["h100", "h200", "a100"]
DEVICE_NAMES: tuple[DeviceName, ...] = get_args(DeviceName)

LAUNCH_SECONDS = 5e-6
"""Host time of one operator: an assumption for PyTorch without graphs; no data sheet has it."""


@dataclass(frozen=True)
class Device:
    """A card as its data sheet describes it; arithmetic without sparsity.

    Attributes:
        bandwidth: bytes per second of its memory.
        bfloat16, float32: operations per second, a multiply-add being two.
        source: where the numbers are from.
        launch_seconds: of one operator.
        overlaps: whether launches, transfers and arithmetic go on side by side; else they are
            added up.
    """

    bandwidth: float
    bfloat16: float
    float32: float
    source: str
    launch_seconds: float = LAUNCH_SECONDS
    overlaps: bool = True


DEVICES: dict[DeviceName, Device] = {
    "h100": Device(3.35e12, 989e12, 67e12, "NVIDIA H100 Tensor Core GPU data sheet, SXM"),
    "h200": Device(4.8e12, 989e12, 67e12, "NVIDIA H200 Tensor Core GPU data sheet, SXM"),
    "a100": Device(2.039e12, 312e12, 19.5e12, "NVIDIA A100 Tensor Core GPU data sheet, 80GB SXM"),
}


@dataclass(frozen=True)
class PartTime:
    """What a part of a step takes, and how long each of it takes alone, in seconds."""

    launches: int
    bytes: int
    multiply_adds: int
    launch_seconds: float
    byte_seconds: float
    arithmetic_seconds: float
    overlaps: bool = True

    @property
    def seconds(self) -> float:
        each = self.launch_seconds, self.byte_seconds, self.arithmetic_seconds
        return max(each) if self.overlaps else sum(each)

    @property
    def bound(self) -> str:
        """What decides."""
        by = {
            "launches": self.launch_seconds,
            "bandwidth": self.byte_seconds,
            "arithmetic": self.arithmetic_seconds,
        }
        return max(by, key=lambda name: by[name])


@dataclass(frozen=True)
class StepTime:
    """A step, part by part, those with most launches first, and place by place in their order.

    The sum over places is larger: one that has little to compute is bound by launches even where
    its part is not.
    """

    counted: Counted
    parts: dict[str, PartTime]
    places: dict[str, PartTime]

    @property
    def seconds(self) -> float:
        return sum(part.seconds for part in self.parts.values())

    def table(self) -> list[list[str]]:
        """Part, launches, GB, multiply-adds in 10¹², least milliseconds, what decides."""
        times = self.parts.values()
        whole = _numbers(
            sum(time.launches for time in times),
            sum(time.bytes for time in times),
            sum(time.multiply_adds for time in times),
            self.seconds,
        )
        return [*_rows(self.parts), ["in all", *whole, ""]]

    def table_by_place(self) -> list[list[str]]:
        """The same of every place of the model."""
        return _rows(self.places)

    def to_json(self) -> dict[str, Any]:
        return {
            "launches": len(self.counted.launches),
            "seconds_at_least": self.seconds,
            "kinds": self.counted.kinds,
            "places": {place: time.launches for place, time in self.places.items()},
            "host_copies": [f"{copy.operator} in {copy.part}" for copy in self.counted.host_copies],
            "parts": {
                part: {
                    "launches": time.launches,
                    "bytes": time.bytes,
                    "multiply_adds": time.multiply_adds,
                    "seconds_at_least": time.seconds,
                    "bound": time.bound,
                }
                for part, time in self.parts.items()
            },
        }


def least_time(counted: Counted, device: Device) -> StepTime:
    """The bound of every part and place of a step."""
    parts, places = (
        {name: _part_time(launches, device) for name, launches in group.items()}
        for group in (counted.parts, counted.places)
    )
    return StepTime(counted, parts, places)


def _part_time(launches: Sequence[Launch], device: Device) -> PartTime:
    by_dtype = {torch.bfloat16: 0, torch.float32: 0}
    for launch in launches:
        if launch.dtype is not None:
            by_dtype[launch.dtype] += launch.multiply_adds
    transferred = sum(launch.bytes for launch in launches)
    return PartTime(
        launches=len(launches),
        bytes=transferred,
        multiply_adds=sum(by_dtype.values()),
        launch_seconds=len(launches) * device.launch_seconds,
        byte_seconds=transferred / device.bandwidth,
        arithmetic_seconds=2 * by_dtype[torch.bfloat16] / device.bfloat16
        + 2 * by_dtype[torch.float32] / device.float32,
        overlaps=device.overlaps,
    )


def _rows(times: Mapping[str, PartTime]) -> list[list[str]]:
    return [
        [name, *_numbers(time.launches, time.bytes, time.multiply_adds, time.seconds), time.bound]
        for name, time in times.items()
    ]


def _numbers(launches: int, transferred: int, multiply_adds: int, seconds: float) -> list[str]:
    return [
        f"{launches:,}",
        f"{transferred / 1e9:.2f}",
        f"{multiply_adds / 1e12:.3f}",
        f"{1000 * seconds:.2f}",
    ]
