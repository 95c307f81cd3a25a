"""Lower bound of the time of a step on a GPU, from counted operators and the GPU's data sheet.

Every part of a step has launches, bytes and arithmetic. It takes at least as long as the slowest of
the three. Real kernels reach neither the full bandwidth nor the peak, so this is a lower bound, not
a forecast. It has not yet been compared with a GPU.

:func:`expert_exchanges` counts the exchanges of expert parallelism: rows of tokens go to the ranks
of their experts and back, and so do their gradients. These are four exchanges per MoE layer
(:mod:`pipeline.model.moe.expert_parallel`), and four per layer of language experts, where each row
goes to one expert. Layers that are recomputed send their rows to the experts and back once more.
The exchange of counts, one number per expert, is left out of the bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from pipeline.config.ds_config import precision_of
from pipeline.config.recipe import Recipe
from pipeline.errors import ConfigError, hint
from pipeline.estimates.operators import Counted, Launch, micro_batch
from pipeline.model.extension import extensions
from pipeline.model.moe.layer import has_experts
from pipeline.model.settings import ModelConfig

DeviceName = Literal["v100", "a100", "h100", "h200"]

LAUNCH_SECONDS = 5e-6
"""Host time of one operator: an assumption for PyTorch without CUDA graphs."""


@dataclass(frozen=True)
class Device:
    """A GPU as its data sheet describes it, without sparsity.

    Attributes:
        memory: bytes of memory, in GB as on the data sheet.
        bandwidth: memory bandwidth in bytes per second.
        half: operations per second in bfloat16, or in float16 on a GPU without bfloat16; a
            multiply-add counts as two.
        float32: operations per second in float32.
        nvlink: bytes per second that a GPU sends over NVLink, half of the data sheet's sum of both
            ways.
        has_bfloat16: whether it computes in bfloat16.
        capability: CUDA's number of its architecture, by which kernels choose.
        source: source of the numbers.
    """

    memory: float
    bandwidth: float
    half: float
    float32: float
    nvlink: float
    has_bfloat16: bool
    capability: tuple[int, int]
    source: str


DEVICES: dict[DeviceName, Device] = {
    "v100": Device(
        *(32e9, 0.9e12, 125e12, 15.7e12, 150e9),
        has_bfloat16=False,
        capability=(7, 0),
        source="NVIDIA V100 Tensor Core GPU data sheet, 32GB SXM2",
    ),
    "a100": Device(
        *(80e9, 2.039e12, 312e12, 19.5e12, 300e9),
        has_bfloat16=True,
        capability=(8, 0),
        source="NVIDIA A100 Tensor Core GPU data sheet, 80GB SXM",
    ),
    "h100": Device(
        *(80e9, 3.35e12, 989e12, 67e12, 450e9),
        has_bfloat16=True,
        capability=(9, 0),
        source="NVIDIA H100 Tensor Core GPU data sheet, SXM",
    ),
    "h200": Device(
        *(141e9, 4.8e12, 989e12, 67e12, 450e9),
        has_bfloat16=True,
        capability=(9, 0),
        source="NVIDIA H200 Tensor Core GPU data sheet, SXM",
    ),
}


def device_named(name: str) -> Device:
    """Return a GPU of :data:`DEVICES`.

    Raises:
        ConfigError: there is none of that name.
    """
    for known, device in DEVICES.items():
        if known == name:
            return device
    raise ConfigError(f"There is no device {name!r}{hint(name, [*DEVICES])}")


@dataclass(frozen=True)
class PartTime:
    """Work of a part of a step, and the least seconds of each kind of work."""

    launches: int
    bytes: int
    multiply_adds: int
    launch_seconds: float
    byte_seconds: float
    arithmetic_seconds: float

    @property
    def seconds(self) -> float:
        """Return the least seconds of the part."""
        return max(self.launch_seconds, self.byte_seconds, self.arithmetic_seconds)

    @property
    def bound(self) -> str:
        """Return the kind of work that takes longest."""
        by = {
            "launches": self.launch_seconds,
            "bandwidth": self.byte_seconds,
            "arithmetic": self.arithmetic_seconds,
        }
        return max(by, key=lambda name: by[name])


@dataclass(frozen=True)
class StepTime:
    """Least time of a step, by part (most launches first) and by place (in order).

    The sum over places is larger: a place with little to compute is bound by launches even if its
    part is not.
    """

    counted: Counted
    parts: dict[str, PartTime]
    places: dict[str, PartTime]

    @property
    def seconds(self) -> float:
        """Return the least seconds of the step."""
        return sum(part.seconds for part in self.parts.values())

    def table(self) -> list[list[str]]:
        """Return rows of part, launches, GB, 10¹² multiply-adds, least milliseconds and bound."""
        times = self.parts.values()
        whole = _numbers(
            sum(time.launches for time in times),
            sum(time.bytes for time in times),
            sum(time.multiply_adds for time in times),
            self.seconds,
        )
        return [*_rows(self.parts), ["in all", *whole, ""]]

    def table_by_place(self) -> list[list[str]]:
        """Return the same rows for every place of the model."""
        return _rows(self.places)

    def to_json(self) -> dict[str, Any]:
        """Return the times as a JSON object."""
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
    """Return the least time of every part and place of a step."""
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
        launch_seconds=len(launches) * LAUNCH_SECONDS,
        byte_seconds=transferred / device.bandwidth,
        arithmetic_seconds=2 * by_dtype[torch.bfloat16] / device.half
        + 2 * by_dtype[torch.float32] / device.float32,
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


ROW_EXCHANGES = 2
"""Exchanges of rows per layer and pass: to the experts and back."""
BYTES_PER_VALUE = 2
"""Size of a bfloat16."""


@dataclass(frozen=True)
class Exchanges:
    """The exchanges of one rank in a micro-batch.

    Attributes:
        size: number of ranks that share the experts.
        layers: number of MoE layers and layers of language experts, once for each pass.
        of_rows: number of exchanges of rows.
        bytes: bytes of the exchanged rows if no route is dropped, including rows that stay on the
            rank: one in ``size`` with even routing.
        host_copies: number of times that the host waits for numbers of rows.
    """

    size: int
    layers: int
    of_rows: int
    bytes: int
    host_copies: int

    @property
    def sent_bytes(self) -> int:
        """Return the bytes that go to other ranks with even routing."""
        return self.bytes * (self.size - 1) // self.size


def expert_exchanges(recipe: Recipe) -> Exchanges:
    """Count the exchanges of a recipe; none if its expert-parallel size is 1.

    Fuse distillation passes a batch twice. Its shared route has no experts of languages. All layers
    of language experts of a side send the same rows, so that the host waits for their counts once.
    Recomputed layers have the counts already.
    """
    model, size = recipe.model, recipe.training.expert_parallel_size
    batch = micro_batch(recipe.batches.tokens)
    tokens = {"encoder": len(batch.source_N), "decoder": len(batch.target_N)}
    depth = {"encoder": model.encoder_layers, "decoder": model.decoder_layers}
    passes = 2 if recipe.loss.objective == "fuse_distillation" else 1
    layers = rows = host_copies = 0
    for side, count in depth.items():
        of_tokens = [layer for layer in range(count) if has_experts(model, layer)]
        of_languages = [layer for layer in range(count) if _has_language_experts(model, layer)]
        routed = passes * len(of_tokens)
        layers += routed + len(of_languages)
        top_k = 0 if model.moe is None else model.moe.top_k
        rows += (routed * top_k + len(of_languages)) * tokens[side]
        host_copies += routed + bool(of_languages)
    if not layers or size == 1:
        return Exchanges(size=1, layers=0, of_rows=0, bytes=0, host_copies=0)
    each = ROW_EXCHANGES * (3 if recipe.training.recompute_layers else 2)
    return Exchanges(
        size=size,
        layers=layers,
        of_rows=each * layers,
        bytes=each * rows * model.width * BYTES_PER_VALUE,
        host_copies=host_copies,
    )


def _has_language_experts(model: ModelConfig, layer: int) -> bool:
    """Return whether every row of a layer goes to the rank of its language."""
    return any(extension.exchanges_rows(model, layer) for extension in extensions())


def peak_operations(ds_config: Mapping[str, Any]) -> float | None:
    """Return the peak of this rank's GPU, in operations per second, in a ds_config's precision.

    None on a CPU, and for GPUs that are not in the table.
    """
    sheet = _data_sheet_of(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    if sheet is None:
        return None
    return sheet.float32 if precision_of(ds_config) == "fp32" else sheet.half


def _data_sheet_of(name: str) -> Device | None:
    """Return the data sheet of a GPU by CUDA's name of it; None if it is not in the table.

    The sheets are of SXM modules. PCIe cards of the same name are slower.
    """
    words = name.lower().replace("-", " ").split()
    if "pcie" in words or "nvl" in words:
        return None
    return next((sheet for known, sheet in DEVICES.items() if known in words), None)
