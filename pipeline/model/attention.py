"""Multi-head attention over packed hidden states.

Legend: B batch, T query length, S key length, N real tokens, D model width, H heads, K head width.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from pipeline.batching.batch import Packing
from pipeline.kernels.packed_attention import Spans, attend_packed, can_attend_packed
from pipeline.kernels.products import Linear
from pipeline.kernels.scaled_dot_product import attend
from pipeline.model.language_modules.low_rank import project as through
from pipeline.model.tokens import Tokens


@dataclass(frozen=True)
class KeyValues:
    """Keys and values of one attention layer, (B, H, S, K) each."""

    key_BHSK: Tensor
    value_BHSK: Tensor
    mask: Tensor | None = None
    """(B, 1, T, S), True where a decoding step may attend, where it may not attend everywhere."""


@dataclass(frozen=True)
class QueriesKeysValues:
    """What self-attention is computed from, (B, H, T, K) each."""

    query_BHTK: Tensor
    key_BHTK: Tensor
    value_BHTK: Tensor


class Contextualizer(Protocol):
    """Lets queries, keys and values of self-attention see their neighbours."""

    def __call__(
        self, attention: "Attention", x_ND: Tensor, packing: Packing, tokens: Tokens
    ) -> QueriesKeysValues:
        """In place of :func:`project`, which it may call with other states."""


class Attention(nn.Module):
    """Self- or cross-attention with query, key, value and output projections (all with bias)."""

    def __init__(
        self,
        *,
        width: int,
        num_heads: int,
        dropout: float,
        contextualizer: Contextualizer | None = None,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.query = Linear(width, width)
        self.key = Linear(width, width)
        self.value = Linear(width, width)
        self.output: nn.Module = Linear(width, width)
        self.contextualizer = contextualizer

    def forward(
        self,
        x_ND: Tensor,
        packing: Packing,
        tokens: Tokens,
        *,
        is_causal: bool = False,
        mask_BTT: Tensor | None = None,
    ) -> Tensor:
        """Self-attention of real tokens, where ``mask_BTT`` is True or, without one, everywhere.

        Sentences are right-padded, so that under a causal mask no real query sees padding. Where
        the device can, and nothing asks for neighbours or a mask, none of them is padded at all.
        """
        if self.contextualizer is None and mask_BTT is None and self._stays_packed(x_ND):
            return self._attend_packed(
                x_ND, packing, x_ND, packing, is_causal=is_causal, tokens=tokens
            )
        contextualize = self.contextualizer or project
        states = contextualize(self, x_ND, packing, tokens)
        mask = None if is_causal else packing.key_mask(beside=states.query_BHTK)
        if mask_BTT is not None:
            mask = None if packing.is_full or is_causal else packing.mask_BT[:, None, None, :]
            is_padding_BT1 = ~packing.mask_BT[:, :, None]
            allowed = (mask_BTT | is_padding_BT1)[:, None]
            mask = allowed if mask is None else allowed & mask
        keys = KeyValues(states.key_BHTK, states.value_BHTK)
        return self._attend(
            states.query_BHTK, keys, packing, mask=mask, is_causal=is_causal, tokens=tokens
        )

    def attend_to(
        self,
        x_ND: Tensor,
        packing: Packing,
        memory_ND: Tensor,
        memory: Packing,
        tokens: Tokens,
    ) -> Tensor:
        """Cross-attention from the real tokens of ``packing`` to those of ``memory``."""
        if self._stays_packed(x_ND):
            return self._attend_packed(
                x_ND, packing, memory_ND, memory, is_causal=False, tokens=tokens
            )
        keys = self.keys(memory_ND, memory, tokens.over(memory))
        query_BHTK = self.heads(packing.unpack(through(self.query, x_ND, tokens)))
        mask = memory.key_mask(beside=query_BHTK)
        return self._attend(query_BHTK, keys, packing, mask=mask, is_causal=False, tokens=tokens)

    def _stays_packed(self, x_ND: Tensor) -> bool:
        return can_attend_packed(x_ND, head_width=x_ND.shape[1] // self.num_heads)

    def _attend_packed(
        self,
        x_ND: Tensor,
        packing: Packing,
        memory_ND: Tensor,
        memory: Packing,
        *,
        is_causal: bool,
        tokens: Tokens,
    ) -> Tensor:
        """From real tokens to real tokens, of the sentence itself or of its source."""
        of_memory = tokens if memory is packing else tokens.over(memory)
        heads = -1, self.num_heads, x_ND.shape[1] // self.num_heads
        context_NHK = attend_packed(
            through(self.query, x_ND, tokens).view(heads),
            through(self.key, memory_ND, of_memory).view(heads),
            through(self.value, memory_ND, of_memory).view(heads),
            queries=Spans(packing.bound_B, packing.length),
            keys=Spans(memory.bound_B, memory.length),
            is_causal=is_causal,
            dropout=self.dropout if self.training else 0.0,
        )
        return through(self.output, context_NHK.flatten(1), tokens)

    def _attend(
        self,
        query_BHTK: Tensor,
        keys: KeyValues,
        packing: Packing,
        *,
        mask: Tensor | None,
        is_causal: bool,
        tokens: Tokens,
    ) -> Tensor:
        context_BHTK = attend(
            query_BHTK,
            keys.key_BHSK,
            keys.value_BHSK,
            mask=mask,
            is_causal=is_causal,
            dropout=self.dropout if self.training else 0.0,
        )
        context_BTD = context_BHTK.transpose(1, 2).flatten(2)
        return through(self.output, packing.pack(context_BTD), tokens)

    def keys(self, memory_ND: Tensor, memory: Packing, tokens: Tokens) -> KeyValues:
        """Keys and values of packed tokens, which ``tokens`` tells of, (B, H, S, K)."""
        return KeyValues(
            self.heads(memory.unpack(through(self.key, memory_ND, tokens))),
            self.heads(memory.unpack(through(self.value, memory_ND, tokens))),
        )

    def step(self, x_RD: Tensor, past: KeyValues, tokens: Tokens, *, length: int) -> Tensor:
        """Self-attention of one new token per row, whose key and value are written to ``past``.

        The rows of a sentence share its keys and values: they are written side by side from entry
        ``length`` on, and ``past.mask`` says which entries are a row's own past and itself. Without
        a mask a row attends to all entries up to its own.
        """
        batch = past.key_BHSK.shape[0]
        beams = x_RD.shape[0] // batch
        stop = length + beams
        x_BJD = x_RD.view(batch, beams, -1)
        past.key_BHSK[:, :, length:stop] = self.heads(through(self.key, x_BJD, tokens))
        past.value_BHSK[:, :, length:stop] = self.heads(through(self.value, x_BJD, tokens))
        if past.mask is None:
            past = KeyValues(past.key_BHSK[:, :, :stop], past.value_BHSK[:, :, :stop])
        return self.step_memory(x_RD, past, tokens, mask=past.mask)

    def step_memory(
        self, x_RD: Tensor, memory: KeyValues, tokens: Tokens, *, mask: Tensor | None
    ) -> Tensor:
        """Cross-attention of one new token per row; rows of a sentence share its memory."""
        batch = memory.key_BHSK.shape[0]
        query_BJD = through(self.query, x_RD, tokens).view(batch, -1, x_RD.shape[-1])
        context_BHJK = attend(self.heads(query_BJD), memory.key_BHSK, memory.value_BHSK, mask=mask)
        context_RD = context_BHJK.transpose(1, 2).reshape(x_RD.shape)
        return through(self.output, context_RD, tokens)

    def heads(self, x_BTD: Tensor) -> Tensor:
        """(B, T, D) → (B, H, T, K)."""
        x_BTHK: Tensor = x_BTD.unflatten(-1, (self.num_heads, -1))
        return x_BTHK.transpose(1, 2)


def project(
    attention: Attention,
    x_ND: Tensor,
    packing: Packing,
    tokens: Tokens,
) -> QueriesKeysValues:
    """Plain projections, cut into heads: the contextualiser that looks at no neighbour."""
    keys = attention.keys(x_ND, packing, tokens)
    query_BHTK = attention.heads(packing.unpack(through(attention.query, x_ND, tokens)))
    return QueriesKeysValues(query_BHTK, keys.key_BHSK, keys.value_BHSK)
