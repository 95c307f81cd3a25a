"""Encoder front ends: how the encoder goes through its layers.

A front end is a module that takes embeddings with their positions, what is known of the sentences
(:class:`Source`) and the encoder's layers (:class:`Passage`), and returns the states of the last
layer. Before, between and in the layers it may change what they see. Its parameters are named
``front.…``, so that those of the layers keep their names.

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
from pipeline.model.sublayer import Reports, run_layer
from pipeline.model.tokens import Tokens


@dataclass(frozen=True)
class Source:
    """The source of a micro-batch.

    Attributes:
        ids_N: token ids, tags and end-of-sentence included.
        packing: where sentences lie.
        tokens: what is known of each.
        embedding: the model's table.
        begins_N: True where a token begins a word that a segmenter found; None where none did.
    """

    ids_N: Tensor
    packing: Packing
    tokens: Tokens
    embedding: Embedding
    begins_N: Tensor | None = None

    def gaps(self, size: int) -> Gaps:
        """The sentences, to be set apart by ``size`` rows."""
        return Gaps(self.tokens.sentence_N, self.packing.batch, size)


@runtime_checkable
class HasBuffers(Protocol):
    """A front with tensors that are no parameters."""

    def reset_buffers(self, device: torch.device) -> None:
        """(Re)compute them."""


@runtime_checkable
class SeesLanguage(Protocol):
    """A front with a router that may be told the source language."""

    @property
    def sees_language(self) -> bool:
        """Whether its router sees a vector of the source language."""

    def show_as(self, language: int | None) -> None:
        """Show the router the vector of this language from now on; None: of the source's."""


class Passage:
    """The encoder's layers, to be gone through once each, in order.

    Attributes:
        reports: what layers have reported so far.
    """

    def __init__(
        self,
        layers: Iterable[nn.Module],
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

    def through(
        self,
        x_ND: Tensor,
        layers: int | None = None,
        *,
        packing: Packing | None = None,
        mask_BTT: Tensor | None = None,
        contextualizer: Contextualizer | None = None,
    ) -> Tensor:
        """States after the next ``layers`` of the encoder, or after all that are left.

        ``packing`` has other spans than sentences to attend within, and ``mask_BTT`` is True where
        attention may look; the contextualiser makes queries, keys and values.
        """
        count = len(self._left) if layers is None else layers
        following, self._left = self._left[:count], self._left[count:]
        for layer in following:
            looking = partial(layer, mask_BTT=mask_BTT, contextualizer=contextualizer)
            output = run_layer(
                looking,
                *(x_ND, packing or self._packing, self._tokens),
                recomputes=self._recomputes,
            )
            x_ND = self.reports.add(output)
        return x_ND


class SubwordFront(nn.Module):
    """No front end: subwords, or any tokens, go through all layers as they are."""

    def forward(
        self,
        x_ND: Tensor,
        source: Source,  # noqa: ARG002 (one signature)
        passage: Passage,
    ) -> Tensor:
        """Return the states of the last layer."""
        return passage.through(x_ND)
