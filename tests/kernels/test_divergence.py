"""Divergences of two passes, against autograd of their definition."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.kernels.divergence import summed_divergence


def by_definition(first_LV: Tensor, second_LV: Tensor, *, is_symmetric: bool) -> Tensor:
    log_p, log_q = first_LV.log_softmax(-1), second_LV.log_softmax(-1)
    if not is_symmetric:
        return F.kl_div(log_q, log_p.detach(), reduction="sum", log_target=True)
    there = F.kl_div(log_q, log_p, reduction="sum", log_target=True)
    back = F.kl_div(log_p, log_q, reduction="sum", log_target=True)
    return (there + back) / 2


@pytest.mark.parametrize("is_symmetric", [True, False])
@pytest.mark.parametrize("labels", [1, 16, 37])
def test_value_and_gradients_are_those_of_the_definition(labels: int, is_symmetric: bool) -> None:
    torch.manual_seed(labels)
    logits = [torch.randn(labels, 11, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    found = summed_divergence(*logits, is_symmetric=is_symmetric)
    expected = by_definition(*logits, is_symmetric=is_symmetric)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    ours = torch.autograd.grad(3 * found, logits, allow_unused=True)
    theirs = torch.autograd.grad(3 * expected, logits, allow_unused=True)
    assert (ours[0] is None) == (theirs[0] is None) == (not is_symmetric)
    for one, other in zip(ours, theirs, strict=True):
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_equal_distributions_are_not_apart_and_pull_at_nothing() -> None:
    first = torch.randn(5, 7, requires_grad=True)
    second = (first.detach() + 3.0).requires_grad_()
    found = summed_divergence(first, second, is_symmetric=True)
    assert float(found.detach().abs()) < 1e-5
    for gradient in torch.autograd.grad(found, [first, second]):
        assert float(gradient.abs().max()) < 1e-6


def test_probabilities_that_vanish_in_float32_have_a_divergence() -> None:
    """exp(-1000) is 0 there; its logarithm is never asked for."""
    first = torch.tensor([[0.0, -1000.0]], requires_grad=True)
    second = torch.tensor([[-1000.0, 0.0]], requires_grad=True)
    found = summed_divergence(first, second, is_symmetric=True)
    assert float(found.detach()) == 1000
    assert all(one.isfinite().all() for one in torch.autograd.grad(found, [first, second]))
