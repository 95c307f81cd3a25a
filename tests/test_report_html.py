"""The page says what the scores say, and is sound, safe and self-contained."""

import re
import xml.etree.ElementTree as ElementTree

import pytest
from example_evaluation import HOSTILE, NAMES, PROFILES, evaluation, history, sample

from pipeline.metrics import Evaluation
from pipeline.report import History, markdown_report
from pipeline.report_html import SERIES_COLOURS, html_report


def page(system_name: str = "experts") -> str:
    return html_report(evaluation(second=system_name), history(system_name), [sample(system_name)])


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
