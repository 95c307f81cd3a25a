"""Parallel test lines are found by equal text, whatever lines are missing or repeated."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.evaluation.line_sets import LineSet, group_lines

LANGUAGES = ("de", "en", "fr", "ja")
PAIRS = tuple("-".join(pair) for pair in combinations(LANGUAGES, 2))


def parallel(kept: Mapping[str, Sequence[int]]) -> dict[str, dict[str, list[str]]]:
    """The lines of the kept sentences of every pair; a sentence has its number as its text."""
    return {
        pair: {code: [f"{code} {number}" for number in numbers] for code in pair.split("-")}
        for pair, numbers in kept.items()
    }


def units(found: LineSet) -> list[tuple[str, int]]:
    """The pair and sentence of every line."""
    return [(pair, one) for pair in found.pairs for one in found.of_lines[pair].tolist()]


def test_test_sets_with_the_same_lines_are_one_set_in_their_order() -> None:
    (found,) = group_lines(parallel(dict.fromkeys(PAIRS, range(30))))
    assert found.pairs == PAIRS
    assert found.sentences == 30
    for pair in PAIRS:
        np.testing.assert_array_equal(found.of_lines[pair], np.arange(30))


def test_lines_that_are_missing_from_some_pairs_do_not_shift_the_others() -> None:
    generator = np.random.default_rng(1)
    kept = {pair: np.flatnonzero(generator.random(60) < 0.8).tolist() for pair in PAIRS}
    (found,) = group_lines(parallel(kept))
    sentence_of = {
        (number, int(one))
        for pair, numbers in kept.items()
        for number, one in zip(numbers, found.of_lines[pair], strict=True)
    }
    assert len(sentence_of) == len({number for number, _ in sentence_of}) == found.sentences


def test_pairs_without_a_common_language_are_parallel_by_way_of_others() -> None:
    chain = parallel(dict.fromkeys(("de-fr", "de-en", "en-ja"), range(25)))
    (found,) = group_lines(chain)
    assert set(found.pairs) == {"de-fr", "de-en", "en-ja"}
    assert found.sentences == 25
    del chain["de-en"]
    assert group_lines(chain) == []


def test_a_few_equal_lines_make_no_parallel_test_sets() -> None:
    """Short lines such as "Yes." are in many test sets."""
    english = ["Yes.", "No.", "Thanks."]
    sides = {
        f"en-{code}": {
            "en": [*english, *(f"{code} {number}" for number in range(10))],
            code: [f"text {number}" for number in range(13)],
        }
        for code in ("fr", "ja")
    }
    assert group_lines(sides) == []


def test_a_short_test_set_is_parallel_to_a_long_one_that_has_its_lines() -> None:
    (found,) = group_lines(parallel({"de-en": range(100), "en-fr": range(40, 60)}))
    np.testing.assert_array_equal(found.of_lines["en-fr"], np.arange(40, 60))
    assert found.sentences == 100


def test_a_line_that_is_repeated_stays_with_its_own_translation() -> None:
    """Verses begin alike: one text in English, two in German."""
    english = ["and he said", "go", "and he said", "stop"]
    sides = {
        "de-en": {"de": ["und er sagte", "geh", "er sprach", "halt"], "en": english},
        "en-fr": {"en": english, "fr": ["il dit", "va", "il dit", "arrête"]},
    }
    (found,) = group_lines(sides)
    assert found.sentences == 4
    for of_lines in found.of_lines.values():
        np.testing.assert_array_equal(of_lines, np.arange(4))


def test_a_line_repeated_more_often_in_one_pair_is_not_taken_for_another() -> None:
    sides = parallel({"de-en": range(20), "en-fr": range(20)})
    sides["en-fr"]["en"][3] = sides["en-fr"]["en"][7]
    (found,) = group_lines(sides)
    assert found.sentences == 22
    shared = set(found.of_lines["de-en"].tolist()) & set(found.of_lines["en-fr"].tolist())
    assert shared == set(range(20)) - {3, 7}


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([3, 6, 40]))
def test_no_sentence_has_two_lines_of_a_pair(seed: int, texts: int) -> None:
    """Even where most lines are repeated, in languages that each repeat other ones."""
    generator = np.random.default_rng(seed)
    text_of = {code: generator.integers(texts, size=12) for code in LANGUAGES}
    sides = {}
    for pair in PAIRS:
        kept = np.flatnonzero(generator.random(12) < 0.9)
        sides[pair] = {
            code: [f"{code} {one}" for one in text_of[code][kept]] for code in pair.split("-")
        }
    for found in group_lines(sides):
        assert max(Counter(units(found)).values()) == 1
        assert {one for _, one in units(found)} == set(range(found.sentences))


@pytest.mark.parametrize("pairs", [(), ("de-en",)])
def test_fewer_than_two_test_sets_make_no_set(pairs: tuple[str, ...]) -> None:
    assert group_lines(parallel(dict.fromkeys(pairs, range(20)))) == []
