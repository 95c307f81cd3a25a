"""Convolutions over neighboring tokens, and conversion of queries, keys and values to heads.

Legend: P positions, V vectors of a position, C their width, N real tokens, H heads, K head width.
"""

import math

import torch
from torch import Tensor, nn

from pipeline.kernels.convolutions import convolve
from pipeline.model.attention import Attention, Projected


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
