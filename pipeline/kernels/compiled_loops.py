"""Loops over tokens, routes and rows on CPU, compiled by numba: routing, searches, 8-bit products.

In PyTorch, these are many operators on few numbers, and calling an operator takes longer than its
work, even more so after matrix products have evicted everything from the cache. Other devices run
the same steps as operators, next to the call of each loop.

numba has no bfloat16: loops receive such states as 16-bit integers
(:func:`~pipeline.kernels.cpu.numbers`) and compute in float32.

Legend: N tokens, M micro-batches of the pass, E experts, C choices per token (top-k), R rows of
experts, D model width; of a search R rows, H heads, K head width, P entries, T entries of a row,
V vocabulary, C candidates.
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


@compiled()
def choose_experts(
    logits_NE: Floats,
    is_renormalized: bool,
    rows_M: Integers,
    weight_M: Floats,
    probability_NE: Floats,
    expert_NC: Integers,
    weight_NC: Floats,
    balance_ME: Floats,
    balance_loss: Floats,
) -> None:
    """Fill in the softmax, the best experts of every token, their weights and the balance loss.

    ``balance_ME`` is the gradient of the balance loss in the probabilities of each micro-batch's
    tokens. Micro-batches have ``rows_M`` tokens, and their losses are weighted by ``weight_M``. The
    first of equal logits is chosen. Chosen indices are valid even if logits are NaN.
    """
    num_experts, top_k = logits_NE.shape[1], expert_NC.shape[1]
    one = logits_NE.dtype.type(1)
    mass_E = np.zeros(num_experts)
    balance_ME[:] = 0
    start, loss = 0, 0.0
    for m in range(len(rows_M)):
        mass_E[:] = 0
        for n in range(start, start + rows_M[m]):
            logit_E, probability_E, expert_C = logits_NE[n], probability_NE[n], expert_NC[n]
            peak = logit_E[0]
            for e in range(1, num_experts):
                peak = max(peak, logit_E[e])
            normalizer = one - one
            for e in range(num_experts):
                probability_E[e] = np.exp(logit_E[e] - peak)
                normalizer += probability_E[e]
            scale = one / normalizer
            for e in range(num_experts):
                probability_E[e] *= scale
                mass_E[e] += probability_E[e]
            chosen = one - one
            for c in range(top_k):
                best = -1
                for e in range(num_experts):
                    is_taken = False
                    for earlier in range(c):
                        is_taken |= expert_C[earlier] == e
                    if not is_taken and (best < 0 or logit_E[e] > logit_E[best]):
                        best = e
                expert_C[c], weight_NC[n, c] = best, probability_E[best]
                chosen += probability_E[best]
            balance_ME[m, expert_C[0]] += 1
            if is_renormalized:
                for c in range(top_k):
                    weight_NC[n, c] /= chosen
        balance_ME[m] *= weight_M[m] * num_experts / max(rows_M[m], 1) ** 2
        loss += (mass_E * balance_ME[m]).sum()
        start += rows_M[m]
    balance_loss[0] = loss


@compiled()
def choose_experts_backward(
    probability_NE: Floats,
    expert_NC: Integers,
    weight_NC: Floats,
    rows_M: Integers,
    balance_ME: Floats,
    is_renormalized: bool,
    d_weight_NC: Floats,
    d_balance_loss: float,
    d_logits_NE: Floats,
) -> None:
    """Fill in the gradient of the logits from those of the weights and of the balance loss.

    Renormalized weights are a softmax over the chosen logits; other weights are entries of the
    softmax over all logits.
    """
    num_experts = probability_NE.shape[1]
    start = 0
    for m in range(len(rows_M)):
        d_probability_E = balance_ME[m] * d_balance_loss
        for n in range(start, start + rows_M[m]):
            probability_E, expert_C = probability_NE[n], expert_NC[n]
            weight_C, d_weight_C, d_logit_E = weight_NC[n], d_weight_NC[n], d_logits_NE[n]
            of_weights = 0.0
            for c in range(len(weight_C)):
                of_weights += weight_C[c] * d_weight_C[c]
            of_all = 0.0 if is_renormalized else of_weights
            of_chosen = of_weights - of_all
            for e in range(num_experts):
                of_all += probability_E[e] * d_probability_E[e]
            for e in range(num_experts):
                d_logit_E[e] = probability_E[e] * (d_probability_E[e] - of_all)
            for c in range(len(weight_C)):
                d_logit_E[expert_C[c]] += weight_C[c] * (d_weight_C[c] - of_chosen)
        start += rows_M[m]


@compiled()
def count_routes(
    expert_NC: Integers,
    micro_batch_N: Integers | None,
    capacity_M: Integers | None,
    routed_E: Integers,
    count_E: Integers,
) -> None:
    """Count routes per expert before limits and after them; see ``placement.Limits``.

    Raise on invalid experts, as later loops do not check indices.
    """
    num_micro_batches = 1 if capacity_M is None else len(capacity_M)
    count_ME = np.zeros((num_micro_batches, len(routed_E)), np.int64)
    for n in range(len(expert_NC)):
        micro_batch = 0 if micro_batch_N is None else micro_batch_N[n]
        for expert in expert_NC[n]:
            if not 0 <= expert < len(routed_E):
                raise IndexError("a token was routed to an expert that does not exist")
            count_ME[micro_batch, expert] += 1
    routed_E[:] = count_ME.sum(0)
    if capacity_M is not None:
        count_ME = np.minimum(count_ME, capacity_M.reshape(-1, 1))
    count_E[:] = count_ME.sum(0)


@compiled()
def place_routes(
    queue: Integers | None,
    expert_NC: Integers,
    micro_batch_N: Integers | None,
    capacity_M: Integers | None,
    rows_E: Integers,
    route_R: Integers,
    token_R: Integers,
    row_NC: Integers,
) -> None:
    """Assign the routes of a queue (numbers token · C + choice) to the next rows of their experts.

    Without a queue, routes come by number. An expert has ``rows_E`` rows, and assigns at most
    ``capacity_M`` of them to each micro-batch. The last three arguments are filled in for routes
    that get a row.
    """
    num_tokens, top_k = expert_NC.shape
    next_E = np.zeros_like(rows_E)
    next_E[1:] = np.cumsum(rows_E[:-1])
    left_ME = np.full((1, len(rows_E)), num_tokens * top_k)
    if capacity_M is not None:
        left_ME = np.zeros((len(capacity_M), len(rows_E)), np.int64) + capacity_M.reshape(-1, 1)
    for place in range(num_tokens * top_k):
        route = place if queue is None else queue[place]
        token, choice = route // top_k, route % top_k
        expert = expert_NC[token, choice]
        micro_batch = 0 if micro_batch_N is None else micro_batch_N[token]
        if left_ME[micro_batch, expert] > 0:
            left_ME[micro_batch, expert] -= 1
            row = next_E[expert]
            next_E[expert] = row + 1
            route_R[row], token_R[row], row_NC[token, choice] = route, token, row


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


@compiled(fastmath={"reassoc", "contract"})
def sum_over_routes(
    y_RD: States, row_NC: Integers, weight_NC: Floats | None, first: int, last: int, sum_ND: States
) -> None:
    """Sum the rows of tokens ``first`` to ``last`` (exclusive), weighted if there are weights.

    A row index beyond the end of ``y_RD`` stands for a row of zeros.
    """
    num_rows, width = y_RD.shape
    total_D = np.empty(width, np.float32)
    for n in range(first, last):
        total_D[:] = 0
        for c in range(row_NC.shape[1]):
            row = row_NC[n, c]
            weight = np.float32(1) if weight_NC is None else weight_NC[n, c]
            if row < num_rows:
                for d in range(width):
                    total_D[d] += weight * widened(y_RD[row, d])
        for d in range(width):
            sum_ND[n, d] = narrowed(total_D[d], sum_ND[n, d])


@compiled(fastmath={"reassoc", "contract"})
def sum_over_routes_backward(
    d_sum_ND: States,
    y_RD: States,
    token_R: Integers,
    route_R: Integers,
    weight_Q: Floats,
    first: int,
    last: int,
    dy_RD: States,
    d_weight_Q: Floats,
    total_D: States,
) -> None:
    """Fill in the gradients of rows ``first`` to ``last`` (exclusive), their sum, and of weights.

    Weights are numbered like routes; a row without a route gets a gradient of 0.
    """
    num_routes, width = len(weight_Q), y_RD.shape[1]
    sum_D = np.zeros(width, np.float32)
    for r in range(first, last):
        token, route, d_weight = token_R[r], route_R[r], np.float32(0)
        weight = weight_Q[route] if route < num_routes else np.float32(0)
        for d in range(width):
            d_sum = widened(d_sum_ND[token, d])
            d_weight += d_sum * widened(y_RD[r, d])
            dy_RD[r, d] = narrowed(d_sum * weight, dy_RD[r, d])
        if route < num_routes:
            d_weight_Q[route] = d_weight
            for d in range(width):
                sum_D[d] += widened(dy_RD[r, d])
    for d in range(width):
        total_D[d] = narrowed(sum_D[d], total_D[d])


@compiled(fastmath={"reassoc", "contract"})
def relu_backward(hidden_RF: States, d_hidden_RF: States, total_F: States) -> None:
    """Overwrite the gradient of ReLU's output by that of its input; fill in its sum over rows."""
    num_rows, width = hidden_RF.shape
    sum_F = np.zeros(width, np.float32)
    for r in range(num_rows):
        for f in range(width):
            is_off = widened(hidden_RF[r, f]) <= 0
            d_hidden = np.float32(0) if is_off else widened(d_hidden_RF[r, f])
            sum_F[f] += d_hidden
            d_hidden_RF[r, f] = narrowed(d_hidden, d_hidden_RF[r, f])
    for f in range(width):
        total_F[f] = narrowed(sum_F[f], total_F[f])


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


@numba.njit(inline="always")
def multiply_four(x_NI: Floats, n: int, weight_I: Floats, bias: Any, o: int, y_NO: Floats) -> None:
    """Fill in one output of four rows from ``n`` on."""
    first = second = third = fourth = bias
    for i in range(len(weight_I)):
        first += weight_I[i] * x_NI[n, i]
        second += weight_I[i] * x_NI[n + 1, i]
        third += weight_I[i] * x_NI[n + 2, i]
        fourth += weight_I[i] * x_NI[n + 3, i]
    y_NO[n, o], y_NO[n + 1, o], y_NO[n + 2, o], y_NO[n + 3, o] = first, second, third, fourth


@numba.njit(inline="always")
def multiply_two(x_NI: Floats, n: int, weight_I: Floats, bias: Any, o: int, y_NO: Floats) -> None:
    """Fill in one output of two rows from ``n`` on."""
    first = second = bias
    for i in range(len(weight_I)):
        first += weight_I[i] * x_NI[n, i]
        second += weight_I[i] * x_NI[n + 1, i]
    y_NO[n, o], y_NO[n + 1, o] = first, second


@numba.njit(inline="always")
def multiply_one(x_NI: Floats, n: int, weight_I: Floats, bias: Any, o: int, y_NO: Floats) -> None:
    """Fill in one output of row ``n``."""
    total = bias
    for i in range(len(weight_I)):
        total += weight_I[i] * x_NI[n, i]
    y_NO[n, o] = total


@compiled(fastmath={"reassoc", "contract"})
def multiply_few(
    x_NI: Floats,
    weight_OI: Floats,
    bias_O: Floats | None,
    first: int,
    last: int,
    y_NO: Floats,
) -> None:
    """Fill in outputs ``first`` to ``last`` (exclusive) of x Wᵀ + b; W is read from memory once."""
    num_rows = len(x_NI)
    for o in range(first, last):
        weight_I = weight_OI[o]
        bias = np.float32(0) if bias_O is None else bias_O[o]
        n = 0
        while n + 4 <= num_rows:
            multiply_four(x_NI, n, weight_I, bias, o, y_NO)
            n += 4
        if n + 2 <= num_rows:
            multiply_two(x_NI, n, weight_I, bias, o, y_NO)
            n += 2
        if n < num_rows:
            multiply_one(x_NI, n, weight_I, bias, o, y_NO)


MAGNITUDE, SMALLEST = np.int32(0x7FFFFFFF), np.int32(0x00800000)
"""All bits of a float32 number but its sign, and those of the smallest normal number."""


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
