"""One step of a search on CPU: loops over rows, compiled by numba.

A step is many operators on few numbers, and those that cut states into heads, mask and move them
take longer than the attention itself. Loops read keys and values as they lie.

Numbers of bfloat16 come as integers, as in :mod:`~pipeline.kernels.routing_loops`.

Legend: R rows, D model width, X width of what a product has made (D or 3 · D), P entries, T entries
of a row, V vocabulary, C candidates.
"""

from typing import Any

import numba
import numpy as np

from pipeline.kernels.routing_loops import Floats, Integers, States, compiled, narrowed, widened

BLOCK = 32
"""Logits whose maximum is taken together: most have no candidate."""

LOG2_E = np.float32(1.4426950408889634)
LN2_HIGH, LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
LOWEST = np.float32(-87.0)
"""e to this is the smallest that is computed; what is below counts for as much."""


@numba.njit(inline="always")
def exponential(x: Any) -> Any:
    """e^x for x ≤ 0, to a unit in the last place or two, as a compiler can do eight at once.

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
    """softmax(q kᵀ / sqrt(K)) v of the rows from ``first`` up to ``last``, head by head.

    A row attends to the entries that a table lists from ``start_R`` up to ``stop_R``, or, without a
    table, to those from ``start_R`` up to ``stop_R`` themselves. Of the heads of queries, which may
    have keys and values behind them, the first H are read.
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
    """log Σ e^x of every row from ``first`` up to ``last``, given its largest logit."""
    size = logits_RV.shape[1]
    for row in range(first, last):
        logit_V, peak, total = logits_RV[row], peak_R[row], np.float32(0)
        for v in range(size):
            total += exponential(logit_V[v] - peak)
        normalizer_R[row] = peak + np.log(total) if peak - peak == 0 else np.float32(np.nan)


@numba.njit(inline="always")
def insert(value: Any, token: int, best_C: Floats, token_C: Integers) -> None:
    """Put a value above the last of those, which are in descending order, behind its equals."""
    place = len(best_C) - 1
    while place > 0 and value > best_C[place - 1]:
        best_C[place], token_C[place] = best_C[place - 1], token_C[place - 1]
        place -= 1
    best_C[place], token_C[place] = value, token


@compiled()
def best_tokens(
    logits_RV: Floats, first: int, last: int, best_RC: Floats, token_RC: Integers
) -> None:
    """The largest logits of every row from ``first`` up to ``last``, and their tokens.

    Best first, of equal ones the first; -inf and token 0 where there are no more above -inf, what
    is not a number left out. They are in the blocks of the C largest maxima.
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
