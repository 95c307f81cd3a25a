"""Placement of tokens in contiguous rows per expert, and the way back: gather and combine.

A *route* is one (token, choice) pair, numbered token · C + choice. Rows are sorted by expert: by
fused kernels on GPUs, else by a stable sort. If experts keep a limited number of routes, each
micro-batch of a pass has limits of its own (:class:`Limits`), and all are placed at once.

On other devices, the host should not wait for the number of kept routes. If the rows are computed
on this rank, dropped routes have rows as well, with a combine weight of 0. If rows are sent to
other ranks, dropped routes follow the kept ones until the host knows their number
(:meth:`Placement.first_rows`). Operators were counted on the meta device and tested on CPU.

Legend: N tokens, C choices per token, E experts, M micro-batches of the pass, G groups: each
expert's micro-batches, Q routes by number, R rows of routes, D model width.
"""

from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from pipeline.errors import ConfigError
from pipeline.kernels.launching import is_fused, launch, power_of_two
from pipeline.kernels.products import GROUPED_MULTIPLE, may_leave_idle_gradients
from pipeline.kernels.routing import MicroBatches, TokenBlocks

MOST_COMPARED = 2**14
"""Most tokens of a micro-batch that are ordered by comparing each with each.

By the kernel's instructions, an H100 compares twice as many for over 200 µs, and would sort them in
less (not measured)."""


@dataclass(frozen=True)
class Limits:
    """The most routes that an expert keeps of each micro-batch.

    Attributes:
        capacity_M: that number; int64.
        shares: the micro-batches; None if there is only one.
    """

    capacity_M: Tensor
    shares: MicroBatches | None = None

    @property
    def micro_batch_N(self) -> Tensor | None:
        """Return the micro-batch of each token; None if there is only one."""
        return None if self.shares is None else self.shares.micro_batch_N


@dataclass(frozen=True)
class RouteNumbers:
    """Constants of placement: of shapes and limits only, and shared by layers."""

    num_tokens: int
    num_choices: int
    num_experts: int
    device: torch.device
    limits: Limits | None = None

    @property
    def num_micro_batches(self) -> int:
        """Return M, as far as experts tell micro-batches apart."""
        return 1 if self.limits is None else len(self.limits.capacity_M)

    @cached_property
    def number_Q(self) -> Tensor:
        """Return the numbers of all routes, 0, 1, 2 …."""
        num_routes = self.num_tokens * self.num_choices
        return torch.arange(num_routes, dtype=torch.int32, device=self.device)

    @cached_property
    def expert_bound_E(self) -> Tensor:
        """Return the bounds of experts among their sorted numbers, (E + 1,)."""
        return torch.arange(self.num_experts + 1, dtype=torch.int32, device=self.device)

    @cached_property
    def first_key_NC(self) -> Tensor:
        """Return the part of :meth:`keys` that does not depend on experts, (N or 1, C)."""
        choice_C = torch.arange(self.num_choices, dtype=torch.float64, device=self.device)
        if self.limits is None or self.limits.micro_batch_N is None:
            return choice_C[None]
        return torch.add(choice_C, self.limits.micro_batch_N[:, None], alpha=self.num_choices)

    @cached_property
    def key_bounds(self) -> Tensor:
        """Return the bounds of experts, (E + 1,), and of groups, (G + 1,), among :meth:`keys`.

        With one micro-batch, both are the same.
        """
        step, num_groups = self.num_choices, self.num_experts * self.num_micro_batches
        stop = (num_groups + 1) * step - 1
        bound_G = torch.arange(-1, stop, step, dtype=torch.float64, device=self.device)
        if self.num_micro_batches == 1:
            return bound_G
        return torch.cat([bound_G[:: self.num_micro_batches], bound_G])

    def keys(self, expert_NC: Tensor, top_N: Tensor | None) -> Tensor:
        """Return keys (Q,) that sort routes by expert, micro-batch, and the order of claims.

        With g = e · M + m for micro-batch m of expert e, the key of choice c is g · C + c without
        probabilities. With them, it lies in [g · C + c - 1, g · C + c), where float64 distinguishes
        all float32 probabilities. The sort must be stable.
        """
        step = self.num_micro_batches * self.num_choices
        key_NC = torch.add(self.first_key_NC, expert_NC, alpha=step)
        return (key_NC if top_N is None else key_NC - top_N[:, None]).flatten()


@dataclass(frozen=True)
class RowSlices:
    """The slice of rows of each expert, on the device; int32.

    Attributes:
        bound_E: (E + 1,), first row of each expert, and the number of rows.
        expert_R: expert of each row.
        number_R: 0, 1, 2 …
    """

    bound_E: Tensor
    expert_R: Tensor
    number_R: Tensor

    @classmethod
    def of(cls, count_E: Tensor, *, num_rows: int) -> "RowSlices":
        """Return the slices of experts with ``count_E`` rows each."""
        bound_E = F.pad(count_E, (1, 0)).cumsum(0, dtype=torch.int32)
        number_R = torch.arange(num_rows, dtype=torch.int32, device=count_E.device)
        return cls.between(bound_E, number_R=number_R)

    @classmethod
    def between(cls, bound_E: Tensor, *, number_R: Tensor) -> "RowSlices":
        """Return the slices between the given bounds."""
        expert_R = torch.searchsorted(bound_E[1:-1], number_R, right=True, out_int32=True)
        return cls(bound_E, expert_R, number_R)

    @property
    def stop_E(self) -> Tensor:
        """Return the row after the last one of each expert."""
        return self.bound_E[1:]

    @property
    def rows_E(self) -> Tensor:
        """Return the number of rows of each expert."""
        return self.bound_E[1:] - self.bound_E[:-1]

    def products(self, y_RO: Tensor, x_RI: Tensor) -> Tensor:
        """Return yᵀ x of each expert by one grouped product, (E, O, I)."""
        found_EOI = F.grouped_mm(y_RO.mT, x_RI, offs=self.stop_E)
        if may_leave_idle_gradients(y_RO):
            found_EOI.masked_fill_((self.rows_E == 0)[:, None, None], 0)
        return found_EOI

    def sums(self, *matrices: Tensor) -> tuple[Tensor, ...]:
        """Sum the rows of each expert in float32, (E, D) of every (R, D).

        It is a product with ones: ``embedding_bag`` adds the rows of a bag one after the other.
        """
        first = matrices[0]
        ones_RK = first.new_ones(len(first), GROUPED_MULTIPLE)  # 16 bytes, as products require
        return tuple(self.products(ones_RK, matrix)[:, 0] for matrix in matrices)


class Counts(NamedTuple):
    """Rows per expert, and routes per expert before and after limits."""

    rows_E: Tensor
    routed_E: Tensor
    count_E: Tensor


@dataclass(frozen=True)
class Placement:
    """The row of every route, and the route of every row.

    Attributes:
        route_R: route of each row, sorted by expert: token · C + choice. Dropped routes without a
            row may follow.
        token_R: token of each row.
        row_NC: row of each (token, choice); the number of rows if it has none.
        is_dropped_NC: True for dropped routes; None if none is dropped.
        lacks_rows: whether the host must assume that some routes have no row.
        counts: rows and routes per expert, if they have been counted.
        slices: slices of experts, if all routes have a row and were sorted on the device.
    """

    route_R: Tensor
    token_R: Tensor
    row_NC: Tensor
    is_dropped_NC: Tensor | None
    lacks_rows: bool
    counts: Counts | None = None
    slices: RowSlices | None = None

    def first_rows(self, num_rows: int) -> Self:
        """Return this placement without the dropped routes that follow ``num_rows`` rows."""
        return replace(self, route_R=self.route_R[:num_rows], token_R=self.token_R[:num_rows])

    @property
    def rows_E(self) -> Tensor:
        """Return the rows per expert."""
        return self._counts.rows_E

    @property
    def routed_E(self) -> Tensor:
        """Return the routes per expert before the capacity limit."""
        return self._counts.routed_E

    @property
    def count_E(self) -> Tensor:
        """Return the kept routes per expert."""
        return self._counts.count_E

    @property
    def _counts(self) -> Counts:
        """Count rows and routes on demand only, as every operator on a device costs a launch."""
        if self.counts is not None:
            return self.counts
        assert self.slices is not None, "counts, or slices to count"
        rows_E = self.slices.rows_E
        if self.is_dropped_NC is None:
            return Counts(rows_E, rows_E, rows_E)
        is_dropped_R = self.is_dropped_NC.view(-1).index_select(0, self.route_R)
        dropped_R = is_dropped_R.to(rows_E.dtype)
        count_E = rows_E.index_add(0, self.slices.expert_R, dropped_R, alpha=-1)
        return Counts(rows_E, rows_E, count_E)


def place_routes(
    expert_NC: Tensor,
    numbers: RouteNumbers,
    *,
    top_N: Tensor | None = None,
    keeps_dropped: bool = False,
) -> Placement:
    """Assign rows to routes; within limits, to each micro-batch's routes that claim them first.

    All first choices come before all second choices, and so on. Within a choice, routes come by
    descending ``top_N`` or, without it, by position.

    Args:
        expert_NC: expert of each route.
        numbers: numbers of tokens, choices and experts on all ranks, and limits.
        top_N: probability of each token's best expert; ties are ordered by position.
        keeps_dropped: whether dropped routes may have rows, since these are computed on this rank.
    """
    if expert_NC.device.type != "cpu":
        return place_by_sorting(expert_NC, numbers, top_N=top_N, keeps_dropped=keeps_dropped)
    if expert_NC.numel() and not 0 <= expert_NC.min() <= expert_NC.max() < numbers.num_experts:
        raise ConfigError(
            f"A router chose an expert that does not exist: there are {numbers.num_experts}, "
            "numbered from 0. Correct its expert_NC."
        )
    placement = place_by_sorting(expert_NC, numbers, top_N=top_N, keeps_dropped=False)
    return _without_dropped(placement)


def place_by_sorting(
    expert_NC: Tensor, numbers: RouteNumbers, *, top_N: Tensor | None, keeps_dropped: bool
) -> Placement:
    """Place routes on any device, without a copy to the host."""
    limits = numbers.limits
    if limits is None:
        expert_Q = expert_NC.to(torch.int32, memory_format=torch.contiguous_format).flatten()
        expert_R, routes = expert_Q.sort(stable=True)
        bound_E = torch.searchsorted(expert_R, numbers.expert_bound_E, out_int32=True)
        slices = RowSlices(bound_E, expert_R, numbers.number_Q)
    else:
        key_R, routes = numbers.keys(expert_NC, top_N).sort(stable=True)
        # Keys without probabilities are integers, of which a bound may equal the last one before.
        bounds = torch.searchsorted(key_R, numbers.key_bounds, right=top_N is None, out_int32=True)
        bound_E = bounds[: numbers.num_experts + 1]
        slices = RowSlices.between(bound_E, number_R=numbers.number_Q)
    row_NC = torch.empty(expert_NC.shape, dtype=torch.int32, device=expert_NC.device)
    row_NC.view(-1)[routes] = numbers.number_Q
    token_R = torch.empty_like(numbers.number_Q)
    placement = Placement(
        route_R=routes,
        token_R=torch.div(routes, numbers.num_choices, rounding_mode="floor", out=token_R),
        row_NC=row_NC,
        is_dropped_NC=None,
        lacks_rows=False,
        slices=slices,
    )
    if limits is None:
        return placement
    group_NC = expert_NC
    if limits.micro_batch_N is not None:
        micro_batch_N1 = limits.micro_batch_N[:, None]
        group_NC = torch.add(micro_batch_N1, expert_NC, alpha=numbers.num_micro_batches)
    first_G = bounds[-numbers.num_experts * numbers.num_micro_batches - 1 : -1]
    stop_G = (first_G.view(numbers.num_experts, -1) + limits.capacity_M).view(-1)
    placement = replace(placement, is_dropped_NC=row_NC >= stop_G[group_NC])
    return placement if keeps_dropped else _dropped_last(placement, numbers)


def place_by_kernels(
    expert_NC: Tensor, numbers: RouteNumbers, *, claim_N: Tensor | None, keeps_dropped: bool
) -> Placement:
    """Place routes by fused kernels that count them in blocks of tokens.

    An expert's rows are in the order of claims also if there are no limits. Ascending ``claim_N``
    sorts tokens by micro-batch and priority; None: by position.
    """
    expert_NC = expert_NC.contiguous()  # a router of one's own may have chosen otherwise
    limits, num_tokens, num_routes = numbers.limits, numbers.num_tokens, expert_NC.numel()
    shares = None if limits is None else limits.shares
    blocks = TokenBlocks.of(expert_NC, num_experts=numbers.num_experts, shares=shares)
    num_blocks, micro_batches = blocks.grid
    length = micro_batches * numbers.num_choices * num_blocks
    number = partial(torch.empty, dtype=torch.int32, device=expert_NC.device)
    count_EX, row_NC = number(numbers.num_experts, length + 1), number(expert_NC.shape)
    token_R, is_dropped_NC = number(num_routes), None
    route_R = torch.empty_like(token_R, dtype=torch.int64)
    expert_R = bound_E = count_KE = None
    if limits is not None:
        is_dropped_NC = torch.empty_like(row_NC, dtype=torch.bool)
    if limits is None or keeps_dropped:
        expert_R, bound_E = number(num_routes), number(len(count_EX) + 1)
    else:
        count_KE = number(2, len(count_EX))
    order_N = None if claim_N is None else in_order(claim_N, blocks)
    given = expert_NC, order_N, blocks.rows_M
    launch("count_routes", blocks.grid, *given, count_EX, num_tokens, length, **blocks.constants)
    launch("sum_before", (len(count_EX),), count_EX, length, BLOCK=1024)
    launch(
        "place_routes",
        blocks.grid,
        *(*given, None if limits is None else limits.capacity_M, count_EX),
        *(route_R, token_R, expert_R, row_NC, is_dropped_NC, bound_E, count_KE),
        *(num_tokens, length),
        **blocks.constants,
    )
    counts = slices = None
    if expert_R is not None and bound_E is not None:
        slices = RowSlices(bound_E, expert_R, numbers.number_Q)
    elif count_KE is not None:
        kept_E, routed_E = count_KE.unbind()
        counts = Counts(kept_E, routed_E, kept_E)
    return Placement(
        route_R=route_R,
        token_R=token_R,
        row_NC=row_NC,
        is_dropped_NC=is_dropped_NC,
        lacks_rows=counts is not None,
        counts=counts,
        slices=slices,
    )


def in_order(claim_N: Tensor, blocks: TokenBlocks) -> Tensor:
    """Return the tokens by ascending claims, ties by position."""
    longest = blocks.grid[0] * blocks.constants["TOKENS"]
    if longest > MOST_COMPARED:
        return claim_N.sort(stable=True).indices
    order_N = torch.empty_like(claim_N)
    options = {"MICRO_BATCHES": blocks.grid[1], "TOKENS": 32, "BLOCK": 128}
    given = claim_N, blocks.rows_M, order_N, len(claim_N)
    launch("order_claims", (-(-longest // 32), blocks.grid[1]), *given, **options)
    return order_N


def _dropped_last(placement: Placement, numbers: RouteNumbers) -> Placement:
    """Move dropped routes to the end and remove their rows, as they are not sent to other ranks.

    All row indices stay within the counted rows, even if probabilities are NaN.
    """
    assert placement.is_dropped_NC is not None, "limits drop routes"
    count_E = placement.count_E
    is_dropped_R = placement.is_dropped_NC.view(-1)[placement.route_R]
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
        counts=Counts(count_E, placement.routed_E, count_E),
        slices=None,
    )


def _without_dropped(placement: Placement) -> Placement:
    """Return a placement on CPU with rows for kept routes only, which the host has counted."""
    rows_E, num_routes = placement.count_E, placement.row_NC.numel()
    num_rows = int(rows_E.sum())
    lacks_rows = num_rows != num_routes
    return replace(
        placement.first_rows(num_rows),
        is_dropped_NC=placement.is_dropped_NC if lacks_rows else None,
        lacks_rows=lacks_rows,
        counts=Counts(rows_E, placement.routed_E, rows_E),
        slices=None,
    )


def gather(x_ND: Tensor, placement: Placement) -> Tensor:
    """Return the token of every row, (R, D), in the order of experts."""
    rows_RD: Tensor = _Gather.apply(x_ND, placement)  # type: ignore[no-untyped-call]
    return rows_RD


def combine(y_RD: Tensor, weight_NC: Tensor, placement: Placement) -> Tensor:
    """Return the weighted sum of each token's expert outputs, (N, D); dropped routes add 0."""
    y_ND: Tensor = _Combine.apply(y_RD, weight_NC, placement)  # type: ignore[no-untyped-call]
    return y_ND


def beside_float32(x_ND: Tensor) -> tuple[Tensor, Tensor]:
    """Return the states for the experts, and a float32 copy for their router.

    On devices other than the CPU, both gradients are added by one operator, in float32.
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
    """Gather of tokens; the gradient sums over each token's routes instead of scattering rows."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, placement: Placement) -> Tensor:
        ctx.placement = placement
        return x_ND.index_select(0, placement.token_R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _sum_over_routes(gradients[0], ctx.placement, weight_NC=None), None


class _Combine(torch.autograd.Function):
    """Weighted sum of rows; the gradient is a gather, as for the tokens."""

    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, weight_NC: Tensor, placement: Placement) -> Tensor:
        ctx.placement = placement
        ctx.save_for_backward(y_RD, weight_NC)
        return _sum_over_routes(y_RD, placement, weight_NC=weight_NC)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # The gradients made like them are then contiguous, too, as the kernel writes them.
        y_RD, weight_NC = (saved.contiguous() for saved in ctx.saved_tensors)
        placement: Placement = ctx.placement
        if not is_fused(y_RD):
            return *_combine_backward(gradients[0], y_RD, weight_NC, placement), None
        d_rows_RD, d_weight_NC = torch.empty_like(y_RD), torch.empty_like(weight_NC)
        given = gradients[0].contiguous(), y_RD, weight_NC, placement.row_NC
        written = d_rows_RD, d_weight_NC
        _launch_by_token("combine_rows_backward", placement, *given, *written, len(y_RD))
        return d_rows_RD, d_weight_NC, None


def _combine_backward(
    d_y_ND: Tensor, y_RD: Tensor, weight_NC: Tensor, placement: Placement
) -> tuple[Tensor, Tensor]:
    """Return the gradients of rows and of weights."""
    d_rows_RD = d_y_ND.index_select(0, placement.token_R)
    d_weight_Q = weight_NC.new_zeros(weight_NC.numel())
    d_weight_Q[placement.route_R] = (d_rows_RD * y_RD).sum(-1, dtype=weight_NC.dtype)
    weight_R = weight_NC.flatten()[placement.route_R]
    d_rows_RD *= weight_R[:, None].to(y_RD.dtype)
    return d_rows_RD, d_weight_Q.view_as(weight_NC)


def _sum_over_routes(y_RD: Tensor, placement: Placement, *, weight_NC: Tensor | None) -> Tensor:
    """Return the rows of each token's kept routes, weighted and summed in one pass, (N, D)."""
    row_NC = placement.row_NC
    if is_fused(y_RD):
        sum_ND = y_RD.new_empty(len(row_NC), y_RD.shape[1])
        weight_NC = None if weight_NC is None else weight_NC.contiguous()
        given = y_RD.contiguous(), weight_NC, row_NC, sum_ND, len(y_RD)
        _launch_by_token("combine_rows", placement, *given)
        return sum_ND
    if placement.lacks_rows:
        y_RD = torch.cat([y_RD, y_RD.new_zeros(1, y_RD.shape[1])])
    weight_NC = None if weight_NC is None else weight_NC.to(y_RD.dtype)
    return F.embedding_bag(row_NC, y_RD, mode="sum", per_sample_weights=weight_NC)


def _launch_by_token(name: str, placement: Placement, rows: Tensor, *others: object) -> None:
    (num_tokens, num_choices), width = placement.row_NC.shape, rows.shape[1]
    shape = {"CHOICES": num_choices, "WIDTH": width, "BLOCK": power_of_two(width)}
    launch(name, (num_tokens,), rows, *others, **shape)
