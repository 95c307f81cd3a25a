"""Tensors as the compiled loops read them.

Importing the loops imports numba, which takes a third of a second. Kernels of the model import them
where they run, so that who only counts parameters or operators waits for none of it; who reads
training data imports them at once, long before the first update.
"""

from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor


def can_loop(x_ND: Tensor) -> bool:
    """Whether hidden states are where, and of a dtype that, the loops can read."""
    return x_ND.device.type == "cpu" and x_ND.dtype in (torch.float32, torch.bfloat16)


def numbers(tensor: Tensor) -> npt.NDArray[Any]:
    """The memory of a contiguous tensor, bfloat16 as 16-bit integers."""
    tensor = tensor.detach() if tensor.requires_grad else tensor
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    array: npt.NDArray[Any] = tensor.numpy()
    return array
