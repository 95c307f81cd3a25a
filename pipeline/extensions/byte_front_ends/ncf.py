"""Byte-nCF: n-grams of states, fused after the first layers (LOBEF, §3.1).

For every n a convolution of kernel n and stride n goes over the sentence, padded on the right to a
multiple of n; each of its results stands for n tokens. What is passed on is their weighted sum.

Legend: B sentences, T their length, N real tokens, D model width, G n-grams, I their width (n · D).
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.extensions.byte_front_ends.settings import NcfConfig
from pipeline.kernels.products import linear
from pipeline.model.front_end import Passage, Source


class NgramConvolution(nn.Module):
    """The weights of one n, (D, D, n) and (D,)."""

    def __init__(self, width: int, *, order: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, width, order))
        self.bias = nn.Parameter(torch.empty(width))

    def initial_value(self, name: str, shape: torch.Size, *, generator: torch.Generator) -> Tensor:  # noqa: ARG002
        """U(±1/sqrt(inputs)), as PyTorch's convolutions."""
        bound = 1 / math.sqrt(self.weight.shape[1] * self.weight.shape[2])
        return torch.empty(shape).uniform_(-bound, bound, generator=generator)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Of sentences padded with zeros: each token's n-gram."""
        order, length = self.weight.shape[2], x_BTD.shape[1]
        padded_BTD = F.pad(x_BTD, (0, 0, 0, -length % order))
        ngrams_BGI = padded_BTD.unflatten(1, (-1, order)).flatten(2)
        seen_BGD = linear(ngrams_BGI, self.weight.permute(0, 2, 1).flatten(1), self.bias)
        seen_BTD: Tensor = seen_BGD.repeat_interleave(order, dim=1)
        return seen_BTD[:, :length]


class Ncf(nn.Module):
    """``orders.2`` and so on, and the mixture, one unconstrained number per n."""

    def __init__(self, config: NcfConfig, *, width: int) -> None:
        super().__init__()
        self.config = config
        self.orders = nn.ModuleDict(
            {str(n): NgramConvolution(width, order=n) for n in config.orders if n > 1}
        )
        self.mixture = nn.Parameter(torch.empty(len(config.orders)))

    def initial_value(self, name: str, shape: torch.Size, *, generator: torch.Generator) -> Tensor:  # noqa: ARG002
        """Return U(±1/sqrt(orders)), as the bias-free linear layer in LOBEF's code starts."""
        bound = 1 / math.sqrt(len(self.mixture))
        return torch.empty(shape).uniform_(-bound, bound, generator=generator)

    def forward(self, x_ND: Tensor, source: Source, passage: Passage) -> Tensor:
        x_ND = passage.through(x_ND, self.config.layers_before)
        return passage.through(self._fused(x_ND, source))

    def _fused(self, x_ND: Tensor, source: Source) -> Tensor:
        x_BTD = source.packing.unpack(x_ND)
        seen = [self.orders[str(n)](x_BTD) if n > 1 else x_BTD for n in self.config.orders]
        fused_BTD = torch.tensordot(self.mixture, torch.stack(seen), dims=1)
        return source.packing.pack(fused_BTD)
