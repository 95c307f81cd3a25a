"""Compute attention, softmax(q kᵀ / sqrt(K)) v, by the fastest kernel for the device and the sizes.

- :func:`attend`, of padded sentences: PyTorch's fused attention, or plain matrix products, which
  are faster on CPU in bfloat16, for a few queries and with dropout.
- :func:`attend_packed`, of sentences that lie one after the other without padding: a fused kernel
  in training and for short sentences, else PyTorch's operator of flash attention for NVIDIA's
  cards. The tests replace the operator by a loop over sentences.
- :func:`attend_entries`, of rows of a search to cached keys: a compiled loop on CPU.

Legend: B batch, T query length, S key length, H heads, K head width; N packed query tokens, M
packed key tokens; R rows of a search, P cached entries, T entries of a row, D model width.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.kernels.cpu import LOOP_COST, cpu_kernels, numbers, over_rows
from pipeline.kernels.launching import is_fused, launch, power_of_two
from pipeline.kernels.noise import Dropout, weight_dropout
from pipeline.kernels.packed_attention import fused_attention
from pipeline.kernels.products import batched_product

FLASH_CAPABILITY = (8, 0)
FLASH_TYPES = (torch.bfloat16, torch.float16)
WIDTH_MULTIPLE = 8
MAX_HEAD_WIDTH = 128
"""Largest head width of packed attention: every GPU has a backward pass with dropout up to this
width; beyond 192, some have none."""
STEP_ENTRIES, STEP_ROWS = 64, 16
"""Cached entries that a program of :func:`attend_step` reads at a time, and most rows of one."""
FUSED_MEAN_LENGTH = 128
"""Mean number of keys per sentence up to which 16-bit attention without gradients uses the fused
kernel: the longest sentences for which it was compared with flash attention, and faster."""


def fused_attention_pays(query_BHTK: Tensor) -> bool:
    """Return whether fused attention without dropout is the faster kernel, as measured."""
    if query_BHTK.device.type != "cpu":
        return True
    queries, width = query_BHTK.shape[-2:]
    return cpu_kernels().fuses_attention(query_BHTK.dtype, queries=queries, width=width)


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
    scores_BHTS = batched_product(query_BHTK * scale, key_BHSK.transpose(-1, -2))
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
    return batched_product(weights_BHTS, value_BHSK)


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
        spans = queries.bound_B, keys.bound_B, queries.span_N, keys.span_N
        states = query_NHK, key_MHK, value_MHK
        return fused_attention(*states, *spans, dropout, is_causal=is_causal)
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


def can_attend_step(key_BHSK: Tensor, *, rows: int) -> bool:
    """Return whether :func:`attend_step` serves so many rows per sentence over these keys.

    Tiles of float32, of wide heads and of many rows may need more memory than a multiprocessor has.
    """
    is_small = key_BHSK.dtype in FLASH_TYPES and key_BHSK.shape[3] <= MAX_HEAD_WIDTH
    fits = rows <= STEP_ROWS and (is_small or key_BHSK.device.type == "cpu")
    return fits and is_fused(key_BHSK)


def attend_step(
    query_RD: Tensor,
    key_BHSK: Tensor,
    value_BHSK: Tensor,
    is_seen_BJS: Tensor,
    new: tuple[Tensor, Tensor, Tensor] | None,
) -> Tensor:
    """Return the context (R, D) of the rows of sentences over cached entries, by a fused kernel.

    Args:
        query_RD: queries, J rows for each of B sentences.
        key_BHSK: cached keys.
        value_BHSK: cached values.
        is_seen_BJS: whether a row attends to an entry, (B, J, S), or (B, 1, S) for all rows.
        new: number of entries so far, on the device, and keys and values (R, D) to write to the
            last J of them; None: nothing is written, and all entries count.
    """
    sentences, heads, entries, width = key_BHSK.shape
    rows, context_RD = len(query_RD) // sentences, query_RD.new_empty(query_RD.shape)
    made, key_RD, value_RD = (None, None, None) if new is None else new
    own_stride = 0 if is_seen_BJS.shape[1] == 1 else is_seen_BJS.stride(1)
    strides = [0 if x is None else x.stride(0) for x in (query_RD, key_RD, value_RD)]
    launch(
        "attend_step",
        (sentences, heads),
        *(query_RD, key_RD, value_RD, key_BHSK, value_BHSK, is_seen_BJS, made, context_RD),
        *(entries, *strides, is_seen_BJS.stride(0), own_stride, width**-0.5),
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
    context_RD = torch.empty_like(query_RD, memory_format=torch.contiguous_format)
    heads = -1, num_heads, width // num_heads
    given = query_RD.contiguous(), key_PD, value_PD, context_RD
    query, key, value, context = (numbers(x.view(heads)) for x in given)
    listed = None if entries.entry_RT is None else entries.entry_RT.numpy()
    start, stop = entries.start_R.numpy(), entries.stop_R.numpy()

    def attend(first: int, last: int) -> None:
        loops.attend_entries(query, key, value, listed, start, stop, first, last, context)

    over_rows(attend, rows, cost_of_row=2 * entries.most * width * LOOP_COST)
    return context_RD
