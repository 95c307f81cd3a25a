"""From routes to contiguous work: which token goes into which row of which expert.

A *route* is one (token, choice) pair. Routes are sorted by expert, so that every expert works on
a contiguous slice of rows. Dropless keeps every route. The capacity form keeps at most C routes
per expert: first choices before second choices, by position or by descending top probability.

An expert's rows may end with spare ones, which belong to no route, for the sake of products in few
shapes (:func:`~pipeline.model.experts.slice_length`). A spare row repeats a token, and nothing
reads its result.

Legend: N tokens, C choices per token, E experts, R rows: kept routes and spare rows.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from operator import sub
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.model.router import Routing

SliceLength = Callable[[int], int]
"""Kept routes of an expert → rows for it, at least as many."""


@dataclass(frozen=True)
class Dispatch:
    """The plan of one MoE layer for one micro-batch.

    Attributes:
        token_R: token of each row, rows in order of their expert.
        row_NC: row of each (token, choice); R where it was dropped.
        weight_NC: combine weights; 0 where dropped.
        rows_E: rows per expert, spare ones included.
        count_E: kept routes per expert.
        routed_E: routes per expert before capacity.
        drops: whether a route may have been dropped (host knowledge, no synchronisation).
    """

    token_R: Tensor
    row_NC: Tensor
    weight_NC: Tensor
    rows_E: Tensor
    count_E: Tensor
    routed_E: Tensor
    drops: bool


def dispatch_dropless(
    routing: Routing, *, num_experts: int, slice_length: SliceLength | None = None
) -> Dispatch:
    """Every route is kept."""
    expert_NC = routing.expert_NC
    order = expert_NC.flatten().argsort(stable=True)
    count_E = torch.bincount(expert_NC.flatten(), minlength=num_experts)
    layout = _Layout.of(order, count_E, expert_NC, slice_length=slice_length)
    return Dispatch(
        token_R=layout.token_R,
        row_NC=layout.row_NC,
        weight_NC=routing.weight_NC,
        rows_E=layout.rows_E,
        count_E=count_E,
        routed_E=count_E,
        drops=False,
    )


def expert_capacity(num_tokens: int, *, num_experts: int, top_k: int, factor: float) -> int:
    """C = ceil(factor · top_k · tokens / experts) slots per expert (mmnmt.md §2)."""
    return math.ceil(round(factor * top_k * num_tokens / num_experts, 6))


def dispatch_with_capacity(
    routing: Routing,
    *,
    num_experts: int,
    capacity: int,
    prioritized: bool,
    renormalize: bool = True,
    slice_length: SliceLength | None = None,
) -> Dispatch:
    """At most ``capacity`` routes per expert.

    With ``renormalize`` a token that loses one choice gives the others all its weight.

    Slots go to first choices before second ones, and within a choice by position or, with
    ``prioritized``, by descending top probability (ties by position).
    """
    expert_NC = routing.expert_NC
    num_tokens, num_choices = expert_NC.shape
    device = expert_NC.device
    if prioritized:
        top_N = routing.probability_NE.detach().amax(-1)
        token_order_N = top_N.argsort(descending=True, stable=True)
    else:
        token_order_N = torch.arange(num_tokens, device=device)
    choice_C = torch.arange(num_choices, device=device)
    queue = (token_order_N[None, :] * num_choices + choice_C[:, None]).flatten()
    expert_of_queue = expert_NC.flatten()[queue]
    by_expert = expert_of_queue.argsort(stable=True)
    routed_E = torch.bincount(expert_of_queue, minlength=num_experts)
    start_E = routed_E.cumsum(0) - routed_E
    sorted_expert = expert_of_queue[by_expert]
    slot = torch.arange(len(queue), device=device) - start_E[sorted_expert]
    kept_routes = queue[by_expert][slot < capacity]

    count_E = routed_E.clamp_max(capacity)
    layout = _Layout.of(kept_routes, count_E, expert_NC, slice_length=slice_length)
    kept_weight_NC = routing.weight_NC * (layout.row_NC < len(layout.token_R))
    if renormalize:
        total_N1 = kept_weight_NC.sum(-1, keepdim=True)
        kept_weight_NC = kept_weight_NC / total_N1.clamp_min(torch.finfo(torch.float32).tiny)
    return Dispatch(
        token_R=layout.token_R,
        row_NC=layout.row_NC,
        weight_NC=kept_weight_NC,
        rows_E=layout.rows_E,
        count_E=count_E,
        routed_E=routed_E,
        drops=True,
    )


@dataclass(frozen=True)
class _Layout:
    """Which row every route gets; the fields are those of :class:`Dispatch`."""

    token_R: Tensor
    row_NC: Tensor
    rows_E: Tensor

    @classmethod
    def of(
        cls, routes: Tensor, count_E: Tensor, expert_NC: Tensor, *, slice_length: SliceLength | None
    ) -> "_Layout":
        """One row per kept route; ``routes`` are numbers token · C + choice, sorted by expert."""
        token_R, rows_E = routes // expert_NC.shape[1], count_E
        row = torch.arange(len(routes), device=routes.device)
        if slice_length is not None and len(routes):
            counts = count_E.tolist()
            rows = [slice_length(count) for count in counts]
            rows_E = torch.tensor(rows)
            spare_before = accumulate(map(sub, rows, counts), initial=0)
            row += torch.tensor([*spare_before][:-1]).repeat_interleave(count_E)
            token_R = token_R.new_zeros(sum(rows)).index_copy_(0, row, token_R)
        row_NC = torch.full(expert_NC.shape, len(token_R), device=routes.device)
        row_NC.view(-1).index_copy_(0, routes, row)
        return cls(token_R, row_NC, rows_E)


def gather(x_ND: Tensor, dispatch: Dispatch) -> Tensor:
    """The token of every row, (R, D), in the order of experts."""
    rows_RD: Tensor = _Gather.apply(x_ND, dispatch)  # type: ignore[no-untyped-call]
    return rows_RD


def combine(y_RD: Tensor, dispatch: Dispatch) -> Tensor:
    """Weighted sum of each token's expert outputs, (N, D); dropped routes contribute 0."""
    y_ND: Tensor = _Combine.apply(  # type: ignore[no-untyped-call]
        y_RD, dispatch.weight_NC, dispatch
    )
    return y_ND


class _Gather(torch.autograd.Function):
    """Its gradient sums over a token's routes, instead of adding row by row into zeros."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, dispatch: Dispatch) -> Tensor:
        ctx.dispatch = dispatch
        return x_ND.index_select(0, dispatch.token_R)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (d_rows_RD,) = gradients
        return _sum_over_routes(d_rows_RD, ctx.dispatch, weight_NC=None), None


class _Combine(torch.autograd.Function):
    """Its gradient is gathered like the tokens."""

    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, weight_NC: Tensor, dispatch: Dispatch) -> Tensor:
        ctx.dispatch = dispatch
        ctx.save_for_backward(y_RD, weight_NC)
        return _sum_over_routes(y_RD, dispatch, weight_NC=weight_NC)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (d_y_ND,) = gradients
        y_RD, weight_NC = ctx.saved_tensors
        row_NC = ctx.dispatch.row_NC
        d_rows_RD = d_y_ND.index_select(0, ctx.dispatch.token_R)
        # one place more than there are rows, where all dropped routes meet
        d_weight = weight_NC.new_zeros(len(y_RD) + 1)
        d_weight[:-1] = (d_rows_RD * y_RD).sum(-1, dtype=weight_NC.dtype)
        weight = y_RD.new_zeros(len(y_RD) + 1)
        weight[row_NC] = weight_NC.to(y_RD.dtype)
        return d_rows_RD.mul_(weight[:-1, None]), d_weight[row_NC], None


def _sum_over_routes(y_RD: Tensor, dispatch: Dispatch, *, weight_NC: Tensor | None) -> Tensor:
    """(N, D): the rows of each token's kept routes, weighted and summed in one pass."""
    if dispatch.drops:
        y_RD = torch.cat([y_RD, y_RD.new_zeros(1, y_RD.shape[1])])
    if weight_NC is not None:
        weight_NC = weight_NC.to(y_RD.dtype)
    return F.embedding_bag(dispatch.row_NC, y_RD, per_sample_weights=weight_NC, mode="sum")
