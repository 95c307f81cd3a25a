"""Compute attention, softmax(q kᵀ / sqrt(K)) v, by the fastest kernel for the device and the sizes.

- :func:`attend`, of padded sentences: PyTorch's fused attention, or plain matrix products, which
  are faster on CPU in bfloat16, for a few queries and with dropout.
- :func:`attend_packed`, of sentences that lie one after the other without padding: a fused kernel
  for short sentences, of which a tile of queries holds several, else PyTorch's operator of flash
  attention for NVIDIA's cards. ``torch.nn.attention.varlen`` calls the same operator, but with a
  dropout of 0 (PyTorch 2.13), so training calls it directly. The tests replace the operator by a
  loop over sentences.
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
from pipeline.kernels.launching import is_fused
from pipeline.kernels.noise import Noise
from pipeline.kernels.packed_attention import fused_attention
from pipeline.kernels.products import batched_product

FLASH_CAPABILITY = (8, 0)
FLASH_TYPES = (torch.bfloat16, torch.float16)
WIDTH_MULTIPLE = 8
MAX_HEAD_WIDTH = 128
"""Largest head width of packed attention: every GPU has a backward pass with dropout up to this
width; beyond 192, some have none."""
FUSED_MEAN_LENGTH = 256
"""Mean number of keys per sentence up to which 16-bit attention uses the fused kernel: an estimate,
not a measurement."""


def fused_attention_pays(query_BHTK: Tensor, *, dropout: float = 0.0) -> bool:
    """Return whether fused attention is the faster kernel, as measured.

    PyTorch has none with dropout for CPUs: it computes plain products as we do, with more copies.
    """
    if query_BHTK.device.type != "cpu":
        return True
    queries, width = query_BHTK.shape[-2:]
    kernels = cpu_kernels()
    return not dropout and kernels.fuses_attention(query_BHTK.dtype, queries=queries, width=width)


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
    dropout: float = 0.0,
) -> Tensor:
    """Return the context of every query, (B, H, T, K).

    ``mask`` broadcasts to (B, H, T, S). It is True where attention is allowed, or a result of
    :func:`attention_mask`.
    """
    if fused_attention_pays(query_BHTK, dropout=dropout):
        return F.scaled_dot_product_attention(
            query_BHTK,
            key_BHSK,
            value_BHSK,
            attn_mask=mask,
            is_causal=is_causal,
            dropout_p=dropout,
        )
    scale = 1.0 / math.sqrt(query_BHTK.shape[-1])
    scores_BHTS = batched_product(query_BHTK * scale, key_BHSK.transpose(-1, -2))
    if is_causal:
        length = scores_BHTS.shape[-1]
        mask = torch.ones(length, length, dtype=torch.bool, device=scores_BHTS.device).tril()
    if mask is not None:
        minus_infinity = torch.finfo(scores_BHTS.dtype).min
        scores_BHTS = scores_BHTS + scores_BHTS.new_zeros(()).where(mask, minus_infinity)
    weights_BHTS = F.softmax(scores_BHTS, dim=-1)  # summed up in float32 whatever the dtype
    weights_BHTS = F.dropout(weights_BHTS, dropout, training=dropout > 0)
    return batched_product(weights_BHTS, value_BHSK)


class Spans(NamedTuple):
    """The bounds of sentences among packed tokens.

    Attributes:
        bound_B: (B + 1,) int32: where each sentence starts, and where the last one ends.
        longest: number of tokens of the longest sentence, on the host.
        sentence_N: int32: the sentence of every token; None: there are no fused kernels for it.
    """

    bound_B: Tensor
    longest: int
    sentence_N: Tensor | None = None


def can_attend_packed(
    x: Tensor, *, head_width: int, capability: tuple[int, int] | None = None
) -> bool:
    """Return whether flash attention supports this head width, for states like ``x``.

    ``capability`` is by default that of the device; the meta device, on which operators are
    counted, has it.
    """
    if x.device.type == "cpu":
        return is_fused(x)
    if x.dtype not in FLASH_TYPES:
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
    dropout: float = 0.0,
    noise: Noise | None = None,
    site: int = 0,
) -> Tensor:
    """Return the context of every query, (N, H, K); queries see the keys of their sentence.

    Args:
        query_NHK: queries.
        key_MHK: keys.
        value_MHK: values.
        queries: sentences of the queries.
        keys: sentences of the keys.
        is_causal: whether a query sees no later key; both are then the same tokens.
        dropout: share of the attention weights to drop.
        noise: keys of the queries' random bits, with the key's position in its sentence as the
            column. None: the kernel draws its own.
        site: number of the place in the model, to which the head is added.
    """
    has_keys = noise is not None or not dropout
    if has_keys and _fuses_packed(query_NHK, len(key_MHK), queries, keys):
        seeds = (None, None) if noise is None or not dropout else noise
        bounds = queries.bound_B, keys.bound_B, queries.sentence_N, keys.sentence_N
        numbers = is_causal, site, dropout
        return fused_attention(query_NHK, key_MHK, value_MHK, *bounds, *seeds, *numbers)
    spans = queries.bound_B, keys.bound_B, queries.longest, keys.longest
    return _flash_attention(query_NHK, key_MHK, value_MHK, *spans, dropout, is_causal)[0]


def _fuses_packed(query_NHK: Tensor, num_keys: int, queries: Spans, keys: Spans) -> bool:
    """Return whether sentences are short enough for the fused kernel to be expected faster."""
    if queries.sentence_N is None or keys.sentence_N is None or not is_fused(query_NHK):
        return False
    sentences = len(keys.bound_B) - 1
    return query_NHK.dtype not in FLASH_TYPES or num_keys <= FUSED_MEAN_LENGTH * sentences


def _flash_attention(*arguments: Any) -> tuple[Tensor, ...]:
    """Call PyTorch's flash attention without its debugging output."""
    results: tuple[Tensor, ...] = torch.ops.aten._flash_attention_forward(*arguments, False)
    return results


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
