"""Figures read as they should, and columns count what they are over."""

from dataclasses import replace

import pytest
from support.example_evaluation import evaluation

from pipeline.evaluation.bleu import Bleu
from pipeline.evaluation.scores import Evaluation
from pipeline.evaluation.tables import (
    average_columns,
    direction_row,
    format_duration,
    format_large,
    format_score,
    score_tables,
    section_tables,
)


def test_accuracy_has_the_columns_and_counts_of_the_directions_it_was_measured_in() -> None:
    found = evaluation()
    (tables,) = section_tables(found).values()
    assert len(tables) == 2
    for table in tables:
        assert [(one.family, one.group, one.directions) for one in table.columns] == [
            ("into_pivot", "all", 1),
            ("into_pivot", "high", 1),
            ("out_of_pivot", "all", 2),
            ("out_of_pivot", "high", 1),
            ("out_of_pivot", "low", 1),
            ("zero_shot", "all", 1),
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
    (tables,) = section_tables(replace(found, systems=changed)).values()
    assert {one.family for table in tables for one in table.columns} == {"into_pivot"}


def test_a_score_is_headed_and_printed_as_its_column_says() -> None:
    found = evaluation()
    rate = replace(Bleu.column, title="Error rate", larger_is_better=False, decimals=3)
    changed = replace(found, columns=(rate, *found.columns[1:]))
    table = score_tables(changed)[0]
    assert table.title == "Error rate (less is better)"
    row = table.rows[0]
    assert format_score(row.values[0], decimals=row.decimals[0]) == "30.000"


def test_a_direction_is_bold_where_the_bootstrap_separates_it() -> None:
    found = evaluation()
    rows = {str(one.direction): direction_row(found, one) for one in found.directions}
    assert rows["de-en"].best == {2, 3}, "BLEU and chrF++ of the second system"
    assert rows["en-fr"].best == frozenset()
    assert rows["en-fr"].values[:4] == (11.0, 22.0, 11.04, 22.08)


def test_without_enough_lines_there_is_neither_interval_nor_bold() -> None:
    bare = Evaluation(**{**vars(evaluation()), "significance": None})
    for table in score_tables(bare):
        assert {row.best for row in table.rows} == {frozenset()}
        assert {one for row in table.rows for one in row.intervals} == {None}


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
