"""Which routes are kept, and with which weight.

A *route* is one (token, choice) pair. Dropless keeps every route. The capacity form keeps at most C
routes per expert: first choices before second choices, by position or by descending top
probability.

Legend: N tokens, C choices per token, E experts, R rows: kept routes and spare rows.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pipeline.kernels.kept_weights import kept_weights
from pipeline.kernels.placement import Placement, place_routes
from pipeline.model.moe.router import Routing


@dataclass(frozen=True)
class Dispatch(Placement):
    """The plan of one MoE layer for one micro-batch: where every route is served, and its weight.

    Attributes:
        weight_NC: combine weights; 0 where dropped.
    """

    weight_NC: Tensor


def dispatch_dropless(routing: Routing, *, spare_rows: bool = False) -> Dispatch:
    """Every route is kept."""
    return _place(routing, None, capacity=len(routing.expert_NC), spare_rows=spare_rows)


def expert_capacity(num_tokens: int, *, num_experts: int, top_k: int, factor: float) -> int:
    """C = ceil(factor · top_k · tokens / experts) slots per expert (MMNMT, §5.1: factor 1.25)."""
    return math.ceil(round(factor * top_k * num_tokens / num_experts, 6))


def dispatch_with_capacity(
    routing: Routing,
    *,
    capacity: int,
    prioritized: bool,
    renormalize: bool = True,
    spare_rows: bool = False,
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
    dispatch = _place(routing, queue, capacity=capacity, spare_rows=spare_rows)
    weight_NC = kept_weights(routing.weight_NC, dispatch.is_kept_NC, renormalize=renormalize)
    return replace(dispatch, weight_NC=weight_NC)


def _place(routing: Routing, queue: Tensor | None, *, capacity: int, spare_rows: bool) -> Dispatch:
    placement = place_routes(
        routing.expert_NC,
        num_experts=routing.probability_NE.shape[1],
        capacity=capacity,
        queue=queue,
        spare_rows=spare_rows,
    )
    return Dispatch(**vars(placement), weight_NC=routing.weight_NC)
