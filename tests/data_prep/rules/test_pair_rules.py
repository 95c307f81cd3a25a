"""The median of length ratios, against numpy's over all of them."""

import random

import numpy as np
import pytest

from data_prep.rules import pair_rules as module
from data_prep.rules.pair_rules import LengthRatios


def median(lines: list[tuple[str, str]]) -> float:
    ratios = LengthRatios()
    for first in range(0, len(lines), 7):
        ratios.add(lines[first : first + 7])
    return ratios.median()


def test_lines_with_an_empty_side_do_not_count() -> None:
    assert median([("ab", "a"), ("abc", "a"), ("aaaaaaaa", "a"), ("", "a"), ("a", "")]) == 3.0


@pytest.mark.parametrize("lines", [[], [("", "a")]])
def test_the_median_of_no_lines_is_1(lines: list[tuple[str, str]]) -> None:
    assert median(lines) == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("counted", [1, 5, 100])
@pytest.mark.parametrize("number", [1, 2, 30, 31])
def test_the_median_is_numpys_whether_lengths_are_counted_or_kept(
    number: int, counted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "COUNTED", counted)
    draw = random.Random(f"{number} {counted}")
    lines = [("x" * draw.randint(1, 9), "y" * draw.randint(1, 9)) for _ in range(number)]
    assert median(lines) == np.median([len(one) / len(other) for one, other in lines])
