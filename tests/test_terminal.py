"""Tests of pipeline/terminal.py."""

import pytest

from pipeline.terminal import an_artifact, clock_text, counted, listed, tallied, text_table


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (3599, "59:59"), (3661, "1:01:01")]
)
def test_durations_read_as_a_clock(seconds: float, text: str) -> None:
    assert clock_text(seconds) == text


def test_a_table_has_no_rule_under_a_column_without_a_name() -> None:
    table = text_table(["stage", ""], [["corpus", "a sentence"], ["clean", ""]])
    assert table.splitlines() == ["stage", "------", "corpus  a sentence", "clean"]


def test_nouns_follow_their_numbers_and_articles_their_nouns() -> None:
    numbers = {0: "0 lines", 1: "1 line", 2: "2 lines", 12345: "12,345 lines"}
    assert {number: counted(number, "line") for number in numbers} == numbers
    assert counted(1, "matrix", "matrices") == "1 matrix"
    assert counted(2, "matrix", "matrices") == "2 matrices"
    for kind in ("corpus", "shards", "translations"):
        assert an_artifact(kind) == f"a {kind} artifact"
    for kind in ("evaluation", "analysis"):
        assert an_artifact(kind) == f"an {kind} artifact"


def test_short_lists_are_written_out_and_of_long_ones_the_rest_is_counted() -> None:
    assert listed([]) == ""
    assert listed("abcdef") == "a, b, c, d, e, f"
    assert listed("abcdefgh") == "a, b, c, d, e and 3 more"


def test_counts_of_zero_are_left_out() -> None:
    assert tallied({"empty": 3, "copy": 0, "long": 1000}) == "empty 3, long 1,000"
