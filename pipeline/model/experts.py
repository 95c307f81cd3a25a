"""The experts' weights, stacked over experts, and their arithmetic on contiguous slices of rows.

On CPU a loop over experts with one matrix product each is as fast as a dense layer on as many
rows; on CUDA one grouped matrix product per projection serves all experts.

Legend: E experts (on this rank), R rows sorted by expert, D model width, F hidden width.
"""

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.model.feed_forward import Activation, activate


class StackedLinear(nn.Module):
    """The weights of one linear layer of every expert: (E, out, in) and (E, out)."""

    def __init__(self, *, num_experts: int, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, out_features, in_features))
        self.bias = nn.Parameter(torch.empty(num_experts, out_features))


class Experts(nn.Module):
    """E feed-forwards of one shape; ``first_expert`` is the global id of the first one here."""

    def __init__(
        self,
        *,
        num_experts: int,
        first_expert: int,
        width: int,
        hidden_width: int,
        activation: Activation,
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.first_expert = first_expert
        self.activation: Activation = activation
        self.up = StackedLinear(
            num_experts=num_experts, in_features=width, out_features=hidden_width
        )
        self.down = StackedLinear(
            num_experts=num_experts, in_features=hidden_width, out_features=width
        )

    def forward(self, x_RD: Tensor, count_E: Sequence[int] | Tensor) -> Tensor:
        """Apply each expert to its slice of rows; ``count_E`` is a tensor on CUDA only."""
        weights = (self.up.weight, self.up.bias, self.down.weight, self.down.bias)
        if isinstance(count_E, Tensor):
            return grouped_feed_forward(x_RD, *weights, count_E, self.activation)
        output: Tensor = _LoopedFeedForward.apply(  # type: ignore[no-untyped-call]
            x_RD, *weights, tuple(count_E), self.activation
        )
        return output


def grouped_feed_forward(
    x_RD: Tensor,
    up_EFD: Tensor,
    up_bias_EF: Tensor,
    down_EDF: Tensor,
    down_bias_ED: Tensor,
    count_E: Tensor,
    activation: Activation,
) -> Tensor:
    """Two grouped matrix products; slice sizes stay on the device."""
    offsets_E = count_E.cumsum(0).to(torch.int32)
    expert_R = torch.repeat_interleave(count_E, output_size=x_RD.shape[0])
    hidden_RF = F.grouped_mm(x_RD, up_EFD.transpose(-1, -2), offs=offsets_E)
    hidden_RF = activate(hidden_RF + up_bias_EF.index_select(0, expert_R), activation)
    y_RD = F.grouped_mm(hidden_RF, down_EDF.transpose(-1, -2), offs=offsets_E)
    return y_RD + down_bias_ED.index_select(0, expert_R)


class _LoopedFeedForward(torch.autograd.Function):
    """The loop over experts, writing every result and gradient straight into stacked tensors.

    Plain autograd over slices of stacked weights would make and add one full-size gradient per
    expert. Experts without rows get a gradient of zeros (DeepSpeed wants one from every rank).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_RD: Tensor,
        up_EFD: Tensor,
        up_bias_EF: Tensor,
        down_EDF: Tensor,
        down_bias_ED: Tensor,
        count_E: tuple[int, ...],
        activation: Activation,
    ) -> Tensor:
        hidden_RF = x_RD.new_empty(x_RD.shape[0], up_EFD.shape[1])
        y_RD = torch.empty_like(x_RD)
        for expert, rows in _slices(count_E):
            torch.addmm(up_bias_EF[expert], x_RD[rows], up_EFD[expert].t(), out=hidden_RF[rows])
            active = _activate_(hidden_RF[rows], activation)
            torch.addmm(down_bias_ED[expert], active, down_EDF[expert].t(), out=y_RD[rows])
        ctx.save_for_backward(x_RD, hidden_RF, up_EFD, down_EDF)
        ctx.count_E, ctx.activation = count_E, activation
        return y_RD

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (dy_RD,) = gradients
        x_RD, hidden_RF, up_EFD, down_EDF = ctx.saved_tensors
        dy_RD = dy_RD.contiguous()
        dx_RD = torch.empty_like(x_RD)
        d_up, d_down = torch.empty_like(up_EFD), torch.empty_like(down_EDF)
        d_up_bias = up_EFD.new_zeros(up_EFD.shape[:2])
        d_down_bias = down_EDF.new_zeros(down_EDF.shape[:2])
        for expert, count in enumerate(ctx.count_E):
            if count == 0:
                d_up[expert].zero_()
                d_down[expert].zero_()
        for expert, rows in _slices(ctx.count_E):
            dy, hidden = dy_RD[rows], hidden_RF[rows]
            active = _activated(hidden, ctx.activation)
            torch.mm(dy.t(), active, out=d_down[expert])
            torch.sum(dy, 0, out=d_down_bias[expert])
            d_hidden = _activation_backward_(dy @ down_EDF[expert], hidden, ctx.activation)
            torch.mm(d_hidden.t(), x_RD[rows], out=d_up[expert])
            torch.sum(d_hidden, 0, out=d_up_bias[expert])
            torch.mm(d_hidden, up_EFD[expert], out=dx_RD[rows])
        return dx_RD, d_up, d_up_bias, d_down, d_down_bias, None, None


def _slices(count_E: Sequence[int]) -> list[tuple[int, slice]]:
    """(expert, its rows) for every expert that has any."""
    bounds = pairwise(accumulate(count_E, initial=0))
    return [(e, slice(start, stop)) for e, (start, stop) in enumerate(bounds) if stop > start]


def _activate_(hidden: Tensor, activation: Activation) -> Tensor:
    """What goes into the down projection; ReLU in place, since its own output serves backward."""
    return hidden.relu_() if activation == "relu" else F.gelu(hidden)


def _activated(hidden: Tensor, activation: Activation) -> Tensor:
    return hidden if activation == "relu" else F.gelu(hidden)


def _activation_backward_(d_active: Tensor, hidden: Tensor, activation: Activation) -> Tensor:
    match activation:
        case "relu":
            gradient: Tensor = torch.ops.aten.threshold_backward(d_active, hidden, 0)
            return gradient
        case "gelu":
            cdf = 0.5 * (1 + torch.erf(hidden / math.sqrt(2)))
            pdf = torch.exp(-0.5 * hidden * hidden) / math.sqrt(2 * math.pi)
            return d_active * (cdf + hidden * pdf)
