"""Multi-head attention over packed hidden states.

Two arithmetically equal kernels: PyTorch's scaled-dot-product attention, and plain matrix products,
which are faster on CPU in bfloat16 and for a few queries. :func:`fused_attention_pays` chooses.

Legend: B batch, T query length, S key length, N real tokens, D model width, H heads, K head width.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.batching.batch import Packing
from pipeline.kernels.products import Linear

FEW_QUERIES = 16
"""Up to here (decoding: one per beam) plain matrix products are the faster kernel on CPU."""


@dataclass(frozen=True)
class KeyValues:
    """Keys and values of one attention layer, (B, H, S, K) each."""

    key_BHSK: Tensor
    value_BHSK: Tensor
    mask: Tensor | None = None
    """(B, 1, T, S), True where a decoding step may attend, where it may not attend everywhere."""


def fused_attention_pays(query_BHTK: Tensor) -> bool:
    """Whether scaled-dot-product attention is the faster kernel, as measured."""
    if query_BHTK.device.type != "cpu":
        return True
    return query_BHTK.dtype != torch.bfloat16 and query_BHTK.shape[-2] > FEW_QUERIES


def attend(
    query_BHTK: Tensor,
    keys: KeyValues,
    *,
    mask: Tensor | None,
    is_causal: bool = False,
    dropout: float = 0.0,
) -> Tensor:
    """softmax(q kᵀ / sqrt(K)) v; ``mask`` (broadcastable to (B, H, T, S)) is True where allowed."""
    if fused_attention_pays(query_BHTK):
        return F.scaled_dot_product_attention(
            query_BHTK,
            keys.key_BHSK,
            keys.value_BHSK,
            attn_mask=mask,
            is_causal=is_causal,
            dropout_p=dropout,
        )
    scale = 1.0 / math.sqrt(query_BHTK.shape[-1])
    scores_BHTS = (query_BHTK * scale) @ keys.key_BHSK.transpose(-1, -2)
    if is_causal:
        length = scores_BHTS.shape[-1]
        mask = torch.ones(length, length, dtype=torch.bool, device=scores_BHTS.device).tril()
    if mask is not None:
        minus_infinity = torch.finfo(scores_BHTS.dtype).min
        scores_BHTS = scores_BHTS + scores_BHTS.new_zeros(()).where(mask, minus_infinity)
    weights_BHTS = F.softmax(scores_BHTS, dim=-1)  # summed up in float32 whatever the dtype
    weights_BHTS = F.dropout(weights_BHTS, dropout, training=dropout > 0)
    return weights_BHTS @ keys.value_BHSK


class Attention(nn.Module):
    """Self- or cross-attention with query, key, value and output projections (all with bias)."""

    def __init__(self, *, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.query = Linear(width, width)
        self.key = Linear(width, width)
        self.value = Linear(width, width)
        self.output = Linear(width, width)

    def forward(
        self,
        x_ND: Tensor,
        packing: Packing,
        *,
        memory_ND: Tensor | None = None,
        memory: Packing | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Attend from the real tokens of ``packing`` to those of ``memory`` (or to themselves).

        Sentences are right-padded, so that under a causal mask no real query sees padding.
        """
        keys_from = packing if memory is None else memory
        keys = self.keys(x_ND if memory_ND is None else memory_ND, keys_from)
        mask = None if keys_from.is_full or is_causal else keys_from.mask_BT[:, None, None, :]
        context_BHTK = attend(
            self._heads(packing.unpack(self.query(x_ND))),
            keys,
            mask=mask,
            is_causal=is_causal,
            dropout=self.dropout if self.training else 0.0,
        )
        context_BTD = context_BHTK.transpose(1, 2).flatten(2)
        projected: Tensor = self.output(packing.pack(context_BTD))
        return projected

    def keys(self, memory_ND: Tensor, memory: Packing) -> KeyValues:
        """Keys and values of packed tokens, (B, H, S, K)."""
        return KeyValues(
            self._heads(memory.unpack(self.key(memory_ND))),
            self._heads(memory.unpack(self.value(memory_ND))),
        )

    def step(self, x_RD: Tensor, past: KeyValues, *, length: int) -> Tensor:
        """Self-attention of one new token per row, whose key and value are written to ``past``.

        The rows of a sentence share its keys and values: they are written side by side from entry
        ``length`` on, and ``past.mask`` says which entries are a row's own past and itself. Without
        a mask a row attends to all entries up to its own.
        """
        batch = past.key_BHSK.shape[0]
        beams = x_RD.shape[0] // batch
        stop = length + beams
        x_BJD = x_RD.view(batch, beams, -1)
        past.key_BHSK[:, :, length:stop] = self._heads(self.key(x_BJD))
        past.value_BHSK[:, :, length:stop] = self._heads(self.value(x_BJD))
        if past.mask is None:
            past = KeyValues(past.key_BHSK[:, :, :stop], past.value_BHSK[:, :, :stop])
        return self.step_memory(x_RD, past, mask=past.mask)

    def step_memory(self, x_RD: Tensor, memory: KeyValues, *, mask: Tensor | None) -> Tensor:
        """Cross-attention of one new token per row; rows of a sentence share its memory."""
        batch = memory.key_BHSK.shape[0]
        query_BJD = self.query(x_RD).view(batch, -1, x_RD.shape[-1])
        context_BHJK = attend(self._heads(query_BJD), memory, mask=mask)
        projected: Tensor = self.output(context_BHJK.transpose(1, 2).reshape(x_RD.shape))
        return projected

    def _heads(self, x_BTD: Tensor) -> Tensor:
        x_BTHK: Tensor = x_BTD.unflatten(-1, (self.num_heads, -1))
        return x_BTHK.transpose(1, 2)
