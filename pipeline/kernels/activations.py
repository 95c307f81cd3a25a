"""Activations of feed-forwards, and their gradients in place."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.kernels.loop_arrays import can_loop, numbers

Activation = Literal["relu", "gelu"]


def activate(x: Tensor, activation: Activation) -> Tensor:
    """ReLU, or the exact (erf) GELU."""
    match activation:
        case "relu":
            return F.relu(x)
        case "gelu":
            return F.gelu(x)


def activate_product(product: Tensor, activation: Activation) -> Tensor:
    """Of the result of a product that rectifies on the way where the activation is ReLU."""
    match activation:
        case "relu":
            return product
        case "gelu":
            return F.gelu(product)


def activation_backward_(
    d_hidden_RF: Tensor, hidden_RF: Tensor, total_F: Tensor, activation: Activation
) -> None:
    """The gradient before the activation in the place of the one behind it; fills in its sum.

    ``hidden_RF`` is what :func:`activate_product` was given. A loop has one thread; who has
    several is better served by operators.
    """
    given = d_hidden_RF, hidden_RF
    match activation:
        case "relu" if can_loop(hidden_RF) and torch.get_num_threads() == 1:
            from pipeline.kernels import routing_loops as loops

            loops.relu_backward(numbers(hidden_RF), numbers(d_hidden_RF), numbers(total_F))
            return
        case "relu":
            torch.ops.aten.threshold_backward.grad_input(*given, 0, grad_input=d_hidden_RF)
        case "gelu":
            torch.ops.aten.gelu_backward.grad_input(*given, grad_input=d_hidden_RF)
    torch.sum(d_hidden_RF, 0, out=total_F)
