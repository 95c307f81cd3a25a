"""Which device a rank computes on: a GPU of its own, or the CPU.

Launchers differ in what they show: all GPUs of a node to each of its ranks, or to every rank its
own, which then is number 0 (``--gpus-per-task=1``). DeepSpeed takes ``LOCAL_RANK`` for the number
of the device, so that it is told what we found (:func:`~pipeline.training.engine.connect`).

Not yet run on a GPU.
"""

import socket
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipeline.distributed.collectives import gather_objects
from pipeline.errors import ConfigError

if TYPE_CHECKING:
    import torch


def device_index(local_rank: int, *, visible: int) -> int | None:
    """Number of a rank's GPU among those it sees; None: there is none."""
    return local_rank % visible if visible else None


def local_device(local_rank: int) -> "torch.device":
    """The device of this rank."""
    import torch

    index = device_index(local_rank, visible=torch.cuda.device_count())
    return torch.device("cpu") if index is None else torch.device("cuda", index)


def take_device(local_rank: int) -> None:
    """Make this rank's device the one it computes on; all ranks call this, before NCCL does.

    Raises:
        ConfigError: on all ranks, if two of them would have one GPU, which NCCL refuses, or if
            some have a GPU and others none.
    """
    import torch

    device = local_device(local_rank)
    name = "the CPU"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        name = str(torch.cuda.get_device_properties(device).uuid)
    refuse_shared(gather_objects((socket.gethostname(), name, device.type)))


def refuse_shared(found: Sequence[tuple[str, str, str]]) -> None:
    """Of every rank: node, device and type of device.

    Raises:
        ConfigError: see :func:`take_device`.
    """
    types = Counter(kind for _, _, kind in found)
    if len(types) > 1:
        raise ConfigError(
            f"{types['cuda']} processes see a GPU and {types['cpu']} see none: start as many as "
            "there are GPUs on every node, or hide the GPUs (CUDA_VISIBLE_DEVICES=) to compute on "
            "CPU."
        )
    for (node, name, kind), count in Counter(found).items():
        if kind == "cuda" and count > 1:
            raise ConfigError(
                f"{count} processes on {node} would share one GPU ({name}): start one per GPU "
                "(--processes, --ntasks-per-node), or hide the GPUs (CUDA_VISIBLE_DEVICES=) to "
                "compute on CPU."
            )
