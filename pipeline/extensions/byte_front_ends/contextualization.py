"""Front ends that let the queries, keys and values of one layer see neighboring tokens.

Legend: P positions with gaps, V vectors of a position, C width of a group or vector, N real tokens,
D model width, H heads, K head width.
"""

import math
from abc import ABC, abstractmethod
from functools import partial

import torch
from torch import Tensor, nn

from pipeline.extensions.byte_front_ends import MscConfig, MshaConfig
from pipeline.kernels.convolutions import convolve
from pipeline.model.attention import Attention, Projected
from pipeline.model.front_end import Passage, Source


class Contextualization(nn.Module, ABC):
    """Front end that contextualizes the projections of one encoder layer, counted from 0."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self._layer = layer

    def forward(self, x_ND: Tensor, source: Source, passage: Passage) -> Tensor:
        """Run the encoder's layers; return the last states."""
        x_ND = passage.through(x_ND, self._layer)
        x_ND = passage.through(x_ND, 1, contextualizer=partial(self.contextualize, source))
        return passage.through(x_ND)

    @abstractmethod
    def contextualize(self, source: Source, attention: Attention, x_ND: Tensor) -> Projected:
        """Return the queries, keys and values of the layer."""


class LocalConvolution(nn.Module):
    """Convolution of every vector with kernel // 2 neighbors on each side, zero-padded."""

    def __init__(self, width: int, *, kernel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, width, kernel))
        self.bias = nn.Parameter(torch.empty(width))

    def initial_value(self, name: str, shape: torch.Size, *, generator: torch.Generator) -> Tensor:  # noqa: ARG002
        """Return U(±1/sqrt(inputs)), as PyTorch's convolutions start."""
        bound = 1 / math.sqrt(self.weight.shape[1] * self.weight.shape[2])
        return torch.empty(shape).uniform_(-bound, bound, generator=generator)

    def forward(self, x_PVC: Tensor) -> Tensor:
        """Return (P, V, C); at least kernel // 2 rows of zeros must separate sentences."""
        return convolve(x_PVC, self.weight, self.bias)


def heads_of(projected: Projected, attention: Attention, *, scales_first: bool) -> Tensor:
    """Return the heads of queries, keys and values, (N, 3, H, K).

    With ``scales_first``, queries are scaled by 1 / sqrt(K) before they are contextualized.
    """
    query_ND, key_ND, value_ND = projected
    if scales_first:
        query_ND = query_ND * _scale(attention)
    states_N3D = torch.stack([query_ND, key_ND, value_ND], dim=1)
    return states_N3D.view(len(query_ND), 3, attention.num_heads, -1)


def projected_of(states_N3HK: Tensor, attention: Attention, *, scales_first: bool) -> Projected:
    """Return queries, keys and values, (N, D) each, from heads (N, 3, H, K)."""
    query_ND, key_ND, value_ND = states_N3HK.flatten(2).unbind(1)
    if scales_first:  # attention scales queries itself: undo the first scaling
        query_ND = query_ND / _scale(attention)
    return Projected(query_ND, key_ND, value_ND)


def _scale(attention: Attention) -> float:
    return 1 / math.sqrt(attention.query.out_features // attention.num_heads)


class Msc(Contextualization):
    """MSC: multi-scale contextualization (Huang and Feng 2024; MoCE, §2.2, eq. 4).

    The input of a layer's query, key and value projections is split along its width into groups.
    Each group passes a convolution with its own kernel size, named by the group's number, or stays
    unchanged. The residual connection uses the original input.
    """

    def __init__(self, config: MscConfig, *, width: int) -> None:
        super().__init__(config.layer)
        self.config = config
        self.convolutions = nn.ModuleDict(
            {
                str(group): LocalConvolution(width // len(config.kernels), kernel=kernel)
                for group, kernel in enumerate(config.kernels)
                if kernel
            }
        )

    def contextualize(self, source: Source, attention: Attention, x_ND: Tensor) -> Projected:
        """Return the queries, keys and values of contextualized states."""
        return attention.project(self._mixed(source, x_ND), source.tokens)

    def _mixed(self, source: Source, x_ND: Tensor) -> Tensor:
        """Return the states with each group convolved by its kernel, (N, D)."""
        gaps = source.gaps(max(self.config.kernels) // 2)
        groups_PC = gaps.open(x_ND).chunk(len(self.config.kernels), dim=1)
        mixed_PC = [
            self.convolutions[str(group)](x_PC[:, None].contiguous()).squeeze(1) if kernel else x_PC
            for group, (kernel, x_PC) in enumerate(zip(self.config.kernels, groups_PC, strict=True))
        ]
        return gaps.close(torch.cat(mixed_PC, dim=1))


class Msha(Contextualization):
    """MSHA: multi-scale attention, where each head has its own scale (MoCE, §3.1, eqs. 8 to 10).

    Each head with δ > 0 has one convolution for its query, key and value, named by the head's
    number (``heads.3``).
    """

    def __init__(self, config: MshaConfig, *, width: int) -> None:
        super().__init__(config.layer)
        self.config = config
        self.heads = nn.ModuleDict(
            {
                str(head): LocalConvolution(width // len(config.scales), kernel=2 * scale - 1)
                for head, scale in enumerate(config.scales)
                if scale
            }
        )

    def contextualize(self, source: Source, attention: Attention, x_ND: Tensor) -> Projected:
        """Return the queries, keys and values of contextualized states."""
        scales_first = self.config.reading == "code"
        projected = attention.project(x_ND, source.tokens)
        states_N3HK = heads_of(projected, attention, scales_first=scales_first)
        gaps = source.gaps(max(*self.config.scales, 1) - 1)
        states_P3HK = gaps.open(states_N3HK)
        seen_P3HK = torch.stack(
            [
                self.heads[str(head)](x_P3K.contiguous()) if scale else x_P3K
                for head, (scale, x_P3K) in enumerate(
                    zip(self.config.scales, states_P3HK.unbind(2), strict=True)
                )
            ],
            dim=2,
        )
        return projected_of(gaps.close(seen_P3HK), attention, scales_first=scales_first)
