"""Attention: equal to PyTorch's module, in steps as at once, by a mask or a contextualiser."""

import pytest
import torch
from support.tiny_models import tokens_in_groups
from torch import Tensor, nn

from pipeline.batching.batch import Packing
from pipeline.model.attention import Attention, Projected
from pipeline.model.tokens import Tokens


def tokens_of(packing: Packing) -> Tokens:
    return tokens_in_groups(packing.sentence_N)


def attention_and_peer(*, width: int = 16, num_heads: int = 4) -> tuple[Attention, nn.Module]:
    """Our module and PyTorch's, with the same weights."""
    torch.manual_seed(1)
    ours = Attention(width=width, num_heads=num_heads, dropout=0.0)
    assert isinstance(ours.output, nn.Linear)
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
    found = ours(x_ND, packing, tokens_of(packing), is_causal=is_causal)
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
    found = ours.attend_to(x_ND, packing, memory_ND, memory, tokens_of(packing))
    torch.testing.assert_close(found, packing.pack(expected), rtol=0, atol=1e-6)


class AllSoFar:
    """Keys and values of one row per sentence, attended to without a kernel."""

    def __init__(self, attention: Attention) -> None:
        self.attention = attention
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def append(self, key_RD: Tensor, value_RD: Tensor) -> None:
        self.keys.append(key_RD)
        self.values.append(value_RD)

    def attend(self, query_RD: Tensor) -> Tensor:
        states = query_RD[:, None], torch.stack(self.keys, 1), torch.stack(self.values, 1)
        query, key, value = (self.attention.heads(x_BTD) for x_BTD in states)
        weight = (query @ key.transpose(2, 3) / key.shape[3] ** 0.5).softmax(3)
        context: Tensor = (weight @ value).flatten(1)
        return context


@torch.no_grad()
def test_steps_of_self_attention_equal_all_positions_at_once() -> None:
    ours, _ = attention_and_peer()
    packing = Packing.from_lengths([5, 5, 5])
    x_BTD = torch.randn(3, 5, 16)
    at_once = packing.unpack(ours(packing.pack(x_BTD), packing, tokens_of(packing), is_causal=True))
    past = AllSoFar(ours)
    for position in range(5):
        step_tokens = tokens_of(Packing.from_lengths([1, 1, 1]))
        step_BD = ours.step(x_BTD[:, position], past, step_tokens)
        torch.testing.assert_close(step_BD, at_once[:, position], rtol=0, atol=1e-6)


@pytest.mark.parametrize("lengths", [[4, 4], [6, 1, 3]])
def test_a_mask_restricts_who_is_attended_to(lengths: list[int]) -> None:
    """Against every pair of neighbours alone: no position sees beyond its pair, nor padding."""
    ours, _ = attention_and_peer()
    packing = Packing.from_lengths(lengths)
    pair_T = torch.arange(packing.length) // 2
    mask_BTT = (pair_T[:, None] == pair_T[None, :]).expand(len(lengths), -1, -1)
    x_ND = torch.randn(sum(lengths), 16, requires_grad=True)
    found = ours(x_ND, packing, tokens_of(packing), mask_BTT=mask_BTT)
    expected = []
    for sentence in x_ND.split(lengths):
        for words in sentence.split(2):
            alone = Packing.from_lengths([len(words)])
            expected.append(ours(words, alone, tokens_of(alone)))
    torch.testing.assert_close(found, torch.cat(expected), rtol=0, atol=1e-6)
    found.square().sum().backward()
    assert x_ND.grad is not None
    assert x_ND.grad.isfinite().all()


def test_a_contextualiser_makes_queries_keys_and_values() -> None:
    """Of each token and the one before it, added."""
    ours, peer = attention_and_peer()
    packing = Packing.from_lengths([3, 5])
    x_ND = torch.randn(8, 16)
    sums = [x + torch.cat([torch.zeros(1, 16), x[:-1]]) for x in x_ND.split([3, 5])]

    def with_left_neighbour(attention: Attention, x_ND: Tensor) -> Projected:
        before_BTD = torch.nn.functional.pad(packing.unpack(x_ND), (0, 0, 1, 0))[:, :-1]
        return attention.project(x_ND + packing.pack(before_BTD), tokens_of(packing))

    x_BTD = packing.unpack(torch.cat(sums))
    expected, _ = peer(x_BTD, x_BTD, x_BTD, key_padding_mask=~packing.mask_BT)
    found = ours(x_ND, packing, tokens_of(packing), contextualizer=with_left_neighbour)
    torch.testing.assert_close(found, packing.pack(expected), rtol=0, atol=1e-6)
