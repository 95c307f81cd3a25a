"""Routing on CPU: loops over tokens and their routes, compiled by numba.

A router, its dispatch and its combine are many operators on few numbers. On CPU each of them takes
longer to call than to carry out, the more so after matrix products that leave nothing else in the
cache. The same in operators, for other devices, stands in ``router`` and ``dispatch``.

numba has no bfloat16: states in it come as the 16-bit integers they are stored in
(:func:`~pipeline.kernels.loop_arrays.numbers`), and are computed with in float32.

Legend: N tokens, E experts, C choices per token (top-k), R rows, D model width.
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
    """Compile at the first call; kept for later processes where a directory can be written to."""

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
    probability_NE: Floats,
    expert_NC: Integers,
    weight_NC: Floats,
    first_E: Floats,
    balance_loss: Floats,
) -> None:
    """Softmax, the best experts of every token and the balance loss; outputs are filled in.

    ``first_E`` is the share of tokens that choose an expert first. Of equal logits the first is
    chosen; what is not a number is never out of range.
    """
    num_tokens, num_experts = logits_NE.shape
    top_k = expert_NC.shape[1]
    one = logits_NE.dtype.type(1)
    mass_E = np.zeros(num_experts)
    first_E[:] = 0
    for n in range(num_tokens):
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
        first_E[expert_C[0]] += 1
        if is_renormalized:
            for c in range(top_k):
                weight_NC[n, c] /= chosen
    first_E /= max(num_tokens, 1)
    balance_loss[0] = num_experts * (mass_E * first_E).sum() / max(num_tokens, 1)


@compiled()
def choose_experts_backward(
    probability_NE: Floats,
    expert_NC: Integers,
    weight_NC: Floats,
    first_E: Floats,
    is_renormalized: bool,
    d_weight_NC: Floats,
    d_balance_loss: float,
    d_logits_NE: Floats,
) -> None:
    """The gradient of the logits from those of the weights and of the balance loss.

    Renormalised weights are a softmax over the chosen logits, weights as they are one over all.
    """
    num_tokens, num_experts = probability_NE.shape
    d_probability_E = first_E * (d_balance_loss * num_experts / max(num_tokens, 1))
    for n in range(num_tokens):
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


@compiled()
def count_routes(expert_NC: Integers, routed_E: Integers) -> None:
    """Routes per expert. Those who go on to write by them rely on it that all experts exist."""
    routed_E[:] = 0
    for expert_C in expert_NC:
        for expert in expert_C:
            if not 0 <= expert < len(routed_E):
                raise IndexError("a token was routed to an expert that does not exist")
            routed_E[expert] += 1


@compiled()
def place_routes(
    queue: Integers | None,
    expert_NC: Integers,
    rows_E: Integers,
    capacity: int,
    route_R: Integers,
    token_R: Integers,
    row_NC: Integers,
) -> None:
    """Give the routes of a queue, numbers token · C + choice, the next free rows of their experts.

    Without a queue they come by number. Experts have ``rows_E`` rows, of which they give away
    ``capacity``. The last three arguments are filled in where a route has a row.
    """
    num_tokens, top_k = expert_NC.shape
    next_E = np.zeros_like(rows_E)
    next_E[1:] = np.cumsum(rows_E[:-1])
    full_E = next_E + capacity
    for place in range(num_tokens * top_k):
        route = place if queue is None else queue[place]
        token, choice = route // top_k, route % top_k
        expert = expert_NC[token, choice]
        row = next_E[expert]
        if row < full_E[expert]:
            next_E[expert] = row + 1
            route_R[row], token_R[row], row_NC[token, choice] = route, token, row


def widened(stored: Any) -> Any:
    """A stored number, to compute with."""
    raise TypeError(f"only compiled loops can widen {stored!r}")


def narrowed(number: Any, like: Any) -> Any:
    """A float32 number in the type of a stored one."""
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
    """The rows of each token from ``first`` up to ``last``, weighted if there are weights, summed.

    A row beyond the last of ``y_RD`` is 0.
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
    """The gradients of rows from ``first`` up to ``last``, their sum, and those of their weights.

    Weights are numbered like routes; a row without one among them gets a gradient of 0.
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
    """The gradient before ReLU in the place of the one behind it, and its sum over rows."""
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
