"""The experts' weights, stacked over experts, and their arithmetic on contiguous slices of rows.

On CPU every expert has products of its own; on CUDA one grouped matrix product per projection
serves all experts.

Legend: E experts (on this rank), R rows sorted by expert, D model width, F hidden width.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from pipeline.allocator import prefer_large_pages
from pipeline.model.feed_forward import Activation, activate
from pipeline.model.linear import product, product_into
from pipeline.model.threads import side_by_side

FEW_ROWS = 768
"""Experts with fewer are served side by side on CPU, others by all threads; as measured."""


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
        output: Tensor = _ExpertByExpert.apply(  # type: ignore[no-untyped-call]
            x_RD, *weights, tuple(count_E), self.activation
        )
        return output


def slice_length(count: int) -> int:
    """How many rows to give an expert with so many routes, on CPU.

    oneDNN generates code for every new shape, which takes as long as a small product, so that
    slices as long as experts happen to get would have it do so at every step. The next multiple of
    8, and of about a 48th of the count, means few shapes and few rows without use.
    """
    step = max(8, 1 << max(count.bit_length() - 6, 0))
    return -(-count // step) * step


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


class _ExpertByExpert(torch.autograd.Function):
    """Products per expert, the gradients of all experts written straight into stacked tensors.

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
        y_RD = torch.empty_like(x_RD)
        xs, ys = x_RD.split(count_E), y_RD.split(count_E)
        hiddens = [x_RD.new_empty(0, up_EFD.shape[1])] * len(count_E)

        def serve(e: int) -> None:
            hiddens[e] = product(xs[e], up_EFD[e], up_bias_EF[e], relu=activation == "relu")
            ys[e].copy_(product(_activated(hiddens[e], activation), down_EDF[e], down_bias_ED[e]))

        _serve_all(serve, count_E, weights=up_EFD[0].numel())
        ctx.save_for_backward(x_RD, up_EFD, down_EDF, *hiddens)
        ctx.count_E, ctx.activation = count_E, activation
        return y_RD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        dy_RD = gradients[0].contiguous()
        x_RD, up_EFD, down_EDF, *hiddens = ctx.saved_tensors
        count_E, activation = ctx.count_E, ctx.activation
        dx_RD = torch.empty_like(x_RD)
        d_up_EFD, d_down_EDF = _empty_like(up_EFD), _empty_like(down_EDF)
        d_up_bias_EF = up_EFD.new_zeros(up_EFD.shape[:2])
        d_down_bias_ED = down_EDF.new_zeros(down_EDF.shape[:2])
        for e, count in enumerate(count_E):
            if count == 0:
                d_up_EFD[e].zero_()
                d_down_EDF[e].zero_()
        xs, dxs, dys = x_RD.split(count_E), dx_RD.split(count_E), dy_RD.split(count_E)

        def serve(e: int) -> None:
            product_into(d_down_EDF[e], dys[e].t(), _activated(hiddens[e], activation).t())
            torch.sum(dys[e], 0, out=d_down_bias_ED[e])
            d_hidden = product(dys[e], down_EDF[e].t())
            d_hidden = _activation_backward_(d_hidden, hiddens[e], activation)
            product_into(d_up_EFD[e], d_hidden.t(), xs[e].t())
            torch.sum(d_hidden, 0, out=d_up_bias_EF[e])
            product_into(dxs[e], d_hidden, up_EFD[e].t())

        _serve_all(serve, count_E, weights=up_EFD[0].numel())
        return dx_RD, d_up_EFD, d_up_bias_EF, d_down_EDF, d_down_bias_ED, None, None


def _empty_like(weights: Tensor) -> Tensor:
    """Memory for a gradient."""
    gradient = torch.empty_like(weights)
    prefer_large_pages(gradient.data_ptr(), gradient.nbytes)
    return gradient


def _serve_all(serve: Callable[[int], None], count_E: Sequence[int], *, weights: int) -> None:
    """Call ``serve(e)`` for every expert with rows, for those with few of them side by side.

    With few rows a product takes its weights from memory faster than it makes use of them.
    """
    few_E = [count if count < FEW_ROWS else 0 for count in count_E]
    for e, count in enumerate(count_E):
        if count > few_E[e]:
            serve(e)
    side_by_side(serve, [count * weights for count in few_E])


def _activated(hidden: Tensor, activation: Activation) -> Tensor:
    """What goes into the down projection; of ReLU the up projection gives the result itself."""
    return hidden if activation == "relu" else F.gelu(hidden)


def _activation_backward_(d_active: Tensor, hidden: Tensor, activation: Activation) -> Tensor:
    """In place."""
    match activation:
        case "relu":
            torch.ops.aten.threshold_backward.grad_input(d_active, hidden, 0, grad_input=d_active)
        case "gelu":
            torch.ops.aten.gelu_backward.grad_input(d_active, hidden, grad_input=d_active)
    return d_active
