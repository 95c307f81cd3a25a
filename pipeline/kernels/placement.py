"""From chosen experts to contiguous work: which route goes into which row of which expert.

A *route* is one (token, choice) pair, numbered token · C + choice. Rows are in the order of their
experts. By a compiled loop on CPU, else by sorting.

On CPU an expert's rows may end with spare ones, which belong to no route, for the sake of products
in few shapes (:func:`slice_length`). A spare row repeats a token, and nothing reads its result.

Legend: N tokens, C choices per token, E experts, R rows: kept routes and spare rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.kernels import routing_loops as loops


@dataclass(frozen=True)
class Placement:
    """Where every route is served.

    Attributes:
        route_R: route of each row, rows in order of their expert: token · C + choice, or N · C
            for a spare row.
        token_R: token of each row.
        row_NC: row of each (token, choice); R where it was dropped.
        rows_E: rows per expert, spare ones included.
        count_E: kept routes per expert.
        routed_E: routes per expert before capacity.
        drops: whether a route may have been dropped, as far as the host knows.
    """

    route_R: Tensor
    token_R: Tensor
    row_NC: Tensor
    rows_E: Tensor
    count_E: Tensor
    routed_E: Tensor
    drops: bool


def place_routes(
    expert_NC: Tensor,
    *,
    num_experts: int,
    capacity: int,
    queue: Tensor | None = None,
    spare_rows: bool = False,
) -> Placement:
    """Rows for the first ``capacity`` routes of each expert in a queue of all routes.

    Routes come by number where there is no queue. Where rows are not sent away before they are
    served, ``spare_rows`` may be added.
    """
    if expert_NC.device.type == "cpu":
        return place_by_loop(expert_NC, num_experts, queue, capacity, spare_rows=spare_rows)
    return place_by_sorting(expert_NC, num_experts, queue, capacity)


def place_by_loop(
    expert_NC: Tensor,
    num_experts: int,
    queue: Tensor | None,
    capacity: int,
    *,
    spare_rows: bool,
) -> Placement:
    """Route by route, on CPU."""
    routed_E = expert_NC.new_empty(num_experts)
    loops.count_routes(expert_NC.numpy(), routed_E.numpy())
    routed = routed_E.tolist()
    kept = [min(count, capacity) for count in routed]
    rows = [slice_length(count) for count in kept] if spare_rows and any(kept) else kept
    num_rows, rows_E = sum(rows), torch.tensor(rows)
    route_R = torch.full((num_rows,), expert_NC.numel())
    token_R = torch.zeros_like(route_R)
    row_NC = torch.full_like(expert_NC, num_rows)
    places = route_R.numpy(), token_R.numpy(), row_NC.numpy()
    order = None if queue is None else queue.numpy()
    loops.place_routes(order, expert_NC.numpy(), rows_E.numpy(), capacity, *places)
    drops = kept != routed
    return Placement(
        route_R=route_R,
        token_R=token_R,
        row_NC=row_NC,
        rows_E=rows_E,
        count_E=torch.tensor(kept) if drops else routed_E,
        routed_E=routed_E,
        drops=drops,
    )


def place_by_sorting(
    expert_NC: Tensor, num_experts: int, queue: Tensor | None, capacity: int
) -> Placement:
    """On any device; without a copy to the host unless routes may be dropped. No spare rows."""
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
    return Placement(
        route_R=routes,
        token_R=routes // expert_NC.shape[1],
        row_NC=row_NC,
        rows_E=count_E,
        count_E=count_E,
        routed_E=routed_E,
        drops=drops,
    )


def slice_lengths(counts: Sequence[int], *, beside: Tensor) -> list[int]:
    """Rows to give experts with so many routes, where their products meet those of ``beside``."""
    return [slice_length(n) for n in counts] if beside.device.type == "cpu" else list(counts)


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
