"""Dispatch and combine against a loop over single tokens."""

from collections import Counter
from fractions import Fraction
from math import ceil

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.dispatched import dispatch_dropless, dispatch_with_capacity
from torch import Tensor

from pipeline.kernels.placement import combine
from pipeline.model.moe.capacity import Dispatch, expert_capacity
from pipeline.model.moe.routing import Routing, choose

Route = tuple[int, int]
"""A token and the number of its choice."""


@st.composite
def routings(draw: st.DrawFn) -> Routing:
    """Routings of few tokens over few experts, with many ties."""
    num_tokens, num_experts = draw(st.integers(0, 9)), draw(st.integers(1, 5))
    top_k = draw(st.integers(1, num_experts))
    row = st.lists(st.integers(0, 3), min_size=num_experts, max_size=num_experts)
    rows = draw(st.lists(row, min_size=num_tokens, max_size=num_tokens))
    logits_NE = torch.tensor(rows, dtype=torch.float32).view(num_tokens, num_experts)
    return choose(logits_NE, top_k=top_k)


NO_TOKENS = choose(torch.empty(0, 3), top_k=2)
ALL_TIED = choose(torch.zeros(6, 3), top_k=2)


def kept_routes(routing: Routing, *, capacity: int, prioritized: bool) -> list[set[Route]]:
    """Per expert, the routes that find a slot: first choices before second ones."""
    experts = routing.expert_NC.tolist()
    top = [max(row) for row in routing.probability_NE.tolist()]
    tokens = sorted(range(len(experts)), key=lambda n: -top[n] if prioritized else n)
    kept: list[set[Route]] = [set() for _ in range(routing.probability_NE.shape[1])]
    for choice in range(routing.expert_NC.shape[1]):
        for token in tokens:
            expert = kept[experts[token][choice]]
            if len(expert) < capacity:
                expert.add((token, choice))
    return kept


def assert_carries_out(
    dispatch: Dispatch, routing: Routing, kept: list[set[Route]], *, renormalize: bool = True
) -> None:
    """Every expert's slice of rows holds its kept routes; weights are of those kept."""
    total = sum(map(len, kept))
    assert dispatch.count_E.tolist() == [len(routes) for routes in kept]
    assert len(dispatch.token_R) == total
    start, rows = 0, dispatch.row_NC.tolist()
    for routes in kept:
        stop = start + len(routes)
        assert {rows[token][choice] for token, choice in routes} == set(range(start, stop))
        for token, choice in routes:
            assert dispatch.token_R[rows[token][choice]] == token
        start = stop
    for token, weights in enumerate(routing.weight_NC.tolist()):
        alive = [any((token, c) in routes for routes in kept) for c in range(len(weights))]
        kept_weights = [w * is_alive for w, is_alive in zip(weights, alive, strict=True)]
        left = sum(kept_weights) if renormalize else 1.0
        expected = [w / left if left else 0.0 for w in kept_weights]
        assert dispatch.weight_NC[token].tolist() == pytest.approx(expected, abs=1e-6)
        assert [row == total for row in rows[token]] == [not is_alive for is_alive in alive]


@pytest.mark.slow
@settings(deadline=None)
@given(routings())
@example(NO_TOKENS)
@example(ALL_TIED)
def test_dropless_keeps_every_route(routing: Routing) -> None:
    dispatch = dispatch_dropless(routing)
    everything = kept_routes(routing, capacity=10**6, prioritized=False)
    assert_carries_out(dispatch, routing, everything)
    assert torch.equal(dispatch.routed_E, dispatch.count_E)


@settings(deadline=None)
@given(routings(), st.integers(0, 12), st.booleans(), st.booleans())
@example(NO_TOKENS, 0, True, True)
@example(ALL_TIED, 2, True, True)
@example(ALL_TIED, 2, False, False)
def test_capacity_keeps_what_a_loop_over_tokens_keeps(
    routing: Routing, capacity: int, prioritized: bool, renormalize: bool
) -> None:
    num_experts = routing.probability_NE.shape[1]
    dispatch = dispatch_with_capacity(
        routing,
        capacity=capacity,
        prioritized=prioritized,
        renormalize=renormalize,
    )
    kept = kept_routes(routing, capacity=capacity, prioritized=prioritized)
    assert_carries_out(dispatch, routing, kept, renormalize=renormalize)
    wanted = Counter(routing.expert_NC.flatten().tolist())
    assert dispatch.routed_E.tolist() == [wanted[expert] for expert in range(num_experts)]


def three_tokens() -> Routing:
    """All prefer expert 0; the last most, then the first."""
    return choose(torch.tensor([[2.0, 1.0, 0.0], [1.5, 0.0, 1.0], [9.0, 1.0, 0.0]]), top_k=2)


@pytest.mark.parametrize(("prioritized", "losers"), [(True, [1]), (False, [2])])
def test_slots_go_by_probability_or_by_position(prioritized: bool, losers: list[int]) -> None:
    dispatch = dispatch_with_capacity(three_tokens(), capacity=2, prioritized=prioritized)
    assert (dispatch.weight_NC[:, 0] == 0).nonzero().flatten().tolist() == losers


def test_a_token_that_lost_one_expert_gives_the_other_all_its_weight() -> None:
    dispatch = dispatch_with_capacity(three_tokens(), capacity=2, prioritized=True)
    assert dispatch.weight_NC[1].tolist() == [0.0, 1.0]


def test_a_first_choice_takes_the_slot_of_an_earlier_second_choice() -> None:
    routing = choose(torch.tensor([[9.0, 1.0], [0.0, 1.0]]), top_k=2)
    for prioritized in (True, False):
        dispatch = dispatch_with_capacity(routing, capacity=1, prioritized=prioritized)
        assert dispatch.weight_NC.tolist() == [[1.0, 0.0], [1.0, 0.0]]


def test_a_token_without_any_slot_becomes_zero() -> None:
    routing = choose(torch.tensor([[2.0, 1.0], [1.0, 0.5]]), top_k=1)
    dispatch = dispatch_with_capacity(routing, capacity=1, prioritized=True)
    y_ND = combine(torch.ones(1, 3), dispatch.weight_NC, dispatch)
    assert y_ND.tolist() == [[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]


@settings(deadline=None)
@given(routings(), st.none() | st.integers(0, 6))
@example(NO_TOKENS, None)
def test_combine_sums_each_tokens_weighted_rows(routing: Routing, capacity: int | None) -> None:
    if capacity is None:
        dispatch = dispatch_dropless(routing)
    else:
        dispatch = dispatch_with_capacity(routing, capacity=capacity, prioritized=True)
    y_RD = torch.randn(len(dispatch.token_R), 4, generator=torch.Generator().manual_seed(1))
    expected = torch.zeros(len(routing.expert_NC), 4)
    for token, (rows, weights) in enumerate(
        zip(dispatch.row_NC.tolist(), dispatch.weight_NC, strict=True)
    ):
        for row, weight in zip(rows, weights, strict=True):
            if row < len(y_RD):
                expected[token] += weight * y_RD[row]
    torch.testing.assert_close(
        combine(y_RD, dispatch.weight_NC, dispatch), expected, rtol=0, atol=1e-6
    )


def gradients(prioritized: bool) -> tuple[Tensor, Tensor]:
    """Of the combined output in the expert outputs and in the logits."""
    logits_NE = torch.tensor([[2.0, 1.0, 0.0], [1.5, 0.0, 1.0], [9.0, 1.0, 0.0]])
    logits_NE.requires_grad_()
    dispatch = dispatch_with_capacity(
        choose(logits_NE, top_k=2), capacity=2, prioritized=prioritized
    )
    y_RD = torch.arange(1.0, len(dispatch.token_R) + 1)[:, None].requires_grad_()
    combine(y_RD, dispatch.weight_NC, dispatch).sum().backward()
    assert y_RD.grad is not None
    assert logits_NE.grad is not None
    return y_RD.grad, logits_NE.grad


def test_gradients_reach_kept_routes_and_no_dropped_one() -> None:
    d_y_RD, d_logits_NE = gradients(prioritized=True)
    assert (d_y_RD > 0).all()
    assert d_logits_NE[0].abs().max() > 1e-3
    torch.testing.assert_close(d_logits_NE[1], torch.zeros(3), rtol=0, atol=1e-6)


@settings(deadline=None)
@given(st.integers(0, 500), st.integers(1, 64), st.integers(1, 4))
def test_capacity_is_the_papers_formula(num_tokens: int, num_experts: int, top_k: int) -> None:
    found = expert_capacity(num_tokens, num_experts=num_experts, top_k=top_k, factor=1.25)
    assert found == ceil(Fraction(5, 4) * top_k * num_tokens / num_experts)
