"""Loops over rows on CPU, compiled by numba: searches, 8-bit products, and places of dropout.

In PyTorch, these are many operators on few numbers, and calling an operator takes longer than its
work, even more so after matrix products have evicted everything from the cache. Other devices run
the same steps as operators, next to the call of each loop.

numba has no bfloat16: loops receive such states as 16-bit integers
(:func:`~pipeline.kernels.cpu.numbers`) and compute in float32.

Legend: N tokens, I inputs, O outputs, X places of a token; of a search R rows, H heads, K head
width, P entries, T entries of a row, V vocabulary, C candidates, B blocks of logits.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
import numpy.typing as npt
from numba import types
from numba.extending import overload

Loop = TypeVar("Loop", bound=Callable[..., Any])
Floats = npt.NDArray[np.floating[Any]]
Integers = npt.NDArray[np.int64]
States = npt.NDArray[np.float32] | npt.NDArray[np.uint16]
"""Hidden states: float32, or bfloat16 as integers."""


def compiled(**options: Any) -> Callable[[Loop], Loop]:
    """Compile a loop at its first call, and cache the code on disk if a directory is writable."""

    def decorate(loop: Loop) -> Loop:
        try:
            fast: Loop = numba.njit(cache=True, nogil=True, **options)(loop)
        except RuntimeError:  # "cannot cache function": neither beside the source nor at home
            fast = numba.njit(nogil=True, **options)(loop)
        return fast

    return decorate


def widened(stored: Any) -> Any:
    """Return a stored number as float32."""
    raise TypeError(f"only compiled loops can widen {stored!r}")


def narrowed(number: Any, like: Any) -> Any:
    """Return a float32 number in the type of a stored one."""
    raise TypeError(f"only compiled loops can narrow {number!r} to {like!r}")


@overload(widened, strict=False)
def _widened(stored: Any) -> Callable[[Any], Any]:
    if stored != types.uint16:
        return lambda stored: stored
    return lambda stored: np.uint32(np.uint32(stored) << np.uint32(16)).view(np.float32)


@overload(narrowed, strict=False)
def _narrowed(number: Any, like: Any) -> Callable[[Any, Any], Any]:  # noqa: ARG001
    def unchanged(number: Any, like: Any) -> Any:  # noqa: ARG001
        return number

    def to_bfloat16(number: Any, like: Any) -> Any:  # noqa: ARG001
        bits = np.float32(number).view(np.uint32)
        odd = (bits >> np.uint32(16)) & np.uint32(1)
        nearest = (bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)
        is_number = (bits & np.uint32(0x7FFFFFFF)) <= np.uint32(0x7F800000)
        return np.uint16(nearest) if is_number else np.uint16(0x7FC0)

    return to_bfloat16 if like == types.uint16 else unchanged


BLOCK = 32
"""Number of logits whose common maximum decides whether they are searched; most blocks are not."""

LOG2_E = np.float32(1.4426950408889634)
LN2_HIGH, LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
LOWEST = np.float32(-87.0)
"""Lower bound of exponents: e^x of anything smaller is not a normal float32 number."""


@numba.njit(inline="always")
def exponential(x: Any) -> Any:
    """Return e^x for x ≤ 0, exact to two units in the last place, in a form that vectorizes.

    Cephes' ``expf``: 2^n · e^r with |r| ≤ ln(2) / 2, e^r by a polynomial.
    """
    x = max(x, LOWEST)
    n = np.floor(x * LOG2_E + np.float32(0.5))
    r = x - n * LN2_HIGH - n * LN2_LOW
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1)
    return p * np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)


@compiled(fastmath={"reassoc", "contract"})
def attend_entries(
    query_RHK: States,
    key_PHK: States,
    value_PHK: States,
    entry_RT: Integers | None,
    start_R: Integers,
    stop_R: Integers,
    first: int,
    last: int,
    context_RHK: States,
) -> None:
    """Compute softmax(q kᵀ / sqrt(K)) v of rows ``first`` to ``last`` (exclusive), head by head.

    A row attends to positions ``start_R`` to ``stop_R`` of its list in a table or, without a table,
    to entries ``start_R`` to ``stop_R``. Query rows may contain keys and values after the queries:
    only the first H heads are read.
    """
    num_heads, width = key_PHK.shape[1:]
    scale = np.float32(1) / np.sqrt(np.float32(width))
    longest = 1
    for row in range(first, last):
        longest = max(longest, stop_R[row] - start_R[row])
    weight_HT = np.empty((num_heads, longest), np.float32)
    total_HK = np.empty((num_heads, width), np.float32)
    for row in range(first, last):
        start = start_R[row]
        count = stop_R[row] - start
        for t in range(count):
            entry = start + t if entry_RT is None else entry_RT[row, start + t]
            for h in range(num_heads):
                query_K, key_K, score = query_RHK[row, h], key_PHK[entry, h], np.float32(0)
                for k in range(width):
                    score += widened(query_K[k]) * widened(key_K[k])
                weight_HT[h, t] = score * scale
        for h in range(num_heads):
            weight_T = weight_HT[h, :count]
            peak = weight_T[0]
            for t in range(1, count):
                peak = max(peak, weight_T[t])
            normalizer = np.float32(0)
            for t in range(count):
                weight_T[t] = exponential(weight_T[t] - peak)
                normalizer += weight_T[t]
            share = np.float32(1) / normalizer if peak - peak == 0 else np.float32(np.nan)
            total_K = total_HK[h]
            total_K[:] = 0
            for t in range(count):
                weight_T[t] *= share
        for t in range(count):
            entry = start + t if entry_RT is None else entry_RT[row, start + t]
            for h in range(num_heads):
                weight, total_K, value_K = weight_HT[h, t], total_HK[h], value_PHK[entry, h]
                for k in range(width):
                    total_K[k] += weight * widened(value_K[k])
        for h in range(num_heads):
            total_K, context_K = total_HK[h], context_RHK[row, h]
            for k in range(width):
                context_K[k] = narrowed(total_K[k], context_K[k])


@compiled(fastmath={"reassoc", "contract"})
def normalize(
    logits_RV: Floats, peak_R: Floats, first: int, last: int, normalizer_R: Floats
) -> None:
    """Compute log Σ e^x of rows ``first`` to ``last`` (exclusive), given their largest logits."""
    size = logits_RV.shape[1]
    for row in range(first, last):
        logit_V, peak, total = logits_RV[row], peak_R[row], np.float32(0)
        for v in range(size):
            total += exponential(logit_V[v] - peak)
        normalizer_R[row] = peak + np.log(total) if peak - peak == 0 else np.float32(np.nan)


MAGNITUDE, SMALLEST = np.int32(0x7FFFFFFF), np.int32(0x00800000)
"""All bits of a float32 number but its sign, and all bits of the smallest normal number."""


@compiled(error_model="numpy")  # no divisor is 0, and checking keeps the loop from vectorizing
def scale_rows(x_RI: Floats, first: int, last: int, scaled_RI: Floats, largest_R: Floats) -> None:
    """Divide rows ``first`` to ``last`` (exclusive) by their largest magnitudes; fill in those.

    Magnitudes are compared as integers, which vectorizes and in which NaN is the largest.
    """
    for row in range(first, last):
        bits_I = x_RI[row].view(np.int32)
        largest = np.int32(SMALLEST)
        for i in range(len(bits_I)):
            largest = max(largest, np.int32(bits_I[i] & MAGNITUDE))
        divisor = np.int32(largest).view(np.float32)
        largest_R[row] = divisor
        for i in range(x_RI.shape[1]):
            scaled_RI[row, i] = x_RI[row, i] / divisor


@compiled(error_model="numpy")  # as in scale_rows
def multiply_in_8_bits(
    x_I: Floats,
    weight_OI: npt.NDArray[np.int8],
    scale_O: Floats,
    bias_O: Floats | None,
    levels: int,
    first: int,
    last: int,
    y_O: Floats,
) -> None:
    """Fill in outputs ``first`` to ``last`` (exclusive) of x Wᵀ + b, x rounded to ±levels."""
    bits_I = x_I.view(np.int32)
    found = np.int32(SMALLEST)
    for i in range(len(bits_I)):
        found = max(found, np.int32(bits_I[i] & MAGNITUDE))
    largest, step = np.int32(found).view(np.float32), np.float32(levels)
    rounded_I = np.empty(len(x_I), np.int8)
    for i in range(len(x_I)):
        rounded_I[i] = np.int8(np.rint(x_I[i] / largest * step))
    for o in range(first, last):
        weight_I = weight_OI[o]
        total = np.int32(0)
        for i in range(len(weight_I)):
            total += np.int32(np.int32(weight_I[i]) * np.int32(rounded_I[i]))
        # numba adds in 64 bits; of a sum whose lower half is asked for, LLVM computes no more.
        y = np.float32(np.int32(total)) * (scale_O[o] / step) * largest
        y_O[o] = y if bias_O is None else y + bias_O[o]


@numba.njit(inline="always")
def insert(value: Any, token: int, best_C: Floats, token_C: Integers) -> None:
    """Insert a value above the last into values in descending order, after its equals."""
    place = len(best_C) - 1
    while place > 0 and value > best_C[place - 1]:
        best_C[place], token_C[place] = best_C[place - 1], token_C[place - 1]
        place -= 1
    best_C[place], token_C[place] = value, token


@compiled()
def best_tokens(
    logits_RV: Floats, first: int, last: int, best_RC: Floats, token_RC: Integers
) -> None:
    """Fill in the C largest logits of rows ``first`` to ``last`` (exclusive), and their tokens.

    They are in descending order; of equal logits, the first token comes first. NaN is skipped; if
    fewer than C logits are above -inf, the rest is -inf and token 0. Only the blocks with the C
    largest maxima are searched, which contain all results.
    """
    size, lowest = logits_RV.shape[1], np.float32(-np.inf)
    peak_B = np.empty(-(-size // BLOCK), np.float32)
    for row in range(first, last):
        logit_V, best_C, token_C = logits_RV[row], best_RC[row], token_RC[row]
        best_C[:], token_C[:] = lowest, 0
        for b in range(len(peak_B)):
            block, peak = logit_V[b * BLOCK : (b + 1) * BLOCK], lowest
            for v in range(len(block)):
                peak = block[v] if block[v] > peak else peak
            peak_B[b] = peak
            if peak > best_C[-1]:
                insert(peak, 0, best_C, token_C)
        bar = best_C[-1]
        best_C[:], token_C[:] = lowest, 0
        for b in range(len(peak_B)):
            if peak_B[b] >= bar:
                block = logit_V[b * BLOCK : (b + 1) * BLOCK]
                for v in range(len(block)):
                    if block[v] >= bar and block[v] > best_C[-1]:
                        insert(block[v], b * BLOCK + v, best_C, token_C)


@compiled()
def _mixed(word: Any) -> Any:
    word = np.uint32(word ^ np.uint32(word >> np.uint32(16)))
    word = np.uint32(word * np.uint32(0x7FEB352D))
    word = np.uint32(word ^ np.uint32(word >> np.uint32(15)))
    word = np.uint32(word * np.uint32(0x846CA68B))
    return np.uint32(word ^ np.uint32(word >> np.uint32(16)))


@compiled()
def keep(
    seed_N: npt.NDArray[np.int32],
    row_N: npt.NDArray[np.int32],
    site: int,
    threshold: int,
    first: int,
    last: int,
    keep_NX: npt.NDArray[np.bool_],
) -> None:
    """Fill in which places dropout keeps (:mod:`pipeline.kernels.noise`), of a range of rows."""
    offset = np.uint32(np.uint32(site) * np.uint32(0x1B873593))
    least = np.uint32(threshold)
    for n in range(first, last):
        stream = np.uint32(np.uint32(seed_N[n]) + offset)
        row = np.uint32(np.uint32(row_N[n]) * np.uint32(0x85EBCA6B))
        key = _mixed(np.uint32(_mixed(stream) ^ row))
        keep_X = keep_NX[n]
        for x in range(len(keep_X)):
            # Every result is cut to 32 bits, since numba would widen it and the loop be slow.
            column = np.uint32(np.uint32(x) * np.uint32(0xC2B2AE35))
            keep_X[x] = _mixed(np.uint32(key ^ column)) >= least
