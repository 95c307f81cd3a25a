"""The page says what the scores say, and is sound, safe and self-contained."""

import math
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
from support.example_evaluation import (
    HOSTILE,
    IMPRINT,
    NAMES,
    PROFILES,
    evaluation,
    history,
    sample,
)

from pipeline.evaluation.charts import MARKERS
from pipeline.evaluation.history import History
from pipeline.evaluation.html_parts import SERIES_COLOURS
from pipeline.evaluation.markdown import markdown_report
from pipeline.evaluation.page import html_report


def page(system_name: str = "experts") -> str:
    return html_report(
        evaluation(second=system_name),
        history(system_name),
        [sample(system_name)],
        imprint=IMPRINT,
    )


def body(text: str) -> ElementTree.Element:
    """The page's content, parsed as XML: every tag closed, every character escaped."""
    start, end = text.index("<main>"), text.index("</main>") + len("</main>")
    return ElementTree.fromstring(text[start:end])


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


def test_the_style_sheet_in_the_page_has_a_colour_for_every_series() -> None:
    (style,) = re.findall(r"<style>(.*?)</style>", page(), flags=re.DOTALL)
    colours = re.findall(r"\.s(\d+)\{--c:", style)
    assert [int(place) for place in colours] == list(range(SERIES_COLOURS))
    dashed = re.findall(r"\.line\.s(\d+)\{stroke-dasharray:", style)
    assert [int(place) for place in dashed] == list(range(1, SERIES_COLOURS))
    assert math.gcd(SERIES_COLOURS, len(MARKERS)) == 1, "colour and marker together differ for long"


def test_text_from_outside_reaches_the_page_as_text() -> None:
    text = page(HOSTILE)
    assert "<script" not in text
    assert HOSTILE in "".join(body(text).itertext())


def test_the_best_cells_of_the_page_are_those_of_the_markdown() -> None:
    bold = [element.text for element in body(page()).iter("b") if element.text]
    numbers = [text for text in bold if re.fullmatch(r"[\d.]+", text)]
    report = markdown_report(evaluation(), history("experts"), imprint=IMPRINT)
    markdown = re.findall(r"\*\*([\d.]+)\*\*", report)
    assert sorted(numbers) == sorted(markdown)


def test_empty_translations_are_shown_as_such_and_scripts_choose_their_direction() -> None:
    cells = list(body(page()).iter("dd"))
    assert {cell.get("dir") for cell in cells} == {"auto"}
    assert [cell.get("lang") for cell in cells] == ["de", "fr", "fr", "fr", "fr"]
    assert "".join(cells[2].itertext()) == "empty"


def test_a_page_without_history_or_language_accuracy_leaves_those_sections_out() -> None:
    found = evaluation()
    bare = replace(found, columns=found.main_columns, references=None, undetectable=(), warnings=())
    text = html_report(bare, History(), [], imprint=IMPRINT)
    titles = [element.text for element in body(text).iter("h2")]
    assert titles == [
        *("At a glance", "Averages by resource", "Distinct outputs", "All directions"),
        "How to read this",
    ]


def test_bars_of_scores_run_to_100_and_say_so() -> None:
    """The largest score filled its bar before, whatever it was."""
    text = page()
    widths = [float(width) for width in re.findall(r'class="bar s\d" style="width:([\d.]+)%', text)]
    scores = [
        float(element.text or "")
        for element in body(text).iter("span")
        if element.get("class") == "bar-value" and " " not in (element.text or "")
    ]
    assert len(scores) == 18
    assert widths == pytest.approx(scores, abs=0.051)
    assert "All bars run from 0 to 100" in text


def test_bars_of_wall_times_are_proportional_and_say_what_a_full_one_is() -> None:
    widths = re.findall(r'class="bar stage" style="width:([\d.]+)%"', page())
    assert [float(width) for width in widths] == [pytest.approx(100 * 4 / 7200, abs=0.01), 100.0]
    assert "A full bar is the longest, 2 h 0 min." in page()


def test_what_a_system_was_trained_for_stands_beside_its_every_score() -> None:
    root = body(page())
    labels = [
        " ".join("".join(element.itertext()).split())
        for element in root.iter("span")
        if element.get("class") == "bar-label"
    ]
    assert labels[:3] == [
        "dense 8 updates (1.0 ×)",
        "experts 24 updates (3.0 ×)",
        "baseline no training",
    ]
    beside = [cell.text for cell in root.iter("td") if cell.get("class") == "trained"]
    assert beside.count("24 updates (3.0 ×)") == 4, "in every table of averages"


def test_families_stand_in_one_order_everywhere() -> None:
    """Samples and tables had an order each."""
    both = [sample("experts"), replace(sample("experts"), profile=PROFILES[0])]
    text = html_report(evaluation(), history("experts"), both, imprint=IMPRINT)
    seen = [
        "".join(element.itertext())
        for element in body(text).iter()
        if element.tag == "h3"
        or element.get("class") == "group"
        or element.get("scope") == "rowgroup"
    ]
    order = ["Any → En", "En → Any", "Zero-shot"]
    found = [
        title
        for entry in seen
        for title in order
        if entry == title or entry.startswith(f"{title} ")
    ]
    assert found == [*order * 5, "Any → En", "Zero-shot", *order]


def test_the_page_says_when_it_was_made_by_which_version_and_of_which_models() -> None:
    text = " ".join(body(page()).itertext())
    assert "2024-02-29 12:30 UTC, mmnmt 1.2.3" in text
    assert "40 k" in text
    assert "experts rests on dense (8 updates) and routed (8 updates)." in text


def test_names_of_systems_are_never_cut() -> None:
    """At 360 pixels the name of the main system was three letters and an ellipsis."""
    name = "Enc(dense)-Dec(MoE-LGR) with a rather long name"
    text = page(name)
    assert "…" not in text
    assert "ellipsis" not in text
    assert text.count(name) > 20
