"""Dispatch of the routes of one micro-batch."""

import torch

from pipeline.kernels.placement import Limits, RouteNumbers
from pipeline.model.moe.capacity import Dispatch, dispatch_routes
from pipeline.model.moe.routing import Routing


def numbers_of(routing: Routing, limits: Limits | None) -> RouteNumbers:
    num_tokens, num_experts = routing.probability_NE.shape
    top_k, device = routing.expert_NC.shape[1], routing.expert_NC.device
    return RouteNumbers(num_tokens, top_k, num_experts, device, limits)


def dispatch_dropless(routing: Routing, *, keeps_dropped: bool = False) -> Dispatch:
    return dispatch_routes(
        routing,
        numbers_of(routing, None),
        prioritized=False,
        renormalize=True,
        keeps_dropped=keeps_dropped,
    )


def dispatch_with_capacity(
    routing: Routing,
    *,
    capacity: int,
    prioritized: bool,
    renormalize: bool = True,
    keeps_dropped: bool = False,
) -> Dispatch:
    return dispatch_routes(
        routing,
        numbers_of(routing, Limits(torch.tensor([capacity]))),
        prioritized=prioritized,
        renormalize=renormalize,
        keeps_dropped=keeps_dropped,
    )
