"""Compiled loops against the same in PyTorch's operators."""

import math
from collections.abc import Iterator
from typing import cast

import numba
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.dispatched import dispatch_dropless, dispatch_with_capacity, numbers_of
from support.tiny_models import tiny_spec
from torch import Tensor

from pipeline.batching.batch import Shares
from pipeline.checkpoints.names import initialize_weights
from pipeline.kernels import compiled_loops as loops
from pipeline.kernels import cpu, placement
from pipeline.kernels.compiled_loops import compiled
from pipeline.kernels.cpu import numbers
from pipeline.kernels.expert_products import ExpertWeights, grouped_feed_forward, grouped_products
from pipeline.kernels.placement import (
    Limits,
    RouteNumbers,
    combine,
    gather,
    place_by_loop,
    place_by_sorting,
)
from pipeline.kernels.products import Activation
from pipeline.kernels.routing import (
    average_of_logits,
    choose_by_operators,
    kept_softmax,
    kept_weights,
    logits_of_average,
)
from pipeline.model.building import build_model
from pipeline.model.moe.experts import Experts
from pipeline.model.moe.layer import MixtureOfExperts
from pipeline.model.moe.routing import Routing, choose
from pipeline.model.settings import CombineWeights, MoEConfig

SEEDS = st.integers(0, 2**16)


def random(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def limits_of(capacity_M: list[int], rows_M: list[int]) -> Limits:
    shares = Shares.of(np.array(rows_M), np.ones(len(rows_M), dtype=np.int64))
    return Limits(torch.tensor(capacity_M), shares if len(rows_M) > 1 else None)


def router_losses(routing: Routing) -> Tensor:
    """Return a loss that depends on all that is differentiable."""
    slope_NC = random(*routing.weight_NC.shape, seed=5)
    return (routing.weight_NC * slope_NC).sum() + 3 * routing.balance_loss


@settings(deadline=None)
@given(st.integers(0, 9), st.integers(1, 6), st.integers(1, 6), st.floats(0.1, 30), SEEDS)
@example(0, 4, 2, 1.0, 1)
@pytest.mark.parametrize("combine_weights", ["renormalized", "probability"])
def test_the_loop_chooses_as_the_operators_do(
    combine_weights: CombineWeights,
    num_tokens: int,
    num_experts: int,
    top_k: int,
    scale: float,
    seed: int,
) -> None:
    top_k = min(top_k, num_experts)
    logits_NE = random(num_tokens, num_experts, seed=seed, scale=scale)
    ours_NE, theirs_NE = logits_NE.clone().requires_grad_(), logits_NE.clone().requires_grad_()
    ours = choose(ours_NE, top_k=top_k, combine_weights=combine_weights)
    is_renormalized = combine_weights == "renormalized"
    chosen = choose_by_operators(theirs_NE, top_k=top_k, is_renormalized=is_renormalized)
    theirs = Routing(theirs_NE, *chosen)
    assert torch.equal(ours.expert_NC, theirs.expert_NC)
    for name in ("probability_NE", "weight_NC", "balance_loss"):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name))
    router_losses(ours).backward()
    router_losses(theirs).backward()
    torch.testing.assert_close(ours_NE.grad, theirs_NE.grad, rtol=1e-4, atol=5e-6)


def test_a_token_that_is_not_a_number_has_two_experts_that_exist() -> None:
    logits_NE = torch.full((3, 4), math.nan)
    logits_NE[1] = torch.tensor([1.0, math.nan, 3.0, math.inf])
    routing = choose(logits_NE, top_k=2)
    for first, second in routing.expert_NC.tolist():
        assert 0 <= first < 4
        assert 0 <= second < 4
        assert first != second
    assert routing.weight_NC.isnan().all()
    assert routing.balance_loss.isnan()


@pytest.mark.parametrize("num_experts", [4, 32, 100])
@pytest.mark.parametrize("levels", [1, 2, 5])
def test_of_equal_logits_every_path_chooses_the_first(num_experts: int, levels: int) -> None:
    generator = torch.Generator().manual_seed(levels)
    logits_NE = torch.randint(levels, (300, num_experts), generator=generator).float()
    expected = [
        sorted(range(num_experts), key=lambda e: (-row[e], e))[:2] for row in logits_NE.tolist()
    ]
    assert choose(logits_NE, top_k=2).expert_NC.tolist() == expected
    by_operators = choose_by_operators(logits_NE, top_k=2, is_renormalized=True)
    assert by_operators.expert_NC.tolist() == expected


MICRO_BATCHES = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 9)), min_size=1, max_size=3)
"""Tokens and capacity of each micro-batch."""


@settings(deadline=None)
@given(MICRO_BATCHES, st.integers(1, 5), st.booleans(), SEEDS)
@example([(5, 1), (0, 3), (7, 2)], 2, True, 1)
def test_micro_batches_placed_at_once_keep_what_each_of_them_keeps(
    micro_batches: list[tuple[int, int]], num_experts: int, prioritized: bool, seed: int
) -> None:
    rows_M, capacity_M = map(list, zip(*micro_batches, strict=True))
    num_tokens, top_k = sum(rows_M), min(2, num_experts)
    expert_NC = choose(random(num_tokens, num_experts, seed=seed), top_k=top_k).expert_NC
    generator = torch.Generator().manual_seed(seed)
    top_N = torch.rand(num_tokens, generator=generator).clamp_min(0.5)  # half of them tied
    kept: list[set[int]] = [set() for _ in range(num_experts)]
    for m, capacity in enumerate(capacity_M):
        first = sum(rows_M[:m])
        tokens = range(first, first + rows_M[m])
        queue = sorted(tokens, key=lambda n: -top_N[n].item() if prioritized else n)
        taken = [0] * num_experts
        for choice in range(top_k):
            for token in queue:
                expert = int(expert_NC[token, choice])
                if taken[expert] < capacity:
                    taken[expert] += 1
                    kept[expert].add(token * top_k + choice)
    numbers = RouteNumbers(
        num_tokens, top_k, num_experts, expert_NC.device, limits_of(capacity_M, rows_M)
    )
    for place in (place_by_loop, place_by_sorting):
        for spare_rows in (False, True):
            placement = place(
                expert_NC, numbers, top_N=top_N if prioritized else None, spare_rows=spare_rows
            )
            assert placement.count_E.tolist() == [len(routes) for routes in kept]
            routed_E = torch.bincount(expert_NC.flatten(), minlength=num_experts)
            assert placement.routed_E.tolist() == routed_E.tolist()
            bounds = [0, *placement.rows_E.cumsum(0).tolist()]
            for expert, routes in enumerate(kept):
                rows = placement.route_R[bounds[expert] : bounds[expert + 1]].tolist()
                rows = [route for route in rows if route < expert_NC.numel()]
                if placement.lacks_rows or placement.is_dropped_NC is None:
                    assert set(rows) == routes
                is_dropped_Q = torch.zeros(expert_NC.shape, dtype=torch.bool)
                if placement.is_dropped_NC is not None:
                    is_dropped_Q = placement.is_dropped_NC
                assert {route for route in rows if not is_dropped_Q.view(-1)[route]} == routes


@settings(deadline=None)
@given(MICRO_BATCHES, st.integers(1, 5), st.sampled_from(["all", "position", "priority"]), SEEDS)
def test_the_loop_places_routes_as_sorting_does(
    micro_batches: list[tuple[int, int]], num_experts: int, order: str, seed: int
) -> None:
    rows_M, capacity_M = map(list, zip(*micro_batches, strict=True))
    num_tokens, top_k = sum(rows_M), min(2, num_experts)
    expert_NC = choose(random(num_tokens, num_experts, seed=seed), top_k=top_k).expert_NC
    generator = torch.Generator().manual_seed(seed)
    top_N = torch.rand(num_tokens, generator=generator).clamp_min(0.5)
    limits = None if order == "all" else limits_of(capacity_M, rows_M)
    numbers = RouteNumbers(num_tokens, top_k, num_experts, expert_NC.device, limits)
    priority_N = top_N if order == "priority" else None
    ours, theirs = (
        place(expert_NC, numbers, top_N=priority_N, spare_rows=False)
        for place in (place_by_loop, place_by_sorting)
    )
    theirs = theirs.first_rows(int(theirs.rows_E.sum()))
    equal = ["rows_E", "count_E", "routed_E"]
    if len(rows_M) == 1:  # of several, an expert's rows come in another order
        equal += ["route_R", "token_R", "row_NC"]
    for name in equal:
        assert torch.equal(getattr(ours, name), getattr(theirs, name).long()), name
    assert ours.lacks_rows <= theirs.lacks_rows


@pytest.mark.parametrize("order", ["position", "priority"])
@pytest.mark.parametrize("capacity", [0, 3, 12, 40])
def test_routes_with_rows_for_dropped_ones_are_served_as_those_without(
    capacity: int, order: str
) -> None:
    """Runs the operators of other devices throughout, gradients included."""
    layer, results = some_experts("relu"), []
    weights = ExpertWeights(layer.up.weight, layer.up.bias, layer.down.weight, layer.down.bias)
    routing = choose(random(40, 5, seed=4), top_k=2)
    top_N = routing.probability_NE.amax(-1) if order == "priority" else None
    numbers = numbers_of(routing, limits_of([capacity, 2], [23, 17]))
    for spare_rows in (False, True):
        placement = place_by_sorting(routing.expert_NC, numbers, top_N=top_N, spare_rows=spare_rows)
        placement = placement.first_rows(int(placement.rows_E.sum()))
        assert (placement.slices is None) == placement.lacks_rows
        layer.zero_grad(set_to_none=True)
        x_ND = random(40, 16, seed=3).requires_grad_()
        logits_NC = random(40, 2, seed=5).requires_grad_()
        weight_NC = logits_NC.softmax(-1)
        if placement.is_dropped_NC is not None:
            weight_NC = kept_softmax(logits_NC, placement.is_dropped_NC)
        x_RD = gather(x_ND, placement)
        if placement.slices is None:
            y_RD = grouped_feed_forward(x_RD, weights, placement.rows_E, "relu")
        else:
            y_RD = grouped_products(x_RD, weights, placement.slices, "relu")
        y_ND = combine(y_RD, weight_NC, placement)
        y_ND.square().sum().backward()
        results.append([y_ND, x_ND.grad, logits_NC.grad, *(p.grad for p in layer.parameters())])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_softmax_over_what_is_kept_is_renormalized_with_its_gradient() -> None:
    is_dropped_NC = random(30, 3, seed=1) > 0
    results = []
    for by_operators in (True, False):
        logits_NC = random(30, 3, seed=2).requires_grad_()
        if by_operators:
            found_NC = kept_softmax(logits_NC, is_dropped_NC)
        else:
            found_NC = kept_weights(logits_NC.softmax(-1), is_dropped_NC, renormalize=True)
        (found_NC * random(30, 3, seed=3)).sum().backward()
        results.append((found_NC, logits_NC.grad))
    assert (results[0][0].sum(-1) == 0).any()
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("rows_M", [[9], [4, 5]])
@pytest.mark.parametrize("order", ["all", "position", "priority"])
@pytest.mark.parametrize("spare_rows", [True, False])
def test_routes_with_priorities_that_are_nan_get_rows_that_exist(
    spare_rows: bool, order: str, rows_M: list[int]
) -> None:
    """The update that NaN spoils is found later: until then kernels must not read elsewhere."""
    routing = choose(random(9, 4, seed=1), top_k=2)
    top_N = torch.full((9,), math.nan)
    top_N[2:5] = 0.5
    limits = None if order == "all" else limits_of([3] * len(rows_M), rows_M)
    placement = place_by_sorting(
        routing.expert_NC,
        numbers_of(routing, limits),
        top_N=top_N if order == "priority" else None,
        spare_rows=spare_rows or limits is None,
    )
    assert sorted(placement.route_R.tolist()) == list(range(18))
    if spare_rows or limits is None:
        assert placement.slices is not None
        assert sorted(placement.row_NC.flatten().tolist()) == list(range(18))
        bounds = placement.slices.bound_E.tolist()
        assert bounds == sorted(bounds)
        assert 0 <= bounds[0] <= bounds[-1] <= 18
        assert set(placement.slices.expert_R.tolist()) <= {0, 1, 2, 3}
    else:
        num_rows = int(placement.rows_E.sum())
        assert 0 <= num_rows <= 12 * len(rows_M)
        assert len(placement.first_rows(num_rows).token_R) == num_rows
        assert 0 <= placement.row_NC.min() <= placement.row_NC.max() <= num_rows


def test_combining_sorted_rows_in_half_precision_is_near_single_precision() -> None:
    routing = choose(random(40, 5, seed=4), top_k=2)
    placement = place_by_sorting(
        routing.expert_NC, numbers_of(routing, None), top_N=None, spare_rows=True
    )
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        x_ND = random(40, 16, seed=1).bfloat16().to(dtype).requires_grad_()
        weight_NC = random(40, 2, seed=2).abs().bfloat16().float().requires_grad_()
        y_ND = combine(gather(x_ND, placement), weight_NC, placement)
        assert y_ND.dtype == dtype
        (y_ND * random(40, 16, seed=3).bfloat16().to(dtype)).sum().backward()
        assert x_ND.grad is not None
        assert weight_NC.grad is not None
        assert weight_NC.grad.dtype == torch.float32
        results.append([y_ND.float(), x_ND.grad.float(), weight_NC.grad])
    for exact, half in zip(*results, strict=True):
        torch.testing.assert_close(half, exact, rtol=0.02, atol=0.02)


def test_states_beside_their_float32_copy_have_the_sum_of_both_gradients() -> None:
    x_ND = random(5, 4, seed=1).bfloat16().requires_grad_()
    both: tuple[Tensor, Tensor] = placement._BesideFloat32.apply(x_ND)  # type: ignore[no-untyped-call]
    states_ND, float_ND = both
    assert float_ND.dtype == torch.float32
    first_ND, second_ND = random(5, 4, seed=2).bfloat16(), random(5, 4, seed=3)
    torch.autograd.backward([states_ND, float_ND], [first_ND, second_ND])
    expected_ND = (first_ND.float() + second_ND).bfloat16()
    assert x_ND.grad is not None
    assert torch.equal(x_ND.grad, expected_ND)


@pytest.mark.parametrize("num_groups", [1, 3])
def test_logits_of_averaged_routers_are_the_average_of_their_logits(num_groups: int) -> None:
    results = []
    for averaged in (average_of_logits, logits_of_average):
        tensors = [random(7, 4, seed=1), random(5, 4, seed=2), random(num_groups, 5, 4, seed=3)]
        x_ND, weight_ED, weight_GED = (tensor.requires_grad_() for tensor in tensors)
        found_NE = averaged(x_ND, weight_ED, weight_GED, torch.arange(7) % num_groups)
        (found_NE * random(7, 5, seed=4)).sum().backward()
        results.append([found_NE, x_ND.grad, weight_ED.grad, weight_GED.grad])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("expert", [-1, 4])
def test_no_route_is_written_to_an_expert_that_does_not_exist(expert: int) -> None:
    routing = choose(random(3, 4, seed=1), top_k=2)
    routing.expert_NC[1, 1] = expert
    with pytest.raises(IndexError, match="does not exist"):
        dispatch_dropless(routing)


@pytest.fixture
def three_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use three threads, however small the work is."""
    monkeypatch.setattr(cpu, "WORTH_OTHER_THREADS", 1)
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(1)


def some_experts(activation: Activation) -> Experts:
    """Five, of width 16, with biases."""
    spec = tiny_spec(moe=MoEConfig(num_experts=5, every=1), width=16, activation=activation)
    model = build_model(spec)
    initialize_weights(model, seed=1)
    found = cast(MixtureOfExperts, model.encoder.layers[0].feed_forward).experts
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.copy_(random(*parameter.shape, seed=2, scale=0.3))
    return found


def served(
    layer: Experts, dtype: torch.dtype, capacity: int | None, spare: bool, how: str
) -> list[Tensor]:
    """Return the output of four of the experts for 40 tokens, and all gradients."""
    layer = layer.to(dtype)
    layer.zero_grad(set_to_none=True)
    x_ND = random(40, 16, seed=3).to(dtype).requires_grad_()
    logits_NE = random(40, 5, seed=4)
    logits_NE[:, 3] = -50
    logits_NE.requires_grad_()
    routing = choose(logits_NE, top_k=2)
    if capacity is None:
        dispatch = dispatch_dropless(routing, spare_rows=spare)
    else:
        dispatch = dispatch_with_capacity(
            routing, capacity=capacity, prioritized=True, spare_rows=spare
        )
    if how == "loops":
        y_ND = layer.serve(x_ND, dispatch)
    else:
        y_ND = combine(layer(gather(x_ND, dispatch), dispatch.rows_E), dispatch.weight_NC, dispatch)
    (y_ND.float() * random(40, 16, seed=6)).sum().backward()
    parameters = [parameter.grad for parameter in layer.parameters()]
    assert x_ND.grad is not None
    assert logits_NE.grad is not None
    assert parameters[0] is not None
    assert parameters[0][3].count_nonzero() == 0
    return [y_ND.detach(), x_ND.grad, logits_NE.grad, *(g for g in parameters if g is not None)]


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("capacity", [None, 12])
@pytest.mark.parametrize("spare", [False, True])
def test_serving_tokens_is_gathering_applying_and_combining(
    activation: Activation, capacity: int | None, spare: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "slice_length", lambda count: count + 3)
    layer = some_experts(activation)
    expected = served(layer, torch.float32, capacity, spare, "operators")
    found = served(layer, torch.float32, capacity, spare, "loops")
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("three_threads")
def test_in_bfloat16_the_loops_are_as_near_to_float32_as_the_operators() -> None:
    exact = some_experts("relu").to(torch.bfloat16)
    expected = served(exact, torch.float32, None, False, "operators")
    errors = {}
    for how in ("operators", "loops"):
        found = served(exact, torch.bfloat16, None, False, how)
        pairs = zip(found, expected, strict=True)
        errors[how] = [float((x.float() - y).norm() / y.norm()) for x, y in pairs]
    for ours, theirs in zip(errors["loops"], errors["operators"], strict=True):
        assert 0 < ours < max(1.1 * theirs, 0.01)


def test_numbers_are_rounded_to_bfloat16_as_pytorch_rounds_them() -> None:
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(-(2**31), 2**31, (2**16,), generator=generator, dtype=torch.int64)
    halves = (torch.arange(2**16) << 16) + 2**15  # between two neighbors, all of them
    some = torch.cat([bits, halves, halves + 1, halves - 1]).to(torch.int32).view(torch.float32)
    one_R1 = torch.ones(1, 1, dtype=torch.bfloat16)
    row_NC = torch.zeros(len(some), 1, dtype=torch.int64)
    found = torch.empty(len(some), 1, dtype=torch.bfloat16)
    loops.sum_over_routes(
        numbers(one_R1), numbers(row_NC), numbers(some[:, None]), 0, len(some), numbers(found)
    )
    expected = some.to(torch.bfloat16)[:, None]
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_loops_are_compiled_where_nothing_can_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    njit = numba.njit

    def cannot_keep(*, cache: bool = False, nogil: bool) -> object:
        if cache:
            raise RuntimeError("cannot cache function 'double': no locator available")
        return njit(nogil=nogil)

    monkeypatch.setattr(numba, "njit", cannot_keep)

    @compiled()
    def double(numbers: loops.Integers) -> None:
        numbers *= 2

    some = torch.arange(3)
    double(some.numpy())
    assert some.tolist() == [0, 2, 4]
