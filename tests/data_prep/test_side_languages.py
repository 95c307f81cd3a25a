"""Whether sides are in their languages: real text the right way round, and exchanged."""

import gzip
from collections import Counter
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from data_prep.side_languages import (
    SAMPLE_LINES,
    EvenSample,
    are_swapped,
    code_warning,
    script_of_language,
)
from pipeline.languages import count_scripts

BIBLE = Path(__file__).parents[3] / "shared" / "data" / "bible"
needs_bible = pytest.mark.skipif(
    not BIBLE.is_dir(), reason="the Bible corpus is not beside the repository"
)

GERMAN = "Die Kinder spielen heute Nachmittag im Garten hinter dem Haus und lachen."
ENGLISH = "The children are playing in the garden behind the house this afternoon."
DANISH = "Børnene leger i haven bag huset i eftermiddag, og de griner hele tiden."
RUSSIAN = "Дети играют сегодня после обеда в саду за домом и смеются."
CHEROKEE = "ᎾᏍᎩᏃ ᎾᏍᏉ ᎢᎦᏛ ᎤᏂᎪᏓ ᎠᏂᏴᏫ"


def sample_of(first: str, second: str, *, lines: int = 12) -> EvenSample:
    sample = EvenSample()
    for number in range(lines):
        sample.offer([f"{first} {number}"], [f"{second} {number}"])
    return sample


@given(st.integers(0, 5000))
def test_a_sample_is_spread_evenly_over_all_lines(count: int) -> None:
    sample = EvenSample()
    for number in range(count):
        sample.offer([str(number)], [str(-number)])
    taken = [int(line) for line in sample.side(0)]
    assert taken == list(range(0, count, sample.stride))
    assert len(taken) <= SAMPLE_LINES
    assert len(taken) >= min(count, SAMPLE_LINES // 2)
    assert [int(line) for line in sample.side(1)] == [-number for number in taken]


@given(st.lists(st.integers(0, 700), max_size=12))
@example([127, 1])
def test_a_sample_does_not_depend_on_how_lines_are_offered(counts: list[int]) -> None:
    alone, together = EvenSample(), EvenSample()
    for count in counts:
        lines = [str(number) for number in range(count)]
        together.offer(lines, lines[::-1])
        for line, other in zip(lines, lines[::-1], strict=True):
            alone.offer([line], [other])
    assert together == alone


@pytest.mark.parametrize(
    ("codes", "first", "second"),
    [
        (("de", "en"), GERMAN, ENGLISH),
        (("deu_Latn", "eng_Latn"), GERMAN, ENGLISH),
        (("da", "de"), DANISH, GERMAN),
        (("en", "ru"), ENGLISH, RUSSIAN),
        (("chr", "en"), CHEROKEE, ENGLISH),
    ],
)
def test_exchanged_files_are_told_from_those_in_order(
    codes: tuple[str, str], first: str, second: str
) -> None:
    assert not are_swapped(sample_of(first, second), codes)
    assert are_swapped(sample_of(second, first), codes)


@pytest.mark.parametrize(
    ("codes", "first", "second"),
    [
        (("de", "en"), ENGLISH, ENGLISH),  # copied, not exchanged
        (("de", "en"), DANISH, DANISH),  # a third language
        (("de", "lb"), ENGLISH, GERMAN),  # langdetect knows no Luxembourgish
        (("de", "en"), "word", "Wort"),  # too short to tell
        (("en", "ru"), "word", "слово"),
        (("sr_Cyrl", "sr_Latn"), RUSSIAN, RUSSIAN),
        (("en", "srp_Latn"), ENGLISH, "Deca se igraju u vrtu iza kuće i smeju se."),
    ],
)
def test_what_cannot_be_told_is_not_called_exchanged(
    codes: tuple[str, str], first: str, second: str
) -> None:
    assert not are_swapped(sample_of(first, second), codes)


def test_a_few_exchanged_lines_do_not_make_an_exchanged_file() -> None:
    sample = sample_of(GERMAN, ENGLISH, lines=30)
    for _ in range(12):
        sample.offer([ENGLISH], [GERMAN])
    assert not are_swapped(sample, ("de", "en"))


@pytest.mark.slow
@needs_bible
def test_no_real_pair_is_taken_for_exchanged_and_each_exchanged_one_is_found() -> None:
    codes = ("cs", "da", "de", "es", "fi", "nl", "pl", "ru", "sv", "zh")
    texts = {}
    for code in codes:
        with gzip.open(BIBLE / f"en-{code}" / f"test.{code}.gz", "rt", encoding="utf-8") as stream:
            texts[code] = stream.read().splitlines()
    for first, second in combinations(codes, 2):
        sample = EvenSample()
        for one, other in zip(texts[first], texts[second], strict=True):
            sample.offer([one], [other])
        assert not are_swapped(sample, (first, second)), (first, second)
        assert are_swapped(sample, (second, first)), (second, first)


# Codes and scripts


def warning(text: str, *spellings: str) -> str | None:
    return code_warning(count_scripts(text * 3), spellings)


@pytest.mark.parametrize(
    ("text", "spelling"),
    [
        (GERMAN, "de"),
        (CHEROKEE, "chr"),
        (RUSSIAN, "sr"),
        (GERMAN, "srp_Latn"),  # the script it names
        ("short", "ru"),  # too little text
        ("日本語です" * 9, "ja"),
        (CHEROKEE, "xyz"),  # nobody knows it, and nothing near is written so
        ("", "ru"),
    ],
)
def test_a_code_whose_text_is_in_its_script_gives_no_warning(text: str, spelling: str) -> None:
    assert spelling == "xyz" or warning(text, spelling) is None


def test_an_unknown_code_near_a_known_one_of_its_script_asks_what_was_meant() -> None:
    found = warning(RUSSIAN, "rux")
    assert found == "rux is the code of no known language (meant: ru, rue?)"
    assert warning(CHEROKEE, "xyz") == "xyz is the code of no known language"


def test_a_known_code_with_text_of_another_script_is_named_with_both() -> None:
    found = warning(RUSSIAN, "de")
    assert found is not None
    assert found.startswith("de has Cyrl text, usual is Latn (meant: be")


def test_the_script_is_the_usual_one_where_the_text_has_its_letters_else_that_of_the_text() -> None:
    japanese = Counter({"Hira": 5, "Hani": 4})
    assert script_of_language(japanese, ["jpn_Jpan"]) == "Jpan"
    assert script_of_language(Counter({"Latn": 5}), ["sr"]) == "Latn"
    assert script_of_language(Counter({"Cher": 5}), ["xyz"]) == "Cher"
    assert script_of_language(Counter(), ["ru"]) == "Cyrl"
    assert script_of_language(Counter(), ["xyz"]) is None
