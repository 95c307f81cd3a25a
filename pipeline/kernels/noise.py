"""Random bits that depend only on a micro-batch, a place in the model, a row and a column.

So dropout does not depend on how micro-batches share passes, and no mask need be stored.

Legend: N tokens, C columns.
"""

from typing import NamedTuple

import torch
from torch import Tensor

LOW_BITS = 2**32 - 1


class Noise(NamedTuple):
    """Keys of the random bits of every token.

    Attributes:
        seed_N: int32: seed of the micro-batch of each token.
        row_N: int32: row of the token within its micro-batch.
    """

    seed_N: Tensor
    row_N: Tensor


def threshold(rate: float) -> int:
    """Return the smallest 32-bit number that keeps a value: a share of ``rate`` lies below."""
    return int(rate * 2**32)


def keep(noise: Noise, site: int, columns: int, rate: float) -> Tensor:
    """Return which of ``columns`` values of every token dropout keeps, (N, C) bool.

    Args:
        noise: keys of the tokens.
        site: number of the place in the model.
        columns: C.
        rate: share of values to drop.
    """
    site_bits = site * 0x1B873593 & LOW_BITS
    row_N = noise.row_N.long() * 0x85EBCA6B & LOW_BITS
    key_N = _mix(_mix((noise.seed_N.long() + site_bits) & LOW_BITS) ^ row_N)
    column_C = torch.arange(columns, device=key_N.device) * 0xC2B2AE35 & LOW_BITS
    return _mix(key_N[:, None] ^ column_C) >= threshold(rate)


def _mix(bits: Tensor) -> Tensor:
    """Return a one-to-one hash of 32 bits (lowbias32), computed in 64."""
    bits = bits ^ bits >> 16
    bits = bits * 0x7FEB352D & LOW_BITS
    bits = bits ^ bits >> 15
    bits = bits * 0x846CA68B & LOW_BITS
    return bits ^ bits >> 16
