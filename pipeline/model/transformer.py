"""The encoder–decoder Transformer of the fairseq / Hugging Face M2M-100 family.

Notable choices:
- hidden states are packed (N, D): only attention sees the padded grid
- source and target are embedded in one look-up; embeddings and output projection are tied,
  unless ``model.embedding`` says otherwise
- pre- or post-norm; sinusoidal (sines, then cosines) or learned positions, counted from
  ``POSITION_OFFSET`` as in fairseq; embedding scale sqrt(D); optional embedding norm
- logits only at real target tokens
- every layer's feed-forward is dense or a mixture of experts, the layer does not care which
- what a layer is told about its tokens is one record, what an MoE layer has to report is returned
  beside the hidden states
- how the encoder goes through its layers is a slot, its front (``model/front/``)

Legend: B batch, N real tokens, D model width, V vocabulary, L predicted tokens.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.batching.batch import Batch, Packing
from pipeline.config.settings import Route
from pipeline.errors import ConfigError
from pipeline.kernels.expert_products import check_widths
from pipeline.model.embedding import Embedding
from pipeline.model.feed_forward import build_feed_forward
from pipeline.model.front.choice import build_front
from pipeline.model.front.passage import HasBuffers, Passage, Source
from pipeline.model.language_modules.choice import add_gates, add_low_rank
from pipeline.model.language_modules.clsr import Projections
from pipeline.model.language_modules.stack import LanguageStack
from pipeline.model.layers import DecoderLayer, EncoderLayer, Reports, run_layer
from pipeline.model.moe.expert_parallel import ExpertParallel
from pipeline.model.moe.layer import RoutingRecord
from pipeline.model.moe.router import Side
from pipeline.model.regularization import Regularization
from pipeline.model.settings import ModelConfig
from pipeline.model.spec import ModelSpec
from pipeline.model.tokens import Tokens

POSITION_OFFSET = 2
"""fairseq counts positions from padding index + 1, and its padding index is 1."""


@dataclass(frozen=True)
class Output:
    """Logits at the predicted positions, and one record per MoE layer, encoder first."""

    logits_LV: Tensor
    routing: tuple[RoutingRecord, ...]
    gates: tuple[Tensor, ...] = ()
    """Of sublayers that are followed by gated projections, (N,) each."""


class Stack(nn.Module):
    """The layers of an encoder or decoder, its positions and its norms."""

    def __init__(self, model: ModelConfig, layers: Sequence[nn.Module], *, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.layers = nn.ModuleList(layers)
        self.embedding_norm = nn.LayerNorm(model.width) if model.embedding_norm else None
        self.projections: Projections | None = None
        """Of languages, shared by all sublayers."""
        self.final_norm = nn.LayerNorm(model.width) if model.norm == "pre" else None
        if model.positions == "learned":
            self.positions = nn.Embedding(model.max_positions + POSITION_OFFSET, model.width)

    def enter(self, x_ND: Tensor, position_N: Tensor, sinusoids_TD: Tensor) -> Tensor:
        """Embedded tokens with their positions, normalised where the model does, dropped out."""
        if hasattr(self, "positions"):
            x_ND = x_ND + self.positions(position_N + POSITION_OFFSET)
        else:
            x_ND = x_ND + sinusoids_TD[position_N].to(x_ND.dtype)
        if self.embedding_norm is not None:
            x_ND = self.embedding_norm(x_ND)
        return F.dropout(x_ND, self.dropout, training=self.training)

    def leave(self, x_ND: Tensor) -> Tensor:
        """What the last layer's states become."""
        return x_ND if self.final_norm is None else self.final_norm(x_ND)


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
        self.expert_parallel_size = 1 if expert_parallel is None else expert_parallel.size

        def feed_forward(side: Side, layer: int) -> nn.Module:
            return build_feed_forward(
                spec,
                side=side,
                layer=layer,
                regularization=rates,
                expert_parallel=expert_parallel,
            )

        encoder = [
            EncoderLayer(model, rates, feed_forward("encoder", i))
            for i in range(model.encoder_layers)
        ]
        last = model.decoder_layers - 1
        decoder = [
            DecoderLayer(
                model,
                rates_of_last(model, rates) if i == last else rates,
                feed_forward("decoder", i),
            )
            for i in range(model.decoder_layers)
        ]
        add_low_rank(spec, encoder, side="encoder")
        add_low_rank(spec, decoder, side="decoder")
        self.recomputes = False
        """Of every layer only its input is kept for the backward pass."""
        self.embedding = Embedding(spec)
        self.front = build_front(spec)
        # Nothing is dropped of one-hot embeddings as the encoder takes them (Shaham and Levy 2021).
        drops = model.embedding.input != "one_hot" or model.embedding.one_hot == "fixed_scale"
        self.encoder = Stack(model, encoder, dropout=rates.dropout if drops else 0.0)
        self.decoder = Stack(model, decoder, dropout=rates.dropout)
        self.encoder.projections = add_gates(spec, encoder)
        self.decoder.projections = add_gates(spec, decoder)
        self.positions_TD: Tensor
        self.group_of_language: Tensor
        self.register_buffer("positions_TD", torch.empty(0), persistent=False)
        self.register_buffer("group_of_language", torch.empty(0), persistent=False)
        self.reset_buffers()

    @property
    def device(self) -> torch.device:
        return self.group_of_language.device

    def reset_buffers(self, device: torch.device | None = None) -> None:
        """(Re)compute what is not a parameter: sinusoids and the groups of languages."""
        model = self.spec.model
        device = device or torch.get_default_device()
        is_table = model.positions == "sinusoidal"
        table_TD = sinusoids(model.max_positions if is_table else 0, model.width)
        self.positions_TD = table_TD.to(device)
        groups = self.spec.language_groups or (0,) * len(self.spec.languages)
        self.group_of_language = torch.tensor(groups, dtype=torch.int64, device="cpu").to(device)
        if isinstance(self.front, HasBuffers):
            self.front.reset_buffers(device)

    def forward(self, batch: Batch, *, route: Route = "specific", progress: float = 0.0) -> Output:
        """Logits for every label of the batch; ``progress``: share of training done so far."""
        source_ND, target_ND = self.embedding.both(batch.source_N, batch.target_N)
        languages = batch.source_language_B, batch.target_language_B
        source = self.tokens_of(batch.source, *languages, route=route, progress=progress)
        target = self.tokens_of(batch.target, *languages, route=route, progress=progress)
        memory_ND, reports = self.encode(
            batch.source_N, source_ND, batch.source, source, begins_N=batch.source_begins_N
        )
        x_ND = self.decoder.enter(target_ND, target.position_N, self.positions_TD)
        for layer in self.decoder.layers:
            states = x_ND, batch.target, target, memory_ND, batch.source
            x_ND = reports.add(run_layer(layer, *states, recomputes=self._recomputes_now))
        logits_LV = self.project(x_ND.index_select(0, batch.label_rows_L))
        return Output(logits_LV, tuple(reports.routing), tuple(reports.gates))

    def encode(
        self,
        ids_N: Tensor,
        embedded_ND: Tensor,
        packing: Packing,
        tokens: Tokens,
        *,
        begins_N: Tensor | None = None,
    ) -> tuple[Tensor, Reports]:
        """Source tokens and their embeddings → memory (N, D), with what layers report.

        ``begins_N``: True where a token begins a word that a segmenter found.
        """
        x_ND = self.encoder.enter(embedded_ND, tokens.position_N, self.positions_TD)
        passage = Passage(self.encoder.layers, packing, tokens, recomputes=self._recomputes_now)
        source = Source(ids_N, packing, tokens, self.embedding, begins_N)
        x_ND = self.front(x_ND, source, passage)
        return self.encoder.leave(x_ND), passage.reports

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
        """What layers are told about the real tokens of a packing."""
        return Tokens(
            sentence_N=packing.sentence_N,
            position_N=packing.position_N,
            source_language_B=source_language_B,
            target_language_B=target_language_B,
            language_group_B=self.group_of_language[target_language_B],
            route=route,
            progress=progress,
        )

    def project(self, x_ND: Tensor) -> Tensor:
        """Decoder states → logits over the vocabulary."""
        return self.embedding.project(self.decoder.leave(x_ND))

    def decoder_layers(self) -> Iterator[DecoderLayer]:
        for layer in self.decoder.layers:
            assert isinstance(layer, DecoderLayer)
            yield layer


def rates_of_last(model: ModelConfig, rates: Regularization) -> Regularization:
    """Return the rates of the last decoder layer.

    With tied one-hot embeddings its states are the logits, of which the code of Shaham and Levy
    (2021) drops nothing.
    """
    if model.embedding.one_hot != "two_scales":
        return rates
    return replace(rates, dropout=0.0, moe_dropout=None)


def sinusoids(max_positions: int, width: int) -> Tensor:
    """Sinusoidal positions as in fairseq: sines in the first half, cosines in the second.

    On the CPU even where new tensors go to the meta device: for arithmetic there, PyTorch loads its
    compiler, which takes more than a second.
    """
    half = width // 2
    steps = torch.arange(half, device="cpu")
    frequency = torch.exp(steps * -(math.log(10000) / max(half - 1, 1)))
    position = torch.arange(max_positions, dtype=torch.float32, device="cpu") + POSITION_OFFSET
    angle = position[:, None] * frequency[None, :]
    return F.pad(torch.cat([angle.sin(), angle.cos()], dim=1), (0, width % 2))


def shape_of_model(spec: ModelSpec) -> Transformer:
    """A model without values: its modules, and the names and shapes of its parameters."""
    with torch.device("meta"):
        return Transformer(spec)


def build_model(
    spec: ModelSpec,
    *,
    regularization: Regularization | None = None,
    expert_parallel: ExpertParallel | None = None,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> Transformer:
    """A model whose parameters are allocated but not yet set (initialise it, or load weights).

    They are allocated once, in ``dtype``, and so are the buffers.

    Raises:
        ConfigError: there is not that much memory, or a kernel of the device does not take the
            model's widths.
    """
    device = device or torch.device("cpu")
    if spec.model.moe is not None:
        check_widths(
            width=spec.model.width, hidden_width=spec.model.feed_forward_width, device=device
        )
    with torch.device("meta"):
        model = Transformer(spec, regularization=regularization, expert_parallel=expert_parallel)
        model.to(dtype)
    try:
        allocate(model, device)
    except RuntimeError as error:
        if "memory" not in str(error):
            raise
        count = sum(parameter.numel() for parameter in model.parameters())
        raise ConfigError(
            f"There is no memory for the {count:,} parameters of this rank: make [model] smaller, "
            "or spread the experts over more ranks (`mmnmt memory` tells what fits)."
        ) from error
    for module in model.modules():
        if isinstance(module, LanguageStack):
            module.clear_padding()
    model.reset_buffers(device)
    return model.to(dtype)


def allocate(model: nn.Module, device: torch.device, *, recurse: bool = True) -> None:
    """Put parameters without values in the place of those on the meta device.

    As ``Module.to_empty`` does, which loads PyTorch's compiler (``empty_like`` of a meta tensor).
    """
    for module in model.modules() if recurse else [model]:
        for name, parameter in list(module.named_parameters(recurse=False)):
            values = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            setattr(module, name, nn.Parameter(values, requires_grad=parameter.requires_grad))
