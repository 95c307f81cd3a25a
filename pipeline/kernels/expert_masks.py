"""Loop that zeroes entries of a tensor at random, compiled by numba: experts of a dense layer.

Drawing by numpy, comparing and multiplying by torch would be passes over memory of their own. The
generator is Philox4x64-10, with the same words as ``numpy.random.Philox``.

Legend: N entries, L entries of a block.
"""

from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic

from pipeline.kernels.compiled_loops import States, compiled

BLOCK = 4096
"""Entries drawn at a time: their words stay in a core's first cache."""
_ROUNDS = 10
_FIRST_FACTOR, _SECOND_FACTOR = np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157)
_FIRST_WEYL, _SECOND_WEYL = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBB67AE8584CAA73B)
_ZERO, _ONE = np.uint64(0), np.uint64(1)
_PRODUCT_BITS = 128


def _multiply_high(_: Any, __: Any, ___: Any) -> Any:
    """Return the upper 64 bits of a product, which numpy's types cannot express."""

    def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        word = context.get_value_type(types.uint64)
        double = type(word)(_PRODUCT_BITS)
        first, second = (builder.zext(argument, double) for argument in arguments)
        product = builder.mul(first, second)
        return builder.trunc(builder.lshr(product, double(_PRODUCT_BITS // 2)), word)

    return types.uint64(types.uint64, types.uint64), generate


_high: Any = intrinsic(_multiply_high)


@compiled()
def mask_entries(dense_N: States, key: int, lowest_kept: int, masked_N: States) -> None:
    """Copy the kept entries and zero the others.

    An entry is kept if its own 16 random bits are at least ``lowest_kept``.

    Args:
        dense_N: Entries of a tensor.
        key: Key of the generator.
        lowest_kept: 1 to 65,535.
        masked_N: Entries of the result.
    """
    word_L = np.empty(BLOCK // 4, np.uint64)
    drawn_L = word_L.view(np.uint16)
    bound, zero = np.uint16(lowest_kept), dense_N.dtype.type(0)
    counter = _ZERO
    for start in range(0, len(dense_N), BLOCK):
        dense_L, masked_L = dense_N[start : start + BLOCK], masked_N[start : start + BLOCK]
        for place in range(0, (len(dense_L) + 15) // 16 * 4, 4):
            counter += _ONE
            a, b, c, d = counter, _ZERO, _ZERO, _ZERO
            first_key, second_key = np.uint64(key), _ZERO
            for _ in range(_ROUNDS):
                a, b, c, d = (
                    _high(_SECOND_FACTOR, c) ^ b ^ first_key,
                    _SECOND_FACTOR * c,
                    _high(_FIRST_FACTOR, a) ^ d ^ second_key,
                    _FIRST_FACTOR * a,
                )
                first_key += _FIRST_WEYL
                second_key += _SECOND_WEYL
            word_L[place], word_L[place + 1] = a, b
            word_L[place + 2], word_L[place + 3] = c, d
        for n in range(len(dense_L)):
            masked_L[n] = dense_L[n] if drawn_L[n] >= bound else zero
