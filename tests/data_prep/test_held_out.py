"""Keys of lines: what does not tell lines apart is left out, what does stays."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.plain_rules import plain_fold, plain_visible

from data_prep.held_out import fold, head
from pipeline.artifacts.spelling import visible

INVISIBLE = "\u00ad\u200b\u200c\u200d\u200e\u200f\u202a\u202e\u2060\u2064\u2066\u2069\ufeff"


@given(st.text(alphabet="abcXYZ019"), st.text(alphabet=" .,!?-–'\"()\t"))
def test_case_spaces_and_punctuation_do_not_tell_lines_apart(word: str, noise: str) -> None:
    assert fold(noise.join([*word, ""])) == word.lower()


def test_full_width_and_decomposed_forms_fold_to_the_usual_ones() -> None:
    assert fold("２０２１ Cafe\u0301 GROSS") == fold("2021 café groß") == "2021cafégross"


@given(st.text(), st.text(alphabet=INVISIBLE, min_size=1))
def test_characters_that_are_not_seen_change_no_key_anywhere(text: str, noise: str) -> None:
    spread = noise.join(["", *text, ""])
    assert visible(spread) == visible(text)
    assert fold(spread) == fold(text)


@pytest.mark.parametrize(
    "lines",
    [
        ("กา", "กี", "กู", "ก"),  # Thai
        ("कि", "की", "कु", "क"),  # Hindi
        ("കാ", "കി", "ക"),  # Malayalam
        ("ကာ", "ကို", "က"),  # Burmese
        ("ކަ", "ކި", "ކ"),  # Dhivehi
        ("𑄇𑄨", "𑄇𑄪", "𑄇"),  # Chakma, beyond the first plane
    ],
)
def test_vowel_signs_tell_short_lines_apart(lines: tuple[str, ...]) -> None:
    assert len({fold(line) for line in lines}) == len(lines)


@pytest.mark.parametrize(
    ("pointed", "plain"), [("שָׁלוֹם", "שלום"), ("مُحَمَّد", "محمد"), ("ܫܠܳܡܳܐ", "ܫܠܡܐ")]
)
def test_points_that_most_text_leaves_out_do_not_tell_lines_apart(pointed: str, plain: str) -> None:
    assert pointed != plain
    assert fold(pointed) == fold(plain)


def test_the_visible_line_keeps_all_that_is_seen() -> None:
    text = "Größe: ܫܠܳܡܳܐ, 日本 𑄇𑄨 🙂 \t"
    assert visible(text) == text


MIXED = st.text(
    st.one_of(st.characters(codec="utf-8"), st.sampled_from(" \u0301\u200b\u06e5é가ᅡ\u1112אָ"))
)


@given(MIXED)
def test_keys_are_those_that_their_definition_gives(text: str) -> None:
    assert visible(text) == plain_visible(text)
    assert fold(text) == plain_fold(text)


@given(MIXED, MIXED, MIXED)
def test_the_key_of_a_line_begins_with_that_of_its_head(one: str, other: str, last: str) -> None:
    for line in (one, f"{one} {other} {last}", f"{one * 9} {other * 9}"):
        assert line.startswith(head(line))
        assert fold(line).startswith(fold(head(line)))
