"""Scripts by the names of letters, against CLDR's and against samples of many scripts."""

import string

import pytest
from babel.core import get_global
from hypothesis import given
from hypothesis import strategies as st

from pipeline.languages import (
    FAMILIES,
    count_scripts,
    has_letter_of,
    letters_of,
    script_of_character,
    usual_script,
)

SAMPLES = {
    "Arab": "العربية",
    "Beng": "বাংলা",
    "Cans": "ᐃᓄᒃᑎᑐᑦ",
    "Cher": "ᏣᎳᎩ ꮳꮃꭹ",
    "Copt": "ϯⲙⲉⲧⲣⲉⲙⲛⲭⲏⲙⲓ",
    "Cyrl": "русский",
    "Deva": "हिन्दी",
    "Ethi": "አማርኛ",
    "Grek": "ελληνικά",
    "Hang": "한국어",
    "Hani": "中文",
    "Hira": "ひらがな",
    "Kana": "カタカナ ｶﾀｶﾅ",
    "Latn": "Tiếng Việt ﬁ Ｆ",
    "Mtei": "ꯃꯩꯇꯩꯂꯣꯟ",
    "Mymr": "မြန်မာ",
    "Nkoo": "ߒߞߏ",
    "Olck": "ᱥᱟᱱᱛᱟᱲᱤ",
    "Orya": "ଓଡ଼ିଆ",
    "Syrc": "ܠܫܢܐ",
    "Tfng": "ⵜⴰⵎⴰⵣⵉⵖⵜ",
    "Thai": "ไทย",
    "Tibt": "བོད་སྐད",
}


@pytest.mark.parametrize("script", SAMPLES)
def test_text_is_in_the_script_of_its_letters(script: str) -> None:
    assert count_scripts(SAMPLES[script]).most_common(1)[0][0] == script
    assert set(count_scripts(SAMPLES[script])) - {"Latn"} <= {script}


@given(st.text(alphabet=string.digits + string.punctuation + " \n\u200d…«»§"))
def test_what_is_no_letter_is_in_no_script(text: str) -> None:
    assert not count_scripts(text)


def test_scripts_written_with_the_letters_of_others_are_known_by_them() -> None:
    assert letters_of("Jpan") == {"Hira", "Kana", "Hani"}
    assert letters_of("Hant") == letters_of("Hans") == {"Hani"}
    assert letters_of("Cher") == {"Cher"}


@pytest.fixture(scope="module")
def letters() -> set[str | None]:
    """The scripts of all letters of the first two planes."""
    return {script_of_character(chr(point)) for point in range(0x20000)}


def test_the_letters_of_every_language_of_the_registry_can_be_found(
    letters: set[str | None],
) -> None:
    for code in (code for codes in FAMILIES.values() for code in codes):
        script = usual_script(code)
        assert script is not None
        assert letters_of(script) <= letters


def test_the_letters_of_nearly_every_script_in_use_can_be_found(letters: set[str | None]) -> None:
    usual = {tag.split("_")[1] for tag in get_global("likely_subtags").values()}
    missing = {script for script in usual if not letters_of(script) & letters}
    assert len(missing) < len(usual) / 5, sorted(missing)


def test_a_letter_of_a_script_is_found_anywhere() -> None:
    assert has_letter_of("12 дом house", frozenset({"Latn"}))
    assert not has_letter_of("12 дом", frozenset({"Latn"}))
    assert not has_letter_of("дом", frozenset())
