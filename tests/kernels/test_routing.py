"""Choice of experts and router logits against plain PyTorch."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from pipeline.kernels.launching import launches_counted_by
from pipeline.kernels.routing import averaged_logits, kept_softmax, kept_weights
from pipeline.model.moe.routing import choose
from pipeline.model.settings import CombineWeights

SEEDS = st.integers(0, 2**16)


def random(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 9), st.integers(1, 6), st.integers(1, 6), st.floats(0.1, 30), SEEDS)
@example(0, 4, 2, 1.0, 1)
@pytest.mark.parametrize("combine_weights", ["renormalized", "probability"])
def test_experts_their_weights_and_the_balance_loss_are_those_of_the_formulas(
    combine_weights: CombineWeights,
    num_tokens: int,
    num_experts: int,
    top_k: int,
    scale: float,
    seed: int,
) -> None:
    top_k = min(top_k, num_experts)
    slope_NC = random(num_tokens, top_k, seed=5)
    ours_NE = random(num_tokens, num_experts, seed=seed, scale=scale).requires_grad_()
    plain_NE = ours_NE.detach().clone().requires_grad_()
    ours = choose(ours_NE, top_k=top_k, combine_weights=combine_weights)
    probability_NE = plain_NE.softmax(-1)
    expert_NC = plain_NE.sort(descending=True, stable=True).indices[:, :top_k]
    weight_NC = probability_NE.gather(1, expert_NC)
    if combine_weights == "renormalized":
        weight_NC = plain_NE.gather(1, expert_NC).softmax(-1)
    count_E = torch.bincount(expert_NC[:, 0], minlength=num_experts)
    products_E = count_E * probability_NE.sum(0) / max(num_tokens, 1) ** 2
    balance_loss = num_experts * products_E.sum()
    assert torch.equal(ours.expert_NC, expert_NC)
    torch.testing.assert_close(ours.probability_NE, probability_NE)
    torch.testing.assert_close(ours.weight_NC, weight_NC)
    torch.testing.assert_close(ours.balance_loss, balance_loss)
    ((ours.weight_NC * slope_NC).sum() + 3 * ours.balance_loss).backward()
    ((weight_NC * slope_NC).sum() + 3 * balance_loss).backward()
    torch.testing.assert_close(ours_NE.grad, plain_NE.grad, rtol=1e-4, atol=5e-6)


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
def test_of_equal_logits_the_first_is_chosen(num_experts: int, levels: int) -> None:
    generator = torch.Generator().manual_seed(levels)
    logits_NE = torch.randint(levels, (300, num_experts), generator=generator).float()
    expected = [
        sorted(range(num_experts), key=lambda e: (-row[e], e))[:2] for row in logits_NE.tolist()
    ]
    assert choose(logits_NE, top_k=2).expert_NC.tolist() == expected


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


@pytest.mark.parametrize("weights", [[[0.7, 0.2], [0.6, 0.3]], [[4.0, 1.0], [2.0, -0.5]]])
def test_weights_of_any_sum_change_only_where_a_route_was_dropped(
    weights: list[list[float]],
) -> None:
    """As evaluation, which drops none, has them: a router may make weights without a sum of 1."""
    weight_NC = torch.tensor([weights[0], *weights, weights[1]])
    is_dropped_NC = torch.tensor([[False, False], [False, True], [False, False], [True, True]])
    found_NC = kept_weights(weight_NC, is_dropped_NC, renormalize=True)
    sum_of_first = sum(map(abs, weights[0]))
    expected = torch.tensor([weights[0], [sum_of_first, 0.0], weights[1], [0.0, 0.0]])
    torch.testing.assert_close(found_NC, expected)


@pytest.mark.parametrize("num_groups", [1, 3])
def test_logits_of_averaged_routers_are_the_average_of_their_logits(num_groups: int) -> None:
    results = []

    def by_definition(x_ND: Tensor, *weights: Tensor) -> Tensor:
        weight_ED, weight_GED, group_N = weights
        return (x_ND @ weight_ED.t() + torch.einsum("nd,ned->ne", x_ND, weight_GED[group_N])) / 2

    for averaged in (by_definition, averaged_logits):
        tensors = [random(7, 4, seed=1), random(5, 4, seed=2), random(num_groups, 5, 4, seed=3)]
        x_ND, weight_ED, weight_GED = (tensor.requires_grad_() for tensor in tensors)
        found_NE = averaged(x_ND, weight_ED, weight_GED, torch.arange(7) % num_groups)
        (found_NE * random(7, 5, seed=4)).sum().backward()
        results.append([found_NE, x_ND.grad, weight_ED.grad, weight_GED.grad])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "kernels"),
    [
        (torch.float32, ["choose_experts", "average_balance", "kept_softmax"]),
        (torch.bfloat16, []),
        (torch.float16, []),
    ],
)
def test_a_gpu_serves_a_router_in_half_precision_by_operators(
    dtype: torch.dtype, kernels: list[str]
) -> None:
    """The kernels read the bits of float32; the meta device stands for a GPU."""
    launched: list[str] = []
    logits_NE = torch.empty(9, 4, device="meta", dtype=dtype)
    with launches_counted_by(lambda name, *_: launched.append(name)):
        routing = choose(logits_NE, top_k=2)
        kept_softmax(logits_NE[:, :2], torch.empty(9, 2, dtype=torch.bool, device="meta"))
    assert launched == kernels
    assert (routing.claim_N is None) == (not kernels)
