"""From chosen experts to contiguous work: which route goes into which row of which expert.

A *route* is one (token, choice) pair, numbered token · C + choice. Rows are in the order of their
experts. By a compiled loop on CPU, else by sorting.

On CPU an expert's rows may end with spare ones, which belong to no route, for the sake of products
in few shapes (:func:`slice_length`). A spare row repeats a token, and nothing reads its result.

On other devices the host should not wait to learn how many routes are kept. Where rows are served
on the spot, dropped routes have rows there, too, whose results have a weight of 0. (Counted on the
meta device and tested on CPU; not yet run on a GPU.)

Legend: N tokens, C choices per token, E experts, R rows: kept routes and spare rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

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
        row_NC: row of each (token, choice); R where it has none.
        is_kept_NC: False where it was dropped; None where none was.
        rows_E: rows per expert, spare ones included.
        count_E: kept routes per expert.
        routed_E: routes per expert before capacity.
        lacks_rows: whether some route may have no row, as far as the host knows.
    """

    route_R: Tensor
    token_R: Tensor
    row_NC: Tensor
    is_kept_NC: Tensor | None
    rows_E: Tensor
    count_E: Tensor
    routed_E: Tensor
    lacks_rows: bool


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
    served, ``spare_rows`` may be added: beside kept routes, or for dropped ones.
    """
    if expert_NC.device.type == "cpu":
        return place_by_loop(expert_NC, num_experts, queue, capacity, spare_rows=spare_rows)
    return place_by_sorting(expert_NC, num_experts, queue, capacity, spare_rows=spare_rows)


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
        is_kept_NC=row_NC < num_rows if drops else None,
        rows_E=rows_E,
        count_E=torch.tensor(kept) if drops else routed_E,
        routed_E=routed_E,
        lacks_rows=drops,
    )


def place_by_sorting(
    expert_NC: Tensor,
    num_experts: int,
    queue: Tensor | None,
    capacity: int,
    *,
    spare_rows: bool,
) -> Placement:
    """On any device; it copies to the host where routes may be dropped and leave no spare rows."""
    expert_Q = expert_NC.flatten() if queue is None else expert_NC.flatten()[queue]
    expert_R, by_expert = expert_Q.sort(stable=True)
    routes = by_expert if queue is None else queue[by_expert]
    number_E = torch.arange(num_experts, device=routes.device)
    start_E = torch.searchsorted(expert_R, number_E)
    routed_E = torch.searchsorted(expert_R, number_E, right=True) - start_E
    row_NC = torch.empty_like(expert_NC, memory_format=torch.contiguous_format)
    row_NC.view(-1)[routes] = torch.arange(len(routes), device=routes.device)
    placement = Placement(
        route_R=routes,
        token_R=routes // expert_NC.shape[1],
        row_NC=row_NC,
        is_kept_NC=None,
        rows_E=routed_E,
        count_E=routed_E,
        routed_E=routed_E,
        lacks_rows=False,
    )
    if capacity >= len(expert_NC):
        return placement
    is_kept_NC = row_NC - start_E[expert_NC] < capacity
    placement = replace(placement, is_kept_NC=is_kept_NC, count_E=routed_E.clamp_max(capacity))
    return placement if spare_rows else _without_dropped(placement, is_kept_NC)


def _without_dropped(placement: Placement, is_kept_NC: Tensor) -> Placement:
    """No rows for dropped routes, which are not sent to other ranks."""
    kept_R = is_kept_NC.view(-1)[placement.route_R].nonzero().squeeze(1)
    route_R = placement.route_R[kept_R]
    row_NC = torch.full_like(placement.row_NC, len(route_R))
    row_NC.view(-1)[route_R] = torch.arange(len(route_R), device=route_R.device)
    return replace(
        placement,
        route_R=route_R,
        token_R=placement.token_R[kept_R],
        row_NC=row_NC,
        rows_E=placement.count_E,
        lacks_rows=True,
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
