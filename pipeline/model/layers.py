"""The layers of encoder and decoder: attention and feed-forward, each with its residual.

Legend: B batch, N real tokens, S source length, R rows of a decoding step, D model width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeline.batching.batch import Packing
from pipeline.config import ModelConfig
from pipeline.kernels.compiled_regions import add_dropped, norm_of_sum, sum_and_norm
from pipeline.model.attention import Attention, Contextualizer, GrowingKeys, StepKeys
from pipeline.model.moe.layer import MixtureOfExperts, RoutingRecord
from pipeline.model.regularization import Regularization
from pipeline.model.tokens import Tokens


class LayerOutput(NamedTuple):
    """Hidden states of a layer, and what its feed-forward has to report."""

    x_ND: Tensor
    record: RoutingRecord | None


@dataclass
class LayerCache:
    """What a decoder layer keeps between decoding steps."""

    past: GrowingKeys
    """Keys and values of the target so far."""
    memory: StepKeys
    """Keys and values of the source."""


class ResidualNorm(nn.LayerNorm):
    """The norm around a sublayer f: x + dropout(f(norm(x))), or norm(x + dropout(f(x))).

    Where it ``is_compiled``, what lies between two sublayers is one kernel in training.
    """

    def __init__(self, width: int, *, pre_norm: bool, dropout: float) -> None:
        super().__init__(width)
        self.pre_norm = pre_norm
        self.dropout = dropout
        self.is_compiled = False

    def enter(self, x: Tensor) -> Tensor:
        """What the sublayer is given."""
        return self(x) if self.pre_norm else x

    def leave(self, x: Tensor, y: Tensor) -> Tensor:
        """Its result y added to x."""
        if self.is_compiled and self.training:
            if self.pre_norm:
                return add_dropped(x, y, rate=self.dropout)
            return norm_of_sum(x, y, self, rate=self.dropout)
        if self.training and self.dropout > 0:
            y = F.dropout(y, self.dropout)
        x = x + y
        return x if self.pre_norm else self(x)

    def pass_on(self, x: Tensor, y: Tensor, following: "ResidualNorm") -> tuple[Tensor, Tensor]:
        """Its result y added to x, and what the following sublayer is given of that."""
        if self.is_compiled and self.training and self.pre_norm:
            return sum_and_norm(x, y, following, rate=self.dropout)
        x = self.leave(x, y)
        return x, following.enter(x)


class EncoderLayer(nn.Module):
    """Self-attention and feed-forward."""

    def __init__(
        self, model: ModelConfig, regularization: Regularization, feed_forward: nn.Module
    ) -> None:
        super().__init__()
        self.self_attention = build_attention(model, regularization)
        self.self_attention_norm = attention_norm(model, regularization)
        self.feed_forward = feed_forward
        self.feed_forward_norm = feed_forward_norm(model, regularization, feed_forward)

    def forward(
        self,
        x_ND: Tensor,
        packing: Packing,
        tokens: Tokens,
        *,
        mask_BTT: Tensor | None = None,
        contextualizer: Contextualizer | None = None,
    ) -> LayerOutput:
        """One layer over the packed source; with ``mask_BTT``, attending only where it is True."""
        norm, following = self.self_attention_norm, self.feed_forward_norm
        context_ND = self.self_attention(
            norm.enter(x_ND), packing, tokens, mask_BTT=mask_BTT, contextualizer=contextualizer
        )
        x_ND, entered_ND = norm.pass_on(x_ND, context_ND, following)

        norm = following
        y_ND, record = self.feed_forward(entered_ND, tokens)
        return LayerOutput(norm.leave(x_ND, y_ND), record)


class DecoderLayer(nn.Module):
    """Causal self-attention, cross-attention and feed-forward."""

    def __init__(
        self, model: ModelConfig, regularization: Regularization, feed_forward: nn.Module
    ) -> None:
        super().__init__()
        self.self_attention = build_attention(model, regularization)
        self.self_attention_norm = attention_norm(model, regularization)
        self.cross_attention = build_attention(model, regularization)
        self.cross_attention_norm = attention_norm(model, regularization)
        self.feed_forward = feed_forward
        self.feed_forward_norm = feed_forward_norm(model, regularization, feed_forward)

    def forward(
        self,
        x_ND: Tensor,
        packing: Packing,
        tokens: Tokens,
        memory_ND: Tensor,
        memory: Packing,
    ) -> LayerOutput:
        """One layer over the packed target, all positions at once."""
        norm, following = self.self_attention_norm, self.cross_attention_norm
        context_ND = self.self_attention(norm.enter(x_ND), packing, tokens, is_causal=True)
        x_ND, entered_ND = norm.pass_on(x_ND, context_ND, following)

        norm, following = following, self.feed_forward_norm
        attended_ND = self.cross_attention.attend_to(entered_ND, packing, memory_ND, memory)
        x_ND, entered_ND = norm.pass_on(x_ND, attended_ND, following)

        norm = following
        y_ND, record = self.feed_forward(entered_ND, tokens)
        return LayerOutput(norm.leave(x_ND, y_ND), record)

    def step(self, x_RD: Tensor, cache: LayerCache, tokens: Tokens) -> Tensor:
        """One decoding step of R rows, which are added to the past."""
        norm = self.self_attention_norm
        x_RD = norm.leave(x_RD, self.self_attention.step(norm.enter(x_RD), cache.past))

        norm = self.cross_attention_norm
        x_RD = norm.leave(x_RD, self.cross_attention.step_memory(norm.enter(x_RD), cache.memory))

        norm = self.feed_forward_norm
        y_RD, _ = self.feed_forward(norm.enter(x_RD), tokens)
        return norm.leave(x_RD, y_RD)


def run_layer(layer: Callable[..., LayerOutput], *states: object, recomputes: bool) -> LayerOutput:
    """One layer, kept whole or by its input alone for the backward pass."""
    output: LayerOutput = (
        checkpoint(layer, *states, use_reentrant=False) if recomputes else layer(*states)
    )
    return output


def compile_regions(model: nn.Module) -> None:
    """Have what lies between the sublayers of a model compiled when it is first trained."""
    for module in model.modules():
        if isinstance(module, ResidualNorm):
            module.is_compiled = True


def build_attention(model: ModelConfig, regularization: Regularization) -> Attention:
    return Attention(
        width=model.width,
        num_heads=model.num_heads,
        dropout=regularization.attention_dropout,
    )


def attention_norm(model: ModelConfig, regularization: Regularization) -> ResidualNorm:
    """The norm of an attention sublayer."""
    return ResidualNorm(model.width, pre_norm=model.norm == "pre", dropout=regularization.dropout)


def feed_forward_norm(
    model: ModelConfig, regularization: Regularization, feed_forward: nn.Module
) -> ResidualNorm:
    """The norm of a feed-forward; experts may have a dropout of their own."""
    rate = regularization.dropout
    if isinstance(feed_forward, MixtureOfExperts) and regularization.moe_dropout is not None:
        rate = regularization.moe_dropout
    return ResidualNorm(model.width, pre_norm=model.norm == "pre", dropout=rate)
