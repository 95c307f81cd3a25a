"""Attention without padding: what the operator is handed, and where it is taken."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from support.tiny_models import tokens_in_groups
from torch import Tensor

from pipeline.batching.batch import Packing
from pipeline.kernels import packed_attention
from pipeline.kernels.packed_attention import Spans, attend_packed, can_attend_packed
from pipeline.model import attention
from pipeline.model.attention import Attention


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
        for bound_B, tokens, longest in (
            (query_bound_B, query_NHK, longest_query),
            (key_bound_B, key_MHK, longest_key),
        ):
            assert bound_B.dtype == torch.int32
            assert bound_B.is_contiguous()
            assert bound_B[0] == 0
            assert bound_B[-1] == len(tokens)
            assert int(bound_B.diff().max()) == longest
        rows = (
            x.tensor_split(bound_B[1:-1].tolist())
            for x, bound_B in (
                (query_NHK, query_bound_B),
                (key_MHK, key_bound_B),
                (value_MHK, key_bound_B),
            )
        )
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
    monkeypatch.setattr(packed_attention, "_flash_attention", loop)
    monkeypatch.setattr(attention, "can_attend_packed", lambda *_, **__: True)
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
        monkeypatch.setattr(attention, "can_attend_packed", lambda *_, _is=packed, **__: _is)
        module.zero_grad(set_to_none=True)
        given_ND = x_ND.clone().requires_grad_()
        y_ND = run(given_ND)
        (y_ND * torch.arange(y_ND.numel()).view_as(y_ND).cos()).sum().backward()
        results.append([y_ND, given_ND.grad, *(p.grad for p in module.parameters())])
    for ours, padded in zip(*results, strict=True):
        torch.testing.assert_close(ours, padded, rtol=0, atol=1e-5)


@pytest.mark.parametrize("lengths", [[4, 4], [6, 1, 3], [5]])
@pytest.mark.parametrize("is_causal", [True, False])
def test_self_attention_is_the_padded_one(
    lengths: list[int],
    is_causal: bool,
    operator: SentenceBySentence,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, packing = Attention(width=16, num_heads=4, dropout=0.0), Packing.from_lengths(lengths)
    tokens = tokens_in_groups(packing.sentence_N)

    def run(x_ND: Tensor) -> Tensor:
        y_ND: Tensor = module(x_ND, packing, tokens, is_causal=is_causal)
        return y_ND

    both_ways(module, run, torch.randn(sum(lengths), 16), monkeypatch)
    assert operator.calls == 1


def test_cross_attention_is_the_padded_one(
    operator: SentenceBySentence, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = Attention(width=16, num_heads=4, dropout=0.0)
    packing, memory = Packing.from_lengths([2, 5, 1]), Packing.from_lengths([3, 1, 4])
    memory_ND, tokens = torch.randn(8, 16), tokens_in_groups(packing.sentence_N)

    def run(x_ND: Tensor) -> Tensor:
        return module.attend_to(x_ND, packing, memory_ND, memory, tokens)

    both_ways(module, run, torch.randn(8, 16), monkeypatch)
    assert operator.calls == 1


def test_dropout_goes_to_the_operator_in_training_only(operator: SentenceBySentence) -> None:
    module, packing = Attention(width=16, num_heads=4, dropout=0.5), Packing.from_lengths([6, 2])
    tokens, x_ND = tokens_in_groups(packing.sentence_N), torch.randn(8, 16)
    assert not torch.equal(module(x_ND, packing, tokens), module(x_ND, packing, tokens))
    module.eval()
    assert torch.equal(module(x_ND, packing, tokens), module(x_ND, packing, tokens))
    assert operator.calls == 4


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
    found_ND = module(
        x_ND,
        packing,
        tokens,
        contextualizer=lambda attention, x_ND: attention.project(x_ND, tokens),
    )
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
    assert can_attend_packed(x, head_width=head_width, capability=capability) == can
    assert not can_attend_packed(torch.empty(1, dtype=dtype), head_width=head_width)


def test_the_operator_takes_the_arguments_in_this_order_and_has_a_derivative() -> None:
    """A contract with PyTorch, whose operator it is under a private name."""
    schema = torch.ops.aten._flash_attention_forward.default._schema
    assert [argument.name for argument in schema.arguments[:10]] == [
        *("query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k"),
        *("dropout_p", "is_causal", "return_debug_mask"),
    ]
    states = torch.empty(10, 4, 16, device="meta", dtype=torch.bfloat16, requires_grad=True)
    spans = Spans(torch.empty(4, device="meta", dtype=torch.int32), 5)
    context = attend_packed(states, states, states, queries=spans, keys=spans, dropout=0.1)
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


@pytest.mark.parametrize("lengths", [[3, 1, 4], [2, 2]])
def test_a_packing_knows_where_its_sentences_start(lengths: list[int]) -> None:
    packing = Packing.from_lengths(lengths)
    sentences = packing.sentence_N.tensor_split(packing.bound_B[1:-1].tolist())
    assert [row.unique().tolist() for row in sentences] == [[i] for i in range(len(lengths))]
    assert [len(row) for row in sentences] == lengths
