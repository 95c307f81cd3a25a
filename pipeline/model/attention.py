"""Multi-head attention over packed hidden states.

Legend: B batch, T query length, S key length, N real tokens, R rows of a decoding step, D model
width, H heads, K head width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor, nn

from pipeline.batching.batch import Packing
from pipeline.kernels.attention import (
    Spans,
    attend,
    attend_packed,
    can_attend_packed,
)
from pipeline.kernels.noise import dropout_in
from pipeline.kernels.products import Linear
from pipeline.model.tokens import Tokens, Unbiased, project, project_jointly, project_last


@dataclass(frozen=True)
class KeyValues:
    """Keys and values of one attention layer."""

    key_BHSK: Tensor
    value_BHSK: Tensor


class Projected(NamedTuple):
    """Queries, keys and values of packed tokens."""

    query_ND: Tensor
    key_ND: Tensor
    value_ND: Tensor


class StepKeys(Protocol):
    """Keys and values that the rows of a decoding step attend to."""

    def attend(self, query_RD: Tensor) -> Tensor:
        """Return the context of every row, (R, D)."""


class GrowingKeys(StepKeys, Protocol):
    """Keys and values of the target so far, one past per row."""

    def append(self, key_RD: Tensor, value_RD: Tensor) -> None:
        """Add the last token of every row."""


class Contextualizer(Protocol):
    """Makes queries, keys and values of self-attention depend on neighboring tokens."""

    def __call__(self, attention: "Attention", x_ND: Tensor) -> Projected:
        """Return queries, keys and values, in place of :meth:`Attention.project`."""


class Attention(nn.Module):
    """Self- or cross-attention with query, key, value and output projections (all with bias)."""

    def __init__(self, *, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.site = 0
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
    ) -> Tensor | Unbiased:
        """Return self-attention of the real tokens, (N, D).

        Args:
            x_ND: packed states.
            packing: boundaries of the sentences.
            tokens: metadata of the tokens.
            is_causal: whether a token sees only itself and earlier tokens.
            mask_BTT: True where a token may attend; None: everywhere in its sentence.
            contextualizer: makes queries, keys and values instead of :meth:`project`.
        """
        states = (
            self.project(x_ND, tokens) if contextualizer is None else contextualizer(self, x_ND)
        )
        context_ND = self._attend(states, packing, packing, is_causal=is_causal, mask_BTT=mask_BTT)
        return project_last(self.output, context_ND, tokens)

    def project(self, x_ND: Tensor, tokens: Tokens) -> Projected:
        """Return queries, keys and values by the linear layers."""
        return Projected(*project_jointly((self.query, self.key, self.value), x_ND, tokens))

    def attend_to(
        self,
        x_ND: Tensor,
        packing: Packing,
        memory_ND: Tensor,
        memory: Packing,
        tokens: Tokens,
        keys_values: Sequence[Tensor] = (),
    ) -> Tensor | Unbiased:
        """Return cross-attention from the real tokens of ``packing`` to ``memory``'s."""
        of_memory = tokens.over(memory)
        if not keys_values:
            keys_values = project_jointly((self.key, self.value), memory_ND, of_memory)
        key_ND, value_ND = keys_values
        states = Projected(project(self.query, x_ND, tokens), key_ND, value_ND)
        return project_last(self.output, self._attend(states, packing, memory), tokens)

    def _attend(
        self,
        states: Projected,
        packing: Packing,
        memory: Packing,
        *,
        is_causal: bool = False,
        mask_BTT: Tensor | None = None,
    ) -> Tensor:
        """Return the context (N, D) of all heads; pad only if no packed kernel can be used."""
        dropout = dropout_in(self, packing.noise, site=self.site, rate=self.dropout)
        head_width = states.query_ND.shape[1] // self.num_heads
        if mask_BTT is None and can_attend_packed(
            states.query_ND, head_width=head_width, has_dropout=dropout is not None
        ):
            context_NHK = attend_packed(
                *(state.unflatten(1, (self.num_heads, -1)) for state in states),
                queries=Spans(packing.bound_B, packing.length, packing.span_N),
                keys=Spans(memory.bound_B, memory.length, memory.span_N),
                is_causal=is_causal,
                dropout=dropout,
            )
            return context_NHK.flatten(1)
        if dropout is not None:
            # Numbers follow the token, not its place in the grid: packed attention draws the same.
            dropout = dropout._replace(noise=packing.noise_BT)
        query_BHTK = self.heads(packing.unpack(states.query_ND))
        key_BHSK, value_BHSK = (self.heads(memory.unpack(state)) for state in states[1:])
        # Padding is on the right, so that the causal mask hides it from real queries.
        mask = None if is_causal else memory.key_mask(beside=query_BHTK)
        if mask_BTT is not None:
            mask = None if packing.is_full or is_causal else packing.mask_BT[:, None, None, :]
            # A query without any key yields NaN, so that padding queries may attend everywhere.
            is_padding_BT1 = ~packing.mask_BT[:, :, None]
            allowed = (mask_BTT | is_padding_BT1)[:, None]
            mask = allowed if mask is None else allowed & mask
        context_BHTK = attend(
            query_BHTK, key_BHSK, value_BHSK, mask=mask, is_causal=is_causal, dropout=dropout
        )
        return packing.pack(context_BHTK.transpose(1, 2).flatten(2))

    def keys(self, memory_ND: Tensor, memory: Packing, tokens: Tokens) -> KeyValues:
        """Return keys and values of packed tokens, padded and cut into heads."""
        return KeyValues(
            self.heads(memory.unpack(project(self.key, memory_ND, tokens))),
            self.heads(memory.unpack(project(self.value, memory_ND, tokens))),
        )

    def step(self, x_RD: Tensor, past: GrowingKeys, tokens: Tokens) -> Tensor:
        """Return self-attention of one new token per row, and append it to the row's past."""
        states = self.project(x_RD, tokens)
        past.append(states.key_ND, states.value_ND)
        return project(self.output, past.attend(states.query_ND), tokens)

    def step_memory(self, x_RD: Tensor, memory: StepKeys, tokens: Tokens) -> Tensor:
        """Return cross-attention of one new token per row, (R, D)."""
        context_RD = memory.attend(project(self.query, x_RD, tokens))
        return project(self.output, context_RD, tokens)

    def heads(self, x_BTD: Tensor) -> Tensor:
        """Split states into heads: (B, T, D) → (B, H, T, K)."""
        x_BTHK: Tensor = x_BTD.unflatten(-1, (self.num_heads, -1))
        return x_BTHK.transpose(1, 2)
