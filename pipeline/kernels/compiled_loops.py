"""Loops compiled by numba, which run on the CPU.

- Over rows of a search, and over places of dropout. In PyTorch, these are many operators on few
  numbers, and calling an operator takes longer than its work. Other devices run the same steps as
  operators, next to the call of each loop.
- Over sentences, to plan and assemble batches, and over their n-grams. A window has millions of
  sentences, and a micro-batch hundreds. numpy would make one pass and one temporary array per
  operator, and Python would take longer than the model. The loops release the interpreter's lock:
  a thread can prepare batches ahead of training.

Legend: N tokens or sentences, X places of a token; of a search R rows, H heads, K head width, P
entries, T entries of a row, V vocabulary, C candidates, B blocks of logits; of batches R rounds, P
pairs, B sentences; of n-grams T texts, K counts; an axis of 2: the sides of a pair, or source and
target.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
import numpy.typing as npt
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.numpy_support import carray

Loop = TypeVar("Loop", bound=Callable[..., Any])
Integers = npt.NDArray[np.signedinteger[Any]]
Flags = npt.NDArray[np.bool_]
States = npt.NDArray[np.float32]
BLOCK = 32
"""Number of logits with one maximum, which decides if they are searched; most blocks are not."""


def compiled(**options: Any) -> Callable[[Loop], Loop]:
    """Compile a loop at its first call, and cache the code on disk if a directory is writable."""

    def decorate(loop: Loop) -> Loop:
        try:
            fast: Loop = numba.njit(cache=True, nogil=True, **options)(loop)
        except RuntimeError:  # "cannot cache function": neither beside the source nor at home
            fast = numba.njit(nogil=True, **options)(loop)
        return fast

    return decorate


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
    to entries ``start_R`` to ``stop_R``.
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
                    score += query_K[k] * key_K[k]
                weight_HT[h, t] = score * scale
        for h in range(num_heads):
            weight_T = weight_HT[h, :count]
            peak = weight_T[0]
            for t in range(1, count):
                peak = max(peak, weight_T[t])
            normalizer = np.float32(0)
            for t in range(count):
                weight_T[t] = np.exp(weight_T[t] - peak)
                normalizer += weight_T[t]
            share = np.float32(1) / normalizer if peak - peak == 0 else np.float32(np.nan)
            for t in range(count):
                weight_T[t] *= share
        total_HK[:] = 0
        for t in range(count):
            entry = start + t if entry_RT is None else entry_RT[row, start + t]
            for h in range(num_heads):
                weight, total_K, value_K = weight_HT[h, t], total_HK[h], value_PHK[entry, h]
                for k in range(width):
                    total_K[k] += weight * value_K[k]
        context_RHK[row] = total_HK


@compiled(error_model="numpy")  # no divisor is 0, and checking keeps the loop from vectorizing
def multiply_in_8_bits(
    x_I: States,
    weight_OI: npt.NDArray[np.int8],
    scale_O: States,
    bias_O: States | None,
    levels: int,
    y_O: States,
) -> None:
    """Compute x Wᵀ + b of one row, which is rounded to ``levels`` whole numbers of either sign.

    The largest magnitude is found among bits as integers: that vectorizes, and NaN is the largest.
    """
    bits_I, largest_bits = x_I.view(np.int32), np.int32(0x00800000)  # the smallest normal number
    for i in range(len(bits_I)):
        largest_bits = max(largest_bits, np.int32(bits_I[i] & np.int32(0x7FFFFFFF)))
    largest, step = np.int32(largest_bits).view(np.float32), np.float32(levels)
    rounded_I = np.empty(len(x_I), np.int8)
    for i in range(len(x_I)):
        rounded_I[i] = np.int8(np.rint(x_I[i] / largest * step))
    for o in range(len(y_O)):
        weight_I = weight_OI[o]
        total = np.int32(0)
        for i in range(len(weight_I)):
            total += np.int32(np.int32(weight_I[i]) * np.int32(rounded_I[i]))
        # numba adds in 64 bits; LLVM computes only the lower half, since no other is used.
        y = np.float32(np.int32(total)) * (scale_O[o] / step) * largest
        y_O[o] = y if bias_O is None else y + bias_O[o]


@numba.njit(inline="always")
def insert(value: Any, token: int, best_C: States, token_C: Integers) -> None:
    """Insert a value above the last into values in descending order, after its equals."""
    place = len(best_C) - 1
    while place > 0 and value > best_C[place - 1]:
        best_C[place], token_C[place] = best_C[place - 1], token_C[place - 1]
        place -= 1
    best_C[place], token_C[place] = value, token


@compiled()
def best_tokens(
    logits_RV: States, first: int, last: int, best_RC: States, token_RC: Integers
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


# ---------------------------------------------------------------- sentences

ITEM_BITS = 32
"""Number of lower bits of a tree edge, which hold an item; the upper bits hold a node."""
MIN_TABLE_BITS = 4

_NO_EDGE = -1
_WORD_BITS = 64
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST_FACTOR, _SECOND_FACTOR = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_FIRST_SHIFT, _SECOND_SHIFT, _LAST_SHIFT = np.uint64(30), np.uint64(27), np.uint64(31)


@compiled()
def measure(first_offsets: Integers, second_offsets: Integers) -> tuple[int, int]:
    """Return the tokens of a pair's longest sentence, and of the longer side of all its lines."""
    longest = total = 0
    for line in range(len(first_offsets) - 1):
        first = first_offsets[line + 1] - first_offsets[line]
        second = second_offsets[line + 1] - second_offsets[line]
        longer = max(first, second)
        longest = max(longest, longer)
        total += longer
    return longest, total


@compiled()
def shuffle(
    position_N: Integers, round_R: npt.NDArray[np.uint64], half: int, size: int, line_N: Integers
) -> None:
    """Compute a keyed permutation of range(size) at each position.

    It is a Feistel network on twice ``half`` bits. Its round function is the finalizer of
    splitmix64: every input bit affects every output bit. A value outside the range is
    permuted again until it lies inside (cycle walking).
    """
    width = np.uint64(half)
    mask = (np.uint64(1) << width) - np.uint64(1)
    last = np.uint64(size - 1)
    for n in range(len(position_N)):
        value = np.uint64(position_N[n])
        walks = True
        while walks:
            left, right = value >> width, value & mask
            for constant in round_R:
                mixed = right * _GOLDEN + constant
                mixed = (mixed ^ (mixed >> _FIRST_SHIFT)) * _FIRST_FACTOR
                mixed = (mixed ^ (mixed >> _SECOND_SHIFT)) * _SECOND_FACTOR
                mixed ^= mixed >> _LAST_SHIFT
                left, right = right, left ^ (mixed & mask)
            value = (left << width) | right
            walks = bool(value > last)
        line_N[n] = value


@compiled()
def mark_cuts(
    source_N: Integers,
    target_N: Integers,
    direction_N: Integers,
    source_extra: int,
    target_extra: int,
    budget: int,
    is_cut_N: Flags,
) -> None:
    """Mark sorted sentences that begin a part, as the part before would exceed the budget.

    The larger side of a part decides its size, including padding and the extra tokens of each
    sentence. A part has one direction.
    """
    start = longest = 0
    for n in range(len(source_N)):
        length = max(source_N[n] + source_extra, target_N[n] + target_extra)
        longest = max(longest, length)
        is_full = (n - start + 1) * longest > budget
        is_cut_N[n] = n > start and (is_full or direction_N[n] != direction_N[n - 1])
        if is_cut_N[n]:
            start, longest = n, length


def _point_at(_: Any, __: Any) -> Any:
    """Return the memory at an address: compiled loops cannot take a list of hundreds of files."""

    def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


_pointer: Any = intrinsic(_point_at)


@compiled()
def locate(
    pair_B: Integers,
    reverse_B: Integers,
    line_B: Integers,
    size_P: Integers,
    offsets_P2: Integers,
    start_2B: Integers,
    length_2B: Integers,
) -> None:
    """Find the first token and the number of tokens of source and target in their files.

    ``offsets_P2`` has the addresses of the offsets of both sides of each pair.
    """
    for b in range(len(pair_B)):
        pair, reverse, line = pair_B[b], reverse_B[b], line_B[b]
        if not 0 <= line < size_P[pair]:
            raise IndexError("a plan names a line that its pair does not have")
        for role in range(2):
            address = offsets_P2[pair, reverse ^ role]
            offsets = carray(_pointer(address), (size_P[pair] + 1,), np.int64)
            start_2B[role, b] = offsets[line]
            length_2B[role, b] = offsets[line + 1] - offsets[line]


@compiled()
def gather(
    pair_B: Integers,
    side_B: Integers,
    start_B: Integers,
    length_B: Integers,
    items_P2: Integers,
    width_P2: Integers,
    item_N: Integers,
) -> None:
    """Copy the items of sentences, one after the other, from the files of their pairs.

    ``items_P2`` has the addresses of the tokens or flags of both sides of each pair, ``width_P2``
    the bytes of an item. Address 0 stands for zeros.
    """
    row = 0
    for b in range(len(pair_B)):
        pair, side, start, length = pair_B[b], side_B[b], start_B[b], length_B[b]
        address, width, end = items_P2[pair, side], width_P2[pair, side], start + length
        if address == 0:
            item_N[row : row + length] = 0
        elif width == 1:
            flags = carray(_pointer(address), (end,), np.uint8)
            for n in range(length):
                item_N[row + n] = flags[start + n]
        elif width == 2:
            narrow = carray(_pointer(address), (end,), np.uint16)
            for n in range(length):
                item_N[row + n] = narrow[start + n]
        else:
            wide = carray(_pointer(address), (end,), np.uint32)
            for n in range(length):
                item_N[row + n] = wide[start + n]
        row += length


@compiled()
def join(
    first_N: Integers,
    first_B: Integers,
    second_N: Integers,
    second_B: Integers,
    third_N: Integers,
    third_B: Integers,
    joined_N: Integers,
) -> None:
    """Join three parts of every sentence; ``_B`` has the lengths of each."""
    first = second = third = row = 0
    for b in range(len(first_B)):
        for _ in range(first_B[b]):
            joined_N[row] = first_N[first]
            first, row = first + 1, row + 1
        for _ in range(second_B[b]):
            joined_N[row] = second_N[second]
            second, row = second + 1, row + 1
        for _ in range(third_B[b]):
            joined_N[row] = third_N[third]
            third, row = third + 1, row + 1


@compiled()
def _table_bits(ngrams: int) -> int:
    """Return log2 of the number of slots, at least half of which stay free."""
    bits = MIN_TABLE_BITS
    while (1 << bits) < 2 * ngrams:
        bits += 1
    return bits


@compiled()
def _slot(edges: Integers, bits: int, edge: int) -> int:
    """Return the slot of an edge, or the free slot where it belongs."""
    mask = (1 << bits) - 1
    slot = np.int64((np.uint64(edge) * _GOLDEN) >> np.uint64(_WORD_BITS - bits))
    while edges[slot] != edge and edges[slot] != _NO_EDGE:
        slot = (slot + 1) & mask
    return int(slot)


@compiled()
def count_shared_ngrams(
    first: Integers,
    first_starts: Integers,
    second: Integers,
    second_starts: Integers,
    found: npt.NDArray[np.int32],
) -> None:
    """Fill ``found`` (lines, orders, 3): n-grams of the first line, of the second, shared ones.

    The shared count of an n-gram is the smaller of its counts in both lines. The n-grams of the
    second line form a tree, stored in a hash table with open addressing, so that no string or tuple
    is created per n-gram. Each edge is an item, and the node after n edges stands for exactly one
    n-gram, regardless of hash collisions. The first line walks down the same tree; where it leaves
    the tree, no longer n-gram from that position can be shared.

    Args:
        found: filled in.
        first: items of all first lines, line after line.
        first_starts: (lines + 1,) where each line begins, and the end of the last.
        second: items of all second lines.
        second_starts: (lines + 1,) likewise.
    """
    lines, orders = found.shape[0], found.shape[1]
    found[:] = 0
    longest = 0
    for line in range(lines):
        longest = max(longest, second_starts[line + 1] - second_starts[line])
    room = _table_bits(orders * longest)
    edges = np.empty(1 << room, np.int64)
    counts = np.empty(1 << room, np.int32)
    for line in range(lines):
        begin, end = second_starts[line], second_starts[line + 1]
        bits = _table_bits(orders * (end - begin))
        edges[: 1 << bits] = _NO_EDGE
        for place in range(begin, end):
            node = 0
            for order in range(min(orders, end - place)):
                edge = (node << ITEM_BITS) | second[place + order]
                slot = _slot(edges, bits, edge)
                if edges[slot] == _NO_EDGE:
                    edges[slot] = edge
                    counts[slot] = 0
                counts[slot] += 1
                found[line, order, 1] += 1
                node = slot + 1
        begin, end = first_starts[line], first_starts[line + 1]
        for order in range(min(orders, end - begin)):
            found[line, order, 0] = end - begin - order
        for place in range(begin, end):
            node = 0
            for order in range(min(orders, end - place)):
                edge = (node << ITEM_BITS) | first[place + order]
                slot = _slot(edges, bits, edge)
                if edges[slot] == _NO_EDGE:
                    break
                if counts[slot] > 0:
                    counts[slot] -= 1
                    found[line, order, 2] += 1
                node = slot + 1


@compiled()
def add_shared_by_pairs(
    ngram_K: Integers, text_K: Integers, count_K: Integers, shared_TT: Integers
) -> None:
    """Add to every pair of texts the smaller count of each n-gram that both have.

    ``ngram_K`` is sorted; each entry counts an n-gram in a text that has it.
    """
    first = 0
    for k in range(len(ngram_K)):
        if ngram_K[k] != ngram_K[first]:
            first = k
        text, count = text_K[k], count_K[k]
        shared_TT[text, text] += count
        for j in range(first, k):
            smaller = min(count, count_K[j])
            shared_TT[text, text_K[j]] += smaller
            shared_TT[text_K[j], text] += smaller
