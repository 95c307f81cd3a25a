"""Outlines of kernel densities hold the shares that they state."""

import numpy as np
import pytest
from scipy.stats import multivariate_normal

from pipeline.extensions.analysis.analyze_languages import SHARES, crossings, outlines


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


def test_an_outline_is_closed_and_parts_what_is_above_from_what_is_below() -> None:
    x, y = np.linspace(-3, 3, 20), np.linspace(-2, 2, 15)
    grid = np.stack(np.meshgrid(x, y, indexing="ij"), axis=2)
    height = np.asarray(multivariate_normal(np.zeros(2)).pdf(grid)) - 0.08
    ends: dict[tuple[float, float], int] = {}
    for segment in crossings(x, y, height):
        for end in segment:
            ends[end] = ends.get(end, 0) + 1
            assert np.hypot(*end) == pytest.approx(np.sqrt(-2 * np.log(0.08 * 2 * np.pi)), abs=0.05)
    assert set(ends.values()) == {2}, "every end of a segment begins another one"


def test_points_that_are_few_or_on_a_line_have_no_outline() -> None:
    assert outlines([]) == []
    assert outlines([[1.0, 2.0], [2.0, 1.0]]) == []
    assert outlines([[1.0, 1.0]] * 9) == []
    assert outlines([[float(x), 2.0 * x + 1.0] for x in range(9)]) == []
