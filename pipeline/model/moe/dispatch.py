"""From routes to contiguous work: which token goes into which row of which expert.

A *route* is one (token, choice) pair. Routes are sorted by expert, so that every expert works on
a contiguous slice of rows. Dropless keeps every route. The capacity form keeps at most C routes
per expert: first choices before second choices, by position or by descending top probability.

An expert's rows may end with spare ones, which belong to no route, for the sake of products in few
shapes (:func:`~pipeline.model.moe.experts.slice_length`). A spare row repeats a token, and nothing
reads its result.

Legend: N tokens, C choices per token, E experts, R rows: kept routes and spare rows.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.kernels import routing_loops as loops
from pipeline.model.moe.router import Routing

SliceLength = Callable[[int], int]
"""Kept routes of an expert → rows for it, at least as many."""


@dataclass(frozen=True)
class Dispatch:
    """The plan of one MoE layer for one micro-batch.

    Attributes:
        route_R: route of each row, rows in order of their expert: token · C + choice, or N · C
            for a spare row.
        token_R: token of each row.
        row_NC: row of each (token, choice); R where it was dropped.
        weight_NC: combine weights; 0 where dropped.
        rows_E: rows per expert, spare ones included.
        count_E: kept routes per expert.
        routed_E: routes per expert before capacity.
        drops: whether a route may have been dropped, as far as the host knows.
    """

    route_R: Tensor
    token_R: Tensor
    row_NC: Tensor
    weight_NC: Tensor
    rows_E: Tensor
    count_E: Tensor
    routed_E: Tensor
    drops: bool


def dispatch_dropless(routing: Routing, *, slice_length: SliceLength | None = None) -> Dispatch:
    """Every route is kept."""
    return _place(routing, None, capacity=len(routing.expert_NC), slice_length=slice_length)


def expert_capacity(num_tokens: int, *, num_experts: int, top_k: int, factor: float) -> int:
    """C = ceil(factor · top_k · tokens / experts) slots per expert (mmnmt.md §2)."""
    return math.ceil(round(factor * top_k * num_tokens / num_experts, 6))


def dispatch_with_capacity(
    routing: Routing,
    *,
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
    num_tokens, num_choices = routing.expert_NC.shape
    device = routing.expert_NC.device
    if prioritized:
        top_N = routing.probability_NE.amax(-1)
        token_order_N = top_N.argsort(descending=True, stable=True)
    else:
        token_order_N = torch.arange(num_tokens, device=device)
    choice_C = torch.arange(num_choices, device=device)
    queue = (token_order_N[None, :] * num_choices + choice_C[:, None]).flatten()
    dispatch = _place(routing, queue, capacity=capacity, slice_length=slice_length)
    kept_weight_NC = routing.weight_NC * (dispatch.row_NC < len(dispatch.token_R))
    if renormalize:
        total_N1 = kept_weight_NC.sum(-1, keepdim=True)
        kept_weight_NC = kept_weight_NC / total_N1.clamp_min(torch.finfo(torch.float32).tiny)
    return replace(dispatch, weight_NC=kept_weight_NC)


def _place(
    routing: Routing, queue: Tensor | None, *, capacity: int, slice_length: SliceLength | None
) -> Dispatch:
    """Rows for the first ``capacity`` routes of each expert in a queue of all routes.

    Routes are numbers token · C + choice, and come by number where there is no queue. Spare rows
    are for CPU.
    """
    if routing.expert_NC.device.type == "cpu":
        return place_by_loop(routing, queue, capacity=capacity, slice_length=slice_length)
    return place_by_sorting(routing, queue, capacity=capacity)


def place_by_loop(
    routing: Routing, queue: Tensor | None, *, capacity: int, slice_length: SliceLength | None
) -> Dispatch:
    """Route by route."""
    expert_NC, num_experts = routing.expert_NC, routing.probability_NE.shape[1]
    routed_E = expert_NC.new_empty(num_experts)
    loops.count_routes(expert_NC.numpy(), routed_E.numpy())
    routed = routed_E.tolist()
    kept = [min(count, capacity) for count in routed]
    rows = [slice_length(count) for count in kept] if slice_length and any(kept) else kept
    num_rows, rows_E = sum(rows), torch.tensor(rows)
    route_R = torch.full((num_rows,), expert_NC.numel())
    token_R = torch.zeros_like(route_R)
    row_NC = torch.full_like(expert_NC, num_rows)
    places = route_R.numpy(), token_R.numpy(), row_NC.numpy()
    order = None if queue is None else queue.numpy()
    loops.place_routes(order, expert_NC.numpy(), rows_E.numpy(), capacity, *places)
    drops = kept != routed
    return Dispatch(
        route_R=route_R,
        token_R=token_R,
        row_NC=row_NC,
        weight_NC=routing.weight_NC,
        rows_E=rows_E,
        count_E=torch.tensor(kept) if drops else routed_E,
        routed_E=routed_E,
        drops=drops,
    )


def place_by_sorting(routing: Routing, queue: Tensor | None, *, capacity: int) -> Dispatch:
    """On any device; without a copy to the host unless routes may be dropped. No spare rows."""
    expert_NC, num_experts = routing.expert_NC, routing.probability_NE.shape[1]
    expert_Q = expert_NC.flatten() if queue is None else expert_NC.flatten()[queue]
    # torch.bincount would wait for the device
    routed_E = count_E = expert_Q.new_zeros(num_experts).index_add_(
        0, expert_Q, torch.ones_like(expert_Q)
    )
    by_expert = expert_Q.argsort(stable=True)
    routes = by_expert if queue is None else queue[by_expert]
    numbers = torch.arange(len(routes), device=routes.device)
    drops = capacity < len(expert_NC)
    if drops:
        start_E = routed_E.cumsum(0) - routed_E
        is_kept = numbers - start_E[expert_Q[by_expert]] < capacity
        routes, count_E = routes[is_kept], routed_E.clamp_max(capacity)
    row_NC = torch.full_like(expert_NC, len(routes))
    row_NC.view(-1)[routes] = numbers[: len(routes)]
    return Dispatch(
        route_R=routes,
        token_R=routes // expert_NC.shape[1],
        row_NC=row_NC,
        weight_NC=routing.weight_NC,
        rows_E=count_E,
        count_E=count_E,
        routed_E=routed_E,
        drops=drops,
    )


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
        route_R = ctx.dispatch.route_R
        d_rows_RD = d_y_ND.index_select(0, ctx.dispatch.token_R)
        # one place more than there are routes, where all spare rows meet
        weight_Q = F.pad(weight_NC.flatten(), (0, 1))
        d_weight_Q = torch.zeros_like(weight_Q)
        d_weight_Q[route_R] = (d_rows_RD * y_RD).sum(-1, dtype=weight_NC.dtype)
        d_rows_RD *= weight_Q[route_R, None].to(y_RD.dtype)
        return d_rows_RD, d_weight_Q[:-1].view_as(weight_NC), None


def _sum_over_routes(y_RD: Tensor, dispatch: Dispatch, *, weight_NC: Tensor | None) -> Tensor:
    """(N, D): the rows of each token's kept routes, weighted and summed in one pass."""
    if dispatch.drops:
        y_RD = torch.cat([y_RD, y_RD.new_zeros(1, y_RD.shape[1])])
    if weight_NC is not None:
        weight_NC = weight_NC.to(y_RD.dtype)
    return F.embedding_bag(dispatch.row_NC, y_RD, per_sample_weights=weight_NC, mode="sum")
