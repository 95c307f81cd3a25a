"""Compute attention, softmax(q kᵀ / sqrt(K)) v, by the fastest kernel for the device and the sizes.

- :func:`attend`, of padded sentences: PyTorch's fused attention, or plain matrix products with
  dropout, and on CPU in bfloat16.
- :func:`attend_packed`, of sentences that lie one after the other without padding: a fused kernel
  in training and for short sentences, else PyTorch's operator of flash attention for NVIDIA's
  cards. The tests replace the operator by a loop over sentences. A tile of 64 queries of the fused
  kernel visits the keys of its first to its last sentence: short sentences share a tile, and no
  work is spent on padding.
- :func:`attend_entries`, of rows of a search to cached keys: a compiled loop on CPU.

Legend: B batch, T query length, S key length, H heads, K head width; N packed query tokens, M
packed key tokens, X width of a product; R rows of a search, P cached entries, T entries of a row, D
model width.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from pipeline.kernels.cpu import LOOP_COST, over_rows
from pipeline.kernels.launching import is_fused, launch, power_of_two
from pipeline.kernels.noise import Dropout, signed_threshold, weight_dropout

FLASH_CAPABILITY = (8, 0)
FLASH_TYPES = (torch.bfloat16, torch.float16)
WIDTH_MULTIPLE = 8
MAX_HEAD_WIDTH = 128
"""Largest head width of packed attention: every GPU has a backward pass with dropout up to this
width; beyond 192, some have none."""
STEP_ENTRIES, STEP_ROWS = 64, 16
"""Cached entries that a program of :func:`attend_step` reads at a time, and most rows of one."""
LISTED_ENTRIES = 1024
"""Entries that a program of :func:`list_seen` reads at a time."""
FUSED_MEAN_LENGTH = 128
"""Mean number of keys per sentence up to which 16-bit attention without gradients uses the fused
kernel: the longest sentences for which it was compared with flash attention, and faster."""
TILES = {
    "attention_forward": (64, 32, 4, 3),
    "attention_backward_queries": (64, 32, 4, 3),
    "attention_backward_keys": (32, 64, 4, 3),
}
"""Queries and keys of a tile, warps, and tiles that are loaded ahead, by kernel."""


def fused_attention_pays(query_BHTK: Tensor) -> bool:
    """Return whether PyTorch's fused attention is the faster kernel without dropout."""
    # On CPU in bfloat16, forward and backward take four times as long as by plain products.
    return query_BHTK.device.type != "cpu" or query_BHTK.dtype != torch.bfloat16


def attention_mask(is_allowed: Tensor, *, beside: Tensor) -> Tensor:
    """Return a mask in the cheapest form for :func:`attend` on a device.

    Except on CPU, it is a tensor to add to the scores: 0 where allowed, else -inf.
    """
    if beside.device.type == "cpu":
        return is_allowed
    bias = torch.zeros_like(is_allowed, dtype=beside.dtype)
    return bias.masked_fill_(~is_allowed, -torch.inf)


def attend(
    query_BHTK: Tensor,
    key_BHSK: Tensor,
    value_BHSK: Tensor,
    *,
    mask: Tensor | None,
    is_causal: bool = False,
    dropout: Dropout | None = None,
) -> Tensor:
    """Return the context of every query, (B, H, T, K).

    ``mask`` broadcasts to (B, H, T, S). It is True where attention is allowed, or a result of
    :func:`attention_mask`. PyTorch's fused attention draws dropout from a generator, so it serves
    attention without dropout only.
    """
    if dropout is None and fused_attention_pays(query_BHTK):
        return F.scaled_dot_product_attention(
            query_BHTK, key_BHSK, value_BHSK, attn_mask=mask, is_causal=is_causal
        )
    scale = 1.0 / math.sqrt(query_BHTK.shape[-1])
    scores_BHTS = query_BHTK * scale @ key_BHSK.transpose(-1, -2)
    if is_causal:
        length = scores_BHTS.shape[-1]
        mask = torch.ones(length, length, dtype=torch.bool, device=scores_BHTS.device).tril()
    if mask is not None and mask.dtype != torch.bool:
        scores_BHTS = scores_BHTS + mask
    elif mask is not None:
        minus_infinity = torch.finfo(scores_BHTS.dtype).min
        scores_BHTS = scores_BHTS + scores_BHTS.new_zeros(()).where(mask, minus_infinity)
    weights_BHTS = F.softmax(scores_BHTS, dim=-1)  # summed up in float32 whatever the dtype
    if dropout is not None:
        weights_BHTS = weight_dropout(weights_BHTS, dropout)
    return weights_BHTS @ value_BHSK


class Spans(NamedTuple):
    """The bounds of sentences among packed tokens.

    Attributes:
        bound_B: (B + 1,) int32: where each sentence starts, and where the last one ends.
        longest: number of tokens of the longest sentence, on the host.
        span_N: int32: the sentence of every token.
    """

    bound_B: Tensor
    longest: int
    span_N: Tensor


def can_attend_packed(
    x: Tensor, *, head_width: int, has_dropout: bool, capability: tuple[int, int] | None = None
) -> bool:
    """Return whether packed attention supports this head width, for states like ``x``.

    Flash attention draws dropout from a generator, so attention with dropout needs the fused
    kernel. ``capability`` is by default the device's; the meta device, on which operators are
    counted, has it.
    """
    if x.device.type == "cpu":
        return is_fused(x)
    if x.dtype not in FLASH_TYPES or (has_dropout and not is_fused(x)):
        return False
    if capability is None:
        is_cuda = x.device.type == "cuda"
        capability = torch.cuda.get_device_capability(x.device) if is_cuda else FLASH_CAPABILITY
    return (
        capability >= FLASH_CAPABILITY
        and head_width <= MAX_HEAD_WIDTH
        and head_width % WIDTH_MULTIPLE == 0
    )


def attend_packed(
    query_NHK: Tensor,
    key_MHK: Tensor,
    value_MHK: Tensor,
    *,
    queries: Spans,
    keys: Spans,
    is_causal: bool = False,
    dropout: Dropout | None = None,
) -> Tensor:
    """Return the context of every query, (N, H, K); queries see the keys of their sentence.

    Args:
        query_NHK: queries.
        key_MHK: keys.
        value_MHK: values.
        queries: sentences of the queries.
        keys: sentences of the keys.
        is_causal: whether a query sees no later key; both are then the same tokens.
        dropout: dropout of the attention weights, with the keys of the queries.
    """
    if _fuses_packed(query_NHK, len(key_MHK), keys):
        noise = (None, None) if dropout is None else dropout.noise
        site, rate = (0, 0.0) if dropout is None else dropout[1:]
        context_NHK: Tensor = _PackedAttention.apply(  # type: ignore[no-untyped-call]
            *(query_NHK, key_MHK, value_MHK, queries.bound_B, keys.bound_B),
            *(queries.span_N, keys.span_N, *noise, is_causal, site, rate),
        )
        return context_NHK
    assert dropout is None, "can_attend_packed refuses dropout without the fused kernel"
    bounds = queries.bound_B, keys.bound_B, queries.longest, keys.longest
    return _flash_attention(query_NHK, key_MHK, value_MHK, *bounds, 0.0, is_causal)[0]


def _fuses_packed(query_NHK: Tensor, num_keys: int, keys: Spans) -> bool:
    """Return whether to use the fused kernel: in training, and for short sentences.

    Flash attention's backward pass adds up gradients in no fixed order, so training with it could
    not be repeated bit for bit.
    """
    if not is_fused(query_NHK):
        return False
    sentences = len(keys.bound_B) - 1
    is_short = num_keys <= FUSED_MEAN_LENGTH * sentences
    return torch.is_grad_enabled() or query_NHK.dtype not in FLASH_TYPES or is_short


def _flash_attention(*arguments: Any) -> tuple[Tensor, ...]:
    """Call PyTorch's flash attention without its debugging output."""
    results: tuple[Tensor, ...] = torch.ops.aten._flash_attention_forward(*arguments, False)
    return results


class _PackedAttention(torch.autograd.Function):
    """Attention by a kernel forward and two backward, of which the first serves the second."""

    @staticmethod
    def forward(
        ctx: Any,
        query_NHK: Tensor,
        key_MHK: Tensor,
        value_MHK: Tensor,
        bound_B: Tensor,
        key_bound_B: Tensor,
        sentence_N: Tensor,
        sentence_M: Tensor,
        seed_N: Tensor | None,
        row_N: Tensor | None,
        is_causal: bool,
        site: int,
        rate: float,
    ) -> Tensor:
        states = [_in_rows(x) for x in (query_NHK, key_MHK, value_MHK)]
        rows, heads, width = query_NHK.shape
        context_NHK = query_NHK.new_empty(rows, heads, width)
        normalizer_NH = query_NHK.new_empty(rows, heads, dtype=torch.float32)
        ctx.strides = tuple(x.stride(0) for x in states)
        ctx.numbers = width**-0.5, 1 / (1 - rate), site, signed_threshold(rate)
        ctx.options = {"HEADS": heads, "K": width, "BK": max(power_of_two(width), 16)}
        ctx.options["CAUSAL"] = is_causal
        given = *states, sentence_N, bound_B, key_bound_B, seed_N, row_N
        _over_tiles(
            "attention_forward",
            rows,
            *(*given, context_NHK, normalizer_NH, rows, *ctx.strides, *ctx.numbers),
            **ctx.options,
        )
        ctx.save_for_backward(*given, sentence_M, context_NHK, normalizer_NH)
        return context_NHK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: a layer that is recomputed refuses a second time
        *states, sentence_N, bound_B, key_bound_B, seed_N, row_N = saved[:8]
        sentence_M, context_NHK, normalizer_NH = saved[8:]
        d_context_NHK = gradients[0].contiguous()
        bounds = bound_B, key_bound_B, seed_N, row_N
        inner_NH = torch.empty_like(normalizer_NH)
        d_query, d_key, d_value = _beside_each_other(states)
        _over_tiles(
            "attention_backward_queries",
            len(d_query),
            *(*states, sentence_N, *bounds, context_NHK, normalizer_NH, d_context_NHK, inner_NH),
            *(d_query, len(d_query), *ctx.strides, d_query.stride(0), *ctx.numbers),
            **ctx.options,
        )
        _over_tiles(
            "attention_backward_keys",
            len(d_key),
            *(*states, sentence_M, *bounds, normalizer_NH, d_context_NHK, inner_NH, d_key, d_value),
            *(len(d_key), *ctx.strides, d_key.stride(0), d_value.stride(0), *ctx.numbers),
            **ctx.options,
        )
        return d_query, d_key, d_value, *(None,) * 9


def _over_tiles(kernel: str, rows: int, *arguments: Any, **options: Any) -> None:
    """Launch a kernel of packed attention for all tiles of rows and all heads."""
    queries, keys, warps, stages = TILES[kernel]
    tile = keys if kernel == "attention_backward_keys" else queries
    sizes = {"BN": queries, "BM": keys, "num_warps": warps, "num_stages": stages}
    launch(kernel, (-(-rows // tile), options["HEADS"]), *arguments, **options, **sizes)


def _in_rows(x_NHK: Tensor) -> Tensor:
    """Return states in which the heads of a token follow each other, as kernels expect."""
    return x_NHK if x_NHK.stride()[1:] == (x_NHK.shape[2], 1) else x_NHK.contiguous()


def _beside_each_other(states: Sequence[Tensor]) -> list[Tensor]:
    """Return an empty gradient for each state; slices of a tensor share a gradient, too."""
    made: list[Tensor] = []
    for group in _groups_of_slices(states):
        rows, *sizes = group[0].shape
        whole = group[0].new_empty(rows, len(group), *sizes)
        made += whole.unbind(1)
    return made


def _groups_of_slices(states: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return runs of tensors that lie beside each other, row by row, in one tensor."""
    groups: list[list[Tensor]] = []
    for state in states:
        if groups and _follows(state, groups[-1][-1]):
            groups[-1].append(state)
        else:
            groups.append([state])
    return groups


def _follows(x: Tensor, before: Tensor) -> bool:
    """Return whether the rows of x begin where the rows of another slice end."""
    is_shared = x.untyped_storage()._cdata == before.untyped_storage()._cdata
    distance = x.storage_offset() - before.storage_offset()
    is_beside = distance == prod(before.shape[1:]) < before.stride(0)
    return is_shared and is_beside and x.stride() == before.stride() and x.shape == before.shape


def sliced(x_NX: Tensor, count: int) -> tuple[Tensor, ...]:
    """Return equally wide slices of rows, for example queries, keys and values of one product.

    Gradients that lie beside each other, as :func:`attend_packed` writes them, are not copied.
    """
    slices: tuple[Tensor, ...] = _Slices.apply(x_NX, count)  # type: ignore[no-untyped-call]
    return slices


class _Slices(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x_NX: Tensor, count: int) -> tuple[Tensor, ...]:
        width = x_NX.shape[1] // count
        return tuple(x_NX.narrow(1, part * width, width) for part in range(count))

    @staticmethod
    @once_differentiable
    def backward(_: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        first, total = gradients[0], sum(d.shape[1] for d in gradients)
        if len(_groups_of_slices(gradients)) == 1 and first.stride() == (total, 1):
            return first.as_strided((len(first), total), (total, 1)), None
        return torch.cat(gradients, 1), None


def can_attend_step(key_BHSK: Tensor, *, rows: int) -> bool:
    """Return whether :func:`attend_step` serves so many rows per sentence over these keys.

    Tiles of float32, of wide heads and of many rows may need more memory than a multiprocessor has.
    """
    is_small = key_BHSK.dtype in FLASH_TYPES and key_BHSK.shape[3] <= MAX_HEAD_WIDTH
    fits = rows <= STEP_ROWS and (is_small or key_BHSK.device.type == "cpu")
    return fits and is_fused(key_BHSK)


class SeenEntries(NamedTuple):
    """The entries of a past that rows attend to; most entries of old steps are unseen."""

    is_seen_BJS: Tensor
    """Whether a row attends to an entry."""
    made: Tensor
    """Number of entries so far, on the device."""
    entry_BS: Tensor
    """Entries that any row of a sentence sees, in order."""
    number_B: Tensor
    """Number of these entries."""


def list_seen(is_seen_BJS: Tensor, made: Tensor) -> SeenEntries:
    """List the entries, of the first ``made``, that any row of a sentence sees, by one kernel."""
    sentences, rows, entries = is_seen_BJS.shape
    entry_BS = torch.empty(sentences, entries, dtype=torch.int32, device=made.device)
    found = SeenEntries(is_seen_BJS, made, entry_BS, entry_BS.new_empty(sentences))
    strides = is_seen_BJS.stride()[:2]
    options = {"ROWS": rows, "BLOCK": LISTED_ENTRIES, "num_warps": 4}
    launch("list_seen", (sentences,), *found, entries, *strides, **options)
    return found


def attend_step(
    query_RD: Tensor,
    key_BHSK: Tensor,
    value_BHSK: Tensor,
    seen: SeenEntries | Tensor,
    new: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Return the context (R, D) of the rows of sentences over cached entries, by a fused kernel.

    Args:
        query_RD: queries, J rows for each of B sentences.
        key_BHSK: cached keys.
        value_BHSK: cached values.
        seen: the entries that rows attend to, or the number of them for each sentence, (B,), where
            all rows attend to the first ones.
        new: keys and values (R, D) to write to the last J entries that are made.
    """
    sentences, heads, entries, width = key_BHSK.shape
    rows, context_RD = len(query_RD) // sentences, query_RD.new_empty(query_RD.shape)
    is_seen_BJS, made, listed_BS, number_B = (
        seen if isinstance(seen, SeenEntries) else (None, None, None, seen)
    )
    key_RD, value_RD = new or (None, None)
    strides = [0 if x is None else x.stride(0) for x in (query_RD, key_RD, value_RD, is_seen_BJS)]
    own_stride = 0 if is_seen_BJS is None else is_seen_BJS.stride(1)
    launch(
        "attend_step",
        (sentences, heads),
        *(query_RD, key_RD, value_RD, key_BHSK, value_BHSK),
        *(is_seen_BJS, made, listed_BS, number_B, context_RD),
        *(entries, *strides, own_stride, width**-0.5),
        **{"ROWS": rows, "HEADS": heads, "K": width},
        **{"BJ": max(power_of_two(rows), 16), "BK": max(power_of_two(width), 16)},
        **{"BS": STEP_ENTRIES, "num_warps": 4, "num_stages": 2},
    )
    return context_RD


@dataclass(frozen=True)
class RowEntries:
    """Cache entries that every row attends to: a range, or a range of the row's list of entries."""

    start_R: Tensor
    stop_R: Tensor
    most: int
    """Largest number of entries of a row."""
    entry_RT: Tensor | None = None

    def select(self, row_R: Tensor) -> "RowEntries":
        """Return the entries of rows that are copies of these."""
        listed = None if self.entry_RT is None else self.entry_RT[row_R]
        return RowEntries(self.start_R[row_R], self.stop_R[row_R], self.most, listed)


def attend_entries(
    query_RD: Tensor, key_PD: Tensor, value_PD: Tensor, entries: RowEntries, *, num_heads: int
) -> Tensor:
    """Return the context of every row, (R, D), over the entries that it attends to; CPU only."""
    from pipeline.kernels import compiled_loops as loops

    rows, width = query_RD.shape
    context_RD = query_RD.new_empty(rows, width, dtype=torch.float32)
    heads = -1, num_heads, width // num_heads
    # numba has no bfloat16, so caches hold float32, and only the queries are converted here.
    given = query_RD.contiguous(), key_PD, value_PD, context_RD
    query, key, value, context = (x.detach().float().view(heads).numpy() for x in given)
    listed = None if entries.entry_RT is None else entries.entry_RT.numpy()
    start, stop = entries.start_R.numpy(), entries.stop_R.numpy()

    def attend(first: int, last: int) -> None:
        loops.attend_entries(query, key, value, listed, start, stop, first, last, context)

    over_rows(attend, rows, cost_of_row=2 * entries.most * width * LOOP_COST)
    return context_RD.to(query_RD.dtype)
