"""Tokens gathered into the rows of their experts, and rows summed over every token's routes.

Legend: N tokens, C choices per token, R rows, D model width.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from pipeline.kernels.placement import Placement


def gather(x_ND: Tensor, placement: Placement) -> Tensor:
    """The token of every row, (R, D), in the order of experts."""
    function = _Gather if placement.slices is None else _GatherAll
    rows_RD: Tensor = function.apply(x_ND, placement)  # type: ignore[no-untyped-call]
    return rows_RD


def combine(y_RD: Tensor, weight_NC: Tensor, placement: Placement) -> Tensor:
    """Weighted sum of each token's expert outputs, (N, D); dropped routes contribute 0."""
    function = _Combine if placement.slices is None else _CombineAll
    y_ND: Tensor = function.apply(y_RD, weight_NC, placement)  # type: ignore[no-untyped-call]
    return y_ND


def beside_float32(x_ND: Tensor) -> tuple[Tensor, Tensor]:
    """States for the experts, and the same in float32 for their router.

    On other devices than the CPU both gradients are added in one operator, and in float32.
    """
    if x_ND.device.type == "cpu" or x_ND.dtype == torch.float32:
        return x_ND, x_ND
    both: tuple[Tensor, Tensor] = _BesideFloat32.apply(x_ND)  # type: ignore[no-untyped-call]
    return both


class _BesideFloat32(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor) -> tuple[Tensor, Tensor]:
        ctx.dtype = x_ND.dtype
        ctx.set_materialize_grads(False)
        return x_ND.view_as(x_ND), x_ND.float()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Tensor | None:
        d_x_ND, d_float_ND = gradients
        if d_x_ND is None or d_float_ND is None:
            return d_float_ND.to(ctx.dtype) if d_x_ND is None and d_float_ND is not None else d_x_ND
        return torch.add(d_x_ND, d_float_ND, out=torch.empty_like(d_x_ND))


class _Gather(torch.autograd.Function):
    """Its gradient sums over a token's routes, instead of adding row by row into zeros."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, placement: Placement) -> Tensor:
        ctx.placement = placement
        return x_ND.index_select(0, placement.token_R)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (d_rows_RD,) = gradients
        return _sum_over_routes(d_rows_RD, ctx.placement, weight_NC=None), None


class _Combine(torch.autograd.Function):
    """Its gradient is gathered like the tokens."""

    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, weight_NC: Tensor, placement: Placement) -> Tensor:
        ctx.placement = placement
        ctx.save_for_backward(y_RD, weight_NC)
        return _sum_over_routes(y_RD, placement, weight_NC=weight_NC)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (d_y_ND,) = gradients
        y_RD, weight_NC = ctx.saved_tensors
        route_R = ctx.placement.route_R
        d_rows_RD = d_y_ND.index_select(0, ctx.placement.token_R)
        d_weight_R = (d_rows_RD * y_RD).sum(-1, dtype=weight_NC.dtype)
        if len(route_R) == weight_NC.numel() and not ctx.placement.lacks_rows:
            weight_R = weight_NC.flatten()[route_R]
            d_weight_NC = d_weight_R[ctx.placement.row_NC]
        else:  # one place more than there are routes, where all spare rows meet
            weight_Q = F.pad(weight_NC.flatten(), (0, 1))
            weight_R = weight_Q[route_R]
            d_weight_Q = torch.zeros_like(weight_Q)
            d_weight_Q[route_R] = d_weight_R
            d_weight_NC = d_weight_Q[:-1].view_as(weight_NC)
        d_rows_RD *= weight_R[:, None].to(y_RD.dtype)
        return d_rows_RD, d_weight_NC, None


class _GatherAll(torch.autograd.Function):
    """:class:`_Gather` where all routes have a row, placed on the device; in few operators."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, placement: Placement) -> Tensor:
        ctx.placement = placement
        return x_ND.index_select(0, placement.token_R)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        row_Q = ctx.placement.row_NC.view(-1)
        first_N = ctx.placement.numbers.first_N
        return F.embedding_bag(row_Q, gradients[0], first_N, mode="sum"), None


class _CombineAll(torch.autograd.Function):
    """:class:`_Combine` where all routes have a row, placed on the device; in few operators."""

    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, weight_NC: Tensor, placement: Placement) -> Tensor:
        row_Q, numbers = placement.row_NC.view(-1), placement.numbers
        assert numbers is not None, "of a placement by sorting"
        weight_Q = weight_NC.to(y_RD.dtype).view(-1)
        ctx.placement, ctx.weight_dtype = placement, weight_NC.dtype
        ctx.save_for_backward(y_RD, weight_Q)
        return F.embedding_bag(
            row_Q, y_RD, numbers.first_N, mode="sum", per_sample_weights=weight_Q
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (d_y_ND,) = gradients
        y_RD, weight_Q = ctx.saved_tensors
        placement, numbers = ctx.placement, ctx.placement.numbers
        weight_R = weight_Q.index_select(0, placement.route_R)
        d_rows_RD = F.embedding_bag(  # one row each
            placement.token_R, d_y_ND, numbers.number_Q, mode="sum", per_sample_weights=weight_R
        )
        d_weight_Q = _dots(
            d_y_ND,
            y_RD,
            placement.row_NC.view(-1),
            token_Q=numbers.token_Q,
            first_N=numbers.first_N,
        )
        d_weight_NC = d_weight_Q.view_as(placement.row_NC).to(ctx.weight_dtype)
        return d_rows_RD, d_weight_NC, None


def _dots(
    d_y_ND: Tensor, y_RD: Tensor, row_Q: Tensor, *, token_Q: Tensor, first_N: Tensor
) -> Tensor:
    """Of every route the product of its token's gradient and its row: that of its weight."""
    d_weight_Q: Tensor = torch.ops.aten._embedding_bag_per_sample_weights_backward(
        d_y_ND, y_RD, row_Q, first_N, token_Q, 0
    )
    return d_weight_Q


def _sum_over_routes(y_RD: Tensor, placement: Placement, *, weight_NC: Tensor | None) -> Tensor:
    """(N, D): the rows of each token's kept routes, weighted and summed in one pass."""
    if placement.lacks_rows:
        y_RD = torch.cat([y_RD, y_RD.new_zeros(1, y_RD.shape[1])])
    if weight_NC is not None:
        weight_NC = weight_NC.to(y_RD.dtype)
    return F.embedding_bag(placement.row_NC, y_RD, per_sample_weights=weight_NC, mode="sum")
