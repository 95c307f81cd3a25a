"""The Markdown report says what the scores say, in tables that hold together."""

import re

import pytest
from example_evaluation import evaluation, history

from pipeline.report import best_places, format_duration, markdown_report, markdown_summary


def table_rows(text: str) -> list[list[str]]:
    """Cells of all Markdown table lines."""
    lines = [line for line in text.split("\n") if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


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
