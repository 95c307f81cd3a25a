"""Attention: two kernels, one function; equal to PyTorch's module; step by step as all at once."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.batching.batch import Packing
from pipeline.model import attention
from pipeline.model.attention import Attention, KeyValues, attend

Kernel = Callable[[bool], None]


@pytest.fixture
def choose_fused(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """Set which kernel ``attend`` takes."""

    def choose(fused: bool) -> None:
        monkeypatch.setattr(attention, "fused_attention_pays", lambda _: fused)

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
    found = attend(query, KeyValues(key, value), mask=mask, is_causal=form == "causal")
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
        out = attend(query, KeyValues(key, value), mask=mask, is_causal=form == "causal")
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
    half = attend(query, KeyValues(key, value), mask=mask)
    assert half.dtype == torch.bfloat16
    exact = brute_force(query, key, value, mask.expand(2, 2, 4, 40))
    torch.testing.assert_close(half.double(), exact, rtol=0, atol=2e-2)


@pytest.mark.parametrize("fused", [True, False])
def test_attention_dropout_drops_and_rescales_weights(fused: bool, choose_fused: Kernel) -> None:
    query, key, _ = random_heads(batch=3, length=8, seed=4)
    value = torch.eye(8).expand(3, 2, 8, 8)
    choose_fused(fused)
    torch.manual_seed(1)
    weights = attend(query, KeyValues(key, value), mask=None)
    dropped = attend(query, KeyValues(key, value), mask=None, dropout=0.25)
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], weights[kept] / 0.75)
    assert 0.6 < kept.float().mean() < 0.9


def attention_and_peer(*, width: int = 16, num_heads: int = 4) -> tuple[Attention, nn.Module]:
    """Our module and PyTorch's, with the same weights."""
    torch.manual_seed(1)
    ours = Attention(width=width, num_heads=num_heads, dropout=0.0)
    peer = nn.MultiheadAttention(width, num_heads, batch_first=True)
    projections = (ours.query, ours.key, ours.value)
    with torch.no_grad():
        peer.in_proj_weight.copy_(torch.cat([p.weight for p in projections]))
        peer.in_proj_bias.copy_(torch.cat([p.bias for p in projections]))
        peer.out_proj.weight.copy_(ours.output.weight)
        peer.out_proj.bias.copy_(ours.output.bias)
    return ours, peer


@pytest.mark.parametrize("lengths", [[4, 4, 4], [6, 1, 3]])
@pytest.mark.parametrize("is_causal", [True, False])
def test_self_attention_equals_the_module_of_pytorch(lengths: list[int], is_causal: bool) -> None:
    ours, peer = attention_and_peer()
    packing = Packing.from_lengths(lengths)
    x_ND = torch.randn(sum(lengths), 16)
    x_BTD = packing.unpack(x_ND)
    size = packing.length
    future = torch.ones(size, size, dtype=torch.bool).triu(1) if is_causal else None
    expected, _ = peer(x_BTD, x_BTD, x_BTD, key_padding_mask=~packing.mask_BT, attn_mask=future)
    found = ours(x_ND, packing, is_causal=is_causal)
    torch.testing.assert_close(found, packing.pack(expected), rtol=0, atol=1e-6)


@pytest.mark.parametrize("memory_lengths", [[5, 5], [2, 7]])
def test_cross_attention_equals_the_module_of_pytorch(memory_lengths: list[int]) -> None:
    ours, peer = attention_and_peer()
    packing, memory = Packing.from_lengths([3, 1]), Packing.from_lengths(memory_lengths)
    x_ND, memory_ND = torch.randn(4, 16), torch.randn(sum(memory_lengths), 16)
    memory_BSD = memory.unpack(memory_ND)
    expected, _ = peer(
        packing.unpack(x_ND), memory_BSD, memory_BSD, key_padding_mask=~memory.mask_BT
    )
    found = ours(x_ND, packing, memory_ND=memory_ND, memory=memory)
    torch.testing.assert_close(found, packing.pack(expected), rtol=0, atol=1e-6)


@torch.no_grad()
def test_steps_of_self_attention_equal_all_positions_at_once() -> None:
    ours, _ = attention_and_peer()
    packing = Packing.from_lengths([5, 5, 5])
    x_BTD = torch.randn(3, 5, 16)
    at_once = packing.unpack(ours(packing.pack(x_BTD), packing, is_causal=True))
    past = KeyValues(torch.full((3, 4, 7, 4), torch.nan), torch.full((3, 4, 7, 4), torch.nan))
    for position in range(5):
        step_BD = ours.step(x_BTD[:, position], past, length=position)
        torch.testing.assert_close(step_BD, at_once[:, position], rtol=0, atol=1e-6)


@torch.no_grad()
def test_beams_share_the_memory_of_their_sentence() -> None:
    ours, _ = attention_and_peer()
    memory = Packing.from_lengths([2, 6])
    memory_ND, x_RD = torch.randn(8, 16), torch.randn(6, 16)
    keys = ours.keys(memory_ND, memory)
    found = ours.step_memory(x_RD, keys, mask=memory.mask_BT[:, None, None, :])
    for row in range(6):
        sentence = memory_ND[:2] if row < 3 else memory_ND[2:]
        alone = Packing.from_lengths([len(sentence)])
        one = Packing.from_lengths([1])
        expected = ours(x_RD[row : row + 1], one, memory_ND=sentence, memory=alone)
        torch.testing.assert_close(found[row], expected[0], rtol=0, atol=1e-6)


def test_dropout_of_the_module_acts_in_training_only() -> None:
    module = Attention(width=16, num_heads=4, dropout=0.5)
    packing = Packing.from_lengths([6])
    x_ND = torch.randn(6, 16)
    assert not torch.equal(module(x_ND, packing), module(x_ND, packing))
    module.eval()
    assert torch.equal(module(x_ND, packing), module(x_ND, packing))


def test_scores_beyond_half_precision_stay_finite(choose_fused: Kernel) -> None:
    query, key, value = (x.to(torch.bfloat16) for x in random_heads(batch=1, length=4, seed=5))
    choose_fused(False)
    out = attend(query * 1e4, KeyValues(key * 1e4, value), mask=key_mask([4]))
    best = (query.float() @ key.float().transpose(-1, -2)).argmax(-1)
    expected = F.one_hot(best, 4).float() @ value.float()
    torch.testing.assert_close(out.float(), expected, rtol=0, atol=2e-2)
