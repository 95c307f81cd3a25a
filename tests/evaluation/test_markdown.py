"""The Markdown report says what the scores say, in tables that hold together."""

import html
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.example_evaluation import HOSTILE, IMPRINT, evaluation, history, sample

from pipeline.evaluation.markdown import escape_markdown, markdown_report, markdown_summary


def report(system_name: str = "experts") -> str:
    return markdown_report(
        evaluation(second=system_name),
        history(system_name),
        [sample(system_name)],
        imprint=IMPRINT,
    )


def table_rows(text: str) -> list[list[str]]:
    """Cells of all Markdown table lines."""
    lines = [line for line in text.split("\n") if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def shown(markdown: str) -> str:
    """What a reader sees of inline Markdown; fails on anything that would be markup."""
    text = ""
    place = 0
    while place < len(markdown):
        character = markdown[place]
        if character == "\\":
            assert re.match(r"[!-/:-@\[-`{-~]", markdown[place + 1]), "escapes punctuation only"
            text, place = text + markdown[place + 1], place + 2
            continue
        if character == "&":
            entity = re.match(r"&(amp|lt|gt);", markdown[place:])
            assert entity, markdown
            text, place = text + html.unescape(entity.group()), place + len(entity.group())
            continue
        assert character not in "`*<>[]~|", markdown
        if character == "_":
            around = (markdown[place - 1 : place], markdown[place + 1 : place + 2])
            assert all(re.fullmatch(r"[^\W_]", one) for one in around), markdown
        text, place = text + character, place + 1
    assert not re.match(r"\s*([#+=-]|\d+[.)](\s|$))", markdown), "begins a heading, list or rule"
    return text


def test_the_summary_shows_means_per_family_and_group_and_what_they_are_over() -> None:
    bleu = table_rows(markdown_summary(evaluation(), history("experts")))[:5]
    assert bleu[0] == [
        "System",
        "Trained for",
        "Any → En all (1)",
        "Any → En high (1)",
        "En → Any all (2)",
        "En → Any high (1)",
        "En → Any low (1)",
        "Zero-shot all (2, not decided)",
    ]
    assert bleu[2] == [
        *("dense", "8 updates (1.0 ×)", "30.0 (29.5–30.5)", "30.0 (29.5–30.5)"),
        *("15.5 (15.0–16.0)", "20.0 (19.5–20.5)", "11.0 (10.5–11.5)", "3.0 (2.5–3.5)"),
    ]


def test_only_scores_that_lead_beyond_chance_are_bold() -> None:
    """The larger mean alone was bold before: 11.04 against 11.00, and both of equal print."""
    bleu = table_rows(markdown_summary(evaluation(), history("experts")))[:5]
    assert [cell.startswith("**") for cell in bleu[3][2:]] == [
        *(True, True, False, True, False, False)
    ]
    assert not [cell for row in (bleu[2], bleu[4]) for cell in row if "**" in cell]


def test_how_long_a_system_was_trained_stands_beside_its_score() -> None:
    rows = table_rows(markdown_summary(evaluation(), history("experts")))
    assert {row[0]: row[1] for row in rows[2:5]} == {
        "dense": "8 updates (1.0 ×)",
        "experts": "24 updates (3.0 ×)",
        "baseline": "no training",
    }


@pytest.mark.parametrize("name", ["a|b", HOSTILE, "``` **x** [y](z)", "# head", "1. list", "x\ny"])
def test_every_markdown_table_is_rectangular_whatever_the_names(name: str) -> None:
    text = report(name)
    widths: list[set[int]] = []
    for block in text.split("\n\n"):
        rows = table_rows(block)
        if rows:
            widths.append({len(row) for row in rows})
    assert len(widths) == 9
    assert all(len(found) == 1 for found in widths)


def test_text_from_outside_reaches_the_report_as_text() -> None:
    name = "*bold* _it_ [l](javascript:x) `c` <b>"
    text = report(name)
    cells = {shown(row[0]) for row in table_rows(text) if row[0] != "---"}
    assert name in cells
    samples = {shown(row[-1]) for row in table_rows(text) if "line 7" in row[0]}
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
    text = report()
    assert "- experts: 3 translations are empty." in text
    assert "`BLEU|tok:13a|version:x` (into de, en, fr, mg)" in text
    assert "`chrF++|nc:6|nw:2` (all targets)" in text
    assert "leaves out: mg." in text
    assert "2024-02-29 12:30 UTC, mmnmt 1.2.3" in text


def test_language_accuracy_is_averaged_and_counted_where_it_was_measured() -> None:
    """Two directions are zero-shot, and the language of one of them can be detected."""
    text = report()
    tables = table_rows(text[text.index("## Language accuracy") : text.index("## Sample")])
    assert tables[0][-1] == "Zero-shot all (1, not decided)"
    assert tables[2] == ["References", "", *["97.1"] * 6]


def test_wall_times_are_listed_and_summed_per_system() -> None:
    rows = table_rows(report())
    assert ["clean", "clean", "4.0 s", "dense, experts"] in rows
    totals = {row[3]: row[2] for row in rows if row[0] == "all stages"}
    assert totals == {"dense": "4.0 s", "experts": "2 h 0 min", "baseline": "0 s"}


def test_budgets_stand_with_what_they_are_made_of() -> None:
    text = report()
    (row,) = [row for row in table_rows(text) if row[0] == "experts" and "40 k" in row]
    assert row == [
        *("experts", "40 k", "2 k"),
        *("8", "900", "800", "9.6 M", "3 min 20 s"),
        *("24", "2.7 k", "2.4 k", "24 M", "8 min 20 s"),
    ]
    assert "experts rests on dense (8 updates) and routed (8 updates)." in text
    assert "6 for each token and each parameter that multiplies it" in text


def test_what_the_stages_kept_and_dropped_is_repeated() -> None:
    text = report()
    section = text[text.index("## What each stage kept and dropped") :]
    assert section.split("\n")[2] == "- clean (clean)"
    assert shown(section.split("\n")[3].strip()[2:]) == f"kept 9 of {HOSTILE}"
