"""Byte-nCF and Byte-WSF: front ends within the first layers (LOBEF, §3).

Legend: B sentences, T their length, N real tokens, D model width, G n-grams, I their width (n · D).
"""

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.batching.batch import Packing
from pipeline.errors import ConfigError
from pipeline.extensions.byte_front_ends import NcfConfig, WsfConfig
from pipeline.kernels.attention import can_attend_packed
from pipeline.kernels.products import linear
from pipeline.model.front_end import Passage, Source
from pipeline.model.spec import ModelSpec

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
    """Byte-nCF: n-gram convolutional fusion after the first layers (LOBEF, §3.1).

    For every n, a convolution with kernel n and stride n runs over the sentence, padded on the
    right to a multiple of n, and each result is repeated for its n tokens. The next layer receives
    the weighted sum over all n.

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


class Wsf(nn.Module):
    """Byte-WSF: attention within words in the first layers (LOBEF, §3.2). It has no weights.

    White space separates words; in a language with a segmenter, its boundaries separate words, too.
    Each white space, each tag and the end of a sentence is a word. If attention has a kernel for
    packed sentences, words are passed to it as sentences; otherwise attention is masked.
    """

    def __init__(self, config: WsfConfig, spec: ModelSpec) -> None:
        super().__init__()
        if spec.lone_ids is None:
            raise ConfigError(
                "model.front is wsf, but the model's spec has no ids of white space. Initialize "
                "the model again from its recipe and tokenizer."
            )
        self.config = config
        self._head_width = spec.model.width // spec.model.num_heads
        self._spec_lone_ids = spec.lone_ids
        self.lone_ids: Tensor
        self.register_buffer("lone_ids", torch.empty(0), persistent=False)

    def reset_buffers(self, device: torch.device) -> None:
        """Recompute the ids that are a word each, on a device."""
        self.lone_ids = torch.tensor(self._spec_lone_ids, device="cpu").to(device)

    def forward(self, x_ND: Tensor, source: Source, passage: Passage) -> Tensor:
        """Run the encoder's layers, the first layers within words; return the last states."""
        begins_N = word_begins(source, self.lone_ids)
        if can_attend_packed(x_ND, head_width=self._head_width, has_dropout=self.training):
            words = words_as_sentences(begins_N, source.packing)
            x_ND = passage.through(x_ND, self.config.layers, packing=words)
        else:
            mask_BTT = within_words(begins_N, source.packing)
            x_ND = passage.through(x_ND, self.config.layers, mask_BTT=mask_BTT)
        return passage.through(x_ND)


def word_begins(source: Source, lone_ids: Tensor) -> Tensor:
    """Return a mask that is True at the first token of every word, (N,)."""
    # torch.isin sorts among many ids, for which the host waits for a GPU.
    is_lone_N = (source.ids_N[:, None] == lone_ids).any(1)
    begins_N = is_lone_N | (source.tokens.position_N == 0)
    begins_N[1:] |= is_lone_N[:-1]
    if source.begins_N is not None:
        begins_N |= source.begins_N
    return begins_N


def within_words(begins_N: Tensor, packing: Packing) -> Tensor:
    """Return a mask that is True where two tokens belong to one word, (B, T, T)."""
    word_BT = packing.unpack(begins_N.cumsum(0)[:, None]).squeeze(-1)
    return word_BT[:, :, None] == word_BT[:, None, :]


def words_as_sentences(begins_N: Tensor, packing: Packing) -> Packing:
    """Return a packing with words as spans.

    It has as many spans as tokens, because the host need not know the number of words then; the
    remaining spans are empty.
    """
    tokens = len(begins_N)
    number_N = torch.arange(tokens, device=begins_N.device)
    begin_N = torch.where(begins_N, number_N, tokens).sort().values
    end = begin_N.new_full((1,), tokens)
    return replace(packing, bound_B=torch.cat([begin_N, end]).int(), batch=tokens)
