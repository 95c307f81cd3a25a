"""Fused kernels against PyTorch's operators, in Triton's interpreter.

:mod:`test_fused_kernels` runs this file in a process of its own with ``TRITON_INTERPRET=1``, which
Triton reads when it is loaded.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import islice, pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.passes import join
from support.tiny_models import (
    EOS_ID,
    random_batch,
    random_examples,
    source_of,
    tiny_model,
    tiny_spec,
)
from torch import Tensor, nn

from pipeline.decoding import grid_search
from pipeline.decoding.beam_search import beam_search_n_best
from pipeline.decoding.settings import DecodingConfig
from pipeline.kernels import logits, pointwise, products
from pipeline.kernels.attention import (
    Spans,
    attend_packed,
    attend_step,
    can_attend_packed,
    can_attend_step,
    list_seen,
    sliced,
)
from pipeline.kernels.cpu import sparing_loops
from pipeline.kernels.launching import fused_kernels_off, fused_on_cpu, is_fused
from pipeline.kernels.logits import finds_best_at_once, fused_best_tokens, summed_cross_entropy
from pipeline.kernels.noise import Dropout, Noise
from pipeline.kernels.pointwise import (
    activated_linear,
    add_and_norm,
    add_dropped,
    dropped,
    layer_norm,
    norm_of_sum,
)
from pipeline.kernels.products import Activation
from pipeline.model import fused_comparison
from pipeline.model.fused_comparison import Sizes, compare
from pipeline.model.settings import MoEConfig
from pipeline.model.sublayer import Regularization
from pipeline.training.losses import training_loss
from pipeline.training.settings import LossConfig

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
DTYPES = [torch.float32, torch.bfloat16]
LAST_SITE = 2**31 - 256


@pytest.fixture(autouse=True)
def fused(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch.manual_seed(0)
    # Few programs, so that each adds up several rows.
    monkeypatch.setattr(pointwise, "PROGRAMS", 2)
    with fused_on_cpu():
        yield


def mixed(bits: Any) -> Any:
    """Return lowbias32 of uint32 numbers."""
    bits = bits ^ (bits >> np.uint32(16))
    bits = bits * np.uint32(0x7FEB352D)
    bits = bits ^ (bits >> np.uint32(15))
    bits = bits * np.uint32(0x846CA68B)
    return bits ^ (bits >> np.uint32(16))


def kept(noise: Noise, site: int, columns: int, rate: float) -> Tensor:
    """Return the values that dropout keeps, from 32-bit arithmetic of NumPy."""
    seed_N, row_N = (x.numpy().view(np.uint32)[:, None] for x in noise)
    site_bits = np.uint32(site * 0x1B873593 % 2**32)
    key_N1 = mixed(mixed(seed_N + site_bits) ^ (row_N * np.uint32(0x85EBCA6B)))
    column_C = np.arange(columns, dtype=np.uint32) * np.uint32(0xC2B2AE35)
    return torch.from_numpy(mixed(key_N1 ^ column_C) >= np.uint32(int(rate * 2**32)))


def drop(x: Tensor, noise: Noise, site: int, rate: float) -> Tensor:
    return torch.where(kept(noise, site, x.shape[1], rate), x / (1 - rate), 0.0)


def gradient(x: Tensor) -> Tensor:
    assert x.grad is not None
    return x.grad


def noise_of(*rows: int) -> Noise:
    """Return the keys of micro-batches of so many tokens, each with a seed of its own."""
    seeds = torch.randint(-(2**31), 2**31, (len(rows),), dtype=torch.int32)
    numbers = [torch.arange(n, dtype=torch.int32) for n in rows]
    return Noise(seeds.repeat_interleave(torch.tensor(rows)), torch.cat(numbers))


def assert_close(found: Tensor, expected: Tensor, *, tolerance: float) -> None:
    assert found.shape == expected.shape
    distance = (found.double() - expected.double()).norm()
    # Relative to the reference or, where that cancels out, to the values of about 1 it is made of.
    assert distance <= tolerance * (expected.double().norm() + 0.1 * expected.numel() ** 0.5)


def assert_same(
    ours: Callable[..., Sequence[Tensor]],
    reference: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor],
    *,
    dtype: torch.dtype,
) -> None:
    """Compare results and gradients; the reference computes in float32."""
    given = [x.detach().clone().to(dtype).requires_grad_() for x in inputs]
    exact = [x.detach().clone().float().requires_grad_() for x in given]
    found, expected = ours(*given), reference(*exact)
    gradients = [torch.randn_like(y) for y in expected]
    torch.autograd.backward(found, [d.to(dtype) for d in gradients])
    torch.autograd.backward(expected, [d.to(dtype).float() for d in gradients])
    for y, z in zip(found, expected, strict=True):
        assert_close(y, z, tolerance=TOLERANCE[dtype])
    for x, z in zip(given, exact, strict=True):
        assert_close(gradient(x), gradient(z), tolerance=TOLERANCE[dtype])


def test_fused_kernels_run_only_where_they_may() -> None:
    x = torch.zeros(2, 2)
    assert is_fused(x)
    assert not is_fused(x.double())
    with fused_kernels_off():
        assert not is_fused(x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("rows", "width", "rate", "site"),
    [((0,), 48, 0.3, 256), ((1,), 16, 0.0, 256), ((2, 3), 24, 0.6, LAST_SITE)],
)
def test_residual_kernels_equal_pytorch(
    rows: tuple[int, ...], width: int, rate: float, site: int, has_bias: bool, dtype: torch.dtype
) -> None:
    noise = noise_of(*rows)
    norm = nn.LayerNorm(width)
    x_ND, y_ND = torch.randn(2, sum(rows), width)
    parameters = [torch.randn(width) for _ in range(2 + has_bias)]

    def added(x: Tensor, y: Tensor, bias: Sequence[Tensor]) -> Tensor:
        return x + drop(sum(bias, y), noise, site, rate)

    def normed(x: Tensor, weight: Tensor, shift: Tensor) -> Tensor:
        return F.layer_norm(x, (width,), weight, shift, norm.eps)

    def with_norm(weight: Tensor, shift: Tensor) -> nn.LayerNorm:
        norm.__dict__.update(weight=weight, bias=shift)
        norm._parameters.clear()
        return norm

    def options(bias: Sequence[Tensor]) -> dict[str, Any]:
        return {"y_bias_D": bias[0] if bias else None, "dropout": Dropout(noise, site, rate)}

    def both(x: Tensor, y: Tensor, weight: Tensor, shift: Tensor, *bias: Tensor) -> Any:
        return add_and_norm(x, y, with_norm(weight, shift), **options(bias))

    def reference(x: Tensor, y: Tensor, weight: Tensor, shift: Tensor, *bias: Tensor) -> Any:
        total = added(x, y, bias)
        return total, normed(total, weight, shift)

    def post(x: Tensor, y: Tensor, weight: Tensor, shift: Tensor, *bias: Tensor) -> Any:
        return [norm_of_sum(x, y, with_norm(weight, shift), **options(bias))]

    inputs = [x_ND, y_ND, *parameters]
    assert_same(both, reference, inputs, dtype=dtype)
    assert_same(post, lambda *values: reference(*values)[1:], inputs, dtype=dtype)
    assert_same(
        lambda x, y, *bias: [add_dropped(x, y, **options(bias))],
        lambda x, y, *bias: [added(x, y, bias)],
        [x_ND, y_ND, *parameters[2:]],
        dtype=dtype,
    )
    if not has_bias:
        assert_same(
            lambda x, weight, shift: [layer_norm(x, with_norm(weight, shift))],
            lambda *values: [normed(*values)],
            [x_ND, *parameters],
            dtype=dtype,
        )
        assert_same(
            lambda x: [dropped(x, Dropout(noise, site, rate)) * 1],
            lambda x: [drop(x, noise, site, rate)],
            [x_ND],
            dtype=dtype,
        )


def test_a_norm_that_nobody_uses_gets_no_gradient() -> None:
    x_ND, y_ND = torch.randn(2, 7, 16).requires_grad_()
    norm = nn.LayerNorm(16)
    total_ND, _ = add_and_norm(x_ND, y_ND, norm)
    d_x_ND, d_weight_D = torch.autograd.grad(total_ND.sum(), (x_ND, norm.weight), allow_unused=True)
    assert torch.equal(d_x_ND, torch.ones(7, 16))
    assert d_weight_D is None


def test_dropout_does_not_depend_on_how_micro_batches_share_a_pass() -> None:
    first, second = noise_of(6), noise_of(9)
    x_ND, y_ND = torch.randn(2, 15, 32)
    apart = [
        add_dropped(x_ND[:6], y_ND[:6], dropout=Dropout(first, 256, 0.5)),
        add_dropped(x_ND[6:], y_ND[6:], dropout=Dropout(second, 256, 0.5)),
    ]
    joined = Noise(*(torch.cat([b, a]) for a, b in zip(first, second, strict=True)))
    swapped = [torch.cat([x[6:], x[:6]]) for x in (x_ND, y_ND)]
    together = add_dropped(*swapped, dropout=Dropout(joined, 256, 0.5))
    assert torch.equal(together, torch.cat(apart[::-1]))


# Each two of a row's parts (full blocks, the last block, padding), type and smoothing meet.
@pytest.mark.parametrize(
    ("rows", "vocabulary", "columns", "block", "smoothing", "dtype"),
    [
        (0, 301, 320, 128, 0.1, torch.float32),
        (1, 256, 256, 128, 0.0, torch.float32),
        (1, 256, 256, 128, 0.1, torch.bfloat16),
        (1, 256, 256, 8192, 0.1, torch.float32),
        (4, 301, 448, 128, 0.1, torch.float32),
        (4, 301, 448, 128, 0.0, torch.bfloat16),
        (4, 301, 448, 8192, 0.0, torch.float32),
        (4, 301, 448, 8192, 0.1, torch.bfloat16),
    ],
)
def test_cross_entropy_equals_pytorch(
    rows: int, vocabulary: int, columns: int, smoothing: float, block: int, dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(logits, "LOSS_BLOCK", block)
    logits_LV = (torch.randn(rows, columns) * 3).to(dtype)
    labels_L = torch.randint(0, vocabulary, (rows,))
    exact = logits_LV[:, :vocabulary].float().requires_grad_()
    by = [
        F.cross_entropy(exact, labels_L, reduction="sum", label_smoothing=s) for s in (smoothing, 0)
    ]
    (by[0] * 3).backward()
    expected = F.pad(gradient(exact), (0, columns - vocabulary))
    options: dict[str, Any] = {"smoothing": smoothing, "vocabulary": vocabulary}
    with torch.no_grad():
        again = summed_cross_entropy(logits_LV, labels_L, **options)
    for overwrites in (False, True):
        given = logits_LV.clone().requires_grad_()
        through = given * 1
        found = summed_cross_entropy(through, labels_L, overwrites=overwrites, **options)
        assert torch.equal(through, logits_LV) or overwrites
        (found[0] * 3).backward()
        for loss, same, other in zip(found, again, by, strict=True):
            assert loss == same
            assert_close(loss, other, tolerance=1e-5)
        assert_close(gradient(given), expected, tolerance=TOLERANCE[dtype])
        assert not gradient(given)[:, vocabulary:].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_very_low_logits_of_padding_leave_the_loss_a_number(dtype: torch.dtype) -> None:
    """A reader has them, and no smoothing: their sum is infinite."""
    logits_LV, labels_L = torch.randn(3, 20).to(dtype), torch.tensor([1, 0, 2])
    logits_LV[:, 5:] = torch.finfo(dtype).min / 2
    losses = summed_cross_entropy(logits_LV, labels_L)
    expected = F.cross_entropy(logits_LV[:, :5].float(), labels_L, reduction="sum")
    for loss in losses:
        assert_close(loss, expected, tolerance=1e-5)


def test_a_view_of_padded_logits_gets_the_gradient_of_its_copy() -> None:
    padded, labels_L = torch.randn(5, 64), torch.randint(0, 50, (5,))
    given = padded.requires_grad_()
    summed_cross_entropy(given[:, :50], labels_L)[0].backward()
    copy = padded.detach()[:, :50].clone().requires_grad_()
    F.cross_entropy(copy, labels_L, reduction="sum").backward()
    assert_close(gradient(given)[:, :50], gradient(copy), tolerance=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 9])
@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
def test_linear_layers_with_activation_equal_pytorch(
    activation: Activation | None, rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pointwise, "LEAST_ONES", 4)  # for fewer rows than 9

    def reference(x: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
        y = F.linear(x, weight, bias)
        return [y if activation is None else getattr(F, activation)(y)]

    assert_same(
        lambda x, weight, bias: [activated_linear(x, weight, bias, activation)],
        reference,
        [torch.randn(rows, 24), torch.randn(40, 24), torch.randn(40)],
        dtype=dtype,
    )


def test_a_gradient_that_others_share_is_not_overwritten() -> None:
    x, weight, other = torch.randn(5, 8), torch.randn(6, 8), torch.randn(5, 6).requires_grad_()
    (activated_linear(x, weight.requires_grad_(), torch.randn(6), "relu") + other).sum().backward()
    assert torch.equal(gradient(other), torch.ones(5, 6))


def spans_of(lengths: Sequence[int]) -> Spans:
    length_B = torch.tensor(lengths, dtype=torch.int64)
    sentence_N = torch.arange(len(lengths)).repeat_interleave(length_B)
    return Spans(F.pad(length_B.cumsum(0), (1, 0)).int(), max(lengths, default=0), sentence_N.int())


def attention_by_sentence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Spans,
    keys: Spans,
    is_causal: bool,
    masks: Tensor | None,
) -> Tensor:
    """Return softmax(q kᵀ / sqrt(K)) v of every sentence and head; ``masks`` is (H, N, S)."""
    found = [q[:0] + k[:0] + v[:0]]
    bounds = zip(pairwise(queries.bound_B.tolist()), pairwise(keys.bound_B.tolist()), strict=True)
    for (first, last), (start, stop) in bounds:
        score_HTS = torch.einsum("thk,shk->hts", q[first:last], k[start:stop]) / q.shape[2] ** 0.5
        if is_causal:
            hidden = torch.ones(score_HTS.shape[1:], dtype=torch.bool).triu(1)
            score_HTS = score_HTS.masked_fill(hidden, -torch.inf)
        weight_HTS = score_HTS.softmax(-1)
        if masks is not None:
            weight_HTS = weight_HTS * masks[:, first:last, : stop - start]
        found.append(torch.einsum("hts,shk->thk", weight_HTS, v[start:stop]))
    return torch.cat(found)


LENGTHS = [[3], [], [5, 1, 30, 7, 9, 40, 3, 2, 17]]
OTHER_LENGTHS = [[33], [], [6, 2, 17, 70, 1, 33, 4, 1, 1]]


# Each two values of type, mask and dropout meet, not each three: the interpreter is slow. It has no
# products of bfloat16 (Triton 3.9).
@pytest.mark.parametrize(
    ("dtype", "is_causal", "rate"),
    [
        (torch.float32, False, 0.0),
        (torch.float32, True, 0.4),
        (torch.float16, False, 0.4),
        (torch.float16, True, 0.0),
    ],
)
@pytest.mark.parametrize(("width", "case"), [(16, 0), (32, 1), (24, 2), (128, 2)])
def test_packed_attention_equals_attention_of_each_sentence(
    width: int, case: int, is_causal: bool, rate: float, dtype: torch.dtype
) -> None:
    heads, site = 2, LAST_SITE
    queries = spans_of(LENGTHS[case])
    keys = spans_of((LENGTHS if is_causal else OTHER_LENGTHS)[case])
    num_queries, num_keys = int(queries.bound_B[-1]), int(keys.bound_B[-1])
    noise = noise_of(num_queries // 3, num_queries - num_queries // 3)
    masks = [kept(noise, site + h, max(keys.longest, 1), rate) / (1 - rate) for h in range(heads)]
    dropout = Dropout(noise, site, rate) if rate else None
    options: dict[str, Any] = {"is_causal": is_causal, "dropout": dropout}
    sizes = [(n, heads * width) for n in (num_queries, num_keys, num_keys)]
    mask_HNS = torch.stack(masks) if rate else None

    def ours(*states: Tensor) -> list[Tensor]:
        heads_of = [x.unflatten(1, (heads, -1)) for x in states]
        return [attend_packed(*heads_of, queries=queries, keys=keys, **options)]

    def reference(*states: Tensor) -> list[Tensor]:
        q, k, v = (x.unflatten(1, (heads, -1)) for x in states)
        return [attention_by_sentence(q, k, v, queries, keys, is_causal, mask_HNS)]

    assert can_attend_packed(torch.empty(1), head_width=width, has_dropout=True)
    assert_same(ours, reference, [torch.randn(size) for size in sizes], dtype=dtype)
    if is_causal and width == 24:
        joined = [torch.randn(num_queries, 3 * heads * width)]
        assert_same(
            lambda x: ours(*sliced(x, 3)), lambda x: reference(*x.chunk(3, 1)), joined, dtype=dtype
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("columns", "width"), [(1024, 4), (1025, 10), (3000, 7), (9, 8), (6000, 3), (9001, 32)]
)
def test_the_best_tokens_of_a_row_and_its_normalizer_equal_those_of_a_sort(
    columns: int, width: int, dtype: torch.dtype
) -> None:
    logits_RV = torch.randn(5, columns, dtype=dtype) * 4  # in bfloat16, some are equal
    logits_RV[1, ::3] = -torch.inf
    logits_RV[2, 9:] = -torch.inf  # fewer parts than tokens have any
    logits_RV[3].round_()  # equal ones in many parts
    excluded = int(logits_RV[0].argmax())
    best_RC, token_RC, normalizer_R = fused_best_tokens(logits_RV, width, excluded=excluded)
    torch.testing.assert_close(normalizer_R, logits_RV.float().logsumexp(1))
    logits_RV[:, excluded] = -torch.inf
    expected_RV, order_RV = logits_RV.float().sort(dim=1, descending=True, stable=True)
    torch.testing.assert_close(best_RC, expected_RV[:, :width], rtol=0, atol=0)
    is_real_RC = best_RC > -torch.inf
    assert torch.equal(token_RC[is_real_RC], order_RV[:, :width][is_real_RC])
    assert 0 <= int(token_RC.min()) <= int(token_RC.max()) < columns


def test_wide_searches_take_the_plain_forms() -> None:
    """Their kernels would be unrolled for each token, and hold a tile of all rows."""
    logits_RV = torch.randn(2, 5000)
    assert finds_best_at_once(logits_RV, 32)
    assert not finds_best_at_once(logits_RV, 33)
    assert not finds_best_at_once(logits_RV.t(), 4)
    keys_BHSK = torch.randn(1, 2, 3, 16)
    assert can_attend_step(keys_BHSK, rows=16)
    assert not can_attend_step(keys_BHSK, rows=17)
    on_meta = torch.empty(1, 2, 3, 128, device="meta", dtype=torch.bfloat16)
    assert can_attend_step(on_meta, rows=5)
    assert not can_attend_step(on_meta.float(), rows=5)
    assert not can_attend_step(on_meta.new_empty(1, 2, 3, 136), rows=5)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_row_with_a_logit_that_is_no_number_has_no_normalizer(value: float) -> None:
    logits_RV = torch.randn(3, 2000)
    logits_RV[1, 1500] = value
    *_, token_RC, normalizer_R = fused_best_tokens(logits_RV, 4, excluded=0)
    assert normalizer_R.isnan().tolist() == [False, True, False]
    assert int(token_RC.max()) < 2000


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # no bfloat16 in tl.dot here
@pytest.mark.parametrize(("rows", "heads", "width"), [(1, 2, 16), (5, 3, 24), (17, 1, 64)])
def test_a_step_of_attention_equals_attention_over_the_entries_that_a_row_sees(
    rows: int, heads: int, width: int, dtype: torch.dtype
) -> None:
    sentences, entries, made = 3, 70 + rows, 66 + rows
    shape = (sentences, heads, entries, width)
    keys, values = torch.randn(2, *shape, dtype=dtype).unbind()
    joined_RX = torch.randn(sentences * rows, 3 * heads * width, dtype=dtype)
    query_RD, key_RD, value_RD = joined_RX.chunk(3, dim=1)
    is_seen_BJS = torch.rand(sentences, rows, entries) < 0.5
    is_seen_BJS[:, :, made - rows : made] = torch.eye(rows, dtype=torch.bool)
    is_seen_BJS[:, :, made:] = False

    def in_heads(x_RD: Tensor) -> Tensor:
        return x_RD.reshape(sentences, rows, heads, width).transpose(1, 2)

    keys[:, :, made - rows : made], values[:, :, made - rows : made] = (
        in_heads(x) for x in (key_RD, value_RD)
    )
    is_seen_BJS[1, :, 5:40] = is_seen_BJS[2, :, : made - rows] = False  # as of beams that ended
    seen = list_seen(is_seen_BJS, torch.tensor(made))
    for sentence, number in enumerate(seen.number_B.tolist()):
        (expected_S,) = is_seen_BJS[sentence].any(0).nonzero(as_tuple=True)
        assert seen.entry_BS[sentence, :number].tolist() == expected_S.tolist()
    number_B = torch.tensor([entries, 1, 64], dtype=torch.int32)
    first_BJS = (torch.arange(entries) < number_B[:, None])[:, None]
    for read, new, mask_BJS in (
        (seen, (key_RD, value_RD), is_seen_BJS),
        (number_B, None, first_BJS),
    ):
        # What no row sees is not loaded: a weight of 0 would not hide it.
        is_unread_BHSK = ~mask_BJS.any(1)[:, None, :, None].expand(shape)
        expected = [x.masked_fill(is_unread_BHSK, torch.nan) for x in (keys, values)]
        key_BHSK, value_BHSK = (x.clone() for x in expected)
        for x in (key_BHSK, value_BHSK) if new else ():
            x[:, :, made - rows : made] = torch.nan
        found_RD = attend_step(query_RD, key_BHSK, value_BHSK, read, new)
        expected_BHJK = F.scaled_dot_product_attention(
            in_heads(query_RD).double(), keys.double(), values.double(), attn_mask=mask_BJS[:, None]
        )
        expected_RD = expected_BHJK.transpose(1, 2).reshape(query_RD.shape)
        assert_close(found_RD, expected_RD.to(dtype), tolerance=TOLERANCE[dtype])
        for x, y in zip((key_BHSK, value_BHSK), expected, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("moe", [None, MoEConfig(num_experts=4, top_k=2, every=1)])
def test_a_search_with_fused_kernels_finds_the_translations_of_the_plain_search(
    moe: MoEConfig | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grid_search, "has_grouped_products", lambda _: True)
    model = tiny_model(tiny_spec(moe=moe, layers=1)).eval()
    examples = random_examples(model.spec, sentences=2, seed=4, shortest=1, longest=4)
    sources = [source_of(one) for one in examples]
    config = DecodingConfig(beam_size=2, n_best=2, max_length_ratio=0, max_extra_length=2)
    grids = grid_search.Grids()
    with fused_kernels_off():
        expected = beam_search_n_best(model, sources, config, eos_id=EOS_ID)
    for _ in range(1 if moe else 2):  # a second time on the grids of the first
        with torch.inference_mode(), sparing_loops():
            search = grid_search.GridSearch(model, sources, config, eos_id=EOS_ID, grids=grids)
            found = search.run()
        for ours, theirs in zip(found, expected, strict=True):
            assert [one.tokens for one in ours] == [one.tokens for one in theirs]
            scores = [one.score for one in theirs]
            assert [one.score for one in ours] == pytest.approx(scores, rel=1e-5)


def test_gradients_of_a_fused_projection_need_no_copy() -> None:
    spans, x_NX = spans_of([3, 4]), torch.randn(7, 96, requires_grad=True)
    slices = sliced(x_NX, 3)
    seen: list[Tensor] = []
    for part in slices:
        part.register_hook(seen.append)
    attend_packed(
        *(x.unflatten(1, (2, 16)) for x in slices), queries=spans, keys=spans
    ).sum().backward()
    assert {d.untyped_storage().data_ptr() for d in seen} == {
        gradient(x_NX).untyped_storage().data_ptr()
    }


def test_slices_pass_on_gradients_of_any_layout() -> None:
    x_NX = torch.randn(5, 6, requires_grad=True)
    first, _, last = sliced(x_NX, 3)
    (first.sum() + 2 * last.sum()).backward()
    assert torch.equal(gradient(x_NX), torch.tensor([1.0, 1, 0, 0, 2, 2]).expand(5, 6))


@pytest.mark.parametrize(
    # Experts have pre-norm layers: both norms are recomputed in a case.
    ("moe", "model", "recomputes", "sentences"),
    [
        (None, {}, False, (1, 2)),
        (None, {"norm": "post", "activation": "gelu"}, True, (1,)),
        (
            MoEConfig(num_experts=4, every=1, dispatch="capacity", capacity_factor=0.8),
            {},
            True,
            (1, 1),
        ),
    ],
    ids=["pre-norm", "post-norm", "experts"],
)
def test_a_model_with_fused_kernels_has_the_loss_and_gradient_of_the_plain_one(
    moe: MoEConfig | None,
    model: dict[str, Any],
    recomputes: bool,
    sentences: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = tiny_spec(moe=moe, layers=1, width=16, num_heads=2, vocabulary=70, model=model)
    rates = Regularization(dropout=0.3, attention_dropout=0.2, expert_output_masking=0.1)
    network = tiny_model(spec, regularization=rates).train()
    batches = [
        random_batch(spec, sentences=count, seed=seed, longest=4).keyed(seed)
        for seed, count in enumerate(sentences)
    ]
    config = LossConfig(label_smoothing=0.1, balance_weight=0.2)
    # In float32, logits are not padded by themselves.
    monkeypatch.setattr(products, "pads_outputs", lambda *_: True)
    monkeypatch.setattr(products, "is_on_cpu", lambda _: False)
    parameters = list(network.parameters())
    results = []
    forms = (nullcontext(), recomputes), (fused_kernels_off(), False)
    for form, network.recomputes in forms:
        with form:
            objective = training_loss(network, join(batches), config).objective
            results.append([objective, *torch.autograd.grad(objective * 0.5, parameters)])
    for found, expected in zip(*results, strict=True):
        assert (found - expected).norm() <= 1e-5 * expected.norm() + 1e-6


def test_forms_are_compared_and_a_kernel_that_differs_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fused_comparison, "ROUNDS", 1)
    sizes = Sizes(sentences=2, length=3, width=16, heads=2, vocabulary=40)
    found = list(compare(torch.device("cpu"), sizes, dtype=torch.float32))
    assert [one.name for one in found] == ["residual and norm", "activation", "attention", "loss"]
    assert all(one.distance < 1e-5 and one.agrees for one in found)
    assert all(one.fused > 0 and one.plain > 0 for one in found)
    original = pointwise.activation_gradients

    def twice(*given: Any) -> list[Tensor]:
        return [2 * gradient for gradient in original(*given)]

    monkeypatch.setattr(pointwise, "activation_gradients", twice)
    found = list(islice(compare(torch.device("cpu"), sizes, dtype=torch.float32), 2))
    assert [one.agrees for one in found] == [True, False]
