"""Reports of an evaluation: tables of its scores, in Markdown and on a page that is sound."""

import html
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.example_evaluation import HOSTILE, MADE, NAMES, PROFILES, evaluation, history, sample

from pipeline.artifacts.corpus import Direction
from pipeline.evaluation.bleu import Bleu
from pipeline.evaluation.charts import SERIES_COLORS
from pipeline.evaluation.history import History
from pipeline.evaluation.report import (
    averages_section,
    directions_section,
    evaluation_report,
    mean_tables,
)
from pipeline.evaluation.scores import Evaluation
from pipeline.evaluation.tables import (
    MAX_COLUMNS,
    Cell,
    Heading,
    Report,
    Table,
    escape_markdown,
    format_large,
    headings,
    render_html,
    render_markdown,
    render_tables,
    row,
)

COVERS = "Covers the test lines of runs/x/clean; systems in runs/x."


def report(system_name: str = "experts") -> Report:
    return evaluation_report(
        evaluation(second=system_name),
        history(system_name),
        [sample(system_name)],
        made=MADE,
        covers=COVERS,
    )


def markdown(system_name: str = "experts") -> str:
    return render_markdown(report(system_name))


def page(system_name: str = "experts") -> str:
    return render_html(report(system_name))


def main_tables(found: Evaluation) -> tuple[Table, ...]:
    return mean_tables(found, history("experts"), found.main_columns)


def test_the_report_opens_with_a_verdict_what_it_covers_and_a_table_of_contents() -> None:
    sections = {one.get("id"): one for one in body(page()).iter("section")}
    first = next(iter(sections.values()))
    assert [one.text and one.text.strip() for one in first.iter("li")] == [
        "Best by mean chrF++: experts (Any → En 62.0, En → Any 33.0); "
        "dense (Zero-shot 6.0, not decided).",
        "The lead in Any → En over all other systems is significant at 95 %.",
        COVERS,
    ]
    assert COVERS in markdown()
    (contents,) = body(page()).iter("nav")
    links = {(link.get("href"), link.text) for link in contents}
    assert links == {(f"#{place}", one[0].text) for place, one in sections.items()}
    assert len(links) > 8


def test_of_equal_systems_none_is_called_best() -> None:
    found = evaluation()
    equal = tuple(replace(found.systems[0], name=one.name) for one in found.systems)
    found = replace(found, systems=equal)
    made = evaluation_report(found, history("experts"), [], made=MADE, covers=COVERS)
    assert "Best by mean chrF++: no system is ahead." in render_markdown(made)


def test_a_report_of_many_directions_has_maps_and_sorted_differences_and_folds_long_tables() -> (
    None
):
    """220 directions were two tables of 220 rows, with no picture."""
    codes = [first + second for first in "bcdfghjklm" for second in "aeiouxyzvwt"]
    ways = [Direction(code, "en") for code in codes] + [Direction("en", code) for code in codes]
    profiles = tuple(
        replace(PROFILES[0 if way.target == "en" else 3], direction=way, training_lines=lines)
        for lines, way in enumerate(ways)
    )
    found, kinds = evaluation(), {"en": "de-en"}
    systems = tuple(
        replace(
            one, directions={str(w): one.directions[kinds.get(w.target, "en-de")] for w in ways}
        )
        for one in found.systems
    )
    quality = {str(way): found.verdicts.directions["de-en"] for way in ways}
    many = replace(
        found,
        directions=profiles,
        systems=systems,
        verdicts=replace(found.verdicts, directions=quality),
        language_names={code: code for code in (*codes, "en")},
    )
    section = directions_section(many)
    assert len(section.figures) == 4  # map and differences of two types
    widths = re.findall(r'class="cell" x="[^"]+" y="[^"]+" width="([^"]+)"', section.figures[0].svg)
    assert len(widths) == 3 * 110
    assert min(map(float, widths)) > 2.5  # whatever the names of the systems
    # The most training lines come first; cells name system, direction and value.
    assert section.figures[0].svg.index(f"{codes[-1]}-en") < section.figures[0].svg.index("ba-en")
    assert "<title>dense, ba-en: 60</title>" in section.figures[0].svg
    text = render_html(evaluation_report(many, History(), made=MADE, covers=COVERS))
    folded = [one for one in body(text).iter("details") if one[0].text]
    assert [one[0].text for one in folded] == ["BLEU, 220 rows", "chrF++, 220 rows"]


def test_both_forms_show_every_part_of_a_table() -> None:
    columns = (*headings("System"), Heading("all", "2"), Heading("n"))
    rows = (
        row("a", Cell(12.345, ".1f", note="low–high", bold=True), 1234),
        row("b", None, Cell("0 | 1", code=True)),
    )
    assert [found.texts for found in rows] == [("a", "12.3", "1,234"), ("b", "–", "0 | 1")]
    assert render_tables((Table("Title", columns, rows),)).split("\n") == [
        *("### Title", ""),
        "| System | all (2) | n |",
        "| --- | ---: | ---: |",
        "| a | **12.3** (low–high) | 1,234 |",
        "| b | – | `0 | 1` |",
    ]


@pytest.mark.parametrize("width", [2, 12, 13, 30, 111])
def test_no_table_is_wider_than_twelve_columns_and_no_cell_is_lost(width: int) -> None:
    titles = [f"c{place}" for place in range(width)]
    table = Table("t", headings(*titles), (row(*map(str, range(width))),))
    parts = table.parts
    assert all(len(part.headings) <= MAX_COLUMNS for part in parts)
    assert {part.headings[0].title for part in parts} == {"c0"}
    shown = [text for part in parts for text in part.rows[0].texts[1:]]
    assert shown == [str(place) for place in range(1, width)]
    assert [one.title for part in parts for one in part.headings[1:]] == titles[1:]


def test_accuracy_has_the_columns_and_counts_of_the_directions_it_was_measured_in() -> None:
    found = averages_section(evaluation(), history("experts")).tables
    tables = [table for table in found if table.title.startswith("langdetect")]
    assert len(tables) == 2
    for table in tables:
        assert [(one.title, one.note) for one in table.headings[2:]] == [
            ("Any → En", "1 direction"),
            ("En → Any", "2 directions"),
            ("Zero-shot", "1 direction, not decided"),
        ]


def test_averages_by_resource_tier_have_a_table_per_score_and_type() -> None:
    found = averages_section(evaluation(), history("experts")).tables
    by_tier = {one.title: one for one in found if "tier" in one.title}
    assert [*by_tier] == [f"{score}, En → Any, by resource tier" for score in ("BLEU", "chrF++")], (
        "the others have one tier or none"
    )
    table = by_tier["BLEU, En → Any, by resource tier"]
    assert [one.title for one in table.headings] == ["System", "high", "low"]
    assert table.rows[0].texts == ("dense", "20.0", "11.0")


def test_a_score_is_headed_and_printed_as_its_column_says() -> None:
    found = evaluation()
    rate = replace(Bleu.column, title="Error rate", larger_is_better=False, decimals=3)
    changed = replace(found, columns=(rate, *found.columns[1:]))
    table = main_tables(changed)[0]
    assert table.title == "Error rate (less is better)"
    assert table.rows[0].texts[2] == "30.000"


def test_a_direction_is_bold_where_a_system_leads() -> None:
    found = evaluation()
    table = directions_section(found).tables[0]
    rows = {one.cells[0].text.replace(" → ", "-"): one for one in table.rows}
    bold = {name: [cell.bold for cell in found.cells[3:]] for name, found in rows.items()}
    assert bold["de-en"] == [False, True, False], "the second system"
    assert not any(bold["en-fr"])
    assert [cell.value for cell in rows["en-fr"].cells[3:]] == [11.0, 11.04, 1.04]


def test_machine_translations_have_a_column_where_a_direction_is_trained_on_them() -> None:
    found = evaluation()
    section = directions_section(found)
    titles = [one.title for one in section.tables[0].headings]
    assert titles[:3] == ["Direction", "Direction type", "Training lines"]
    assert "Synthetic" not in " ".join(titles)
    profiles = tuple(
        replace(one, synthetic_lines=500 if str(one.direction) == "en-fr" else 0)
        for one in found.directions
    )
    section = directions_section(replace(found, directions=profiles))
    for table in section.tables:
        assert table.headings[3].title == "Synthetic lines"
        assert {one.cells[0].text: one.texts[3] for one in table.rows}["en → fr"] == "500"
        assert sorted(one.texts[3] for one in table.rows)[:-1] == ["0"] * (len(table.rows) - 1)
        assert all(len(one.cells) == len(table.headings) for one in table.rows)


def test_without_enough_lines_there_is_neither_interval_nor_bold() -> None:
    bare = Evaluation(**{**vars(evaluation()), "significance": None})
    cells = [cell for table in main_tables(bare) for one in table.rows for cell in one.cells]
    assert not any(cell.bold or cell.note for cell in cells)


def test_large_numbers_have_three_digits_and_a_unit() -> None:
    texts: dict[float | None, str] = {
        **{None: "–", 0: "0", 7: "7", 940: "940", 999.9: "1 k", 1000: "1 k"},
        **{18_449_000: "18.4 M", 2.3456e15: "2.35 P", 4.5e21: "4.5 Z"},
    }
    assert {value: format_large(value) for value in texts} == texts


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


def test_the_summary_shows_means_per_family_and_what_they_are_over() -> None:
    bleu = table_rows(render_tables(main_tables(evaluation())))[:5]
    assert bleu[0] == [
        *("System", "Trained for", "Any → En (1 direction)", "En → Any (2 directions)"),
        "Zero-shot (2 directions, not decided)",
    ]
    assert bleu[2] == [
        *("dense", "8 updates (1.0 ×)", "30.0 (29.5–30.5)", "15.5 (15.0–16.0)"),
        "3.0 (2.5–3.5)",
    ]
    assert [cells[1] for cells in bleu[3:5]] == ["24 updates (3.0 ×)", "no training"]
    assert [cell.startswith("**") for cell in bleu[3][2:]] == [True, False, False]
    assert not [cell for row in (bleu[2], bleu[4]) for cell in row if "**" in cell]


@pytest.mark.parametrize("name", ["a|b", HOSTILE, "``` **x** [y](z)", "# head", "1. list", "x\ny"])
def test_every_markdown_table_is_rectangular_whatever_the_names(name: str) -> None:
    text = markdown(name)
    widths: list[set[int]] = []
    for block in text.split("\n\n"):
        rows = table_rows(block)
        if rows:
            widths.append({len(row) for row in rows})
    assert len(widths) > 8
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
    assert f"{name}: 3 translations are empty." in map(shown, bullets)


metacharacters = st.text(alphabet="\\`*_{}[]<>()#+-.!|~=&;:1a \n", max_size=30)


@settings(max_examples=200)
@given(st.one_of(st.text(max_size=40), metacharacters))
def test_escaped_text_reads_as_it_stands_on_one_line(text: str) -> None:
    visible = re.sub(r"[\s\x00-\x1f\x7f-\x9f]+", " ", text).strip()
    assert shown(escape_markdown(text)) == visible


def test_the_report_states_warnings_signatures_and_when_it_was_made() -> None:
    text = markdown()
    assert "- experts: 3 translations are empty." in text
    assert "`BLEU|tok:13a|version:x` (all targets)" in text
    assert "`chrF++|nc:6|nw:2` (all targets)" in text
    unknown = "langdetect does not know these target languages, which its accuracy leaves out: mg."
    assert unknown in text
    assert "lid.176 does not know" not in text
    assert "No identifier knows" not in text
    assert "2024-02-29 12:30 UTC, mmnmt 1.2.3" in text


def test_budgets_stand_with_what_they_are_made_of() -> None:
    text = markdown()
    (row,) = [row for row in table_rows(text) if row[0] == "experts" and "40 k" in row]
    assert row == [*("experts", "40 k", "2 k", "24", "2.7 k", "2.4 k", "24 M", "8:20", "–")]
    assert "experts rests on dense, routed, tuned." in text
    assert "6 for each token and each parameter that multiplies it" in text


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
    assert not re.search(r"(src|href(?!=\"#)|srcset|action)\s*=|url\(|@import|https?:", text)
    attributes = {name for element in body(text).iter() for name in element.attrib}
    assert not [name for name in attributes if name.startswith("on")]


def test_the_style_sheet_in_the_page_has_a_color_for_every_series() -> None:
    (style,) = re.findall(r"<style>(.*?)</style>", page(), flags=re.DOTALL)
    colors = re.findall(r"\.s(\d+)\{--c:", style)
    assert [int(place) for place in colors] == list(range(SERIES_COLORS))
    dashed = re.findall(r"\.line\.s(\d+)\{stroke-dasharray:", style)
    assert [int(place) for place in dashed] == list(range(1, SERIES_COLORS))


def test_text_from_outside_reaches_the_page_as_text() -> None:
    text = page(HOSTILE)
    assert "<script" not in text
    assert HOSTILE in "".join(body(text).itertext())


def test_the_best_cells_of_the_page_are_those_of_the_markdown() -> None:
    bold = [element.text for element in body(page()).iter("b") if element.text]
    assert sorted(bold) == sorted(re.findall(r"\*\*([\d.]+)\*\*", markdown()))
    assert len(bold) == 8


def test_samples_are_text_with_its_own_direction() -> None:
    (table,) = [one for one in body(page()).iter("section") if one[0].text == "Sample translations"]
    cells = list(table.iter("td"))
    assert {cell.get("dir") for cell in cells} == {"auto"}
    texts = ["".join(cell.itertext()).strip() for cell in cells]
    assert texts[1::2] == [HOSTILE, "réf", "(empty)", HOSTILE, "x"]


def test_a_page_without_history_or_language_accuracy_leaves_those_sections_out() -> None:
    found = evaluation()
    bare = replace(found, columns=found.main_columns, undetectable={}, warnings=())
    text = render_html(evaluation_report(bare, History(), made=MADE, covers=COVERS))
    titles = [element.text for element in body(text).iter("h2")]
    assert titles == [
        *("Verdict", "Overview", "Average scores", "Scores by direction", "Notes", "Signatures")
    ]


def test_the_overview_has_bars_with_intervals_of_every_main_score_and_type() -> None:
    (overview,) = [one for one in body(page()).iter("section") if one[0].text == "Overview"]
    captions = [one.text for one in overview.iter("figcaption")]
    assert captions[:2] == ["chrF++, Any → En (1 direction)", "chrF++, En → Any (2 directions)"]
    assert len(captions) == 6
    for figure in overview.iter("figure"):
        styles = [one.get("class") for one in figure.iter()]
        assert [one for one in styles if one and one.startswith("fill")] == [
            *("fill s0", "fill s1", "fill s2")
        ]
        assert styles.count("whisker") == 3


def test_names_of_systems_are_never_cut() -> None:
    """At 360 pixels the name of the main system was three letters and an ellipsis."""
    name = "Enc(dense)-Dec(MoE-LGR) with a rather long name"
    text = page(name)
    assert "…" not in text
    assert "ellipsis" not in text
    assert text.count(name) > 15
