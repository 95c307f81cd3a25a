"""GPUs as their data sheets describe them, and the peak by which training logs ``mfu``."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pipeline.config.ds_config import precision_of
from pipeline.errors import ConfigError, hint


@dataclass(frozen=True)
class Device:
    """A GPU, without sparsity.

    Attributes:
        memory: bytes of memory.
        bandwidth: memory bandwidth in bytes per second.
        half: operations per second in bfloat16; a multiply-add counts as two.
        float32: operations per second in float32.
        multiprocessors: number of streaming multiprocessors.
        nvlink: bytes per second that a GPU sends to others of its node.
        adapter: bytes per second that a GPU sends to other nodes, in NVIDIA's DGX.
        capability: CUDA's number of its architecture, by which kernels choose.
    """

    memory: float
    bandwidth: float
    half: float
    float32: float
    multiprocessors: int
    nvlink: float
    adapter: float
    capability: tuple[int, int]


DEVICES = {  # by NVIDIA's data sheets of SXM modules: A100 of 80 GB, H100, H200
    "a100": Device(80e9, 2.039e12, 312e12, 19.5e12, 108, 300e9, 25e9, (8, 0)),
    "h100": Device(80e9, 3.35e12, 989e12, 67e12, 132, 450e9, 50e9, (9, 0)),
    "h200": Device(141e9, 4.8e12, 989e12, 67e12, 132, 450e9, 50e9, (9, 0)),
}


def device_named(name: str) -> Device:
    """Return a GPU of :data:`DEVICES`.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in DEVICES:
        raise ConfigError(f"There is no device {name!r}{hint(name, [*DEVICES, 'cpu'])}")
    return DEVICES[name]


def peak_operations(ds_config: Mapping[str, Any]) -> float | None:
    """Return the peak of this rank's GPU, in operations per second, in a ds_config's precision.

    None on a CPU, and for GPUs that are not in the table.
    """
    sheet = data_sheet_of(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    if sheet is None:
        return None
    return sheet.float32 if precision_of(ds_config) == "fp32" else sheet.half


def data_sheet_of(name: str) -> Device | None:
    """Return the data sheet of a GPU by CUDA's name of it; None if it is not in the table.

    The sheets are of SXM modules. PCIe cards of the same name are slower.
    """
    words = name.lower().replace("-", " ").split()
    if "pcie" in words or "nvl" in words:
        return None
    return next((sheet for known, sheet in DEVICES.items() if known in words), None)
