"""Select the routes that experts serve, within their capacity, and their combine weights.

A *route* is one (token, choice) pair. Dropless dispatch keeps every route. Capacity dispatch keeps
a limited number of routes per expert and micro-batch: first choices before second choices, by
position or by descending top probability.

Legend: N tokens, C choices per token, E experts, R rows of routes.
"""

import math
from dataclasses import dataclass

from torch import Tensor

from pipeline.kernels.placement import Placement, RouteNumbers, place_by_kernels, place_routes
from pipeline.kernels.routing import kept_softmax, kept_weights
from pipeline.model.moe.routing import Routing


@dataclass(frozen=True, kw_only=True)
class Dispatch(Placement):
    """Placement and combine weights of all routes of one MoE layer and one pass.

    Attributes:
        weight_NC: combine weights; 0 for dropped routes.
    """

    weight_NC: Tensor


def expert_capacity(num_tokens: int, *, num_experts: int, top_k: int, factor: float) -> int:
    """Return ceil(factor · top_k · tokens / experts) slots per expert (MMNMT, §5.1: 1.25)."""
    # Rounded first, lest a rounding error of the product add a slot.
    return math.ceil(round(factor * top_k * num_tokens / num_experts, 6))


def dispatch_routes(
    routing: Routing,
    numbers: RouteNumbers,
    *,
    prioritized: bool,
    renormalize: bool,
    keeps_dropped: bool,
) -> Dispatch:
    """Keep every route or, if ``numbers`` has limits, as many as they allow.

    Slots go to first choices before second ones, and within a choice by position or, with
    ``prioritized``, by descending top probability (ties by position). With ``renormalize``, a
    token's kept choices get the weights of those that it lost.
    """
    is_limited = numbers.limits is not None
    given, by_priority = (routing.expert_NC, numbers), is_limited and prioritized
    if routing.claim_N is not None:
        claim_N = routing.claim_N if by_priority else None
        placement = place_by_kernels(*given, claim_N=claim_N, keeps_dropped=keeps_dropped)
    else:
        top_N = routing.probability_NE.amax(-1) if by_priority else None
        placement = place_routes(*given, top_N=top_N, keeps_dropped=keeps_dropped)
    weight_NC = (
        _kept_weights(routing, placement.is_dropped_NC, renormalize=renormalize)
        if is_limited
        else routing.weight_NC
    )
    return Dispatch(**vars(placement), weight_NC=weight_NC)


def _kept_weights(routing: Routing, is_dropped_NC: Tensor | None, *, renormalize: bool) -> Tensor:
    # Weights that a router made itself go before the logits of a choice that it began with.
    logits_NC = routing.chosen_logits_NC if routing.made_weight_NC is None else None
    if renormalize and is_dropped_NC is not None and logits_NC is not None:
        return kept_softmax(logits_NC, is_dropped_NC)
    return kept_weights(routing.weight_NC, is_dropped_NC, renormalize=renormalize)
