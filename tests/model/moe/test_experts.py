"""The experts' arithmetic against one pair of linear layers per expert."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pipeline.kernels import cpu
from pipeline.kernels.expert_products import (
    ExpertWeights,
    grouped_feed_forward,
    padded_feed_forward,
    serve_rows,
)
from pipeline.kernels.products import Activation
from pipeline.model.moe.experts import Experts

WIDTH, HIDDEN = 8, 16
COUNTS = ([3, 0, 2, 4], [0, 7, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0], [0, 0, 0, 5])
Linears = list[tuple[nn.Linear, nn.Linear]]
AllAtOnce = Callable[[Tensor, ExpertWeights, Tensor, Activation], Tensor]


def experts_and_linears(activation: Activation) -> tuple[Experts, Linears]:
    """Four stacked experts, and the same weights in layers of their own."""
    torch.manual_seed(1)
    experts = Experts(
        num_experts=4, first_expert=0, width=WIDTH, hidden_width=HIDDEN, activation=activation
    )
    linears = []
    with torch.no_grad():
        for expert in range(4):
            up, down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
            experts.up.weight[expert] = up.weight
            experts.up.bias[expert] = up.bias
            experts.down.weight[expert] = down.weight
            experts.down.bias[expert] = down.bias
            linears.append((up, down))
    return experts, linears


def expert_by_expert(
    x_RD: Tensor, counts: list[int], linears: Linears, activation: Activation
) -> Tensor:
    function = F.relu if activation == "relu" else F.gelu
    rows = x_RD.split(counts)
    parts = [down(function(up(x))) for x, (up, down) in zip(rows, linears, strict=True)]
    return torch.cat(parts)


def assert_same_function(
    found: tuple[Tensor, Tensor, Experts],
    expected: tuple[Tensor, Tensor, Linears],
    *,
    atol: float = 1e-6,
) -> None:
    """Equal outputs, and equal gradients in the rows and in every weight."""
    y_RD, x_RD, experts = found
    expected_y, expected_x, linears = expected
    torch.testing.assert_close(y_RD, expected_y, rtol=0, atol=atol)
    slope_RD = torch.arange(y_RD.numel(), dtype=torch.float32).view_as(y_RD).cos()
    (y_RD * slope_RD).sum().backward()
    (expected_y * slope_RD).sum().backward()
    torch.testing.assert_close(x_RD.grad, expected_x.grad, rtol=0, atol=atol)
    for index, pair in enumerate(linears):
        for stacked, linear in zip((experts.up, experts.down), pair, strict=True):
            for ours, theirs in ((stacked.weight, linear.weight), (stacked.bias, linear.bias)):
                assert ours.grad is not None
                gradient = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad
                torch.testing.assert_close(ours.grad[index], gradient, rtol=0, atol=10 * atol)


def rows(count: int) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(2)).requires_grad_()


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("counts", COUNTS)
def test_the_loop_equals_autograd_over_single_experts(
    counts: list[int], activation: Activation
) -> None:
    experts, linears = experts_and_linears(activation)
    x_RD, other_x_RD = rows(sum(counts)), rows(sum(counts))
    y_RD = experts(x_RD, counts)
    expected = expert_by_expert(other_x_RD, counts, linears, activation)
    assert_same_function((y_RD, x_RD, experts), (expected, other_x_RD, linears))


def weights_of(experts: Experts) -> ExpertWeights:
    up, down = experts.up, experts.down
    return ExpertWeights(up.weight, up.bias, down.weight, down.bias)


@pytest.mark.parametrize("serve", [grouped_feed_forward, padded_feed_forward])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("counts", COUNTS)
def test_products_of_all_experts_at_once_equal_autograd_over_single_experts(
    counts: list[int], activation: Activation, serve: AllAtOnce
) -> None:
    experts, linears = experts_and_linears(activation)
    x_RD, other_x_RD = rows(sum(counts)), rows(sum(counts))
    y_RD = serve(x_RD, weights_of(experts), torch.tensor(counts), activation)
    expected = expert_by_expert(other_x_RD, counts, linears, activation)
    assert_same_function((y_RD, x_RD, experts), (expected, other_x_RD, linears), atol=1e-5)


def one_by_one(
    x_RD: Tensor, weights: ExpertWeights, count_E: Tensor, activation: Activation
) -> Tensor:
    return serve_rows(x_RD, count_E.tolist(), weights, activation=activation)


@pytest.mark.parametrize("serve", [grouped_feed_forward, padded_feed_forward, one_by_one])
@pytest.mark.parametrize("counts", COUNTS)
def test_products_of_experts_are_near_in_half_precision(
    counts: list[int], serve: AllAtOnce
) -> None:
    """Gradients included; those of experts without rows are zero."""
    experts, linears = experts_and_linears("relu")
    x_RD, other_x_RD = rows(sum(counts)), rows(sum(counts))
    expert_by_expert(other_x_RD, counts, linears, "relu").square().sum().backward()
    experts.to(torch.bfloat16)
    y_RD = serve(x_RD.bfloat16(), weights_of(experts), torch.tensor(counts), "relu")
    assert y_RD.dtype == torch.bfloat16
    y_RD.float().square().sum().backward()
    torch.testing.assert_close(x_RD.grad, other_x_RD.grad, rtol=0.1, atol=0.1)
    for index, pair in enumerate(linears):
        for stacked, linear in zip((experts.up, experts.down), pair, strict=True):
            for ours, theirs in ((stacked.weight, linear.weight), (stacked.bias, linear.bias)):
                assert ours.grad is not None
                if not counts[index]:
                    assert ours.grad[index].count_nonzero() == 0
                elif theirs.grad is not None:
                    torch.testing.assert_close(
                        ours.grad[index].float(), theirs.grad, rtol=0.1, atol=0.2
                    )


def test_what_a_card_leaves_in_the_gradients_of_experts_without_rows_does_not_matter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def product_with_noise(x: Tensor, matrix: Tensor, *, offs: Tensor) -> Tensor:
        product = torch._grouped_mm(x, matrix, offs=offs)
        if product.dim() == 3:
            product[offs.diff(prepend=offs.new_zeros(1)) == 0] = torch.nan
        return product

    monkeypatch.setattr(F, "grouped_mm", product_with_noise)
    experts, _ = experts_and_linears("relu")
    y_RD = grouped_feed_forward(rows(5), weights_of(experts), torch.tensor([0, 3, 2, 0]), "relu")
    y_RD.square().sum().backward()
    for parameter in experts.parameters():
        assert parameter.grad is not None
        assert parameter.grad[[0, 3]].count_nonzero() == 0
        assert parameter.grad.isfinite().all()


def test_bias_gradients_in_half_precision_are_summed_in_single_precision() -> None:
    experts, _ = experts_and_linears("relu")
    experts.to(torch.bfloat16)
    x_RD = torch.randn(4000, WIDTH).bfloat16()
    y_RD = grouped_feed_forward(x_RD, weights_of(experts), torch.tensor([1000] * 4), "relu")
    y_RD.sum().backward()
    assert experts.down.bias.grad is not None
    assert (experts.down.bias.grad == 1000).all()  # in bfloat16, 256 + 1 is 256


@settings(deadline=None)
@given(st.lists(st.integers(0, 6), min_size=4, max_size=4))
def test_any_counts_give_every_row_its_expert(counts: list[int]) -> None:
    experts, linears = experts_and_linears("relu")
    with torch.no_grad():
        found = experts(rows(sum(counts)), counts)
        expected = expert_by_expert(rows(sum(counts)), counts, linears, "relu")
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_experts_without_rows_get_a_gradient_of_zero(activation: Activation) -> None:
    experts, _ = experts_and_linears(activation)
    experts(rows(5), [0, 5, 0, 0]).sum().backward()
    for parameter in experts.parameters():
        assert parameter.grad is not None
        assert parameter.grad[[0, 2, 3]].count_nonzero() == 0
        assert parameter.grad[1].abs().max() > 1e-3


@pytest.mark.parametrize("counts", [[300, 40, 0, 900], [64, 64, 64, 64]])
def test_experts_served_by_several_threads_give_what_they_give_on_one(
    counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "WORTH_OTHER_THREADS", 1)
    torch.manual_seed(1)
    experts = Experts(num_experts=4, first_expert=0, width=16, hidden_width=32, activation="relu")
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_()
    results = []
    for number in (1, 3):
        torch.set_num_threads(number)
        try:
            x_RD = torch.randn(sum(counts), 16, generator=torch.Generator().manual_seed(2))
            x_RD.requires_grad_()
            experts.zero_grad(set_to_none=True)
            y_RD = experts(x_RD, counts)
            y_RD.square().sum().backward()
        finally:
            torch.set_num_threads(1)
        results.append([y_RD, x_RD.grad, *(parameter.grad for parameter in experts.parameters())])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)


def test_a_row_that_is_not_a_number_stays_with_its_expert() -> None:
    experts, _ = experts_and_linears("relu")
    x_RD = rows(12).detach()
    x_RD[:3] = float("nan")
    experts(x_RD.requires_grad_(), [3, 3, 3, 3]).sum().backward()
    for parameter in experts.parameters():
        assert parameter.grad is not None
        assert parameter.grad[1:].isfinite().all()


def test_the_rows_themselves_are_left_as_they_were() -> None:
    experts, _ = experts_and_linears("relu")
    x_RD = rows(6)
    before = x_RD.detach().clone()
    experts(x_RD, [2, 2, 1, 1]).sum().backward()
    assert torch.equal(x_RD, before)


def test_half_precision_is_close_to_single_precision() -> None:
    experts, linears = experts_and_linears("gelu")
    counts = [4, 0, 8, 4]
    expected = expert_by_expert(rows(16), counts, linears, "gelu")
    found = experts.to(torch.bfloat16)(rows(16).bfloat16(), counts)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=3e-2)
