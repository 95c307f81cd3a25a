"""What is counted of a pair's text is what counting it by hand gives."""

from collections import Counter
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.survey.counts import LENGTH_BIN, LanguageCounts, count_pair, quantile

SIDE = st.text(alphabet="ab äあ", max_size=40)
LINES = st.lists(st.tuples(SIDE, SIDE), max_size=30)


@given(LINES)
def test_lines_characters_and_words_are_those_of_the_text(lines: list[tuple[str, str]]) -> None:
    for place, side in enumerate(count_pair(lines).sides):
        text = [line[place] for line in lines]
        assert side.lines == len(text)
        assert side.characters == sum(map(len, text))
        assert side.words == len(" ".join(text).split())
        assert side.lengths == Counter(len(line) // LENGTH_BIN for line in text)


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=40))
def test_the_median_ratio_is_within_a_bin_of_the_true_one(sizes: list[tuple[int, int]]) -> None:
    ratio = count_pair(("a" * one, "b" * other) for one, other in sizes).ratio(0.5)
    ratios = sorted(one / other for one, other in sizes)
    assert ratio == pytest.approx(ratios[(len(ratios) - 1) // 2], rel=0.011)
    if len(sizes) % 2:
        assert ratio == pytest.approx(median(ratios), rel=0.011)


@given(st.lists(st.integers(-5, 5), min_size=1), st.floats(0.01, 1))
def test_a_quantile_is_the_lowest_value_that_enough_do_not_exceed(
    values: list[int], share: float
) -> None:
    found = quantile(Counter(values), share)
    assert found is not None
    assert sum(value <= found for value in values) >= share * len(values)
    assert sum(value < found for value in values) < share * len(values)


def test_what_was_never_counted_has_no_quantile() -> None:
    assert quantile(Counter(), 0.5) is None
    assert count_pair([("", "a"), ("b", "")]).ratio(0.5) is None


def test_counts_of_two_pairs_are_those_of_both_texts() -> None:
    one, other = [("a b", "x")], [("ccc", "y"), ("", "z")]
    total = LanguageCounts()
    for counts in (count_pair(one), count_pair(other)):
        total.add(counts.sides[0])
    assert total == count_pair(one + other).sides[0]
