"""XLM-R with a task head: a pretrained encoder that tags tokens or finds an answer span.

The encoder is RoBERTa's (Conneau et al. 2020, §3): post-norm layers with GELU, learned positions
from ``POSITION_OFFSET`` on, and a norm after the embeddings. The embedding of its only token type
is added to the positions on import (``extensions/tasks/xlmr.py``). The layers are those of the
translation model, low-rank modules included; the language of a sentence is both its source and its
target language.

Legend: B windows, T window length, N real tokens, L labels, V tags, D model width.
"""

from dataclasses import replace
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from pipeline.batching.batch import Packing
from pipeline.batching.labelled import LabelledBatch
from pipeline.config.settings import Route
from pipeline.kernels.noise import dropout_in, number_sites
from pipeline.kernels.products import Linear
from pipeline.kernels.residuals import dropped
from pipeline.model.building import allocate, dense_feed_forward
from pipeline.model.extension import extensions
from pipeline.model.regularization import Regularization
from pipeline.model.spec import ModelSpec
from pipeline.model.sublayer import Residual, run_layer
from pipeline.model.tokens import Tokens
from pipeline.model.transformer import EncoderLayer, Output, Stack, Transformer

HEAD_STD = 0.02
"""Standard deviation of a head's initial weights: Hugging Face's ``initializer_range``."""


class Head(Linear):
    """Linear layer from token states to logits."""

    def initial_value(self, name: str, shape: torch.Size, *, generator: torch.Generator) -> Tensor:
        """Return N(0, 0.02²) for weights, 0 for biases."""
        if name == "bias":
            return torch.zeros(shape)
        return torch.empty(shape).normal_(0, HEAD_STD, generator=generator)


class Labeller(nn.Module):
    """Encoder and task head.

    ``spec`` defines the encoder; its ``decoder_layers`` are ignored. A ``tagger`` has one logit per
    tag; a ``reader`` has one for the first and one for the last token of an answer.
    """

    expert_parallel_size = 1

    def __init__(
        self,
        spec: ModelSpec,
        *,
        head: Literal["tagger", "reader"],
        num_tags: int = 2,
        regularization: Regularization | None = None,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.kind = head
        rates = regularization or Regularization()
        model = spec.model
        self.recomputes = False
        """Whether the backward pass recomputes each layer from its input."""
        self.dropout = rates.dropout
        self.site = 0
        self.embedding = nn.Embedding(spec.vocabulary_size, model.width)
        layers = [
            EncoderLayer(model, rates, dense_feed_forward(model))
            for _ in range(model.encoder_layers)
        ]
        self.encoder = Stack(model, layers, dropout=rates.dropout)
        for extension in extensions():
            extension.change_side(spec, self.encoder, side="encoder")
        self.head = Head(model.width, 2 if head == "reader" else num_tags)
        number_sites(self)

    def forward(
        self, batch: LabelledBatch, *, route: Route = "specific", progress: float = 0.0
    ) -> Output:
        """Return logits for every label: (L, V) of a tagger; (2B, T) of a reader.

        The first B rows of a reader are for the first tokens of answers, the others for the last.
        """
        packing = batch.packing.noisy() if self.training else batch.packing
        batch = replace(batch, packing=packing)
        x_ND = self.encode(batch, route=route, progress=progress)
        if self.kind == "tagger":
            # As in Hugging Face's models, dropout precedes a tagger's head but not a reader's.
            rate = self.dropout
            x_ND = dropped(x_ND, dropout_in(self, packing.noise, site=self.site, rate=rate))
            return Output(self.head(x_ND.index_select(0, batch.label_rows_L)), ())
        return Output(spans(self.head(x_ND), packing), ())

    def encode(self, batch: LabelledBatch, *, route: Route, progress: float) -> Tensor:
        """Return the states of all real tokens, (N, D)."""
        packing = batch.packing
        tokens = Tokens(
            sentence_N=packing.sentence_N,
            position_N=packing.position_N,
            source_language_B=batch.language_B,
            target_language_B=batch.language_B,
            language_group_B=torch.zeros_like(batch.language_B),
            route=route,
            progress=progress,
            noise=packing.noise,
        )
        embedded_ND = self.embedding(batch.ids_N)
        nothing_TD = embedded_ND.new_empty(0)  # positions are learned
        x_ND = self.encoder.enter(embedded_ND, tokens, nothing_TD)
        x = Residual(x_ND, tokens)
        recomputes = self.recomputes and self.training and torch.is_grad_enabled()
        for layer in self.encoder.layers:
            x = run_layer(layer, x, packing, recomputes=recomputes)._replace(gates=())
        states: Tensor = self.encoder.leave(x.sum())
        return states


Trained: TypeAlias = Transformer | Labeller
"""A model that an engine trains."""


def spans(logits_N2: Tensor, packing: Packing) -> Tensor:
    """Return logits of first and last tokens over the windows, (2B, T); very low at padding."""
    logits_BT2 = packing.unpack(logits_N2)
    if not packing.is_full:
        least = torch.finfo(logits_BT2.dtype).min / 2  # halved: log-softmax stays finite
        logits_BT2 = logits_BT2.masked_fill(~packing.mask_BT[:, :, None], least)
    return logits_BT2.permute(2, 0, 1).reshape(2 * packing.batch, packing.length)


def allocated(model: Labeller, device: torch.device) -> Labeller:
    """Allocate the parameters of a model on the meta device, and return it; values are not set."""
    allocate(model, device)
    return model
