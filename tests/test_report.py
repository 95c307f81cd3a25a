"""The reports say what the scores say, and the page is sound, safe and self-contained."""

import math
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.corpus import Direction
from pipeline.metrics import (
    DirectionProfile,
    DirectionScores,
    Evaluation,
    LanguageAccuracy,
    ReferenceAccuracy,
    Scores,
    SystemScores,
    average_accuracy,
    average_scores,
)
from pipeline.report import (
    Curve,
    CurvePoint,
    History,
    Sample,
    Series,
    StageRun,
    best_places,
    format_duration,
    html_report,
    line_chart,
    markdown_report,
    markdown_summary,
    nice_ticks,
    spread_labels,
    thin_out,
)

HOSTILE = "<script>alert(\"1\")</script> | & 'x'"

PROFILES = (
    DirectionProfile(Direction("de", "en"), "into_pivot", "high", 900, 10),
    DirectionProfile(Direction("de", "fr"), "zero_shot", None, 0, 10),
    DirectionProfile(Direction("en", "de"), "out_of_pivot", "high", 900, 10),
    DirectionProfile(Direction("en", "fr"), "out_of_pivot", "low", 20, 10),
)
NAMES = {"de": "German", "en": "English", "fr": "French"}


def system(name: str, bleu: Mapping[str, float]) -> SystemScores:
    scores = {
        direction: Scores(value, 2 * value, LanguageAccuracy(90.0, 95.0))
        for direction, value in bleu.items()
    }
    return SystemScores(
        name=name,
        directions={
            direction: DirectionScores(one, 10, 0, 0, "tok:13a|version:x", "nc:6|nw:2")
            for direction, one in scores.items()
        },
        averages=average_scores(scores, profiles=PROFILES),
    )


def evaluation(*, second: str = "experts") -> Evaluation:
    references = {str(one.direction): LanguageAccuracy(97.1, 98.2) for one in PROFILES}
    return Evaluation(
        pivot="en",
        thresholds=(100, 500),
        directions=PROFILES,
        language_names=NAMES,
        tokenizers={"de": "13a", "en": "13a", "fr": "13a"},
        systems=(
            system("dense", {"de-en": 30.0, "de-fr": 5.0, "en-de": 20.0, "en-fr": 11.0}),
            system(second, {"de-en": 31.0, "de-fr": 4.0, "en-de": 22.0, "en-fr": 11.04}),
        ),
        references=ReferenceAccuracy(references, average_accuracy(references, profiles=PROFILES)),
        undetectable=("mg",),
        warnings=(f"{second}: 3 translations are empty.",),
    )


def history(system_name: str) -> History:
    points = tuple(
        CurvePoint(update, 1.5 * update, 9.0 / update, {"high": 8.0 / update, "low": 10.0 / update})
        for update in range(1, 9)
    )
    return History(
        stages=(
            StageRun("clean", "clean", 4.0, ("dense", system_name)),
            StageRun("pretrain", HOSTILE, 7200.0, (system_name,)),
        ),
        curves=(Curve(system_name, points, points), Curve("dense", points[:1], ())),
        missing=("shards",),
    )


def sample(system_name: str) -> Sample:
    return Sample(
        direction=Direction("de", "fr"),
        family="zero_shot",
        line=7,
        source=HOSTILE,
        reference="réf",
        translations={"dense": "", system_name: HOSTILE},
    )


def page(system_name: str = "experts") -> str:
    return html_report(evaluation(second=system_name), history(system_name), [sample(system_name)])


def body(text: str) -> ElementTree.Element:
    """The page's content, parsed as XML: every tag closed, every character escaped."""
    start, end = text.index("<main>"), text.index("</main>") + len("</main>")
    return ElementTree.fromstring(text[start:end])


def table_rows(text: str) -> list[list[str]]:
    """Cells of all Markdown table lines."""
    lines = [line for line in text.split("\n") if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


# Markdown


def test_the_summary_shows_means_per_family_and_group_with_the_best_in_bold() -> None:
    bleu = table_rows(markdown_summary(evaluation()))[:4]
    assert bleu[0] == [
        "System",
        "Any → En all (1)",
        "Any → En high (1)",
        "En → Any all (2)",
        "En → Any high (1)",
        "En → Any low (1)",
        "Zero-shot all (1)",
    ]
    assert bleu[2] == ["dense", "30.0", "30.0", "15.5", "20.0", "**11.0**", "**5.0**"]
    assert bleu[3] == ["experts", "**31.0**", "**31.0**", "**16.5**", "**22.0**", "**11.0**", "4.0"]


def test_every_markdown_table_is_rectangular_even_with_bars_in_names() -> None:
    text = markdown_report(evaluation(second="a|b"), history("a|b"))
    widths: list[set[int]] = []
    for block in text.split("\n\n"):
        rows = table_rows(block)
        if rows:
            widths.append({len(row) for row in rows})
    assert len(widths) == 6
    assert all(len(found) == 1 for found in widths)


def test_the_markdown_report_states_warnings_ceilings_signatures_and_wall_times() -> None:
    text = markdown_report(evaluation(), history("experts"))
    assert "- experts: 3 translations are empty." in text
    assert ["References", *["97.1"] * 6] in table_rows(text)
    assert ["References", *["98.2"] * 6] in table_rows(text)
    assert "`BLEU|tok:13a|version:x` (into de, en, fr)" in text
    assert "`chrF++|nc:6|nw:2` (all targets)" in text
    assert "leaves out: mg." in text
    assert ["clean", "clean", "4.0 s", "dense, experts"] in table_rows(text)


def test_one_system_alone_is_never_the_best() -> None:
    assert best_places([12.0]) == []
    assert best_places([None, 12.0]) == []
    assert best_places([12.04, 12.0, 11.0]) == [0, 1]


# HTML


def test_the_page_is_well_formed_and_shows_every_direction() -> None:
    text = " ".join(body(page()).itertext())
    for found in PROFILES:
        assert f"{found.direction.source} → {found.direction.target}" in text
        assert f"{NAMES[found.direction.source]} → {NAMES[found.direction.target]}" in text


def test_the_page_loads_nothing_and_runs_nothing() -> None:
    text = page()
    assert not re.search(r"<(script|link|img|iframe|object|embed|base|form)\b", text)
    assert not re.search(r"(src|href|srcset|action)\s*=|url\(|@import|https?:", text)
    attributes = {name for element in body(text).iter() for name in element.attrib}
    assert not [name for name in attributes if name.startswith("on")]


def test_text_from_outside_reaches_the_page_as_text() -> None:
    text = page(HOSTILE)
    assert "<script" not in text
    assert HOSTILE in "".join(body(text).itertext())


def test_the_best_cells_of_the_page_are_those_of_the_markdown() -> None:
    bold = [element.text for element in body(page()).iter("b") if element.text]
    numbers = [text for text in bold if re.fullmatch(r"[\d.]+", text)]
    markdown = re.findall(r"\*\*([\d.]+)\*\*", markdown_report(evaluation(), history("experts")))
    assert sorted(numbers) == sorted(markdown)


def test_empty_translations_are_shown_as_such_and_scripts_choose_their_direction() -> None:
    cells = list(body(page()).iter("dd"))
    assert {cell.get("dir") for cell in cells} == {"auto"}
    assert [cell.get("lang") for cell in cells] == ["de", "fr", "fr", "fr"]
    assert "".join(cells[2].itertext()) == "empty"


def test_a_page_without_history_or_language_accuracy_leaves_those_sections_out() -> None:
    bare = Evaluation(
        **{**vars(evaluation()), "references": None, "undetectable": (), "warnings": ()}
    )
    titles = [element.text for element in body(html_report(bare, History(), [])).iter("h2")]
    assert titles == ["At a glance", "Averages by resource", "All directions", "How to read this"]


def test_bars_are_proportional_to_the_wall_times() -> None:
    widths = re.findall(r'class="bar stage" style="width:([\d.]+)%"', page())
    assert [float(width) for width in widths] == [pytest.approx(100 * 4 / 7200, abs=0.01), 100.0]


# Charts


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


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (59.9, "59.9 s"),
        (59.97, "1 min 0 s"),
        (61.5, "1 min 2 s"),
        (3599.6, "1 h 0 min"),
        (100_740.0, "27 h 59 min"),
    ],
)
def test_durations_read_in_two_units_at_most(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
