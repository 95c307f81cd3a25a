"""Charts draw their data where the ticks say, and labels stay legible."""

import math
import re
import xml.etree.ElementTree as ElementTree
from importlib import resources
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.evaluation.charts import (
    Bar,
    Point,
    Series,
    bar_chart,
    line_chart,
    nice_ticks,
    picture,
    scatter_chart,
)


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


def test_a_chart_maps_its_data_linearly_onto_its_ticks() -> None:
    data = ((10.0, 4.0), (20.0, 2.5), (40.0, 1.0))
    svg = line_chart([Series("a", data, 0)], title="t", x_label="x", y_label="y")
    root = ElementTree.fromstring(svg)
    points = next(root.iter("polyline")).attrib["points"].split()
    ticks = [
        (element.attrib["text-anchor"], float(element.text or ""), element.attrib)
        for element in root.iter("text")
        if element.get("class") == "tick"
    ]
    at_x = {value: float(place["x"]) for anchor, value, place in ticks if anchor == "middle"}
    at_y = {value: float(place["y"]) - 4 for anchor, value, place in ticks if anchor == "end"}
    x_unit = (at_x[40.0] - at_x[0.0]) / 40
    y_unit = (at_y[4.0] - at_y[1.0]) / 3
    for (x, y), point in zip(data, points, strict=True):
        drawn_x, drawn_y = map(float, point.split(","))
        assert drawn_x == pytest.approx(at_x[0.0] + x * x_unit, abs=0.2)
        assert drawn_y == pytest.approx(at_y[1.0] + (y - 1) * y_unit, abs=0.2)


def test_a_single_point_and_a_constant_line_can_be_drawn() -> None:
    series = [Series("a", ((5.0, 3.0),), 0), Series("b", ((1.0, 3.0), (9.0, 3.0)), 1)]
    svg = line_chart(series, title="t", x_label="x", y_label="y")
    root = ElementTree.fromstring(svg)
    markers = [one for one in root.iter("circle") if one.get("class") == "marker s0"]
    assert len(markers) == 1, "a line of one point shows by its marker"
    heights = {
        y for line in root.iter("polyline") for y in re.findall(r",([\d.]+)", line.attrib["points"])
    }
    assert len(heights) == 1


def test_the_legend_shows_names_in_full_with_a_line() -> None:
    name = "Enc(dense)-Dec(MoE-LGR) & more than one line holds"
    series = [Series(name, ((1.0, 1.0),), 9), Series("none", (), 0)]
    root = ElementTree.fromstring(line_chart(series, title="t", x_label="x", y_label="y"))
    named = [one for one in root.iter("text") if one.get("class") == "name"]
    assert len(named) > 1
    assert " ".join(one.text or "" for one in named) == name
    assert [one.get("class") for one in root.iter("path")] == ["line s1"]
    assert float(named[-1].attrib["y"]) < float(root.attrib["viewBox"].split()[3])


@pytest.mark.parametrize("width", [300, 350])
def test_type_in_a_chart_is_at_least_ten_pixels_at_the_width_of_a_phone(width: int) -> None:
    style = (resources.files("pipeline.evaluation") / "report.css").read_text(encoding="utf-8")
    (size,) = re.findall(r"figure>svg\{[^}]*font-size:(\d+)px", style)
    svg = line_chart([Series("a", ((1.0, 1.0),), 0)], title="t", x_label="x", y_label="y")
    units = float(ElementTree.fromstring(svg).attrib["viewBox"].split()[2])
    assert int(size) * width / units >= 10


def assert_not_clipped(svg: str) -> None:
    """The upright texts of a chart begin and end within it.

    A digit of DejaVu Sans, the widest font of the style sheet, is 0.636 em wide.
    """
    root, size = ElementTree.fromstring(svg), 13 * 0.636
    for one in root.iter("text"):
        if "x" in one.attrib:
            x, width = float(one.attrib["x"]), size * len(one.text or "")
            begin = x - {"start": 0.0, "middle": 0.5, "end": 1.0}[one.attrib["text-anchor"]] * width
            assert 0 <= begin < begin + width <= float(root.attrib["viewBox"].split()[2]), one.text


@pytest.mark.parametrize("updates", [7, 600, 1000, 60_000, 1_300_000])
@pytest.mark.parametrize("loss", [8.0, 0.0125, 1234.5])
def test_no_text_of_a_line_chart_is_clipped(updates: int, loss: float) -> None:
    """Of 600, the last tick, the last zero was cut off."""
    data = ((updates / 10, loss), (float(updates), loss / 2))
    series = [Series("a", data, 0)]
    assert_not_clipped(line_chart(series, title="t", x_label="updates", y_label="nats"))


def test_no_name_or_value_of_a_bar_is_clipped() -> None:
    bars = [Bar("sr_Latn", 12_345.0), Bar("en", 1.0), Bar("zh_Hant_TW", 600.0)]
    assert_not_clipped(bar_chart(bars, title="t", x_label="bytes"))


@pytest.mark.parametrize("low", [0.0, 40.0])
def test_bars_are_as_long_as_their_values_and_these_stand_within_the_chart(low: float) -> None:
    values = [400.0, 100.0, low]
    bars = [Bar(f"<{number}>", value) for number, value in enumerate(values)]
    root = ElementTree.fromstring(bar_chart(bars, title="a & b", x_label="bytes", low=low))
    widths = [float(one.attrib["width"]) for one in root.iter("rect")]
    assert widths[1] / widths[0] == pytest.approx((100 - low) / (400 - low), abs=0.003)
    assert widths[2] < 1
    texts = {one.text: float(one.attrib["x"]) for one in root.iter("text")}
    assert {"<0>", "<1>", "<2>", "bytes", "400", "100"} <= texts.keys()
    width = float(root.attrib["viewBox"].split()[2])
    assert all(x < width - 25 for x in texts.values()), "room for three digits"


@pytest.mark.parametrize("points", [[(0.0, 0.0), (3.0, 40.0)], [(-5.0, 1.0), (95.0, 4.0)]])
def test_a_unit_of_a_scatter_chart_is_as_long_on_both_axes(points: list[Point]) -> None:
    first, second = ((point,) for point in points)
    series = [Series("a", first, 0), Series("none", (), 1), Series("b", second, 2)]
    root = ElementTree.fromstring(scatter_chart(series, title="t"))
    width, height = (float(size) for size in root.attrib["viewBox"].split()[2:])
    drawn = [(float(one.attrib["cx"]), float(one.attrib["cy"])) for one in root.iter("circle")]
    assert all(5 <= x <= width - 5 and 5 <= y <= height - 5 for x, y in drawn), "room for a marker"
    (x, y), (other_x, other_y) = points
    (at_x, at_y), (other_at_x, other_at_y), *keys = drawn
    assert len({x for x, _ in keys}) == 1 < len(keys), "markers in the legend"
    units = (other_at_x - at_x) / (other_x - x), (at_y - other_at_y) / (other_y - y)
    assert units[0] == pytest.approx(units[1], rel=0.05)
    alone = ElementTree.fromstring(scatter_chart(series[:1], title="t"))
    assert [one.tag for one in alone] == ["circle", "circle", "text"], "a point and its legend"


def test_the_whisker_of_a_bar_spans_its_interval() -> None:
    bars = [Bar("a", 50.0, interval=(40.0, 60.0)), Bar("b", 100.0)]
    root = ElementTree.fromstring(bar_chart(bars, title="t", x_label="x"))
    (whisker,) = [one for one in root.iter("line") if one.get("class") == "whisker"]
    first, second = root.iter("rect")
    unit = float(second.attrib["width"]) / 100
    start = float(first.attrib["x"])
    assert float(whisker.attrib["x1"]) == pytest.approx(start + 40 * unit, abs=0.2)
    assert float(whisker.attrib["x2"]) == pytest.approx(start + 60 * unit, abs=0.2)


@pytest.mark.parametrize("scheme", ["line", "bar"])
def test_a_picture_is_an_svg_document_with_its_style_and_the_names_of_its_lines(
    scheme: str,
) -> None:
    series = [Series("a < b", ((0.0, 1.0), (1.0, 2.0)), 0, upright=0.5), Series("none", (), 1)]
    if scheme == "line":
        text = picture(line_chart(series, title="t", x_label="x", y_label="y"))
    else:
        text = picture(bar_chart([Bar("a < b", 1.0)], title="t", x_label="x"))
    root = ElementTree.fromstring(text.encode())
    space = "{http://www.w3.org/2000/svg}"
    assert root.tag == f"{space}svg"
    names = [one.text for one in root.iter(f"{space}text")]
    assert names.count("a < b") == 1
    assert "none" not in names
    (style,) = root.iter(f"{space}style")
    assert ".fill{" in (style.text or "")
    heights = [float(one.attrib["y"]) for one in root.iter(f"{space}text") if "y" in one.attrib]
    assert max(heights) < float(root.attrib["viewBox"].split()[3])
