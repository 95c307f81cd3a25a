"""Loops compiled by numba: compilation without a writable directory, shared n-grams."""

from collections import Counter
from collections.abc import Sequence

import numba
import numpy as np
import pytest
import torch

from pipeline.kernels.compiled_loops import ITEM_BITS, Integers, compiled, count_shared_ngrams

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


@pytest.mark.parametrize("alphabet", [2, 50, LARGEST])
def test_long_lines_fill_a_table_without_one_ngram_taken_for_another(alphabet: int) -> None:
    generator = np.random.default_rng(alphabet)
    one, other = (generator.integers(alphabet, size=3000).tolist() for _ in range(2))
    other[500:900] = one[100:500]
    found = np.full((1, 6, 3), -1, dtype=np.int32)
    starts = np.array([0, 3000])
    count_shared_ngrams(np.array(one), starts, np.array(other), starts, found)
    assert found[0].tolist() == by_counters(one, other, orders=6)
