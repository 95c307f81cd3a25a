"""The position-wise feed-forward: up, activation, down."""

from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.kernels.products import Linear

Activation = Literal["relu", "gelu"]


def activate(x: Tensor, activation: Activation) -> Tensor:
    """ReLU, or the exact (erf) GELU."""
    match activation:
        case "relu":
            return F.relu(x)
        case "gelu":
            return F.gelu(x)


class FeedForward(nn.Module):
    """down(activation(up(x))), on packed (N, D) states."""

    def __init__(self, *, width: int, hidden_width: int, activation: Activation) -> None:
        super().__init__()
        self.activation: Activation = activation
        self.up = Linear(width, hidden_width)
        self.down = Linear(hidden_width, width)

    def forward(self, x_ND: Tensor) -> Tensor:
        projected: Tensor = self.down(activate(self.up(x_ND), self.activation))
        return projected
