"""Charts draw their data where the ticks say, and labels stay legible."""

import math
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.charts import Series, line_chart, nice_ticks, spread_labels, thin_out


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6), st.integers(3, 8))
def test_ticks_enclose_the_range_at_round_and_even_steps(
    low: float, span: float, about: int
) -> None:
    ticks = nice_ticks(low, low + span, about=about)
    steps = [later - earlier for earlier, later in pairwise(ticks)]
    tolerance = 1e-6 * steps[0]
    assert ticks[0] <= low + tolerance
    assert ticks[-1] >= low + span - tolerance
    assert steps == pytest.approx([steps[0]] * len(steps), rel=1e-5, abs=1e-9)
    mantissa = steps[0] / 10 ** math.floor(math.log10(steps[0]) + 1e-6)
    assert min(abs(mantissa - round_one) for round_one in (1, 2, 5)) < 1e-3
    assert len(ticks) <= about + 3


@given(st.lists(st.floats(0, 100), min_size=1, max_size=8), st.floats(1, 40))
def test_labels_keep_their_order_their_distance_and_the_range(
    positions: list[float], gap: float
) -> None:
    placed = spread_labels(positions, gap=gap, low=0.0, high=100.0)
    order = sorted(range(len(positions)), key=lambda place: positions[place])
    possible = min(gap, 100.0 / max(len(positions) - 1, 1))
    distances = [placed[b] - placed[a] for a, b in pairwise(order)]
    assert all(distance >= possible - 1e-6 for distance in distances)
    assert min(placed) >= -1e-6
    assert max(placed) <= 100.0 + 1e-6


def test_labels_that_are_far_apart_stay_where_they_are() -> None:
    assert spread_labels([80.0, 10.0, 50.0], gap=13.0, low=0.0, high=100.0) == [80.0, 10.0, 50.0]


def test_thinned_curves_keep_their_mean_and_their_last_update() -> None:
    points = [(float(update), float(update % 7)) for update in range(1200)]
    thinned = thin_out(points, limit=300)
    assert len(thinned) == 300
    assert thinned[-1][0] == 1199.0
    mean = sum(value for _, value in points) / len(points)
    assert sum(value for _, value in thinned) / len(thinned) == pytest.approx(mean)
    assert thin_out(points[:300], limit=300) == tuple(points[:300])


def drawn_points(svg: str) -> Iterator[tuple[float, float]]:
    line = next(ElementTree.fromstring(svg).iter("polyline"))
    for pair in line.attrib["points"].split():
        x, y = pair.split(",")
        yield float(x), float(y)


def test_a_chart_maps_its_data_linearly_onto_its_ticks() -> None:
    data = ((10.0, 4.0), (20.0, 2.5), (40.0, 1.0))
    svg = line_chart([Series("a", data, "s0")], title="t", x_label="x", y_label="y")
    ticks = [
        (element.attrib["text-anchor"], float(element.text or ""), element.attrib)
        for element in ElementTree.fromstring(svg).iter("text")
        if element.get("class") == "tick"
    ]
    at_x = {value: float(place["x"]) for anchor, value, place in ticks if anchor == "middle"}
    at_y = {value: float(place["y"]) - 3.5 for anchor, value, place in ticks if anchor == "end"}
    x_unit = (at_x[40.0] - at_x[0.0]) / 40
    y_unit = (at_y[4.0] - at_y[1.0]) / 3
    for (x, y), (drawn_x, drawn_y) in zip(data, drawn_points(svg), strict=True):
        assert drawn_x == pytest.approx(at_x[0.0] + x * x_unit, abs=0.2)
        assert drawn_y == pytest.approx(at_y[1.0] + (y - 1) * y_unit, abs=0.2)


def test_the_dot_of_a_chart_is_on_the_lowest_point() -> None:
    data = ((1.0, 4.0), (2.0, 2.0), (3.0, 3.0))
    svg = line_chart(
        [Series("a", data, "s0")], title="t", x_label="x", y_label="y", mark_lowest=True
    )
    dot = next(ElementTree.fromstring(svg).iter("circle"))
    assert (float(dot.attrib["cx"]), float(dot.attrib["cy"])) == list(drawn_points(svg))[1]


def test_a_single_point_and_a_constant_line_can_be_drawn() -> None:
    series = [Series("a", ((5.0, 3.0),), "s0"), Series("b", ((1.0, 3.0), (9.0, 3.0)), "s1")]
    svg = line_chart(series, title="t", x_label="x", y_label="y")
    root = ElementTree.fromstring(svg)
    assert len(list(root.iter("circle"))) == 1
    heights = {
        y for line in root.iter("polyline") for y in re.findall(r",([\d.]+)", line.attrib["points"])
    }
    assert len(heights) == 1
