"""Random numbers of training that depend on their place only: dropout, jitter and other noise.

A generator draws numbers in the order of calls, so its numbers change if micro-batches share a pass
or move to another rank. Here a number is a hash of (seed of the micro-batch, site, row in the
micro-batch, column). A *site* is a place in the model that draws numbers (:func:`number_sites`). So
an update does not depend on how its micro-batches share passes, and the backward pass computes a
mask again instead of keeping it.

The hash is two rounds of a 32-bit finalizer ("lowbias32" by Chris Wellons, public domain). On CPU a
compiled loop computes it, on other devices the fused kernels, or operators on 64-bit integers.

Legend: N tokens, X columns; B sentences, H heads, T queries, S keys.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeline.kernels.cpu import over_rows, uses_loops

SITE_STEP = 256
"""Distance between two sites. Attention adds the number of its head to its site."""

SITE_FACTOR, ROW_FACTOR, COLUMN_FACTOR = 0x1B873593, 0x85EBCA6B, 0xC2B2AE35
"""Odd factors that spread small numbers over 32 bits (from MurmurHash3)."""

_FIRST_FACTOR, _SECOND_FACTOR = 0x7FEB352D, 0x846CA68B
_WORD = 0xFFFFFFFF
_HASH_COST = 4  # of a hash in the loop, in multiply-adds of a matrix product


@dataclass(frozen=True)
class Noise:
    """Keys of the random numbers of packed tokens.

    Attributes:
        seed_N: (N,) int32: the seed of each token's micro-batch.
        row_N: (N,) int32: the row of each token in its micro-batch.
    """

    seed_N: Tensor
    row_N: Tensor

    def __iter__(self) -> Iterator[Tensor]:
        """Yield both keys."""
        return iter((self.seed_N, self.row_N))

    def salted(self, salt: int) -> "Noise":
        """Return the keys of other numbers, for a second pass of the same tokens."""
        return Noise(self.seed_N + salt * SITE_STEP, self.row_N)


def number_sites(model: nn.Module) -> None:
    """Give every module that draws random numbers (it has an attribute ``site``) its own site."""
    number = 0
    for module in model.modules():
        if hasattr(module, "site"):
            number += 1
            module.site = number * SITE_STEP  # type: ignore[assignment]


class Dropout(NamedTuple):
    """Dropout at one place of the model.

    Attributes:
        noise: keys of the rows.
        site: number of the place.
        rate: share of values that are zeroed.
    """

    noise: Noise
    site: int
    rate: float


def dropout_in(module: nn.Module, noise: Noise | None, *, site: int, rate: float) -> Dropout | None:
    """Return the dropout at a site of a module; None outside training and at a rate of 0."""
    if not module.training or rate == 0:
        return None
    assert noise is not None, "training with dropout needs keys of random numbers"
    return Dropout(noise, site, rate)


def threshold(rate: float) -> int:
    """Return the bits from which a value is kept if values are dropped at a rate."""
    return min(int(rate * 2**32), _WORD)


def signed_threshold(rate: float) -> int:
    """Return the threshold of a rate as the int32 with the same bits, as kernels get it."""
    bits = threshold(rate)
    return bits - 2**32 if bits >= 2**31 else bits


def dropout(x_NX: Tensor, dropout: Dropout) -> Tensor:
    """Zero values at a rate and divide the others by (1 - rate); differentiable, keeps no mask."""
    noise, site, rate = dropout
    dropped: Tensor = _Dropout.apply(  # type: ignore[no-untyped-call]
        x_NX, noise.seed_N, noise.row_N, site, rate
    )
    return dropped


def weight_dropout(weight_BHTS: Tensor, of_queries: Dropout) -> Tensor:
    """Apply dropout to attention weights of padded sentences.

    A weight's numbers depend on the keys of its query, (B, T), the head, and the position of its
    key.
    """
    noise_BT, site, rate = of_queries
    _, heads, _, keys = weight_BHTS.shape
    head_H1 = torch.arange(heads, dtype=torch.int32, device=weight_BHTS.device)[:, None]
    # The site enters the hash as a product, so the site of a head is the same as another seed.
    seed_BHT = noise_BT.seed_N[:, None] + head_H1 * SITE_FACTOR
    row_BHT = noise_BT.row_N[:, None].expand_as(seed_BHT)
    rows = Dropout(Noise(seed_BHT.flatten(), row_BHT.flatten()), site, rate)
    return dropout(weight_BHTS.view(-1, keys), rows).view_as(weight_BHTS)


def uniform(noise: Noise, site: int, *, columns: int) -> Tensor:
    """Return (N, X) float32 numbers between 0 and 1, never 0 or 1."""
    bits_NX = _bits(noise, site, columns)
    return ((bits_NX >> 9).float() + 0.5) * 2.0**-23


def normal(noise: Noise, site: int, *, columns: int) -> Tensor:
    """Return (N, X) float32 numbers of a standard normal distribution."""
    return torch.erfinv(uniform(noise, site, columns=columns) * 2 - 1) * math.sqrt(2)


def keep(noise: Noise, site: int, columns: int, rate: float) -> Tensor:
    """Return a mask of (N, X) that is False at ``rate`` of the places."""
    if not uses_loops(noise.seed_N):
        return _bits(noise, site, columns) >= threshold(rate)
    from pipeline.kernels import compiled_loops as loops

    seed_N, row_N = (keys_N.contiguous().numpy() for keys_N in noise)
    keep_NX = torch.empty(len(seed_N), columns, dtype=torch.bool)
    mask_NX = keep_NX.numpy()

    def fill(first: int, last: int) -> None:
        loops.keep(seed_N, row_N, site, threshold(rate), first, last, mask_NX)

    over_rows(fill, len(seed_N), cost_of_row=columns * _HASH_COST)
    return keep_NX


class _Dropout(torch.autograd.Function):
    """Dropout that computes its mask in both passes."""

    @staticmethod
    def forward(
        ctx: Any, x_NX: Tensor, seed_N: Tensor, row_N: Tensor, site: int, rate: float
    ) -> Tensor:
        ctx.save_for_backward(seed_N, row_N)
        ctx.site, ctx.rate = site, rate
        return _dropped(x_NX, Noise(seed_N, row_N), site, rate)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        noise = Noise(*ctx.saved_tensors)
        return _dropped(gradients[0], noise, ctx.site, ctx.rate), None, None, None, None


def _dropped(x_NX: Tensor, noise: Noise, site: int, rate: float) -> Tensor:
    if rate >= 1:
        return torch.zeros_like(x_NX)
    kept_NX = keep(noise, site, x_NX.shape[-1], rate)
    return x_NX * kept_NX * (1 / (1 - rate))


def _bits(noise: Noise, site: int, columns: int) -> Tensor:
    """Return 32 random bits per place as (N, X) int64, by operators."""
    stream_N = (noise.seed_N.long() + site * SITE_FACTOR) & _WORD
    key_N = _mixed(_mixed(stream_N) ^ (noise.row_N.long() * ROW_FACTOR & _WORD))
    column_X = torch.arange(columns, device=key_N.device) * COLUMN_FACTOR & _WORD
    return _mixed(key_N[:, None] ^ column_X)


def _mixed(x: Tensor) -> Tensor:
    """Return a permutation of 32-bit numbers, which int64 tensors hold, that looks random."""
    x = x & _WORD
    x = x ^ (x >> 16)
    x = x * _FIRST_FACTOR & _WORD
    x = x ^ (x >> 15)
    x = x * _SECOND_FACTOR & _WORD
    return x ^ (x >> 16)
