"""Data sheets of GPUs, and the peak by which training logs ``mfu``."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pipeline.config.ds_config import precision_of
from pipeline.errors import no_such


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
    if "pcie" in words or "nvl" in words:  # slower than the SXM modules of the same name
        return None
    sheet = next((sheet for name, sheet in DEVICES.items() if name in words), None)
    if sheet is None:
        return None
    return sheet.float32 if precision_of(ds_config) == "fp32" else sheet.half
