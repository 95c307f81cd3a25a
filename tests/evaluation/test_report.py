"""Reports of an evaluation: tables of its scores, in Markdown and on a page that is sound."""

import html
import math
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.example_evaluation import (
    HOSTILE,
    IMPRINT,
    NAMES,
    PROFILES,
    evaluation,
    history,
    sample,
)

from pipeline.evaluation.bleu import Bleu
from pipeline.evaluation.charts import MARKERS, SERIES_COLORS
from pipeline.evaluation.history import History
from pipeline.evaluation.rendering import (
    escape_markdown,
    render_html,
    render_markdown,
    render_tables,
)
from pipeline.evaluation.report import evaluation_report, summary_tables
from pipeline.evaluation.score_tables import (
    average_columns,
    direction_row,
    directions_section,
    main_tables,
    separate_sections,
)
from pipeline.evaluation.scores import Evaluation
from pipeline.evaluation.tables import (
    Cell,
    Heading,
    Report,
    Table,
    format_duration,
    format_large,
    headings,
    row,
)


def report(system_name: str = "experts") -> Report:
    return evaluation_report(
        evaluation(second=system_name),
        history(system_name),
        [sample(system_name)],
        imprint=IMPRINT,
    )


def markdown(system_name: str = "experts") -> str:
    return render_markdown(report(system_name))


def page(system_name: str = "experts") -> str:
    return render_html(report(system_name))


def trained(_: str) -> str:
    return "long"


# Tables


def test_both_forms_show_every_part_of_a_table() -> None:
    columns = (
        *headings("System"),
        Heading("all", group="Any", note="2"),
        Heading("n", group="Any"),
    )
    rows = (
        row("a", Cell(12.345, ".1f", note="low–high", bold=True), 1234, group="first"),
        row("b", None, Cell("0 | 1", code=True, bar=0.25), group="second"),
    )
    table = Table("Title", columns, rows, group_title="Kind")
    assert [[one.title for one in group] for group in table.heading_groups] == [
        ["System"],
        ["all", "n"],
    ]
    assert table.starts == (False, True, False)
    assert [found.texts for found in rows] == [("a", "12.3", "1,234"), ("b", "–", "0 | 1")]
    assert render_tables((table,)).split("\n") == [
        *("### Title", ""),
        "| System | Kind | Any all (2) | Any n |",
        "| --- | --- | ---: | ---: |",
        "| a | first | **12.3** (low–high) | 1,234 |",
        "| b | second | – | `0 | 1` |",
    ]


def test_accuracy_has_the_columns_and_counts_of_the_directions_it_was_measured_in() -> None:
    found = evaluation()
    (section,) = separate_sections(found, trained)
    assert len(section.tables) == 2
    for table in section.tables:
        assert [one.full_title for one in table.headings[2:]] == [
            "Any → En all (1 direction)",
            "Any → En high (1 direction)",
            "En → Any all (2 directions)",
            "En → Any high (1 direction)",
            "En → Any low (1 direction)",
            "Zero-shot all (1 direction, not decided)",
        ]
    assert average_columns(found)[-1].directions == 2, "scores are over both zero-shot directions"


def test_a_family_without_any_measured_direction_has_no_column_of_language_accuracy() -> None:
    found = evaluation()
    changed = tuple(
        replace(
            system,
            directions={
                name: one if name == "de-en" else replace(one, scores={"bleu": 1.0, "chrf": 2.0})
                for name, one in system.directions.items()
            },
        )
        for system in found.systems
    )
    (section,) = separate_sections(replace(found, systems=changed), trained)
    titles = [one.group for table in section.tables for one in table.headings[2:]]
    assert set(titles) == {"Any → En"}


def test_a_score_is_headed_and_printed_as_its_column_says() -> None:
    found = evaluation()
    rate = replace(Bleu.column, title="Error rate", larger_is_better=False, decimals=3)
    changed = replace(found, columns=(rate, *found.columns[1:]))
    table = main_tables(changed, trained)[0]
    assert table.title == "Error rate (less is better)"
    assert table.rows[0].texts[2] == "30.000"


def test_a_direction_is_bold_where_the_bootstrap_separates_it() -> None:
    found = evaluation()
    rows = {str(one.direction): direction_row(found, one) for one in found.directions}
    bold = {name: [cell.bold for cell in found.cells[2:]] for name, found in rows.items()}
    assert bold["de-en"] == [False, False, True, True, False, False], "both of the second system"
    assert not any(bold["en-fr"])
    assert [cell.value for cell in rows["en-fr"].cells[2:6]] == [11.0, 22.0, 11.04, 22.08]


def test_machine_translations_have_a_column_where_a_direction_is_trained_on_them() -> None:
    found = evaluation()
    section = directions_section(found)
    assert section is not None
    titles = [one.title for one in section.tables[0].headings]
    assert titles[:2] == ["Direction", "Training lines"]
    assert "Synthetic" not in " ".join([section.lead, *titles])
    profiles = tuple(
        replace(one, synthetic_lines=500 if str(one.direction) == "en-fr" else 0)
        for one in found.directions
    )
    section = directions_section(replace(found, directions=profiles))
    assert section is not None
    (table,) = section.tables
    assert table.headings[2].title == "Synthetic lines"
    assert {one.cells[0].text: one.texts[2] for one in table.rows}["en → fr"] == "500"
    assert sorted(one.texts[2] for one in table.rows)[:-1] == ["0"] * (len(table.rows) - 1)
    assert all(len(one.cells) == len(table.headings) for one in table.rows)
    assert "Synthetic lines have a machine translation" in section.lead


def test_without_enough_lines_there_is_neither_interval_nor_bold() -> None:
    bare = Evaluation(**{**vars(evaluation()), "significance": None})
    cells = [
        cell for table in main_tables(bare, trained) for one in table.rows for cell in one.cells
    ]
    assert not any(cell.bold or cell.note for cell in cells)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (0.04, "< 0.1 s"),
        (0.05, "0.1 s"),
        (59.9, "59.9 s"),
        (59.97, "1 min 0 s"),
        (61.5, "1 min 2 s"),
        (3599.6, "1 h 0 min"),
        (100_740.0, "27 h 59 min"),
    ],
)
def test_durations_read_in_two_units_at_most(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0, "0"),
        (7, "7"),
        (940, "940"),
        (999.9, "1 k"),
        (1000, "1 k"),
        (18_449_000, "18.4 M"),
        (2.3456e15, "2.35 P"),
        (4.5e21, "4.5 Z"),
    ],
)
def test_large_numbers_have_three_digits_and_a_unit(value: float | None, text: str) -> None:
    assert format_large(value) == text


# Markdown


def table_rows(text: str) -> list[list[str]]:
    """Cells of all Markdown table lines."""
    lines = [line for line in text.split("\n") if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def shown(line: str) -> str:
    """Return the text that inline Markdown shows; fail on anything that would be markup."""
    text = ""
    place = 0
    while place < len(line):
        character = line[place]
        if character == "\\":
            assert re.match(r"[!-/:-@\[-`{-~]", line[place + 1]), "escapes punctuation only"
            text, place = text + line[place + 1], place + 2
            continue
        if character == "&":
            entity = re.match(r"&(amp|lt|gt);", line[place:])
            assert entity, line
            text, place = text + html.unescape(entity.group()), place + len(entity.group())
            continue
        assert character not in "`*<>[]~|", line
        if character == "_":
            around = (line[place - 1 : place], line[place + 1 : place + 2])
            assert all(re.fullmatch(r"[^\W_]", one) for one in around), line
        text, place = text + character, place + 1
    assert not re.match(r"\s*([#=]|[+-](?!\d)|\d+[.)](\s|$))", line), (
        "begins a heading, list or rule"
    )
    return text


def summary() -> str:
    return render_tables(summary_tables(evaluation(), history("experts")))


def test_the_summary_shows_means_per_family_and_group_and_what_they_are_over() -> None:
    bleu = table_rows(summary())[:5]
    assert bleu[0] == [
        "System",
        "Trained for",
        "Any → En all (1 direction)",
        "Any → En high (1 direction)",
        "En → Any all (2 directions)",
        "En → Any high (1 direction)",
        "En → Any low (1 direction)",
        "Zero-shot all (2 directions, not decided)",
    ]
    assert bleu[2] == [
        *("dense", "8 updates (1.0 ×)", "30.0 (29.5–30.5)", "30.0 (29.5–30.5)"),
        *("15.5 (15.0–16.0)", "20.0 (19.5–20.5)", "11.0 (10.5–11.5)", "3.0 (2.5–3.5)"),
    ]


def test_only_scores_that_lead_beyond_chance_are_bold() -> None:
    """The larger mean alone was bold before: 11.04 against 11.00, and both of equal print."""
    bleu = table_rows(summary())[:5]
    assert [cell.startswith("**") for cell in bleu[3][2:]] == [
        *(True, True, False, True, False, False)
    ]
    assert not [cell for row in (bleu[2], bleu[4]) for cell in row if "**" in cell]


def test_how_long_a_system_was_trained_stands_beside_its_score() -> None:
    rows = table_rows(summary())
    assert {row[0]: row[1] for row in rows[2:5]} == {
        "dense": "8 updates (1.0 ×)",
        "experts": "24 updates (3.0 ×)",
        "baseline": "no training",
    }


@pytest.mark.parametrize("name", ["a|b", HOSTILE, "``` **x** [y](z)", "# head", "1. list", "x\ny"])
def test_every_markdown_table_is_rectangular_whatever_the_names(name: str) -> None:
    text = markdown(name)
    widths: list[set[int]] = []
    for block in text.split("\n\n"):
        rows = table_rows(block)
        if rows:
            widths.append({len(row) for row in rows})
    assert len(widths) == 9, "tables"
    assert all(len(found) == 1 for found in widths)


def test_text_from_outside_reaches_the_report_as_text() -> None:
    name = "*bold* _it_ [l](javascript:x) `c` <b>"
    text = markdown(name)
    cells = {shown(row[0]) for row in table_rows(text) if row[0] != "---"}
    assert name in cells
    samples = {shown(row[-1]) for row in table_rows(text) if row[0].endswith("line 7")}
    assert samples == {HOSTILE, "réf", "(empty)", "x"}
    assert "<" not in text
    bullets = [line.strip()[2:] for line in text.split("\n") if line.strip().startswith("- ")]
    assert f"{name}: 3 translations are empty." in map(shown, bullets[:1])
    assert f"kept 9 of {HOSTILE}" in [shown(one) for one in bullets if "kept" in one]


@given(st.text(max_size=40))
def test_escaped_text_reads_as_it_stands_on_one_line(text: str) -> None:
    visible = re.sub(r"[\s\x00-\x1f\x7f-\x9f]+", " ", text).strip()
    assert shown(escape_markdown(text)) == visible


@given(st.text(alphabet="\\`*_{}[]<>()#+-.!|~=&;:1a \n", max_size=30))
def test_escaped_metacharacters_read_as_they_stand(text: str) -> None:
    assert shown(escape_markdown(text)) == re.sub(r"\s+", " ", text).strip()


def test_the_report_states_warnings_ceilings_signatures_and_when_it_was_made() -> None:
    text = markdown()
    assert "- experts: 3 translations are empty." in text
    assert "`BLEU|tok:13a|version:x` (into de, en, fr, mg)" in text
    assert "`chrF++|nc:6|nw:2` (all targets)" in text
    assert "leaves out: mg." in text
    assert "2024-02-29 12:30 UTC, mmnmt 1.2.3" in text


def test_language_accuracy_is_averaged_and_counted_where_it_was_measured() -> None:
    """Two directions are zero-shot, and the language of one of them can be detected."""
    text = markdown()
    tables = table_rows(text[text.index("## Language accuracy") : text.index("## Sample")])
    assert tables[0][-1] == "Zero-shot all (1 direction, not decided)"
    assert tables[2] == ["References", "", *["97.1"] * 6]


def test_wall_times_are_listed_and_summed_per_system() -> None:
    rows = table_rows(markdown())
    assert ["clean", "clean", "4.0 s", "dense, experts"] in rows
    totals = {row[3]: row[2] for row in rows if row[0] == "all stages"}
    assert totals == {"dense": "4.0 s", "experts": "2 h 0 min", "baseline": "0 s"}


def test_budgets_stand_with_what_they_are_made_of() -> None:
    text = markdown()
    (row,) = [row for row in table_rows(text) if row[0] == "experts" and "40 k" in row]
    assert row == [
        *("experts", "40 k", "2 k"),
        *("8", "900", "800", "9.6 M", "3 min 20 s"),
        *("24", "2.7 k", "2.4 k", "24 M", "8 min 20 s"),
    ]
    assert "experts rests on dense (8 updates) and routed (8 updates)." in text
    assert "6 for each token and each parameter that multiplies it" in text


def test_what_the_stages_kept_and_dropped_is_repeated() -> None:
    text = markdown()
    lines = text[text.index("## Stage summaries") :].split("\n")
    assert lines[2] == "### clean (clean)"
    assert shown(lines[4].removeprefix("- ")) == f"kept 9 of {HOSTILE}"


# HTML


def body(text: str) -> ElementTree.Element:
    """Return the content of a page, parsed as XML: every tag closed, every character escaped."""
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


def test_the_style_sheet_in_the_page_has_a_color_for_every_series() -> None:
    (style,) = re.findall(r"<style>(.*?)</style>", page(), flags=re.DOTALL)
    colors = re.findall(r"\.s(\d+)\{--c:", style)
    assert [int(place) for place in colors] == list(range(SERIES_COLORS))
    dashed = re.findall(r"\.line\.s(\d+)\{stroke-dasharray:", style)
    assert [int(place) for place in dashed] == list(range(1, SERIES_COLORS))
    assert math.gcd(SERIES_COLORS, len(MARKERS)) == 1, "color and marker together differ for long"


def test_text_from_outside_reaches_the_page_as_text() -> None:
    text = page(HOSTILE)
    assert "<script" not in text
    assert HOSTILE in "".join(body(text).itertext())


def test_the_best_cells_of_the_page_are_those_of_the_markdown() -> None:
    bold = [element.text for element in body(page()).iter("b") if element.text]
    assert sorted(bold) == sorted(re.findall(r"\*\*([\d.]+)\*\*", markdown()))
    assert len(bold) == 10


def test_empty_translations_are_shown_as_such_and_scripts_choose_their_direction() -> None:
    cells = list(body(page()).iter("dd"))
    assert {cell.get("dir") for cell in cells} == {"auto"}
    assert [cell.get("lang") for cell in cells] == ["de", "fr", "fr", "fr", "fr"]
    assert "".join(cells[2].itertext()) == "empty"


def test_a_page_without_history_or_language_accuracy_leaves_those_sections_out() -> None:
    found = evaluation()
    bare = replace(found, columns=found.main_columns, references=None, undetectable=(), warnings=())
    text = render_html(evaluation_report(bare, History(), imprint=IMPRINT))
    titles = [element.text for element in body(text).iter("h2")]
    assert titles == [
        *("Overview", "Average scores by resource group", "Distinct outputs"),
        *("Scores by direction", "Notes", "Signatures"),
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
    assert "Bars run from 0 to 100" in text


def test_bars_of_wall_times_are_proportional_and_say_what_a_full_one_is() -> None:
    widths = re.findall(r'class="bar" style="width:([\d.]+)%"', page())
    assert [float(width) for width in widths] == [pytest.approx(100 * 4 / 7200, abs=0.01), 100.0]
    assert "A full bar is the longest stage, 2 h 0 min." in page()


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
    beside = [cell.text for cell in root.iter("td") if cell.get("class") == "words"]
    assert beside.count("24 updates (3.0 ×)") == 4, "in every table of averages"


def test_families_stand_in_one_order_everywhere() -> None:
    """Samples and tables had an order each."""
    both = [sample("experts"), replace(sample("experts"), profile=PROFILES[0])]
    text = render_html(evaluation_report(evaluation(), history("experts"), both, imprint=IMPRINT))
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
    assert found == [*order * 6, "Any → En", "Zero-shot", *order]


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
