"""Attention's two kernels are one function."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.batching.batch import Packing
from pipeline.kernels import scaled_dot_product
from pipeline.kernels.scaled_dot_product import attend, attention_mask

Kernel = Callable[[bool], None]


@pytest.fixture
def choose_fused(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """Set which kernel ``attend`` takes."""

    def choose(fused: bool) -> None:
        monkeypatch.setattr(scaled_dot_product, "fused_attention_pays", lambda _, **__: fused)

    return choose


def random_heads(*, batch: int, length: int, seed: int, keys: int | None = None) -> list[Tensor]:
    """Query, key and value, (B, H, T or S, K)."""
    generator = torch.Generator().manual_seed(seed)
    lengths = (length, keys or length, keys or length)
    return [torch.randn(batch, 2, size, 8, generator=generator) for size in lengths]


def key_mask(lengths: list[int]) -> Tensor:
    return Packing.from_lengths(lengths).mask_BT[:, None, None, :]


def brute_force(query: Tensor, key: Tensor, value: Tensor, allowed_BHTS: Tensor) -> Tensor:
    """One query at a time, over its allowed keys only, in float64."""
    out = torch.empty(query.shape, dtype=torch.float64)
    for b, h, t in torch.cartesian_prod(*map(torch.arange, query.shape[:3])).tolist():
        seen = allowed_BHTS[b, h, t]
        scores = key[b, h, seen].double() @ query[b, h, t].double() / math.sqrt(query.shape[-1])
        weights = scores.exp() / scores.exp().sum()
        out[b, h, t] = weights @ value[b, h, seen].double()
    return out


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("form", ["free", "padded", "causal"])
def test_both_kernels_equal_brute_force(fused: bool, form: str, choose_fused: Kernel) -> None:
    query, key, value = random_heads(batch=3, length=5, seed=1)
    mask = key_mask([5, 1, 3]) if form == "padded" else None
    allowed = torch.ones(3, 2, 5, 5, dtype=torch.bool)
    if mask is not None:
        allowed = mask.expand(3, 2, 5, 5)
    if form == "causal":
        allowed = allowed.tril()
    choose_fused(fused)
    found = attend(query, key, value, mask=mask, is_causal=form == "causal")
    expected = brute_force(query, key, value, allowed)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("form", ["free", "padded", "causal"])
def test_both_kernels_have_the_same_gradients(form: str, choose_fused: Kernel) -> None:
    gradients = []
    mask = key_mask([5, 1, 3]) if form == "padded" else None
    for fused in (True, False):
        inputs = [x.requires_grad_() for x in random_heads(batch=3, length=5, seed=2)]
        query, key, value = inputs
        choose_fused(fused)
        out = attend(query, key, value, mask=mask, is_causal=form == "causal")
        (out * torch.arange(out.numel()).view_as(out).cos()).sum().backward()
        gradients.append([x.grad for x in inputs])
    for first, second in zip(*gradients, strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=1e-6)


@pytest.mark.parametrize("fused", [True, False])
def test_half_precision_is_close_to_single_precision(fused: bool, choose_fused: Kernel) -> None:
    heads = random_heads(batch=2, length=4, seed=3, keys=40)
    query, key, value = (x.to(torch.bfloat16) for x in heads)
    mask = key_mask([40, 17])
    choose_fused(fused)
    half = attend(query, key, value, mask=mask)
    assert half.dtype == torch.bfloat16
    exact = brute_force(query, key, value, mask.expand(2, 2, 4, 40))
    torch.testing.assert_close(half.double(), exact, rtol=0, atol=2e-2)


@pytest.mark.parametrize("fused", [True, False])
def test_attention_dropout_drops_and_rescales_weights(fused: bool, choose_fused: Kernel) -> None:
    query, key, _ = random_heads(batch=3, length=8, seed=4)
    value = torch.eye(8).expand(3, 2, 8, 8)
    choose_fused(fused)
    torch.manual_seed(1)
    weights = attend(query, key, value, mask=None)
    dropped = attend(query, key, value, mask=None, dropout=0.25)
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], weights[kept] / 0.75)
    assert 0.6 < kept.float().mean() < 0.9


def test_scores_beyond_half_precision_stay_finite(choose_fused: Kernel) -> None:
    query, key, value = (x.to(torch.bfloat16) for x in random_heads(batch=1, length=4, seed=5))
    choose_fused(False)
    out = attend(query * 1e4, key * 1e4, value, mask=key_mask([4]))
    best = (query.float() @ key.float().transpose(-1, -2)).argmax(-1)
    expected = F.one_hot(best, 4).float() @ value.float()
    torch.testing.assert_close(out.float(), expected, rtol=0, atol=2e-2)


def test_a_mask_of_numbers_as_other_devices_add_it_is_the_mask(choose_fused: Kernel) -> None:
    choose_fused(True)
    heads = random_heads(batch=3, length=5, seed=6)
    mask = key_mask([5, 1, 3])
    numbers = attention_mask(mask, beside=torch.empty(0, device="meta"))
    assert numbers.dtype == torch.float32
    query, key, value = heads
    found = attend(query, key, value, mask=numbers)
    torch.testing.assert_close(found, attend(query, key, value, mask=mask))
    assert attention_mask(mask, beside=heads[0]) is mask
