"""Interface of encoder front ends, which run the encoder's layers.

A front end is a module that takes embeddings with positions, the source (:class:`Source`) and the
encoder's layers (:class:`Passage`), and returns the states of the last layer. It may change the
states before, between and within layers. Its parameters are named ``front.…``, so that those of the
layers keep their names.

Legend: B sentences, T their length, N real tokens, D model width.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from pipeline.batching.batch import Packing
from pipeline.kernels.convolutions import Gaps
from pipeline.model.attention import Contextualizer
from pipeline.model.embedding import Embedding
from pipeline.model.sublayer import Layer, Reports, Residual, run_layer
from pipeline.model.tokens import Tokens


@dataclass(frozen=True)
class Source:
    """The source of a micro-batch.

    Attributes:
        ids_N: token ids, tags and end-of-sentence included.
        packing: boundaries of the sentences.
        tokens: metadata of the tokens.
        embedding: the model's embeddings.
        begins_N: True where a token begins a word that a segmenter found; None without segmenters.
    """

    ids_N: Tensor
    packing: Packing
    tokens: Tokens
    embedding: Embedding
    begins_N: Tensor | None = None

    def gaps(self, size: int) -> Gaps:
        """Return the layout that separates sentences by ``size`` rows of zeros."""
        return Gaps(self.tokens.sentence_N, self.packing.batch, size)


@runtime_checkable
class HasBuffers(Protocol):
    """A front end with buffers."""

    def reset_buffers(self, device: torch.device) -> None:
        """Recompute the buffers on a device."""


@runtime_checkable
class SeesLanguage(Protocol):
    """A front end with a router that may see the source language."""

    @property
    def sees_language(self) -> bool:
        """Return whether the router sees a vector of the source language."""

    def show_as(self, language: int | None) -> None:
        """Make the router see the vector of this language; None restores the source's."""


class Passage:
    """The encoder's layers; each runs once, in order.

    Attributes:
        reports: routing records and gates of the layers run so far.
    """

    def __init__(
        self,
        layers: Iterable[Layer],
        packing: Packing,
        tokens: Tokens,
        *,
        recomputes: bool = False,
    ) -> None:
        self.reports = Reports()
        self._left = list(layers)
        self._packing = packing
        self._tokens = tokens
        self._recomputes = recomputes

    def count_left(self) -> int:
        """Return the number of layers that have not run yet."""
        return len(self._left)

    def through(
        self,
        x_ND: Tensor,
        layers: int | None = None,
        *,
        packing: Packing | None = None,
        mask_BTT: Tensor | None = None,
        contextualizer: Contextualizer | None = None,
    ) -> Tensor:
        """Run the next ``layers`` of the encoder, or all that are left, and return their states.

        Args:
            x_ND: states of the layer before.
            layers: number of layers to run; None: all that are left.
            packing: spans within which tokens attend; None: sentences.
            mask_BTT: True where a token may attend; None: everywhere in its span.
            contextualizer: makes queries, keys and values of self-attention.
        """
        count = len(self._left) if layers is None else layers
        following, self._left = self._left[:count], self._left[count:]
        x = Residual(x_ND, self._tokens)
        for layer in following:
            looking = partial(layer, mask_BTT=mask_BTT, contextualizer=contextualizer)
            spans = packing or self._packing
            x = self.reports.take(run_layer(looking, x, spans, recomputes=self._recomputes))
        return x.sum()


class SubwordFront(nn.Module):
    """The front end of subword models: run all layers unchanged."""

    def forward(
        self,
        x_ND: Tensor,
        source: Source,  # noqa: ARG002 (one signature)
        passage: Passage,
    ) -> Tensor:
        """Return the states of the last layer."""
        return passage.through(x_ND)
