"""The experts' weights, stacked over experts, and their arithmetic on contiguous slices of rows.

On CPU every expert has products of its own; on CUDA one grouped matrix product per projection
serves all experts.

Legend: E experts (on this rank), R rows sorted by expert, D model width, F hidden width.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from pipeline.kernels import routing_loops as loops
from pipeline.kernels.allocator import prefer_large_pages
from pipeline.kernels.products import product, product_into
from pipeline.kernels.routing_loops import can_loop, numbers
from pipeline.kernels.threads import WORTH_OTHER_THREADS, side_by_side
from pipeline.model.feed_forward import Activation, activate
from pipeline.model.moe.dispatch import Dispatch

LOOP_COST = 16
"""Multiply-adds of a product in the time of one of a loop, as measured."""


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
            x_RD, None, *weights, tuple(count_E), None, self.activation
        )
        return output

    def serve(self, x_ND: Tensor, dispatch: Dispatch) -> Tensor:
        """Gather, apply and combine on CPU: every token's experts, weighted and summed, (N, D)."""
        weights = (self.up.weight, self.up.bias, self.down.weight, self.down.bias)
        rows_E = tuple(dispatch.rows_E.tolist())
        output: Tensor = _ExpertByExpert.apply(  # type: ignore[no-untyped-call]
            x_ND, dispatch.weight_NC.contiguous(), *weights, rows_E, dispatch, self.activation
        )
        return output


def slice_length(count: int) -> int:
    """How many rows to give an expert with so many routes, on CPU.

    oneDNN generates code for every new shape, which takes as long as a small product, so that
    slices as long as experts happen to get would have it do so at every step. The next multiple of
    a step means few shapes and few rows without use.
    """
    step = slice_step(count)
    return -(-count // step) * step


def slice_step(count: int) -> int:
    """8, or about a 48th of the count."""
    return max(8, 1 << max(count.bit_length() - 6, 0))


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

    The input is rows sorted by expert, or tokens with a dispatch: then every expert gathers its
    rows where it needs them, and the rows are combined. Plain autograd over slices of stacked
    weights would make and add one full-size gradient per expert. Experts without rows get a
    gradient of zeros (DeepSpeed wants one from every rank).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_NC: Tensor | None,
        up_EFD: Tensor,
        up_bias_EF: Tensor,
        down_EDF: Tensor,
        down_bias_ED: Tensor,
        rows_E: tuple[int, ...],
        dispatch: Dispatch | None,
        activation: Activation,
    ) -> Tensor:
        y_RD = x.new_empty(sum(rows_E), x.shape[1])
        slices = _slices(rows_E)
        hiddens = [x.new_empty(0, up_EFD.shape[1])] * len(rows_E)

        def serve(e: int) -> None:
            x_rows = _rows(x, slices[e], dispatch)
            hidden = product(x_rows, up_EFD[e], up_bias_EF[e], relu=activation == "relu")
            y_RD[slices[e]] = product(_activated(hidden, activation), down_EDF[e], down_bias_ED[e])
            hiddens[e] = hidden

        weights = up_EFD[0].numel()
        side_by_side(serve, [rows * weights for rows in rows_E])
        ctx.slices, ctx.dispatch, ctx.activation = slices, dispatch, activation
        if dispatch is None or weight_NC is None:
            ctx.save_for_backward(x, None, None, up_EFD, down_EDF, *hiddens)
            return y_RD
        ctx.save_for_backward(x, weight_NC, y_RD, up_EFD, down_EDF, *hiddens)
        return _combine_by_loop(y_RD, dispatch.row_NC, weight_NC)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        d_out = gradients[0].contiguous()
        x, weight_NC, y_RD, up_EFD, down_EDF, *hiddens = ctx.saved_tensors
        slices, dispatch, activation = ctx.slices, ctx.dispatch, ctx.activation
        dx_RD = x.new_empty(slices[-1].stop, x.shape[1])
        d_up_EFD, d_down_EDF = _empty_like(up_EFD), _empty_like(down_EDF)
        d_up_bias_EF = up_EFD.new_empty(up_EFD.shape[:2])
        d_down_bias_ED = down_EDF.new_empty(down_EDF.shape[:2])
        d_weights = d_up_EFD, d_up_bias_EF, d_down_EDF, d_down_bias_ED
        row_gradient: Callable[[slice, Tensor], Tensor] = partial(_sum_rows, d_out)
        if dispatch is not None:
            d_weight_NC = torch.zeros_like(weight_NC)
            row_gradient = _row_gradients(d_out, y_RD, dispatch, weight_NC, d_weight_NC)

        def serve(e: int) -> None:
            rows, hidden = slices[e], hiddens[e]
            if not len(hidden):
                for gradient in d_weights:
                    gradient[e].zero_()
                return
            dy = row_gradient(rows, d_down_bias_ED[e])
            product_into(d_down_EDF[e], dy.t(), _activated(hidden, activation))
            d_hidden = product(dy, down_EDF[e].t())
            _activation_backward_(d_hidden, hidden, d_up_bias_EF[e], activation)
            product_into(d_up_EFD[e], d_hidden.t(), _rows(x, rows, dispatch))
            product_into(dx_RD[rows], d_hidden, up_EFD[e])

        weights = up_EFD[0].numel()
        side_by_side(serve, [max(len(hidden), 1) * weights for hidden in hiddens])
        if dispatch is None:
            return dx_RD, None, *d_weights, None, None, None
        dx_ND = _combine_by_loop(dx_RD, dispatch.row_NC, None)
        return dx_ND, d_weight_NC, *d_weights, None, None, None


def _slices(rows_E: Sequence[int]) -> list[slice]:
    """Where each expert's rows are."""
    return [slice(start, stop) for start, stop in pairwise(accumulate(rows_E, initial=0))]


def _rows(x: Tensor, rows: slice, dispatch: Dispatch | None) -> Tensor:
    """An expert's rows, or the tokens they are made of."""
    return x[rows] if dispatch is None else x.index_select(0, dispatch.token_R[rows])


def _combine_by_loop(y_RD: Tensor, row_NC: Tensor, weight_NC: Tensor | None) -> Tensor:
    """(N, D): the rows of each token's kept routes, weighted if there are weights, and summed."""
    (num_tokens, num_choices), width = row_NC.shape, y_RD.shape[1]
    sum_ND = y_RD.new_empty(num_tokens, width)
    arrays = numbers(y_RD), numbers(row_NC), None if weight_NC is None else numbers(weight_NC)
    cost = num_tokens * num_choices * width * LOOP_COST
    parts = min(torch.get_num_threads(), 1 + cost // WORTH_OTHER_THREADS)
    bounds = [num_tokens * part // parts for part in range(parts + 1)]

    def sum_part(part: int) -> None:
        loops.sum_over_routes(*arrays, bounds[part], bounds[part + 1], numbers(sum_ND))

    if parts == 1:  # most models: not worth the planning
        sum_part(0)
    else:
        side_by_side(sum_part, [cost / parts] * parts)
    return sum_ND


def _row_gradients(
    d_sum_ND: Tensor, y_RD: Tensor, dispatch: Dispatch, weight_NC: Tensor, d_weight_NC: Tensor
) -> Callable[[slice, Tensor], Tensor]:
    """:func:`_combine_by_loop` backwards, one expert at a time; fills ``d_weight_NC``."""
    dy_RD = torch.empty_like(y_RD)
    d_sum, y, dy = numbers(d_sum_ND), numbers(y_RD), numbers(dy_RD)
    token, route = numbers(dispatch.token_R), numbers(dispatch.route_R)
    weight, d_weight = numbers(weight_NC.view(-1)), numbers(d_weight_NC.view(-1))

    def row_gradient(rows: slice, total_D: Tensor) -> Tensor:
        first, last, total = rows.start, rows.stop, numbers(total_D)
        loops.sum_over_routes_backward(
            d_sum, y, token, route, weight, first, last, dy, d_weight, total
        )
        return dy_RD[rows]

    return row_gradient


def _sum_rows(dy_RD: Tensor, rows: slice, total_D: Tensor) -> Tensor:
    """The gradients of rows as they came, and their sum."""
    torch.sum(dy_RD[rows], 0, out=total_D)
    return dy_RD[rows]


def _empty_like(weights: Tensor) -> Tensor:
    """Memory for a gradient."""
    gradient = torch.empty_like(weights)
    prefer_large_pages(gradient.data_ptr(), gradient.nbytes)
    return gradient


def _activated(hidden: Tensor, activation: Activation) -> Tensor:
    """What goes into the down projection; of ReLU the up projection gives the result itself."""
    return hidden if activation == "relu" else F.gelu(hidden)


def _activation_backward_(
    d_hidden_RF: Tensor, hidden_RF: Tensor, total_F: Tensor, activation: Activation
) -> None:
    """The gradient before the activation in the place of the one behind it; fills in its sum.

    A loop has one thread; an expert that has several is better served by operators.
    """
    if activation == "relu" and can_loop(hidden_RF) and torch.get_num_threads() == 1:
        loops.relu_backward(numbers(hidden_RF), numbers(d_hidden_RF), numbers(total_F))
        return
    given = d_hidden_RF, hidden_RF
    match activation:
        case "relu":
            torch.ops.aten.threshold_backward.grad_input(*given, 0, grad_input=d_hidden_RF)
        case "gelu":
            torch.ops.aten.gelu_backward.grad_input(*given, grad_input=d_hidden_RF)
    torch.sum(d_hidden_RF, 0, out=total_F)
