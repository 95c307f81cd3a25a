"""Placement of routes, and what experts compute with it, against plain loops over tokens."""

import math
from collections.abc import Iterator
from typing import cast

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.dispatched import dispatch_dropless, dispatch_with_capacity, numbers_of
from support.tiny_models import tiny_spec
from torch import Tensor

from pipeline.batching.batch import Shares
from pipeline.errors import ConfigError
from pipeline.kernels import cpu, placement
from pipeline.kernels.expert_products import ExpertWeights, grouped_feed_forward, grouped_products
from pipeline.kernels.placement import (
    Limits,
    RouteNumbers,
    combine,
    gather,
    place_by_sorting,
    place_routes,
)
from pipeline.kernels.products import Activation, activate
from pipeline.kernels.routing import kept_softmax
from pipeline.model.building import build_model
from pipeline.model.moe.experts import Experts
from pipeline.model.moe.layer import MixtureOfExperts
from pipeline.model.moe.routing import choose
from pipeline.model.parameters import initialize_weights
from pipeline.model.settings import MoEConfig

SEEDS = st.integers(0, 2**16)


def random(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def limits_of(capacity_M: list[int], rows_M: list[int]) -> Limits:
    shares = Shares.of(np.array(rows_M), np.ones(len(rows_M), dtype=np.int64))
    return Limits(torch.tensor(capacity_M), shares if len(rows_M) > 1 else None)


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
    for place in (place_routes, place_by_sorting):
        for keeps_dropped in (False, True):
            claims = {"top_N": top_N if prioritized else None}
            placement = place(expert_NC, numbers, **claims, keeps_dropped=keeps_dropped)
            for token, row_C in enumerate(placement.row_NC.tolist()):
                for choice, row in enumerate(row_C):
                    if row < int(placement.rows_E.sum()):
                        assert placement.route_R[row] == token * top_k + choice
                        assert placement.token_R[row] == token
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
    for keeps_dropped in (False, True):
        placement = place_by_sorting(
            routing.expert_NC, numbers, top_N=top_N, keeps_dropped=keeps_dropped
        )
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


@pytest.mark.parametrize("rows_M", [[9], [4, 5]])
@pytest.mark.parametrize("order", ["all", "position", "priority"])
@pytest.mark.parametrize("keeps_dropped", [True, False])
def test_routes_with_priorities_that_are_nan_get_rows_that_exist(
    keeps_dropped: bool, order: str, rows_M: list[int]
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
        keeps_dropped=keeps_dropped or limits is None,
    )
    assert sorted(placement.route_R.tolist()) == list(range(18))
    if keeps_dropped or limits is None:
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
        routing.expert_NC, numbers_of(routing, None), top_N=None, keeps_dropped=True
    )
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        x_ND = random(40, 16, seed=1).bfloat16().to(dtype).requires_grad_()
        weight_NC = random(40, 2, seed=2).abs().bfloat16().float().requires_grad_()
        y_ND = combine(gather(x_ND, placement), weight_NC, placement)
        assert y_ND.dtype == dtype
        slope_ND = random(40, 16, seed=3).bfloat16().to(dtype)
        d_x_ND, d_weight_NC = torch.autograd.grad((y_ND * slope_ND).sum(), (x_ND, weight_NC))
        results.append([y_ND.float(), d_x_ND.float(), d_weight_NC])
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


@pytest.mark.parametrize("expert", [-1, 4])
def test_no_route_is_written_to_an_expert_that_does_not_exist(expert: int) -> None:
    routing = choose(random(3, 4, seed=1), top_k=2)
    routing.expert_NC[1, 1] = expert
    with pytest.raises(ConfigError, match="does not exist: there are"):
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


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("capacity", [None, 12])
def test_tokens_are_served_as_by_a_loop_over_their_experts(
    activation: Activation, capacity: int | None
) -> None:
    """Output and all gradients; an expert without rows has gradients of zero."""
    layer, results = some_experts(activation), []
    for is_plain in (False, True):
        layer.zero_grad(set_to_none=True)
        x_ND = random(40, 16, seed=3).requires_grad_()
        logits_NE = random(40, 5, seed=4)
        logits_NE[:, 3] = -50
        logits_NE.requires_grad_()
        routing = choose(logits_NE, top_k=2)
        if capacity is None:
            dispatch = dispatch_dropless(routing)
        else:
            dispatch = dispatch_with_capacity(routing, capacity=capacity, prioritized=True)
        if is_plain:
            is_dropped_NC = dispatch.is_dropped_NC
            outputs = []
            for n, experts in enumerate(routing.expert_NC.tolist()):
                output_D = torch.zeros(16)
                for c, e in enumerate(experts):
                    if is_dropped_NC is not None and is_dropped_NC[n, c]:
                        continue
                    hidden_F = activate(layer.up.weight[e] @ x_ND[n] + layer.up.bias[e], activation)
                    y_D = layer.down.weight[e] @ hidden_F + layer.down.bias[e]
                    output_D = output_D + dispatch.weight_NC[n, c] * y_D
                outputs.append(output_D)
            y_ND = torch.stack(outputs)
        else:
            y_ND = layer.serve(x_ND, dispatch)
        (y_ND * random(40, 16, seed=6)).sum().backward()
        found = [parameter.grad for parameter in layer.parameters()]
        assert all(gradient is not None and not gradient[3].any() for gradient in found)
        results.append([y_ND.detach(), x_ND.grad, logits_NE.grad, *found])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
