"""The page says what the scores say, and is sound, safe and self-contained."""

import math
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import numpy as np
import pytest
from support.example_evaluation import (
    DENSE,
    HOSTILE,
    IMPRINT,
    NAMES,
    PROFILES,
    evaluation,
    history,
    sample,
)

from pipeline.artifacts.corpus import Direction, Resource
from pipeline.evaluation.averages import average_scores
from pipeline.evaluation.budgets import Parameters, SystemTraining
from pipeline.evaluation.charts import MARKERS
from pipeline.evaluation.history import History
from pipeline.evaluation.html_parts import SERIES_COLOURS
from pipeline.evaluation.markdown import markdown_report
from pipeline.evaluation.page import html_report
from pipeline.evaluation.scores import LanguageAverage
from pipeline.evaluation.significance import compare_all
from pipeline.evaluation.verdicts import judge


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


DEMO_SYSTEMS = (
    *("dense", "dense, whole budget", "MoE", "MoE-LGR source", "Enc(dense)-Dec(MoE-LGR) assembled"),
    "Enc(dense)-Dec(MoE-LGR) fine-tuned",
)


EMS = {**dict.fromkeys("0123456789", 0.636), **dict.fromkeys(".,: ", 0.337), "–": 0.5}
"""Widths of characters of DejaVu Sans, the widest font of the style sheet; of others 0.65 at most
on average."""


def narrowest(frame: ElementTree.Element, style: str) -> float:
    """The least width that a table can have, in pixels, by the rules of the style sheet."""
    (padding,) = re.findall(r"\nth,td\{padding:\d+px (\d+)px[^}]*white-space:nowrap", style)
    assert re.search(r"thead th,td\.words\{white-space:normal\}", style)
    assert re.search(
        r"tbody th\{white-space:normal;overflow-wrap:anywhere;min-width:140px\}", style
    )
    assert re.search(r"\.trained\{[^}]*white-space:normal;[^}]*min-width:100px", style)
    first, *rows = frame.iter("tr")
    spanning = sum("rowspan" in one.attrib for one in first)
    widths: dict[int, float] = {}
    for row in rows or [first]:
        in_body = row[0].get("scope") == "row"
        for place, cell in enumerate(row, start=0 if in_body else spanning):
            least = {"row": 140.0}.get(cell.get("scope") or "", 0.0)
            if cell.get("class") in {"trained", "words"}:
                least = 104.0
            if not least:
                size = 14 if cell.tag == "td" else 13
                texts = [(cell.text or "", size)]
                texts += [
                    ("".join(one.itertext()), 11 if one.tag == "small" else size) for one in cell
                ]
                pieces = [
                    (piece, size)
                    for text, size in texts
                    for piece in ([text] if cell.tag == "td" else re.split(r"(?<=-)| ", text))
                ]
                least = max(
                    size * sum(EMS.get(one, 0.65) for one in piece) for piece, size in pieces
                )
                least += 2 * int(padding)
            widths[place] = max(widths.get(place, 0.0), least)
    return sum(widths.values())


def page_of(systems: tuple[str, ...], groups: tuple[Resource, ...]) -> str:
    """A page of many systems with the largest figures there are: into English and out of it in all
    resource groups, and zero-shot."""
    found = evaluation()
    first = found.systems[0]
    profiles = [
        replace(one, direction=Direction(*pair), resource=group)
        for family, template in (
            ("into", PROFILES[0]),
            ("out", PROFILES[3]),
            ("beside", PROFILES[1]),
        )
        for number, group in enumerate(groups if family != "beside" else (None,))
        for one in [template]
        for code in [f"x{number}"]
        for pair in [{"into": (code, "en"), "out": ("en", code), "beside": ("de", code)}[family]]
    ]
    scores = {str(one.direction): {"bleu": 100.0, "chrf": 100.0} for one in profiles}
    scored = {name: replace(first.directions["de-en"], scores=one) for name, one in scores.items()}
    averages = average_scores(scores, profiles=profiles)
    made = tuple(
        replace(first, name=name, directions=scored, averages=averages) for name in systems
    )
    draws = {name: {"bleu": np.full((len(systems), 100), 100.0)} for name in scores}
    verdicts = judge(made, baseline=systems[0], profiles=profiles)
    shown = replace(
        found,
        columns=found.main_columns,
        systems=made,
        directions=tuple(profiles),
        language_names={code: code for one in scores for code in one.split("-")},
        references=None,
        verdicts=verdicts,
        significance=compare_all(
            {name: {"bleu": [100.0] * len(systems)} for name in scores},
            draws,
            columns=found.main_columns[:1],
            systems=systems,
            profiles=profiles,
            verdicts=verdicts,
        ),
        language_averages=(
            LanguageAverage("family", "Indo-European", "into_pivot", 12, dict(scores_of(systems))),
        ),
    )
    trainings = tuple(
        SystemTraining(name, Parameters(1, 1), DENSE, (), complete=True) for name in systems
    )
    return html_report(shown, History(trainings=trainings), [], imprint=IMPRINT)


def scores_of(systems: tuple[str, ...]) -> dict[str, dict[str, float]]:
    return {name: {"bleu": 100.0, "chrf": 100.0} for name in systems}


def test_averages_with_their_zero_shot_column_and_all_systems_fit_a_screen_of_1280_pixels() -> None:
    """The zero-shot column was hidden, as were systems in the averages by language."""
    text = page_of(DEMO_SYSTEMS, ("extremely_low", "low", "medium", "high"))
    (style,) = re.findall(r"<style>(.*?)</style>", text, flags=re.DOTALL)
    (width, padding) = re.findall(r"\nmain\{max-width:(\d+)px;[^}]*padding:\d+px (\d+)px", style)[0]
    room = min(int(width), 1280) - 2 * int(padding) - 2
    frames = {
        "".join(heading.itertext()): frame
        for part in body(text).iter("section")
        for heading, frame in zip(part, [*part][1:], strict=False)
        if heading.tag == "h3" and frame.tag == "div"
    }
    for title in ("BLEU", "chrF++", "BLEU by family", "chrF++ by family"):
        shown = "".join(frames[title].itertext())
        assert all(name in shown for name in DEMO_SYSTEMS)
        assert narrowest(frames[title], style) <= room, title
    assert "Zero-shot" in "".join(frames["BLEU"].itertext())


def test_names_of_systems_are_never_cut() -> None:
    """At 360 pixels the name of the main system was three letters and an ellipsis."""
    name = "Enc(dense)-Dec(MoE-LGR) with a rather long name"
    text = page(name)
    assert "…" not in text
    assert "ellipsis" not in text
    assert text.count(name) > 20
