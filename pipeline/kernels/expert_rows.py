"""Tokens gathered into the rows of their experts, and rows summed over every token's routes.

Legend: N tokens, C choices per token, R rows, D model width.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.kernels.placement import Placement


def gather(x_ND: Tensor, placement: Placement) -> Tensor:
    """The token of every row, (R, D), in the order of experts."""
    rows_RD: Tensor = _Gather.apply(x_ND, placement)  # type: ignore[no-untyped-call]
    return rows_RD


def combine(y_RD: Tensor, weight_NC: Tensor, placement: Placement) -> Tensor:
    """Weighted sum of each token's expert outputs, (N, D); dropped routes contribute 0."""
    y_ND: Tensor = _Combine.apply(  # type: ignore[no-untyped-call]
        y_RD, weight_NC, placement
    )
    return y_ND


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


def _sum_over_routes(y_RD: Tensor, placement: Placement, *, weight_NC: Tensor | None) -> Tensor:
    """(N, D): the rows of each token's kept routes, weighted and summed in one pass."""
    if placement.lacks_rows:
        y_RD = torch.cat([y_RD, y_RD.new_zeros(1, y_RD.shape[1])])
    if weight_NC is not None:
        weight_NC = weight_NC.to(y_RD.dtype)
    return F.embedding_bag(placement.row_NC, y_RD, per_sample_weights=weight_NC, mode="sum")
