"""n-grams that two lines share, of many pairs of lines: loops over them, compiled by numba.

Counting the n-grams of a line makes a string or a tuple of every one of them. Here the n-grams of
the second line of a pair are a tree in a table of open addressing: a step from the root is an item,
and the node after n steps is one n-gram and no other, whatever items hash to. The first line walks
down the same tree; where it leaves the tree, nothing longer that begins there can be shared.
"""

import numpy as np
import numpy.typing as npt

from pipeline.kernels.routing_loops import compiled

Integers = npt.NDArray[np.int64]

ITEM_BITS = 32
"""An edge of the tree is a node and, in the lower bits, an item, which is not negative."""
MIN_TABLE_BITS = 4

_WORD_BITS = 64
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_NO_EDGE = -1


@compiled()
def _table_bits(ngrams: int) -> int:
    """Of the number of slots: at least half of them stay free."""
    bits = MIN_TABLE_BITS
    while (1 << bits) < 2 * ngrams:
        bits += 1
    return bits


@compiled()
def _slot(edges: Integers, bits: int, edge: int) -> int:
    """Where an edge is, or the free slot where it belongs."""
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

    An n-gram is shared as often as the line has it that has it less often.

    Args:
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
