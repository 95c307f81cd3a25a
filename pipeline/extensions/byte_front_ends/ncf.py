"""Byte-nCF: n-gram convolutional fusion after the first layers (LOBEF, §3.1).

For every n, a convolution with kernel n and stride n runs over the sentence, padded on the right to
a multiple of n, and each result is repeated for its n tokens. The next layer receives the weighted
sum over all n.

Legend: B sentences, T their length, N real tokens, D model width, G n-grams, I their width (n · D).
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.extensions.byte_front_ends.settings import NcfConfig
from pipeline.kernels.products import linear
from pipeline.model.front_end import Passage, Source

ORDERS = (1, 2, 3, 4)
"""Values of n; 1 is the state itself."""


class NgramConvolution(nn.Module):
    """Convolution over n-grams, with weights (D, D, n) and (D,)."""

    def __init__(self, width: int, *, order: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, width, order))
        self.bias = nn.Parameter(torch.empty(width))

    def initial_value(self, name: str, shape: torch.Size, *, generator: torch.Generator) -> Tensor:  # noqa: ARG002
        """Return U(±1/sqrt(inputs)), as PyTorch's convolutions start."""
        bound = 1 / math.sqrt(self.weight.shape[1] * self.weight.shape[2])
        return torch.empty(shape).uniform_(-bound, bound, generator=generator)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return the result of each token's n-gram, (B, T, D), of zero-padded sentences."""
        order, length = self.weight.shape[2], x_BTD.shape[1]
        padded_BTD = F.pad(x_BTD, (0, 0, 0, -length % order))
        ngrams_BGI = padded_BTD.unflatten(1, (-1, order)).flatten(2)
        seen_BGD = linear(ngrams_BGI, self.weight.permute(0, 2, 1).flatten(1), self.bias)
        seen_BTD: Tensor = seen_BGD.repeat_interleave(order, dim=1)
        return seen_BTD[:, :length]


class Ncf(nn.Module):
    """The Byte-nCF front end.

    Convolutions are named by n (``orders.2``); ``mixture`` has one unconstrained weight per n.
    """

    def __init__(self, config: NcfConfig, *, width: int) -> None:
        super().__init__()
        self.config = config
        self.orders = nn.ModuleDict(
            {str(n): NgramConvolution(width, order=n) for n in ORDERS if n > 1}
        )
        self.mixture = nn.Parameter(torch.empty(len(ORDERS)))

    def initial_value(self, name: str, shape: torch.Size, *, generator: torch.Generator) -> Tensor:  # noqa: ARG002
        """Return U(±1/sqrt(orders)), as LOBEF's code: the mixture is a linear layer there."""
        bound = 1 / math.sqrt(len(self.mixture))
        return torch.empty(shape).uniform_(-bound, bound, generator=generator)

    def forward(self, x_ND: Tensor, source: Source, passage: Passage) -> Tensor:
        """Run the encoder's layers, with fusion after the first layers; return the last states."""
        x_ND = passage.through(x_ND, self.config.layers_before)
        return passage.through(self._fused(x_ND, source))

    def _fused(self, x_ND: Tensor, source: Source) -> Tensor:
        x_BTD = source.packing.unpack(x_ND)
        seen = [self.orders[str(n)](x_BTD) if n > 1 else x_BTD for n in ORDERS]
        fused_BTD = torch.tensordot(self.mixture, torch.stack(seen), dims=1)
        return source.packing.pack(fused_BTD)
