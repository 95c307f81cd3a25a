"""Routers: which experts a token goes to, and how languages change that."""

import math
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import pytest
import torch
from support.tiny_models import tokens_in_groups
from torch import Tensor, nn

from pipeline.batching.batch import Shares
from pipeline.errors import ConfigError
from pipeline.model.moe.router import LanguageGroupRouter, TokenRouter
from pipeline.model.moe.routing import choose, z_loss
from pipeline.model.settings import MoEConfig

WIDTH, EXPERTS, GROUPS = 8, 5, 3
RouterType = TypeVar("RouterType", TokenRouter, LanguageGroupRouter)


def token_router(*, top_k: int = 2, seed: int = 1) -> TokenRouter:
    router = TokenRouter(MoEConfig(num_experts=EXPERTS, top_k=top_k), width=WIDTH)
    return fill(router, seed=seed)


def group_router(*, groups: int = GROUPS, top_k: int = 2, seed: int = 1) -> LanguageGroupRouter:
    router = LanguageGroupRouter(
        MoEConfig(num_experts=EXPERTS, top_k=top_k), width=WIDTH, num_groups=groups
    )
    return fill(router, seed=seed)


def fill(router: RouterType, *, seed: int) -> RouterType:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in router.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return router


def random_tokens(count: int, *, seed: int = 7) -> tuple[Tensor, Tensor]:
    """Hidden states, and groups in which all of the GROUPS occur."""
    generator = torch.Generator().manual_seed(seed)
    x_ND = torch.randn(count, WIDTH, generator=generator)
    return x_ND, torch.arange(count) % GROUPS


def probabilities(logits: list[float]) -> list[float]:
    exponents = torch.tensor(logits, dtype=torch.float64).exp()
    values: list[float] = (exponents / exponents.sum()).tolist()
    return values


@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_the_best_experts_are_chosen_best_first(top_k: int) -> None:
    router = token_router(top_k=top_k)
    x_ND, group_N = random_tokens(20)
    routing = router(x_ND, tokens_in_groups(group_N))
    for token, x_D in enumerate(x_ND):
        logits = [float(row.double() @ x_D.double()) for row in router.weight.detach()]
        expected = probabilities(logits)
        best = sorted(range(EXPERTS), key=lambda e: -expected[e])[:top_k]
        total = sum(expected[e] for e in best)
        assert routing.expert_NC[token].tolist() == best
        assert routing.probability_NE[token].tolist() == pytest.approx(expected, abs=1e-6)
        weights = [expected[e] / total for e in best]
        assert routing.weight_NC[token].tolist() == pytest.approx(weights, abs=1e-6)


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_weights_of_the_chosen_experts_sum_to_one(top_k: int) -> None:
    logits_NE = 30 * torch.randn(200, EXPERTS, generator=torch.Generator().manual_seed(1))
    routing = choose(logits_NE, top_k=top_k)
    torch.testing.assert_close(routing.weight_NC.sum(-1), torch.ones(200), rtol=0, atol=1e-6)


def test_probabilities_may_be_kept_as_they_are() -> None:
    logits_NE = torch.randn(20, EXPERTS, generator=torch.Generator().manual_seed(1))
    routing = choose(logits_NE, top_k=2, combine_weights="probability")
    best_NC = logits_NE.softmax(-1).sort(descending=True).values[:, :2]
    torch.testing.assert_close(routing.weight_NC, best_NC)


def test_the_z_loss_is_the_mean_squared_logarithm_of_the_normaliser() -> None:
    logits_NE = 3 * torch.randn(6, EXPERTS, generator=torch.Generator().manual_seed(1))
    squares = [math.log(sum(math.exp(z) for z in row)) ** 2 for row in logits_NE.tolist()]
    assert z_loss(logits_NE).item() == pytest.approx(sum(squares) / 6, rel=1e-5)


def test_a_group_router_averages_the_shared_logits_and_those_of_the_group() -> None:
    router = group_router()
    x_ND, group_N = random_tokens(12)
    routing = router(x_ND, tokens_in_groups(group_N))
    for token, group in enumerate(group_N.tolist()):
        mean_ED = (router.weight.double() + router.group_weight[group].double()) / 2
        expected = probabilities((mean_ED @ x_ND[token].double()).tolist())
        assert routing.probability_NE[token].tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("groups", [1, GROUPS])
def test_group_routers_equal_to_the_shared_one_are_a_token_router(groups: int) -> None:
    plain, grouped = token_router(), group_router(groups=groups)
    with torch.no_grad():
        grouped.weight.copy_(plain.weight)
        grouped.group_weight.copy_(plain.weight.expand(groups, -1, -1))
    x_ND, group_N = random_tokens(30)
    expected, found = (
        plain(x_ND, tokens_in_groups(group_N % groups)),
        grouped(x_ND, tokens_in_groups(group_N % groups)),
    )
    assert torch.equal(found.expert_NC, expected.expert_NC)
    torch.testing.assert_close(found.probability_NE, expected.probability_NE, rtol=0, atol=1e-6)


def test_changing_a_groups_router_changes_the_tokens_of_that_group_only() -> None:
    router = group_router()
    x_ND, group_N = random_tokens(12)
    before = router(x_ND, tokens_in_groups(group_N)).probability_NE.detach()
    with torch.no_grad():
        router.group_weight[1] *= -1
    after = router(x_ND, tokens_in_groups(group_N)).probability_NE.detach()
    changed_N = (before - after).abs().amax(-1)
    assert torch.equal(before[group_N != 1], after[group_N != 1])
    assert changed_N[group_N == 1].min() > 1e-4


def test_groups_without_tokens_get_a_gradient_of_zero() -> None:
    router = group_router()
    x_ND, _ = random_tokens(9)
    router(x_ND, tokens_in_groups(torch.ones(9, dtype=torch.int64))).weight_NC[
        :, 0
    ].sum().backward()
    gradient = router.group_weight.grad
    assert gradient is not None
    assert gradient[[0, 2]].count_nonzero() == 0
    assert gradient[1].abs().max() > 1e-3
    assert router.weight.grad is not None
    torch.testing.assert_close(gradient[1], router.weight.grad)


@pytest.mark.parametrize("router", [token_router(), group_router()])
def test_half_precision_states_are_routed_in_single_precision(router: nn.Module) -> None:
    x_ND, group_N = random_tokens(50)
    half = router.to(torch.bfloat16)
    found = half(x_ND.bfloat16(), tokens_in_groups(group_N))
    expected = half.float()(x_ND.bfloat16().float(), tokens_in_groups(group_N))
    assert found.probability_NE.dtype == torch.float32
    assert torch.equal(found.probability_NE, expected.probability_NE)
    assert torch.equal(found.weight_NC, expected.weight_NC)


@pytest.mark.parametrize("router", [token_router(), group_router()])
def test_routing_has_no_noise_even_in_training(router: nn.Module) -> None:
    x_ND, group_N = random_tokens(50)
    first, second = (
        router.train()(x_ND, tokens_in_groups(group_N)),
        router(x_ND, tokens_in_groups(group_N)),
    )
    assert torch.equal(first.probability_NE, second.probability_NE)
    assert torch.equal(first.expert_NC, second.expert_NC)


def test_no_tokens_make_an_empty_routing() -> None:
    routing = group_router()(
        torch.empty(0, WIDTH), tokens_in_groups(torch.empty(0, dtype=torch.int64))
    )
    assert routing.probability_NE.shape == (0, EXPERTS)
    assert routing.expert_NC.shape == routing.weight_NC.shape == (0, 2)
    assert routing.balance_loss.item() == 0
    assert z_loss(routing.logits_NE).item() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_losses_of_a_shared_pass_take_a_routers_logits_in_any_precision(dtype: torch.dtype) -> None:
    shares = Shares.of(np.array([3, 5]), np.array([2, 6]))
    logits_NE = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    losses: list[Callable[[Tensor], Tensor]] = [
        lambda logits_NE: choose(logits_NE, top_k=2, shares=shares).balance_loss,
        lambda logits_NE: z_loss(logits_NE, shares),
    ]
    for loss in losses:
        found, expected = loss(logits_NE.to(dtype)), loss(logits_NE)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.0)


@pytest.mark.parametrize("top_k", [1, 2])
def test_a_router_of_groups_without_groups_names_where_it_gets_them(top_k: int) -> None:
    with pytest.raises(ConfigError, match=r"^The router 'token' reads .* to GROUP_ROUTERS in"):
        group_router(groups=0, top_k=top_k)
