"""The encoder–decoder Transformer of the fairseq / Hugging Face M2M-100 family.

Notable choices:
- hidden states are packed (N, D): only attention sees the padded grid
- source and target are embedded in one look-up; embeddings and output projection are tied
- pre- or post-norm; sinusoidal (sines, then cosines) or learned positions, counted from
  ``POSITION_OFFSET`` as in fairseq; embedding scale sqrt(D); optional embedding norm
- logits only at real target tokens
- every layer's feed-forward is dense or a mixture of experts, the layer does not care which
- what an MoE layer has to report is returned beside the hidden states

Legend: B batch, N real tokens, D model width, V vocabulary, L predicted tokens.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.batching.batch import Batch, Packing
from pipeline.config import ModelConfig
from pipeline.errors import ConfigError
from pipeline.kernels.products import linear
from pipeline.model.attention import Attention, KeyValues
from pipeline.model.feed_forward import FeedForward
from pipeline.model.moe.expert_parallel import ExpertParallel
from pipeline.model.moe.experts import Experts
from pipeline.model.moe.layer import MixtureOfExperts, RoutingRecord
from pipeline.model.moe.router import LanguageGroupRouter, Router, TokenRouter
from pipeline.model.regularization import Regularization
from pipeline.model.spec import ModelSpec
from pipeline.seeds import named_generator

POSITION_OFFSET = 2
"""fairseq counts positions from padding index + 1, and its padding index is 1."""


@dataclass(frozen=True)
class Output:
    """Logits at the predicted positions, and one record per MoE layer, encoder first."""

    logits_LV: Tensor
    routing: tuple[RoutingRecord, ...]


class LayerOutput(NamedTuple):
    """Hidden states of a layer, and its routing record where it has experts."""

    x_ND: Tensor
    record: RoutingRecord | None


@dataclass
class LayerCache:
    """What a decoder layer keeps between decoding steps, per sentence: its beams share it."""

    past: KeyValues
    """Keys and values of the target so far, preallocated along its length."""
    memory: KeyValues
    """Keys and values of the source, one per sentence."""


def residual(
    x: Tensor,
    sublayer: Callable[[Tensor], Tensor],
    norm: nn.Module,
    *,
    pre_norm: bool,
    dropout: float,
) -> Tensor:
    """x + dropout(sublayer(norm(x))), or norm(x + dropout(sublayer(x)))."""
    if pre_norm:
        return x + F.dropout(sublayer(norm(x)), dropout, training=dropout > 0)
    normed: Tensor = norm(x + F.dropout(sublayer(x), dropout, training=dropout > 0))
    return normed


class EncoderLayer(nn.Module):
    """Self-attention and feed-forward."""

    def __init__(
        self,
        model: ModelConfig,
        regularization: Regularization,
        feed_forward: FeedForward | MixtureOfExperts,
    ) -> None:
        super().__init__()
        self.pre_norm = model.norm == "pre"
        self.dropout = _rates(regularization, feed_forward)
        self.self_attention = _attention(model, regularization)
        self.self_attention_norm = nn.LayerNorm(model.width)
        self.feed_forward = feed_forward
        self.feed_forward_norm = nn.LayerNorm(model.width)

    def forward(self, x_ND: Tensor, packing: Packing, group_N: Tensor) -> LayerOutput:
        """One layer over the packed source."""
        add = partial(residual, pre_norm=self.pre_norm)
        dropout, feed_forward_dropout = self.dropout if self.training else (0.0, 0.0)

        def attend_to_self(h_ND: Tensor) -> Tensor:
            return self.self_attention.forward(h_ND, packing)

        x_ND = add(x_ND, attend_to_self, self.self_attention_norm, dropout=dropout)
        feed_forward = _Recording(self.feed_forward, group_N)
        x_ND = add(x_ND, feed_forward, self.feed_forward_norm, dropout=feed_forward_dropout)
        return LayerOutput(x_ND, feed_forward.record)


class DecoderLayer(nn.Module):
    """Causal self-attention, cross-attention and feed-forward."""

    def __init__(
        self,
        model: ModelConfig,
        regularization: Regularization,
        feed_forward: FeedForward | MixtureOfExperts,
    ) -> None:
        super().__init__()
        self.pre_norm = model.norm == "pre"
        self.dropout = _rates(regularization, feed_forward)
        self.self_attention = _attention(model, regularization)
        self.self_attention_norm = nn.LayerNorm(model.width)
        self.cross_attention = _attention(model, regularization)
        self.cross_attention_norm = nn.LayerNorm(model.width)
        self.feed_forward = feed_forward
        self.feed_forward_norm = nn.LayerNorm(model.width)

    def forward(
        self,
        x_ND: Tensor,
        packing: Packing,
        group_N: Tensor,
        memory_ND: Tensor,
        memory: Packing,
    ) -> LayerOutput:
        """One layer over the packed target, all positions at once."""

        def attend_to_self(h_ND: Tensor) -> Tensor:
            return self.self_attention.forward(h_ND, packing, is_causal=True)

        def attend_to_source(h_ND: Tensor) -> Tensor:
            attention = self.cross_attention
            return attention.forward(h_ND, packing, memory_ND=memory_ND, memory=memory)

        feed_forward = _Recording(self.feed_forward, group_N)
        x_ND = self._sublayers(x_ND, attend_to_self, attend_to_source, feed_forward)
        return LayerOutput(x_ND, feed_forward.record)

    def step(
        self,
        x_RD: Tensor,
        cache: LayerCache,
        *,
        length: int,
        group_R: Tensor,
        memory_mask: Tensor | None,
    ) -> Tensor:
        """One decoding step of R = B · beams rows, written to the cache from entry ``length`` on.

        ``memory_mask`` is (B, 1, 1, S), True at real source tokens, or None where nothing is
        padded. Beams of a sentence attend to its one copy of keys and values as if they were
        positions of one query.
        """

        def attend_to_self(h_RD: Tensor) -> Tensor:
            return self.self_attention.step(h_RD, cache.past, length=length)

        def attend_to_source(h_RD: Tensor) -> Tensor:
            return self.cross_attention.step_memory(h_RD, cache.memory, mask=memory_mask)

        feed_forward = _Recording(self.feed_forward, group_R)
        return self._sublayers(x_RD, attend_to_self, attend_to_source, feed_forward)

    def _sublayers(
        self,
        x: Tensor,
        attend_to_self: Callable[[Tensor], Tensor],
        attend_to_source: Callable[[Tensor], Tensor],
        feed_forward: Callable[[Tensor], Tensor],
    ) -> Tensor:
        add = partial(residual, pre_norm=self.pre_norm)
        dropout, feed_forward_dropout = self.dropout if self.training else (0.0, 0.0)
        x = add(x, attend_to_self, self.self_attention_norm, dropout=dropout)
        x = add(x, attend_to_source, self.cross_attention_norm, dropout=dropout)
        return add(x, feed_forward, self.feed_forward_norm, dropout=feed_forward_dropout)


class _Recording:
    """One call of a feed-forward, dense or MoE, that keeps what an MoE has to report."""

    def __init__(self, feed_forward: FeedForward | MixtureOfExperts, group: Tensor) -> None:
        self.feed_forward, self.group = feed_forward, group
        self.record: RoutingRecord | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if isinstance(self.feed_forward, FeedForward):
            return self.feed_forward.forward(x)
        y, self.record = self.feed_forward.forward(x, self.group)
        return y


class Stack(nn.Module):
    """The layers of an encoder or decoder, its positions and its norms."""

    def __init__(self, model: ModelConfig, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.embedding_norm = nn.LayerNorm(model.width) if model.embedding_norm else None
        self.final_norm = nn.LayerNorm(model.width) if model.norm == "pre" else None
        if model.positions == "learned":
            self.positions = nn.Embedding(model.max_positions + POSITION_OFFSET, model.width)


class Transformer(nn.Module):
    """Encoder, decoder and the embeddings they share."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        regularization: Regularization | None = None,
        expert_parallel: ExpertParallel | None = None,
    ) -> None:
        super().__init__()
        self.spec = spec
        model, rates = spec.model, regularization or Regularization()
        self.dropout = rates.dropout
        self.expert_parallel_size = 1 if expert_parallel is None else expert_parallel.size
        self.embedding = nn.Embedding(spec.vocabulary_size, model.width)
        self.encoder = Stack(
            model,
            [
                EncoderLayer(
                    model, rates, _feed_forward(spec, i, "encoder", rates, expert_parallel)
                )
                for i in range(model.encoder_layers)
            ],
        )
        self.decoder = Stack(
            model,
            [
                DecoderLayer(
                    model, rates, _feed_forward(spec, i, "decoder", rates, expert_parallel)
                )
                for i in range(model.decoder_layers)
            ],
        )
        self.positions_TD: Tensor
        self.group_of_language: Tensor
        self.register_buffer("positions_TD", torch.empty(0), persistent=False)
        self.register_buffer("group_of_language", torch.empty(0), persistent=False)
        self.reset_buffers()

    def reset_buffers(self, device: torch.device | None = None) -> None:
        """(Re)compute what is not a parameter: sinusoids and the groups of languages."""
        model = self.spec.model
        if model.positions == "sinusoidal":
            self.positions_TD = sinusoids(model.max_positions, model.width).to(device)
        groups = self.spec.language_groups or (0,) * len(self.spec.languages)
        self.group_of_language = torch.tensor(groups, dtype=torch.int64).to(device)

    def forward(self, batch: Batch) -> Output:
        """Logits for every label of the batch."""
        embedded = self.embed_tokens(torch.cat([batch.source_N, batch.target_N]))
        source_ND, target_ND = embedded.split([len(batch.source_N), len(batch.target_N)])
        group_B = self.group_of_language[batch.target_language_B]
        memory_ND, records = self.encode(source_ND, batch.source, group_B)
        x_ND = self.add_positions(self.decoder, target_ND, batch.target.position_N)
        group_N = group_B[batch.target.sentence_N]
        for layer in self.decoder.layers:
            x_ND, record = layer(x_ND, batch.target, group_N, memory_ND, batch.source)
            records += [record] if record is not None else []
        return Output(self.project(x_ND.index_select(0, batch.label_rows_L)), tuple(records))

    def encode(
        self, source_ND: Tensor, packing: Packing, group_B: Tensor
    ) -> tuple[Tensor, list[RoutingRecord]]:
        """Embedded source tokens → memory (N, D), with the routing records."""
        x_ND = self.add_positions(self.encoder, source_ND, packing.position_N)
        group_N = group_B[packing.sentence_N]
        records: list[RoutingRecord] = []
        for layer in self.encoder.layers:
            x_ND, record = layer(x_ND, packing, group_N)
            records += [record] if record is not None else []
        if self.encoder.final_norm is not None:
            x_ND = self.encoder.final_norm(x_ND)
        return x_ND, records

    def embed_tokens(self, ids_N: Tensor) -> Tensor:
        """Token embeddings, scaled; (N, D)."""
        x_ND: Tensor = self.embedding(ids_N)
        return x_ND * math.sqrt(x_ND.shape[-1]) if self.spec.model.scale_embedding else x_ND

    def add_positions(self, stack: Stack, x_ND: Tensor, position_N: Tensor) -> Tensor:
        """Add positions, normalise where the model does, drop out."""
        if self.spec.model.positions == "sinusoidal":
            x_ND = x_ND + self.positions_TD[position_N].to(x_ND.dtype)
        else:
            x_ND = x_ND + stack.positions(position_N + POSITION_OFFSET)
        if stack.embedding_norm is not None:
            x_ND = stack.embedding_norm(x_ND)
        return F.dropout(x_ND, self.dropout, training=self.training)

    def project(self, x_ND: Tensor) -> Tensor:
        """Decoder states → logits over the vocabulary."""
        if self.decoder.final_norm is not None:
            x_ND = self.decoder.final_norm(x_ND)
        return linear(x_ND, self.embedding.weight)

    def decoder_layers(self) -> Iterator[DecoderLayer]:
        for layer in self.decoder.layers:
            assert isinstance(layer, DecoderLayer)
            yield layer


def sinusoids(max_positions: int, width: int) -> Tensor:
    """Sinusoidal positions as in fairseq: sines in the first half, cosines in the second."""
    half = width // 2
    frequency = torch.exp(torch.arange(half) * -(math.log(10000) / max(half - 1, 1)))
    position = torch.arange(max_positions, dtype=torch.float32) + POSITION_OFFSET
    angle = position[:, None] * frequency[None, :]
    return F.pad(torch.cat([angle.sin(), angle.cos()], dim=1), (0, width % 2))


def build_model(
    spec: ModelSpec,
    *,
    regularization: Regularization | None = None,
    expert_parallel: ExpertParallel | None = None,
    device: torch.device | None = None,
) -> Transformer:
    """A model whose parameters are allocated but not yet set (initialise it, or load weights).

    Raises:
        ConfigError: there is not that much memory.
    """
    with torch.device("meta"):
        model = Transformer(spec, regularization=regularization, expert_parallel=expert_parallel)
    try:
        model.to_empty(device=device or torch.device("cpu"))
    except RuntimeError as error:
        if "memory" not in str(error):
            raise
        count = sum(parameter.numel() for parameter in model.parameters())
        raise ConfigError(
            f"There is no memory for the {count:,} parameters of this rank: make [model] smaller, "
            "or spread the experts over more ranks (`mmnmt memory` tells what fits)."
        ) from error
    model.reset_buffers(device)
    return model


def initialize(name: str, shape: torch.Size, *, spec: ModelSpec, seed: int) -> Tensor:
    """The initial value of the named tensor (fairseq's): independent of all others and of topology.

    Embeddings N(0, 1/D) with a zero padding row; linear weights Xavier-uniform; biases 0; norms 1
    and 0; routers U(±1/sqrt(D)). Every expert has a name of its own, hence a value of its own.
    """
    generator = named_generator("initialize", seed, name)
    width = spec.model.width
    if name.startswith("embedding.") or ".positions." in name:
        value = torch.empty(shape).normal_(0, width**-0.5, generator=generator)
        if name.startswith("embedding."):
            value[spec.pad_id] = 0
        return value
    if ".router." in name:
        bound = width**-0.5
        return torch.empty(shape).uniform_(-bound, bound, generator=generator)
    if name.endswith("norm.weight"):
        return torch.ones(shape)
    if name.endswith(".bias"):
        return torch.zeros(shape)
    bound = math.sqrt(6.0 / (shape[-1] + shape[-2]))
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def has_experts(model: ModelConfig, layer: int) -> bool:
    """Whether layer ``layer`` (from 0) of encoder and decoder is an MoE layer."""
    return model.moe is not None and (layer + 1) % model.moe.every == 0


def _rates(
    regularization: Regularization, feed_forward: FeedForward | MixtureOfExperts
) -> tuple[float, float]:
    """Dropout of a layer's attention sublayers and of its feed-forward."""
    in_moe = regularization.moe_dropout
    if in_moe is None or isinstance(feed_forward, FeedForward):
        in_moe = regularization.dropout
    return regularization.dropout, in_moe


def _attention(model: ModelConfig, regularization: Regularization) -> Attention:
    return Attention(
        width=model.width,
        num_heads=model.num_heads,
        dropout=regularization.attention_dropout,
    )


def _feed_forward(
    spec: ModelSpec,
    layer: int,
    side: str,
    regularization: Regularization,
    expert_parallel: ExpertParallel | None,
) -> FeedForward | MixtureOfExperts:
    model = spec.model
    if model.moe is None or not has_experts(model, layer):
        return FeedForward(
            width=model.width,
            hidden_width=model.feed_forward_width,
            activation=model.activation,
        )
    size, rank = (1, 0) if expert_parallel is None else (expert_parallel.size, expert_parallel.rank)
    if model.moe.num_experts % size:
        raise ConfigError(
            f"{model.moe.num_experts} experts cannot be spread over {size} ranks: choose a "
            "training.expert_parallel_size that divides model.moe.num_experts."
        )
    local_experts = model.moe.num_experts // size
    return MixtureOfExperts(
        model.moe,
        router=_router(spec, side),
        experts=Experts(
            num_experts=local_experts,
            first_expert=rank * local_experts,
            width=model.width,
            hidden_width=model.feed_forward_width,
            activation=model.activation,
        ),
        expert_parallel=expert_parallel,
        regularization=regularization,
    )


def _router(spec: ModelSpec, side: str) -> Router:
    moe, width = spec.model.moe, spec.model.width
    assert moe is not None
    match moe.decoder_router if side == "decoder" else "token":
        case "token":
            return TokenRouter(
                width=width,
                num_experts=moe.num_experts,
                top_k=moe.top_k,
                combine_weights=moe.combine_weights,
            )
        case "language_group":
            return LanguageGroupRouter(
                width=width,
                num_experts=moe.num_experts,
                num_groups=spec.num_groups,
                top_k=moe.top_k,
                combine_weights=moe.combine_weights,
            )
