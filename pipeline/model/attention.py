"""Multi-head attention over packed hidden states.

Legend: B batch, T query length, S key length, N real tokens, R rows of a decoding step, D model
width, H heads, K head width.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor, nn

from pipeline.batching.batch import Packing
from pipeline.kernels.attention import Spans, attend, attend_packed, can_attend_packed
from pipeline.kernels.products import Linear
from pipeline.model.language_modules.low_rank import project
from pipeline.model.tokens import Tokens


@dataclass(frozen=True)
class KeyValues:
    """Keys and values of one attention layer, (B, H, S, K) each."""

    key_BHSK: Tensor
    value_BHSK: Tensor


class Projected(NamedTuple):
    """What self-attention is computed from, of packed tokens."""

    query_ND: Tensor
    key_ND: Tensor
    value_ND: Tensor


class StepKeys(Protocol):
    """What the rows of a decoding step attend to: entries of their own or of their sentence."""

    def attend(self, query_RD: Tensor) -> Tensor:
        """The context of every row, (R, D)."""


class GrowingKeys(StepKeys, Protocol):
    """The past of every row."""

    def append(self, key_RD: Tensor, value_RD: Tensor) -> None:
        """The last token of every row becomes part of it."""


class Contextualizer(Protocol):
    """Lets queries, keys and values of self-attention see their neighbours."""

    def __call__(self, attention: "Attention", x_ND: Tensor) -> Projected:
        """In place of :meth:`Attention.project`, which it may call with other states."""


class Attention(nn.Module):
    """Self- or cross-attention with query, key, value and output projections (all with bias)."""

    def __init__(self, *, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.query = Linear(width, width)
        self.key = Linear(width, width)
        self.value = Linear(width, width)
        self.output: nn.Module = Linear(width, width)

    def forward(
        self,
        x_ND: Tensor,
        packing: Packing,
        tokens: Tokens,
        *,
        is_causal: bool = False,
        mask_BTT: Tensor | None = None,
        contextualizer: Contextualizer | None = None,
    ) -> Tensor:
        """Self-attention of real tokens, where ``mask_BTT`` is True or, without one, everywhere.

        Sentences are right-padded, so that under a causal mask no real query sees padding. Where
        the device can, and nothing asks for a mask, none of them is padded at all.
        """
        states = (
            self.project(x_ND, tokens) if contextualizer is None else contextualizer(self, x_ND)
        )
        if mask_BTT is None and self._stays_packed(x_ND):
            return self._attend_packed(states, packing, packing, tokens, is_causal=is_causal)
        query_BHTK, *keys_BHTK = (self.heads(packing.unpack(state)) for state in states)
        mask = None if is_causal else packing.key_mask(beside=query_BHTK)
        if mask_BTT is not None:
            mask = None if packing.is_full or is_causal else packing.mask_BT[:, None, None, :]
            is_padding_BT1 = ~packing.mask_BT[:, :, None]
            allowed = (mask_BTT | is_padding_BT1)[:, None]
            mask = allowed if mask is None else allowed & mask
        keys = KeyValues(*keys_BHTK)
        return self._attend(
            query_BHTK, keys, packing, mask=mask, is_causal=is_causal, tokens=tokens
        )

    def project(self, x_ND: Tensor, tokens: Tokens) -> Projected:
        """Plain projections, which look at no neighbour."""
        return Projected(
            project(self.query, x_ND, tokens),
            project(self.key, x_ND, tokens),
            project(self.value, x_ND, tokens),
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
            of_memory = tokens.over(memory)
            states = Projected(
                project(self.query, x_ND, tokens),
                project(self.key, memory_ND, of_memory),
                project(self.value, memory_ND, of_memory),
            )
            return self._attend_packed(states, packing, memory, tokens, is_causal=False)
        keys = self.keys(memory_ND, memory, tokens.over(memory))
        query_BHTK = self.heads(packing.unpack(project(self.query, x_ND, tokens)))
        mask = memory.key_mask(beside=query_BHTK)
        return self._attend(query_BHTK, keys, packing, mask=mask, is_causal=False, tokens=tokens)

    def _stays_packed(self, x_ND: Tensor) -> bool:
        return can_attend_packed(x_ND, head_width=x_ND.shape[1] // self.num_heads)

    def _attend_packed(
        self,
        states: Projected,
        packing: Packing,
        memory: Packing,
        tokens: Tokens,
        *,
        is_causal: bool,
    ) -> Tensor:
        """From real tokens to real tokens, of the sentence itself or of its source."""
        context_NHK = attend_packed(
            *(state.unflatten(1, (self.num_heads, -1)) for state in states),
            queries=Spans(packing.bound_B, packing.length),
            keys=Spans(memory.bound_B, memory.length),
            is_causal=is_causal,
            dropout=self.dropout if self.training else 0.0,
        )
        return project(self.output, context_NHK.flatten(1), tokens)

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
        return project(self.output, packing.pack(context_BTD), tokens)

    def keys(self, memory_ND: Tensor, memory: Packing, tokens: Tokens) -> KeyValues:
        """Keys and values of packed tokens, which ``tokens`` tells of, (B, H, S, K)."""
        return KeyValues(
            self.heads(memory.unpack(project(self.key, memory_ND, tokens))),
            self.heads(memory.unpack(project(self.value, memory_ND, tokens))),
        )

    def step(self, x_RD: Tensor, past: GrowingKeys, tokens: Tokens) -> Tensor:
        """Self-attention of one new token per row, which is added to the row's past."""
        states = self.project(x_RD, tokens)
        past.append(states.key_ND, states.value_ND)
        return project(self.output, past.attend(states.query_ND), tokens)

    def step_memory(self, x_RD: Tensor, memory: StepKeys, tokens: Tokens) -> Tensor:
        """Cross-attention of one new token per row."""
        context_RD = memory.attend(project(self.query, x_RD, tokens))
        return project(self.output, context_RD, tokens)

    def heads(self, x_BTD: Tensor) -> Tensor:
        """(B, T, D) → (B, H, T, K)."""
        x_BTHK: Tensor = x_BTD.unflatten(-1, (self.num_heads, -1))
        return x_BTHK.transpose(1, 2)
