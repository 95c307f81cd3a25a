"""How stages write numbers and lists for people."""

import pytest

from pipeline.terminal import counted, listed, tallied, with_article


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 lines"), (1, "1 line"), (2, "2 lines"), (12345, "12,345 lines")]
)
def test_a_noun_follows_its_number(number: int, text: str) -> None:
    assert counted(number, "line") == text


def test_a_noun_may_have_a_plural_of_its_own() -> None:
    assert counted(1, "matrix", "matrices") == "1 matrix"
    assert counted(2, "matrix", "matrices") == "2 matrices"


@pytest.mark.parametrize("noun", ["corpus", "shards", "checkpoint"])
def test_nouns_that_begin_with_a_consonant_have_the_article_a(noun: str) -> None:
    assert with_article(noun) == f"a {noun}"


@pytest.mark.parametrize("noun", ["evaluation", "export", "analysis"])
def test_nouns_that_begin_with_a_vowel_have_the_article_an(noun: str) -> None:
    assert with_article(noun) == f"an {noun}"


def test_short_lists_are_written_out_and_of_long_ones_the_rest_is_counted() -> None:
    assert listed([]) == ""
    assert listed("abcdef") == "a, b, c, d, e, f"
    assert listed("abcdefgh") == "a, b, c, d, e and 3 more"


def test_counts_of_zero_are_left_out() -> None:
    assert tallied({"empty": 3, "copy": 0, "long": 1000}) == "empty 3, long 1,000"
