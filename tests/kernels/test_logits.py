"""Losses over a vocabulary and a search's best tokens, against their definitions."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.kernels import logits
from pipeline.kernels.logits import (
    DEVICE_CHUNKS,
    best_tokens,
    rows_at_a_time,
    summed_cross_entropy,
    summed_divergence,
)


def logits_and_labels(rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    logits_LV = 3 * torch.randn(rows, 50, generator=generator)
    return logits_LV.to(dtype), torch.randint(50, (rows,), generator=generator)


@pytest.mark.parametrize("is_cpu", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("rows", [0, 1, 7, 8, 100])
@pytest.mark.parametrize("overwrites", [False, True])
def test_any_chunks_give_the_plain_computation(
    overwrites: bool,
    rows: int,
    smoothing: float,
    dtype: torch.dtype,
    is_cpu: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chunk = rows_at_a_time(rows, is_cpu=is_cpu)
    monkeypatch.setattr(logits, "rows_at_a_time", lambda *_, **__: chunk)
    logits_LV, labels_L = logits_and_labels(rows, dtype)
    ours, theirs = (logits_LV.clone().requires_grad_() for _ in range(2))
    read = ours * 1  # no leaf, as logits are
    smoothed, plain = summed_cross_entropy(
        read, labels_L, smoothing=smoothing, overwrites=overwrites
    )
    assert torch.equal(read, logits_LV) or overwrites
    expected = F.cross_entropy(theirs.float(), labels_L, label_smoothing=smoothing, reduction="sum")
    torch.testing.assert_close(smoothed, expected, rtol=1e-6, atol=0)
    exact = F.cross_entropy(logits_LV.double(), labels_L, reduction="sum")
    assert smoothed.dtype == plain.dtype == torch.float32
    assert plain.item() == pytest.approx(exact.item(), rel=1e-6)
    assert not plain.requires_grad
    (2 * smoothed).backward()
    (2 * expected).backward()
    tolerance = 1e-6 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=tolerance, atol=1e-6)


def test_in_float64_nothing_is_rounded_to_less() -> None:
    logits_LV, labels_L = logits_and_labels(100, torch.float64)
    ours, theirs = (logits_LV.clone().requires_grad_() for _ in range(2))
    smoothed, plain = summed_cross_entropy(ours, labels_L, smoothing=0.1)
    expected = F.cross_entropy(theirs, labels_L, label_smoothing=0.1, reduction="sum")
    torch.testing.assert_close(smoothed, expected, rtol=1e-13, atol=0)
    exact = F.cross_entropy(logits_LV, labels_L, reduction="sum")
    torch.testing.assert_close(plain, exact, rtol=1e-13, atol=0)
    found, wanted = (
        torch.autograd.grad(*pair)[0] for pair in ((smoothed, ours), (expected, theirs))
    )
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_that_are_a_view_of_longer_rows_lose_as_their_copy_does(dtype: torch.dtype) -> None:
    """Those of a padded vocabulary are one. What is beyond them is not read."""
    logits_LV, labels_L = logits_and_labels(7, dtype)
    view_LV = F.pad(logits_LV, (0, 14), value=torch.nan)[:, :50].requires_grad_()
    copy_LV = logits_LV.clone().requires_grad_()
    found, expected = (
        summed_cross_entropy(each, labels_L, smoothing=0.1)[0] for each in (view_LV, copy_LV)
    )
    assert torch.equal(found, expected)
    gradients = torch.autograd.grad(found, view_LV) + torch.autograd.grad(expected, copy_LV)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("rows", [0, 1, 8, 9, 4019, 10**6])
def test_off_the_cpu_there_are_few_chunks_however_many_rows(rows: int) -> None:
    chunk = rows_at_a_time(rows, is_cpu=False)
    assert chunk >= 1
    assert -(-rows // chunk) <= DEVICE_CHUNKS


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


def test_probabilities_that_vanish_in_float32_have_a_divergence() -> None:
    """exp(-1000) is 0 there; its logarithm is never asked for."""
    first = torch.tensor([[0.0, -1000.0]], requires_grad=True)
    second = torch.tensor([[-1000.0, 0.0]], requires_grad=True)
    found = summed_divergence(first, second, is_symmetric=True)
    assert float(found.detach()) == 1000
    assert all(one.isfinite().all() for one in torch.autograd.grad(found, [first, second]))


@pytest.mark.parametrize("size", [7, 32, 33, 64, 1000])
@pytest.mark.parametrize("width", [1, 2, 7])
def test_the_best_tokens_are_those_of_a_stable_sort(width: int, size: int) -> None:
    torch.manual_seed(size)
    logits_RV = torch.randint(0, 40, (50, size)).float()  # many are equal
    logits_RV[:, ::3] = -torch.inf
    best_RC, token_RC = best_tokens(logits_RV, width)
    sorted_RV, order_RV = logits_RV.sort(dim=1, descending=True, stable=True)
    assert torch.equal(best_RC, sorted_RV[:, :width])
    is_there = best_RC.isfinite()
    assert torch.equal(token_RC[is_there], order_RV[:, :width][is_there])
    assert not token_RC[~is_there].any()
