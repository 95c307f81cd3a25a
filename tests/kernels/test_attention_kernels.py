"""Attention of padded and packed sentences and of a search's rows, against brute force."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.tiny_models import tokens_in_groups
from torch import Tensor

from pipeline.batching.batch import Packing
from pipeline.kernels import attention as kernel
from pipeline.kernels import cpu
from pipeline.kernels.attention import (
    RowEntries,
    attend,
    attend_entries,
    attention_mask,
    can_attend_packed,
)
from pipeline.kernels.launching import fused_kernels_off
from pipeline.kernels.noise import Dropout, Noise, weight_dropout
from pipeline.model import attention as model
from pipeline.model.attention import Attention, Projected

LISTED = torch.tensor([[4, 0, 2, 2], [1, 5, 3, 0], [0, 0, 0, 0]])


Kernel = Callable[[bool], None]


@pytest.fixture
def choose_fused(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """Set which kernel ``attend`` takes."""

    def choose(fused: bool) -> None:
        monkeypatch.setattr(kernel, "fused_attention_pays", lambda _, **__: fused)

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
def test_both_kernels_equal_brute_force_in_values_and_gradients(
    fused: bool, form: str, choose_fused: Kernel
) -> None:
    query, key, value = (x.requires_grad_() for x in random_heads(batch=3, length=5, seed=1))
    mask = key_mask([5, 1, 3]) if form == "padded" else None
    allowed = torch.ones(3, 2, 5, 5, dtype=torch.bool)
    if mask is not None:
        allowed = mask.expand(3, 2, 5, 5)
    if form == "causal":
        allowed = allowed.tril()
    choose_fused(fused)
    results = []
    for out in (
        attend(query, key, value, mask=mask, is_causal=form == "causal"),
        brute_force(query, key, value, allowed),
    ):
        slope = torch.arange(out.numel()).view_as(out).cos()
        gradients = torch.autograd.grad((out * slope).sum(), (query, key, value))
        results.append([out.double(), *gradients])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


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


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.float32])
def test_attention_dropout_drops_and_rescales_weights(
    mask_dtype: torch.dtype, choose_fused: Kernel
) -> None:
    query, key, _ = random_heads(batch=3, length=8, seed=4)
    value = torch.eye(8).expand(3, 2, 8, 8)
    choose_fused(True)  # PyTorch's kernel draws from a generator, and is not taken
    mask = key_mask([8, 3, 5])
    weights = attend(query, key, value, mask=mask)
    keys = torch.arange(24, dtype=torch.int32).view(3, 8)
    of_queries = Dropout(Noise(keys % 5, keys), 512, 0.25)
    if mask_dtype != torch.bool:
        mask = attention_mask(mask, beside=torch.empty(0, device="meta"))
    dropped = attend(query, key, value, mask=mask, dropout=of_queries)
    kept = weight_dropout(torch.ones(3, 2, 8, 8), of_queries) != 0
    torch.testing.assert_close(dropped, torch.where(kept, weights / 0.75, 0))


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


class SentenceBySentence:
    """The operator as its name, its arguments and its documentation have it, and its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(
        self,
        query_NHK: Tensor,
        key_MHK: Tensor,
        value_MHK: Tensor,
        query_bound_B: Tensor,
        key_bound_B: Tensor,
        longest_query: int,
        longest_key: int,
        dropout: float,
        is_causal: bool,
    ) -> tuple[Tensor, ...]:
        self.calls += 1
        sides = (query_bound_B, query_NHK, longest_query), (key_bound_B, key_MHK, longest_key)
        for bound_B, tokens, longest in sides:
            assert bound_B.dtype == torch.int32
            assert bound_B.is_contiguous()
            assert bound_B[0] == 0
            assert bound_B[-1] == len(tokens)
            assert int(bound_B.diff().max()) == longest
        bounds = zip(
            (query_bound_B, key_bound_B, key_bound_B), (query_NHK, key_MHK, value_MHK), strict=True
        )
        rows = (x.tensor_split(bound_B[1:-1].tolist()) for bound_B, x in bounds)
        contexts = []
        for of_sentence in zip(*rows, strict=True):
            query, key, value = (x.transpose(0, 1) for x in of_sentence)
            context = F.scaled_dot_product_attention(
                query, key, value, dropout_p=dropout, is_causal=is_causal
            )
            contexts.append(context.transpose(0, 1))
        return (torch.cat(contexts),)


@pytest.fixture
def operator(monkeypatch: pytest.MonkeyPatch) -> SentenceBySentence:
    """Attention as on a device that has the operator, with a loop in its place."""
    loop = SentenceBySentence()
    monkeypatch.setattr(kernel, "_flash_attention", loop)
    monkeypatch.setattr(model, "can_attend_packed", lambda *_, **__: True)
    return loop


def both_ways(
    module: Attention,
    run: Callable[[Tensor], Tensor],
    x_ND: Tensor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same results and gradients with padding as without."""
    results = []
    for packed in (True, False):
        monkeypatch.setattr(model, "can_attend_packed", lambda *_, _is=packed, **__: _is)
        module.zero_grad(set_to_none=True)
        given_ND = x_ND.clone().requires_grad_()
        y_ND = run(given_ND)
        (y_ND * torch.arange(y_ND.numel()).view_as(y_ND).cos()).sum().backward()
        results.append([y_ND, given_ND.grad, *(p.grad for p in module.parameters())])
    for ours, padded in zip(*results, strict=True):
        torch.testing.assert_close(ours, padded, rtol=0, atol=1e-5)


@pytest.mark.parametrize("lengths", [[4, 4], [6, 1, 3], [5]])
@pytest.mark.parametrize("form", ["causal", "free", "cross"])
def test_packed_attention_is_the_padded_one(
    lengths: list[int], form: str, operator: SentenceBySentence, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, packing = Attention(width=16, num_heads=4, dropout=0.0), Packing.from_lengths(lengths)
    memory = Packing.from_lengths([length % 4 + 1 for length in lengths])
    memory_ND, tokens = torch.randn(len(memory.index_N), 16), tokens_in_groups(packing.sentence_N)

    def run(x_ND: Tensor) -> Tensor:
        if form == "cross":
            y_ND = module.attend_to(x_ND, packing, memory_ND, memory, tokens)
        else:
            y_ND = module(x_ND, packing, tokens, is_causal=form == "causal")
        assert isinstance(y_ND, Tensor)
        return y_ND

    both_ways(module, run, torch.randn(sum(lengths), 16), monkeypatch)
    assert operator.calls == 1


def test_a_mask_has_the_padded_form_and_a_contextualiser_stays_packed(
    operator: SentenceBySentence,
) -> None:
    module, packing = Attention(width=16, num_heads=4, dropout=0.0), Packing.from_lengths([6, 2])
    tokens, x_ND = tokens_in_groups(packing.sentence_N), torch.randn(8, 16)
    expected_ND = module(x_ND, packing, tokens)
    assert operator.calls == 1
    everywhere_BTT = torch.ones(2, 6, 6, dtype=torch.bool)
    torch.testing.assert_close(module(x_ND, packing, tokens, mask_BTT=everywhere_BTT), expected_ND)
    assert operator.calls == 1

    def as_is(attention: Attention, x_ND: Tensor) -> Projected:
        return attention.project(x_ND, tokens)

    found_ND = module(x_ND, packing, tokens, contextualizer=as_is)
    assert torch.equal(found_ND, expected_ND)
    assert operator.calls == 2


@pytest.mark.parametrize(
    ("dtype", "head_width", "capability", "can"),
    [
        (torch.bfloat16, 64, (8, 0), True),
        (torch.float16, 128, (9, 0), True),
        (torch.float32, 64, (9, 0), False),
        (torch.bfloat16, 64, (7, 5), False),
        (torch.bfloat16, 256, (9, 0), False),
        (torch.bfloat16, 20, (9, 0), False),
    ],
)
def test_the_operator_is_for_half_precision_on_cards_from_ampere_on(
    dtype: torch.dtype, head_width: int, capability: tuple[int, int], can: bool
) -> None:
    x = torch.empty(1, dtype=dtype, device="meta")

    def found(has_dropout: bool) -> bool:
        kind: dict[str, Any] = {"has_dropout": has_dropout, "capability": capability}
        return can_attend_packed(x, head_width=head_width, **kind)

    assert found(False) == can
    on_cpu = torch.empty(1, dtype=dtype)
    assert not can_attend_packed(on_cpu, head_width=head_width, has_dropout=False)
    with fused_kernels_off():
        assert found(False) == can
        assert not found(True)


def test_the_operator_takes_the_arguments_in_this_order_and_has_a_derivative() -> None:
    """A contract with PyTorch, whose operator it is under a private name."""
    schema = torch.ops.aten._flash_attention_forward.default._schema
    assert [argument.name for argument in schema.arguments[:10]] == [
        *("query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k"),
        *("dropout_p", "is_causal", "return_debug_mask"),
    ]
    states = torch.empty(10, 4, 16, device="meta", dtype=torch.bfloat16, requires_grad=True)
    bounds = torch.empty(4, device="meta", dtype=torch.int32)
    context = kernel._flash_attention(states, states, states, bounds, bounds, 5, 5, 0.0, True)[0]
    assert context.shape == states.shape
    context.sum().backward()
    assert states.grad is not None


def test_the_padded_forms_mask_is_made_once_for_all_layers_and_adds_numbers_on_a_device() -> None:
    packing = Packing.from_lengths([3, 1]).to(torch.device("meta"))
    x = torch.empty(1, device="meta")
    mask = packing.key_mask(beside=x)
    assert mask is not None
    assert mask.dtype == x.dtype
    assert packing.key_mask(beside=x) is mask
    half = packing.key_mask(beside=x.bfloat16())
    assert half is not None
    assert half.dtype == torch.bfloat16


def attended(query_RD: Tensor, key_PD: Tensor, value_PD: Tensor, listed: list[list[int]]) -> Tensor:
    """Row by row, two heads, in double precision."""
    rows = []
    for query_D, entries in zip(query_RD.double(), listed, strict=True):
        states = query_D[None], key_PD[entries].double(), value_PD[entries].double()
        query, key, value = (x_TD.unflatten(1, (2, -1)).transpose(0, 1) for x_TD in states)
        rows.append(F.scaled_dot_product_attention(query, key, value).flatten())
    return torch.stack(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_listed", [True, False])
@pytest.mark.parametrize("threads", [1, 2])
def test_rows_attend_to_their_entries_and_to_no_others(
    threads: int, is_listed: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "WORTH_OTHER_THREADS", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    torch.manual_seed(1)
    query_RD, key_PD, value_PD = (torch.randn(n, 10).to(dtype) for n in (3, 6, 6))
    start_R, stop_R = torch.tensor([0, 1, 2]), torch.tensor([4, 3, 3])
    spans = [range(*span) for span in zip(start_R.tolist(), stop_R.tolist(), strict=True)]
    listed = [
        LISTED[row, list(span)].tolist() if is_listed else list(span)
        for row, span in enumerate(spans)
    ]
    entries = RowEntries(start_R, stop_R, 4, LISTED if is_listed else None)
    found_RD = attend_entries(query_RD, key_PD, value_PD, entries, num_heads=2)
    expected_RD = attended(query_RD, key_PD, value_PD, listed)
    accuracy = 1e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found_RD.double(), expected_RD, rtol=accuracy, atol=accuracy)


def test_what_is_no_number_is_none_in_the_context_of_its_row_alone() -> None:
    query_RD, key_PD = torch.ones(2, 4), torch.ones(3, 4)
    query_RD[0, 0] = torch.nan
    entries = RowEntries(torch.tensor([0, 0]), torch.tensor([3, 3]), 3)
    found_RD = attend_entries(query_RD, key_PD, key_PD, entries, num_heads=1)
    assert found_RD[0].isnan().all()
    assert torch.equal(found_RD[1], torch.ones(4))
