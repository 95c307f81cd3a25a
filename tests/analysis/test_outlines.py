"""Outlines of kernel densities hold the shares that they state."""

from collections import Counter

import numpy as np
import pytest

from pipeline.extensions.analysis.analyze_languages import SHARES, outlines


def test_outlines_hold_their_shares_of_a_normal_distribution() -> None:
    """That of a share is a circle: its density is 1 - share of the highest one.

    The kernels widen the distribution, by N ** (-1 / 3) of its variance.
    """
    number = 1500
    xy = np.random.default_rng(1).normal(size=(number, 2))
    found = outlines(xy.tolist())
    for share, segments in zip(SHARES, found, strict=True):
        radius = np.sqrt(-2 * np.log(1 - share) * (1 + number ** (-1 / 3)))
        lengths = np.linalg.norm(np.array(segments).reshape(-1, 2) - xy.mean(axis=0), axis=1)
        assert lengths.mean() == pytest.approx(radius, rel=0.05)
        assert np.abs(lengths / radius - 1).max() < 0.25


def test_an_outline_is_closed() -> None:
    xy = np.random.default_rng(2).normal(size=(60, 2)) * [3.0, 1.0]
    for segments in outlines(xy.tolist()):
        ends = Counter(end for segment in segments for end in segment)
        assert len(segments) > 10
        assert {count % 2 for count in ends.values()} == {0}, "every end begins another segment"


def test_points_that_are_few_or_on_a_line_have_no_outline() -> None:
    assert outlines([]) == []
    assert outlines([[1.0, 2.0], [2.0, 1.0]]) == []
    assert outlines([[1.0, 1.0]] * 9) == []
    assert outlines([[float(x), 2.0 * x + 1.0] for x in range(9)]) == []
