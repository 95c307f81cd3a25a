"""The encoder–decoder Transformer of the fairseq / Hugging Face M2M-100 family.

Design:
- hidden states are packed (N, D): only attention may see a padded grid
- source and target are embedded in one look-up; embeddings and output projection are tied,
  unless ``model.embedding`` says otherwise
- pre- or post-norm; sinusoidal (sines, then cosines) or learned positions, counted from
  ``POSITION_OFFSET`` as in fairseq; embedding scale sqrt(D); optional embedding norm
- a layer has two or three residual sublayers (:mod:`pipeline.model.sublayer`) and registers their
  modules under the names that checkpoints use
- a layer does not know whether its feed-forward is dense or a mixture of experts
- :class:`~pipeline.model.tokens.Tokens` carries all token metadata into a layer; the routing of an
  MoE layer is returned together with the hidden states
- a front end runs the encoder's layers (:mod:`pipeline.model.front_end`)
- with ``model.converter_layers`` the encoder's output depends on the target language (LCS)
- logits are computed at the predicted positions only

:mod:`pipeline.model.building` builds a model from its spec.

Legend: B batch, N real tokens, T length, R rows of a decoding step, D model width, V vocabulary,
L predicted tokens.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.batching.batch import Batch, Packing, Shares
from pipeline.config.settings import Route
from pipeline.errors import ConfigError, no_such
from pipeline.kernels.launching import is_fused
from pipeline.kernels.noise import dropout_in
from pipeline.kernels.pointwise import JointParameters, dropped, joins_parameters
from pipeline.kernels.products import Linear
from pipeline.model.attention import Attention, Contextualizer, GrowingKeys, StepKeys
from pipeline.model.embedding import Embedding
from pipeline.model.front_end import HasBuffers, Passage, Source
from pipeline.model.moe.routing import RoutingRecord
from pipeline.model.settings import ModelConfig
from pipeline.model.spec import ModelSpec
from pipeline.model.sublayer import (
    Layer,
    Regularization,
    Reports,
    Residual,
    ResidualNorm,
    Sublayer,
    run_layer,
    same_shape,
)
from pipeline.model.tokens import ReadsFloat32, Tokens
from pipeline.terminal import counted

POSITION_OFFSET = 2
"""fairseq counts positions from padding index + 1, and its padding index is 1."""


@dataclass(frozen=True)
class Output:
    """Logits at the predicted positions, and one record per MoE layer, encoder first."""

    logits_LV: Tensor
    routing: tuple[RoutingRecord, ...]
    gates: tuple[Tensor, ...] = ()
    """Gates of the projections that follow sublayers (CLSR), (N,) each."""
    gate_shares: tuple[Shares | None, ...] = ()
    """For each of these, the micro-batches that share the pass; None for a single one."""


class Trained(nn.Module):
    """Interface of a model that an engine trains; extensions have models of their own."""

    spec: ModelSpec
    expert_parallel_size: int
    recomputes = False
    """Whether the backward pass recomputes each layer from its input."""


@dataclass
class LayerCache:
    """State of a decoder layer between decoding steps."""

    past: GrowingKeys
    """Keys and values of the target so far."""
    memory: StepKeys
    """Keys and values of the source."""


class EncoderLayer(nn.Module):
    """Self-attention and feed-forward."""

    def __init__(
        self,
        model: ModelConfig,
        rates: Regularization,
        feed_forward: nn.Module,
        *,
        feed_forward_dropout: float | None = None,
    ) -> None:
        """Build the layer.

        Args:
            model: the settings of the model.
            rates: the dropout rates.
            feed_forward: a dense feed-forward or a mixture of experts.
            feed_forward_dropout: rate after the feed-forward; None: ``rates.dropout``.
        """
        super().__init__()
        self.self_attention = build_attention(model, rates)
        self.self_attention_norm = residual_norm(model, rates.dropout)
        self.feed_forward = feed_forward
        self.feed_forward_norm = residual_norm(
            model, rates.dropout if feed_forward_dropout is None else feed_forward_dropout
        )
        attention = self.self_attention
        self.sublayers = {
            "self_attention": Sublayer(self.self_attention_norm, attention, attention.step),
            "feed_forward": Sublayer(self.feed_forward_norm, feed_forward, feed_forward),
        }

    def forward(
        self,
        x: Residual,
        packing: Packing,
        *,
        mask_BTT: Tensor | None = None,
        contextualizer: Contextualizer | None = None,
    ) -> Residual:
        """Apply the layer to the packed source; with ``mask_BTT``, attend only where it is True."""
        attend, transform = self.sublayers.values()
        x = attend(x, packing, x.tokens, mask_BTT=mask_BTT, contextualizer=contextualizer)
        return transform(x, x.tokens)


class DecoderLayer(nn.Module):
    """Causal self-attention, cross-attention and feed-forward."""

    def __init__(
        self,
        model: ModelConfig,
        rates: Regularization,
        feed_forward: nn.Module,
        *,
        feed_forward_dropout: float | None = None,
    ) -> None:
        """Build the layer.

        Args:
            model: the settings of the model.
            rates: the dropout rates.
            feed_forward: a dense feed-forward or a mixture of experts.
            feed_forward_dropout: rate after the feed-forward; None: ``rates.dropout``.
        """
        super().__init__()
        self.self_attention = build_attention(model, rates)
        self.self_attention_norm = residual_norm(model, rates.dropout)
        self.cross_attention = build_attention(model, rates)
        self.cross_attention_norm = residual_norm(model, rates.dropout)
        self.feed_forward = feed_forward
        self.feed_forward_norm = residual_norm(
            model, rates.dropout if feed_forward_dropout is None else feed_forward_dropout
        )
        own, cross = self.self_attention, self.cross_attention
        self.sublayers = {
            "self_attention": Sublayer(self.self_attention_norm, own, own.step),
            "cross_attention": Sublayer(
                self.cross_attention_norm, cross.attend_to, cross.step_memory
            ),
            "feed_forward": Sublayer(self.feed_forward_norm, feed_forward, feed_forward),
        }

    def forward(
        self,
        x: Residual,
        packing: Packing,
        memory_ND: Tensor,
        memory: Packing,
        keys_values: Sequence[Tensor] = (),
    ) -> Residual:
        """Apply the layer to all positions of the packed target at once.

        ``keys_values`` are keys and values of the memory (N, D), if they have been computed.
        """
        attend, attend_to_source, transform = self.sublayers.values()
        x = attend(x, packing, x.tokens, is_causal=True)
        x = attend_to_source(x, packing, memory_ND, memory, x.tokens, keys_values)
        return transform(x, x.tokens)

    def step(self, x: Residual, cache: LayerCache) -> Residual:
        """Apply the layer to one new token per row, and add it to the row's past."""
        attend, attend_to_source, transform = self.sublayers.values()
        x = attend.step(x, cache.past, x.tokens)
        x = attend_to_source.step(x, cache.memory, x.tokens)
        return transform.step(x, x.tokens)


def build_attention(model: ModelConfig, rates: Regularization) -> Attention:
    """Return an attention module of the model's width and heads."""
    return Attention(width=model.width, num_heads=model.num_heads, dropout=rates.attention_dropout)


def residual_norm(model: ModelConfig, dropout: float) -> ResidualNorm:
    """Return the norm of a sublayer, pre- or post-norm as the model is."""
    return ResidualNorm(model.width, pre_norm=model.norm == "pre", dropout=dropout)


class Stack(nn.Module):
    """Layers, positions and norms of an encoder or decoder."""

    def __init__(self, model: ModelConfig, layers: Sequence[nn.Module], *, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.site = 0
        self.layers = nn.ModuleList(layers)
        self.embedding_norm = nn.LayerNorm(model.width) if model.embedding_norm else None
        self.final_norm = nn.LayerNorm(model.width) if model.norm == "pre" else None
        if model.positions == "learned":
            self.positions = nn.Embedding(model.max_positions + POSITION_OFFSET, model.width)

    def enter(self, x_ND: Tensor, tokens: Tokens, sinusoids_TD: Tensor) -> Tensor:
        """Add positions to embedded tokens, then apply the optional norm and dropout."""
        if hasattr(self, "positions"):
            x_ND = x_ND + self.positions(tokens.position_N + POSITION_OFFSET)
        else:
            x_ND = x_ND + sinusoids_TD[tokens.position_N].to(x_ND.dtype)
        if self.embedding_norm is not None:
            x_ND = self.embedding_norm(x_ND)
        return dropped(x_ND, dropout_in(self, tokens.noise, site=self.site, rate=self.dropout))

    def leave(self, x_ND: Tensor) -> Tensor:
        """Return the last layer's states, normalized in a pre-norm model."""
        return x_ND if self.final_norm is None else self.final_norm(x_ND)


class Transformer(Trained):
    """Encoder–decoder Transformer with embeddings for both sides."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        front: nn.Module,
        encoder: Stack,
        decoder: Stack,
        expert_parallel_size: int = 1,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.expert_parallel_size = expert_parallel_size
        self.embedding = Embedding(spec)
        self.front = front
        self.encoder = encoder
        self.decoder = decoder
        self.positions_TD: Tensor
        self.group_of_language: Tensor
        self.token_of_language: Tensor
        # Not persistent: the spec determines all, and checkpoints hold parameters only.
        for name in ("positions_TD", "group_of_language", "token_of_language"):
            self.register_buffer(name, torch.empty(0), persistent=False)
        self.reset_buffers()

    @property
    def device(self) -> torch.device:
        """Return the device that the model is on."""
        return self.group_of_language.device

    def reset_buffers(self, device: torch.device | None = None) -> None:
        """Recompute all buffers: sinusoids, groups and tokens of languages, the front end's."""
        model = self.spec.model
        device = device or torch.get_default_device()
        is_table = model.positions == "sinusoidal"
        table_TD = sinusoids(model.max_positions if is_table else 0, model.width)
        self.positions_TD = table_TD.to(device)
        groups = self.spec.language_groups or (0,) * len(self.spec.languages)
        self.group_of_language = torch.tensor(groups, dtype=torch.int64, device="cpu").to(device)
        ids = (model.converter_layers and self.spec.language_token_ids) or ()
        self.token_of_language = torch.tensor(ids, dtype=torch.int64, device="cpu").to(device)
        if isinstance(self.front, HasBuffers):
            self.front.reset_buffers(device)

    def forward(self, batch: Batch, *, route: Route = "specific", progress: float = 0.0) -> Output:
        """Return logits for every label of the batch, and what the layers report.

        Args:
            batch: packed source, target and labels.
            route: the language-specific or the shared route.
            progress: share of training done before this update, 0 to 1.
        """
        source_ND, target_ND = self.embedding.both(batch.source_N, batch.target_N)
        languages = batch.source_language_B, batch.target_language_B
        source_packing, target_packing = batch.source, batch.target
        if self.training:
            # Both routes of fuse distillation draw different numbers.
            salt = 0 if route == "specific" else 1
            source_packing, target_packing = source_packing.noisy(salt), target_packing.noisy(salt)
        source = self.tokens_of(source_packing, *languages, route=route, progress=progress)
        target = self.tokens_of(target_packing, *languages, route=route, progress=progress)
        # Made once per pass: copies in every layer would be as many launches as they save.
        joint = self._joint_parameters(source_ND)
        source, target = replace(source, joint=joint), replace(target, joint=joint)
        memory_ND, reports = self.encode(
            batch.source_N, source_ND, source_packing, source, begins_N=batch.source_begins_N
        )
        gate_shares = [source.shares] * len(reports.gates)
        x_ND = self.decoder.enter(target_ND, target, self.positions_TD)
        x = Residual(x_ND, target)
        # One product for all layers reads the encoder's states once, and its backward pass adds up
        # their gradients, which would be an addition per layer.
        keys_values = joint.apply(memory_ND, self._memory_projections()) if joint else None
        for index, layer in enumerate(self.decoder.layers):
            own = keys_values[2 * index : 2 * index + 2] if keys_values else ()
            states = target_packing, memory_ND, source_packing, own
            x = reports.take(run_layer(layer, x, *states, recomputes=self._recomputes_now))
        logits_LV = self.project(x.sum().index_select(0, batch.label_rows_L))
        gate_shares += [target.shares] * (len(reports.gates) - len(gate_shares))
        return Output(logits_LV, tuple(reports.routing), tuple(reports.gates), tuple(gate_shares))

    def encode(
        self,
        ids_N: Tensor,
        embedded_ND: Tensor,
        packing: Packing,
        tokens: Tokens,
        *,
        begins_N: Tensor | None = None,
    ) -> tuple[Tensor, Reports]:
        """Return the encoder's output (N, D), and what its layers report.

        Args:
            ids_N: token ids of the source.
            embedded_ND: their embeddings.
            packing: boundaries of the sentences.
            tokens: metadata of the tokens.
            begins_N: True where a token begins a word that a segmenter found.
        """
        x_ND = self.encoder.enter(embedded_ND, tokens, self.positions_TD)
        layers = self._encoder_layers()
        passage = Passage(layers, packing, tokens, recomputes=self._recomputes_now)
        source = Source(ids_N, packing, tokens, self.embedding, begins_N)
        x_ND = same_shape(self.front(x_ND, source, passage), x_ND, self.front)
        if left := passage.count_left():
            raise ConfigError(
                f"{type(self.front).__name__} left {counted(left, 'layer')} of the encoder out. "
                "Take the states through all, by `passage.through`."
            )
        return self.encoder.leave(x_ND), passage.reports

    def _encoder_layers(self) -> list[Layer]:
        """Return the encoder's layers, the first of the converter layers with its addition."""
        layers: list[Layer] = list(self.encoder.layers)
        if count := self.spec.model.converter_layers:
            layers[-count] = partial(self._convert, layers[-count])
        return layers

    def _convert(self, layer: Layer, x: Residual, packing: Packing, **options: Any) -> Residual:
        """Apply a layer to the states plus the embedding of the target language's token.

        LCS ("A Language Converter Strategy for Zero-Shot Neural Machine Translation", Sun et al.
        2024, arXiv 2406.02876) gives the target language's embedding to the top encoder layers and
        adds no parameters. Its abstract and the description of its code were followed, not its
        text: the embedding, scaled like an input token's, is added once to every token.
        """
        target_ND = self.embedding(self.token_of_language[x.tokens.target_language_N])
        return layer(Residual(x.sum() + target_ND, x.tokens), packing, **options)

    def _joint_parameters(self, x_ND: Tensor) -> JointParameters | None:
        """Return the parameters of layers that share products in a pass on states like ``x_ND``.

        These are the queries, keys and values of self-attention, and the keys and values of all
        cross-attentions, but for replaced layers. Layers that are recomputed keep no keys.
        """
        if not joins_parameters(x_ND):
            return None
        groups: list[list[nn.Module]] = []
        for layer in (*self.encoder.layers, *self.decoder.layers):
            assert isinstance(layer, EncoderLayer | DecoderLayer)
            own = layer.self_attention
            groups.append([own.query, own.key, own.value])
        if not self._recomputes_now:
            groups.append(self._memory_projections())
        float32 = [one for module in self._float32_readers for one in module.parameters()]
        return JointParameters(_linear_groups(groups), float32)

    def joint_parameters_of_steps(self) -> JointParameters | None:
        """Return copies of the parameters that share products in steps of decoding, if any do."""
        if not is_fused(next(self.decoder.parameters())):
            return None
        # For the few rows of a step, a product with three times the outputs takes as long: 6 us on
        # an H100.
        layers = [layer.self_attention for layer in self.decoder_layers()]
        groups = _linear_groups([[one.query, one.key, one.value] for one in layers])
        return JointParameters(groups) if groups else None

    @cached_property
    def _float32_readers(self) -> list[ReadsFloat32]:
        """Modules that read their parameters in float32; searching for them takes milliseconds."""
        return [module for module in self.modules() if isinstance(module, ReadsFloat32)]

    def _memory_projections(self) -> list[nn.Module]:
        layers = [layer.cross_attention for layer in self.decoder_layers()]
        return [projection for one in layers for projection in (one.key, one.value)]

    @property
    def _recomputes_now(self) -> bool:
        return self.recomputes and self.training and torch.is_grad_enabled()

    def tokens_of(
        self,
        packing: Packing,
        source_language_B: Tensor,
        target_language_B: Tensor,
        *,
        route: Route = "specific",
        progress: float = 0.0,
    ) -> Tokens:
        """Return the metadata of the real tokens of a packing; ConfigError for no such route."""
        if route not in get_args(Route):
            raise no_such("There is no route", str(route), get_args(Route))
        return Tokens(
            sentence_N=packing.sentence_N,
            position_N=packing.position_N,
            source_language_B=source_language_B,
            target_language_B=target_language_B,
            group_of_language_L=self.group_of_language,
            route=route,
            progress=progress,
            shares=packing.shares,
            noise=packing.noise,
        )

    def project(self, x_ND: Tensor) -> Tensor:
        """Return the logits over the vocabulary, (L, V), for states of the last decoder layer."""
        return self.embedding.project(self.decoder.leave(x_ND))

    def decoder_layers(self) -> Iterator[DecoderLayer]:
        """Yield the decoder's layers, typed."""
        for layer in self.decoder.layers:
            assert isinstance(layer, DecoderLayer)
            yield layer


def sinusoids(max_positions: int, width: int) -> Tensor:
    """Return fairseq's sinusoidal positions (T, D): sines in the first half, then cosines.

    The table is computed on the CPU even under a meta device: arithmetic on meta makes PyTorch load
    its compiler, which takes more than a second.
    """
    half = width // 2
    steps = torch.arange(half, device="cpu")
    frequency = torch.exp(steps * -(math.log(10000) / max(half - 1, 1)))
    position = torch.arange(max_positions, dtype=torch.float32, device="cpu") + POSITION_OFFSET
    angle = position[:, None] * frequency[None, :]
    return F.pad(torch.cat([angle.sin(), angle.cos()], dim=1), (0, width % 2))


def _linear_groups(groups: Sequence[Sequence[nn.Module]]) -> list[list[Linear]]:
    """Return the groups in which no linear layer is replaced."""
    linear = ([one for one in group if type(one) is Linear] for group in groups)
    return [own for own, group in zip(linear, groups, strict=True) if len(own) == len(group) > 0]
