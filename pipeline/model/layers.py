"""The layers of encoder and decoder: attention and feed-forward, each with its residual.

Legend: B batch, N real tokens, S source length, R rows of a decoding step, D model width.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeline.batching.batch import Packing
from pipeline.kernels.compiled_regions import add_dropped, norm_of_sum, sum_and_norm
from pipeline.model.attention import Attention, Contextualizer, GrowingKeys, StepKeys
from pipeline.model.language_modules.clsr import ConditionalRouting
from pipeline.model.moe.layer import MixtureOfExperts, RoutingRecord
from pipeline.model.regularization import Regularization
from pipeline.model.settings import ModelConfig
from pipeline.model.tokens import Tokens


class LayerOutput(NamedTuple):
    """Hidden states of a layer, and what its sublayers have to report."""

    x_ND: Tensor
    record: RoutingRecord | None
    gates: tuple[Tensor, ...] = ()
    """Of sublayers that are followed by gated projections, (N,) each."""


@dataclass(frozen=True)
class Reports:
    """What the layers of a pass have to report, in order."""

    routing: list[RoutingRecord] = field(default_factory=list)
    gates: list[Tensor] = field(default_factory=list)

    def add(self, output: LayerOutput) -> Tensor:
        """Note what a layer reports; returns its states."""
        if output.record is not None:
            self.routing.append(output.record)
        self.gates.extend(output.gates)
        return output.x_ND


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


def routed(
    routing: ConditionalRouting | None,
    x_ND: Tensor,
    y_ND: Tensor,
    tokens: Tokens,
    gates: list[Tensor],
) -> Tensor:
    """A sublayer's result y, through what follows it, whose gates are added to ``gates``."""
    if routing is None:
        return y_ND
    y_ND, gate_N = routing(x_ND, y_ND, tokens)
    gates.append(gate_N)
    return y_ND


class EncoderLayer(nn.Module):
    """Self-attention and feed-forward."""

    sublayers = ("self_attention", "feed_forward")

    def __init__(
        self, model: ModelConfig, regularization: Regularization, feed_forward: nn.Module
    ) -> None:
        super().__init__()
        self.self_attention = build_attention(model, regularization)
        self.self_attention_norm = attention_norm(model, regularization)
        self.feed_forward = feed_forward
        self.feed_forward_norm = feed_forward_norm(model, regularization, feed_forward)
        self.self_attention_routing: ConditionalRouting | None = None
        self.feed_forward_routing: ConditionalRouting | None = None

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
        gates: list[Tensor] = []
        norm, following = self.self_attention_norm, self.feed_forward_norm
        entered_ND = norm.enter(x_ND)
        y_ND = self.self_attention(
            entered_ND, packing, tokens, mask_BTT=mask_BTT, contextualizer=contextualizer
        )
        y_ND = routed(self.self_attention_routing, entered_ND, y_ND, tokens, gates)
        x_ND, entered_ND = norm.pass_on(x_ND, y_ND, following)

        norm = following
        y_ND, record = self.feed_forward(entered_ND, tokens)
        y_ND = routed(self.feed_forward_routing, entered_ND, y_ND, tokens, gates)
        return LayerOutput(norm.leave(x_ND, y_ND), record, tuple(gates))


class DecoderLayer(nn.Module):
    """Causal self-attention, cross-attention and feed-forward."""

    sublayers = ("self_attention", "cross_attention", "feed_forward")

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
        self.self_attention_routing: ConditionalRouting | None = None
        self.cross_attention_routing: ConditionalRouting | None = None
        self.feed_forward_routing: ConditionalRouting | None = None

    def forward(
        self,
        x_ND: Tensor,
        packing: Packing,
        tokens: Tokens,
        memory_ND: Tensor,
        memory: Packing,
    ) -> LayerOutput:
        """One layer over the packed target, all positions at once."""
        gates: list[Tensor] = []
        norm, following = self.self_attention_norm, self.cross_attention_norm
        entered_ND = norm.enter(x_ND)
        y_ND = self.self_attention(entered_ND, packing, tokens, is_causal=True)
        y_ND = routed(self.self_attention_routing, entered_ND, y_ND, tokens, gates)
        x_ND, entered_ND = norm.pass_on(x_ND, y_ND, following)

        norm, following = following, self.feed_forward_norm
        y_ND = self.cross_attention.attend_to(entered_ND, packing, memory_ND, memory, tokens)
        y_ND = routed(self.cross_attention_routing, entered_ND, y_ND, tokens, gates)
        x_ND, entered_ND = norm.pass_on(x_ND, y_ND, following)

        norm = following
        y_ND, record = self.feed_forward(entered_ND, tokens)
        y_ND = routed(self.feed_forward_routing, entered_ND, y_ND, tokens, gates)
        return LayerOutput(norm.leave(x_ND, y_ND), record, tuple(gates))

    def step(self, x_RD: Tensor, cache: LayerCache, tokens: Tokens) -> Tensor:
        """One decoding step of R rows, which are added to the past."""
        unheard: list[Tensor] = []
        norm = self.self_attention_norm
        entered_RD = norm.enter(x_RD)
        y_RD = self.self_attention.step(entered_RD, cache.past, tokens)
        x_RD = norm.leave(
            x_RD, routed(self.self_attention_routing, entered_RD, y_RD, tokens, unheard)
        )

        norm = self.cross_attention_norm
        entered_RD = norm.enter(x_RD)
        y_RD = self.cross_attention.step_memory(entered_RD, cache.memory, tokens)
        x_RD = norm.leave(
            x_RD, routed(self.cross_attention_routing, entered_RD, y_RD, tokens, unheard)
        )

        norm = self.feed_forward_norm
        entered_RD = norm.enter(x_RD)
        y_RD, _ = self.feed_forward(entered_RD, tokens)
        y_RD = routed(self.feed_forward_routing, entered_RD, y_RD, tokens, unheard)
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
