"""From chosen experts to contiguous work: which route goes into which row of which expert.

A *route* is one (token, choice) pair, numbered token · C + choice. Rows are in the order of their
experts. By a compiled loop on CPU, else by sorting.

On CPU an expert's rows may end with spare ones, which belong to no route, for the sake of products
in few shapes (:func:`slice_length`). A spare row repeats a token, and nothing reads its result.

On other devices the host should not wait to learn how many routes are kept. Where rows are served
on the spot, dropped routes have rows there, too, whose results have a weight of 0. Where rows are
sent away, dropped routes are listed behind them until the host knows how many there are
(:meth:`Placement.first_rows`). Counted on the meta device and tested on CPU; not yet run on a GPU.

Legend: N tokens, C choices per token, E experts, Q routes by number, R rows: kept routes and spare
rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class RouteNumbers:
    """What placing by sorting counts with: of shapes alone, so that layers can share it."""

    num_tokens: int
    num_choices: int
    num_experts: int
    device: torch.device

    @cached_property
    def number_Q(self) -> Tensor:
        """0, 1, 2 …"""
        num_routes = self.num_tokens * self.num_choices
        return torch.arange(num_routes, dtype=torch.int32, device=self.device)

    @cached_property
    def token_Q(self) -> Tensor:
        """The token of each route."""
        return self.number_Q // self.num_choices

    @cached_property
    def first_N(self) -> Tensor:
        """The first route of each token."""
        stop = self.num_tokens * self.num_choices
        return torch.arange(0, stop, self.num_choices, dtype=torch.int32, device=self.device)

    @cached_property
    def expert_bound_E(self) -> Tensor:
        """(E + 1,): where experts start among their numbers."""
        return torch.arange(self.num_experts + 1, dtype=torch.int32, device=self.device)

    @cached_property
    def choice_C(self) -> Tensor:
        """The number of each choice, in the type of :meth:`Queue.keys`."""
        return torch.arange(self.num_choices, dtype=torch.float64, device=self.device)

    @cached_property
    def key_bound_E(self) -> Tensor:
        """(E + 1,): where experts start among the keys of a queue."""
        step, stop = self.num_choices, (self.num_experts + 1) * self.num_choices
        return torch.arange(-1, stop - 1, step, dtype=torch.float64, device=self.device)


@dataclass(frozen=True)
class Queue:
    """First choices before second ones; within a choice by descending ``top_N``, or by position.

    Attributes:
        top_N: the probability of each token's best expert; ties go by position.
    """

    top_N: Tensor | None = None

    def routes(self, expert_NC: Tensor) -> Tensor:
        """All routes in their order."""
        (num_tokens, num_choices), device = expert_NC.shape, expert_NC.device
        if self.top_N is None:
            token_N = torch.arange(num_tokens, device=device)
        else:
            token_N = self.top_N.argsort(descending=True, stable=True)
        choice_C = torch.arange(num_choices, device=device)
        return (token_N[None, :] * num_choices + choice_C[:, None]).flatten()

    def keys(self, expert_NC: Tensor, numbers: RouteNumbers) -> Tensor:
        """Numbers by which a stable sort brings routes to their experts in this order, (Q,).

        That of choice c of expert e lies from e · C + c - 1, included, up to e · C + c, without a
        probability on that: float64 can tell probabilities of float32 from each other there.
        """
        key_NC = torch.add(numbers.choice_C, expert_NC, alpha=numbers.num_choices)
        return (key_NC if self.top_N is None else key_NC - self.top_N[:, None]).flatten()


@dataclass(frozen=True)
class RowSlices:
    """Where the rows of experts are, on the device; int32.

    Attributes:
        bound_E: (E + 1,): where each expert's rows start, and where the last one's end.
        expert_R: expert of each row.
        number_R: 0, 1, 2 …
    """

    bound_E: Tensor
    expert_R: Tensor
    number_R: Tensor

    @classmethod
    def of(cls, count_E: Tensor, *, num_rows: int) -> "RowSlices":
        """Of experts with so many rows each."""
        bound_E = F.pad(count_E, (1, 0)).cumsum(0, dtype=torch.int32)
        number_R = torch.arange(num_rows, dtype=torch.int32, device=count_E.device)
        return cls.between(bound_E, number_R=number_R)

    @classmethod
    def between(cls, bound_E: Tensor, *, number_R: Tensor) -> "RowSlices":
        expert_R = torch.searchsorted(bound_E[1:-1], number_R, right=True, out_int32=True)
        return cls(bound_E, expert_R, number_R)

    @property
    def stop_E(self) -> Tensor:
        return self.bound_E[1:]

    @property
    def rows_E(self) -> Tensor:
        return self.bound_E[1:] - self.bound_E[:-1]

    def sums(self, rows: Tensor) -> Tensor:
        """The rows of each expert summed up, in their order and in float32."""
        return F.embedding_bag(self.number_R, rows, self.bound_E[:-1], mode="sum")


class Counts(NamedTuple):
    """Rows per expert, and routes per expert before capacity."""

    rows_E: Tensor
    routed_E: Tensor


@dataclass(frozen=True)
class Placement:
    """Where every route is served.

    Attributes:
        route_R: route of each row, rows in order of their expert: token · C + choice, or N · C
            for a spare row. Dropped routes may follow that have no row.
        token_R: token of each row.
        row_NC: row of each (token, choice); that after the last row where it has none.
        is_dropped_NC: True where it was dropped; None where none was.
        capacity: routes that an expert keeps at most; None where none is dropped.
        lacks_rows: whether some route may have no row, as far as the host knows.
        counts: as far as they have been counted.
        slices: of rows that were sorted on the device, all routes having one.
        numbers: beside ``slices``.
    """

    route_R: Tensor
    token_R: Tensor
    row_NC: Tensor
    is_dropped_NC: Tensor | None
    capacity: int | None
    lacks_rows: bool
    counts: Counts | None = None
    slices: RowSlices | None = None
    numbers: RouteNumbers | None = None

    def first_rows(self, num_rows: int) -> Self:
        """Without what follows them, where there are so many rows."""
        return replace(self, route_R=self.route_R[:num_rows], token_R=self.token_R[:num_rows])

    @property
    def rows_E(self) -> Tensor:
        """Rows per expert, spare ones included."""
        return self._counts.rows_E

    @property
    def routed_E(self) -> Tensor:
        """Routes per expert before capacity."""
        return self._counts.routed_E

    @property
    def _counts(self) -> Counts:
        """Counted where someone asks: every operator on a device costs a launch."""
        if self.counts is not None:
            return self.counts
        assert self.slices is not None, "counts, or slices to count"
        rows_E = self.slices.rows_E
        return Counts(rows_E, rows_E)

    @property
    def count_E(self) -> Tensor:
        """Kept routes per expert."""
        return self.routed_E if self.capacity is None else self.routed_E.clamp_max(self.capacity)


def place_routes(
    expert_NC: Tensor,
    *,
    num_experts: int,
    capacity: int,
    queue: Queue | None = None,
    spare_rows: bool = False,
    numbers: RouteNumbers | None = None,
) -> Placement:
    """Rows for the first ``capacity`` routes of each expert in a queue of all routes.

    Routes come by number where there is no queue. Where rows are not sent away before they are
    served, ``spare_rows`` may be added: beside kept routes, or for dropped ones. ``numbers`` are
    made where they are needed and not given.
    """
    if expert_NC.device.type == "cpu":
        order = None if queue is None else queue.routes(expert_NC)
        return place_by_loop(expert_NC, num_experts, order, capacity, spare_rows=spare_rows)
    return place_by_sorting(
        expert_NC, num_experts, queue, capacity, spare_rows=spare_rows, numbers=numbers
    )


def place_by_loop(
    expert_NC: Tensor,
    num_experts: int,
    queue: Tensor | None,
    capacity: int,
    *,
    spare_rows: bool,
) -> Placement:
    """Route by route, on CPU."""
    from pipeline.kernels import routing_loops as loops

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
        is_dropped_NC=row_NC == num_rows if drops else None,
        capacity=capacity if drops else None,
        lacks_rows=drops,
        counts=Counts(rows_E, routed_E),
    )


def place_by_sorting(
    expert_NC: Tensor,
    num_experts: int,
    queue: Queue | None,
    capacity: int,
    *,
    spare_rows: bool,
    numbers: RouteNumbers | None = None,
) -> Placement:
    """On any device, without a copy to the host."""
    num_tokens, num_choices = expert_NC.shape
    if numbers is None:
        numbers = RouteNumbers(num_tokens, num_choices, num_experts, expert_NC.device)
    routes, slices = _sorted_routes(expert_NC, queue, numbers)
    row_NC = torch.empty(expert_NC.shape, dtype=torch.int32, device=expert_NC.device)
    row_NC.view(-1)[routes] = numbers.number_Q
    token_R = torch.empty_like(numbers.number_Q)
    placement = Placement(
        route_R=routes,
        token_R=torch.div(routes, num_choices, rounding_mode="floor", out=token_R),
        row_NC=row_NC,
        is_dropped_NC=None,
        capacity=None,
        lacks_rows=False,
        slices=slices,
        numbers=numbers,
    )
    if capacity >= num_tokens:
        return placement
    is_dropped_NC = torch.zeros_like(row_NC, dtype=torch.bool)
    expert_R = slices.expert_R  # a row is beyond capacity if as far before it is the same expert
    is_dropped_NC.view(-1)[routes[capacity:]] = expert_R[capacity:] == expert_R[: -capacity or None]
    placement = replace(placement, is_dropped_NC=is_dropped_NC, capacity=capacity)
    return placement if spare_rows else _dropped_last(placement, is_dropped_NC, numbers)


def _sorted_routes(
    expert_NC: Tensor, queue: Queue | None, numbers: RouteNumbers
) -> tuple[Tensor, RowSlices]:
    """The routes in the order of experts and, within each, of the queue; and where experts are."""
    if queue is None:
        expert_Q = expert_NC.to(torch.int32, memory_format=torch.contiguous_format).flatten()
        expert_R, routes = expert_Q.sort(stable=True)
        bound_E = torch.searchsorted(expert_R, numbers.expert_bound_E, out_int32=True)
        return routes, RowSlices(bound_E, expert_R, numbers.number_Q)
    key_R, routes = queue.keys(expert_NC, numbers).sort(stable=True)
    by_position = queue.top_N is None  # then keys are whole, and a bound is the one before it
    bound_E = torch.searchsorted(key_R, numbers.key_bound_E, right=by_position, out_int32=True)
    return routes, RowSlices.between(bound_E, number_R=numbers.number_Q)


def _dropped_last(placement: Placement, is_dropped_NC: Tensor, numbers: RouteNumbers) -> Placement:
    """No rows for dropped routes, which are not sent to other ranks.

    No row is beyond those that are counted, also where probabilities are not numbers.
    """
    count_E = placement.count_E
    is_dropped_R = is_dropped_NC.view(-1)[placement.route_R]
    order_R = is_dropped_R.view(torch.uint8).argsort(stable=True)
    route_R = placement.route_R[order_R]
    row_NC = torch.empty_like(placement.row_NC)
    row_NC.view(-1)[route_R] = numbers.number_Q
    return replace(
        placement,
        route_R=route_R,
        token_R=placement.token_R[order_R],
        row_NC=torch.minimum(row_NC, count_E.sum(dtype=row_NC.dtype)),
        lacks_rows=True,
        counts=Counts(count_E, placement.routed_E),
        slices=None,
        numbers=None,
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
