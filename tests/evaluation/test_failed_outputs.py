"""What can be seen of a translation without knowing its language, on lines that are counted."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.artifacts.corpus import Direction
from pipeline.evaluation.failed_outputs import (
    LOOP_REPEATS,
    LOOP_WORDS,
    FailedOutputs,
    LengthRatio,
    has_loop,
)
from pipeline.evaluation.score_slot import TranslatedLines

SOURCES = ["Guten  Tag", "Haus", "la la la la", "x"]
HYPOTHESES = ["guten tag", " ", "la la la la", "no no no no no"]
REFERENCES = ["good day", "house", "la la la la la", "no"]
LINES = TranslatedLines(
    Direction("de", "en"), HYPOTHESES, REFERENCES, lambda: SOURCES, "", [0, 2, 0, 1]
)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("copies", [True, False, True, False]),
        ("empty", [False, True, False, False]),
        ("invalid", [False, True, False, True]),
        ("loops", [False, False, False, True]),
    ],
)
def test_lines_of_each_kind_are_counted(name: str, expected: list[bool]) -> None:
    score = FailedOutputs.with_defect(name)
    rows = score.line_statistics(LINES).rows
    assert rows.tolist() == expected
    assert score.of_corpus(rows) == 100 * np.mean(expected)
    assert score.of_sums(np.array([[3.0]]), lines=4).tolist() == [75.0]


def test_the_length_ratio_is_of_all_characters_together() -> None:
    found = LengthRatio()
    rows = found.line_statistics(LINES).rows
    expected = sum(len(text.strip()) for text in HYPOTHESES) / sum(map(len, REFERENCES))
    assert found.of_corpus(rows) == pytest.approx(expected)
    assert found.column.heading == "Length ratio", "neither end is the good one"


@given(st.lists(st.sampled_from("ab"), max_size=24))
def test_loops_of_words_are_those_a_regular_expression_finds(words: list[str]) -> None:
    text = " ".join(words)
    pattern = rf"((?:\S ){{1,{LOOP_WORDS}}}?)\1{{{LOOP_REPEATS - 1}}}"
    assert has_loop(text) == (re.search(pattern, f"{text} ") is not None)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("我们走吧" * 8, True),
        ("我们走吧" * 7, False),  # not longer than what may be one word
        ("aaaaaaa", False),
        ("the end", False),
        ("", False),
    ],
)
def test_loops_within_words_are_looked_for_in_long_ones(text: str, expected: bool) -> None:
    assert has_loop(text) == expected
