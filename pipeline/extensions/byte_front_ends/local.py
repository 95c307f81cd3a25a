"""What looks at the tokens around one, along the sentence, and the heads that are looked at.

Legend: P positions, V vectors of a position, C their width, N real tokens, H heads, K head width.
"""

import math

import torch
from torch import Tensor, nn

from pipeline.kernels.convolutions import convolve
from pipeline.model.attention import Attention, Projected


class LocalConvolution(nn.Module):
    """Every vector with kernel // 2 neighbours on each side; zeros beyond a sentence."""

    def __init__(self, width: int, *, kernel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, width, kernel))
        self.bias = nn.Parameter(torch.empty(width))

    def initial_value(self, name: str, shape: torch.Size, *, generator: torch.Generator) -> Tensor:  # noqa: ARG002
        """U(±1/sqrt(inputs)), as PyTorch's convolutions."""
        bound = 1 / math.sqrt(self.weight.shape[1] * self.weight.shape[2])
        return torch.empty(shape).uniform_(-bound, bound, generator=generator)

    def forward(self, x_PVC: Tensor) -> Tensor:
        """(P, V, C) of sentences that stand apart by kernel // 2 rows of zeros or more."""
        return convolve(x_PVC, self.weight, self.bias)


def heads_of(projected: Projected, attention: Attention, *, scales_first: bool) -> Tensor:
    """Heads of queries, keys and values, (N, 3, H, K); queries scaled, where that comes first."""
    query_ND, key_ND, value_ND = projected
    if scales_first:
        query_ND = query_ND * _scale(attention)
    states_N3D = torch.stack([query_ND, key_ND, value_ND], dim=1)
    return states_N3D.view(len(query_ND), 3, attention.num_heads, -1)


def projected_of(states_N3HK: Tensor, attention: Attention, *, scales_first: bool) -> Projected:
    """Back to queries, keys and values, of which attention scales the queries (again)."""
    query_ND, key_ND, value_ND = states_N3HK.flatten(2).unbind(1)
    if scales_first:
        query_ND = query_ND / _scale(attention)
    return Projected(query_ND, key_ND, value_ND)


def _scale(attention: Attention) -> float:
    return 1 / math.sqrt(attention.query.out_features // attention.num_heads)
