"""Loops compiled by numba: compilation without a writable directory, shared n-grams."""

from collections import Counter
from collections.abc import Sequence

import numba
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipeline.kernels.compiled_loops import (
    ITEM_BITS,
    Integers,
    compiled,
    count_shared_ngrams,
)

LARGEST = (1 << ITEM_BITS) - 1
Line = Sequence[int]


def test_loops_are_compiled_where_nothing_can_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    njit = numba.njit

    def cannot_keep(*, cache: bool = False, nogil: bool) -> object:
        if cache:
            raise RuntimeError("cannot cache function 'double': no locator available")
        return njit(nogil=nogil)

    monkeypatch.setattr(numba, "njit", cannot_keep)

    @compiled()
    def double(numbers: Integers) -> None:
        numbers *= 2

    some = torch.arange(3)
    double(some.numpy())
    assert some.tolist() == [0, 2, 4]


def counted(pairs: Sequence[tuple[Line, Line]], *, orders: int) -> list[list[list[int]]]:
    """The loops' counts of pairs of lines."""
    found = np.full((len(pairs), orders, 3), -1, dtype=np.int32)
    count_shared_ngrams(
        *joined([one for one, _ in pairs]), *joined([two for _, two in pairs]), found
    )
    counts: list[list[list[int]]] = found.tolist()
    return counts


def joined(lines: Sequence[Line]) -> tuple[Integers, Integers]:
    items = np.array([item for line in lines for item in line], dtype=np.int64)
    return items, np.cumsum([0, *map(len, lines)], dtype=np.int64)


def ngrams(line: Line, order: int) -> Counter[tuple[int, ...]]:
    return Counter(tuple(line[at : at + order]) for at in range(len(line) - order + 1))


def by_counters(one: Line, other: Line, *, orders: int) -> list[list[int]]:
    return [
        [
            ngrams(one, order).total(),
            ngrams(other, order).total(),
            (ngrams(one, order) & ngrams(other, order)).total(),
        ]
        for order in range(1, orders + 1)
    ]


items = st.one_of(st.integers(0, 3), st.sampled_from([0x1F600, LARGEST - 1, LARGEST]))
lines = st.lists(items, max_size=40)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(lines, lines), min_size=1, max_size=5), st.integers(1, 7))
@example([([], []), ([1], []), ([], [1])], 6)
@example([([1] * 400, [1] * 300), ([1, 2], [2, 1])], 6)
def test_shared_ngrams_are_those_of_the_counters_intersection(
    pairs: list[tuple[list[int], list[int]]], orders: int
) -> None:
    expected = [by_counters(one, other, orders=orders) for one, other in pairs]
    assert counted(pairs, orders=orders) == expected


@pytest.mark.parametrize("alphabet", [2, 50, LARGEST])
def test_long_lines_fill_a_table_without_one_ngram_taken_for_another(alphabet: int) -> None:
    generator = np.random.default_rng(alphabet)
    one, other = (generator.integers(alphabet, size=3000).tolist() for _ in range(2))
    other[500:900] = one[100:500]
    assert counted([(one, other)], orders=6) == [by_counters(one, other, orders=6)]
