"""Phrases from CLDR: what they say, and that held-out ones share nothing with training."""

import hashlib
import os
import re
import subprocess
import sys
import unicodedata
from itertools import combinations
from random import Random

import pytest

from data_prep.readers.cldr import (
    CURRENCIES,
    TEMPLATES,
    UNITS,
    Clause,
    Part,
    PhraseSplits,
    check_languages,
    draw_clause,
    format_clause,
    format_part,
    held_out_clauses,
    is_reserved,
    make_phrases,
    training_clauses,
)
from data_prep.settings import CldrConfig
from pipeline.errors import ConfigError

LANGUAGES = "ar de el fr he hi ja ko ru tr uk zh".split()
CONFIG = CldrConfig(
    train_pairs=dict.fromkeys(LANGUAGES, 400), zero_shot=("de", "fr"), test_phrases=300
)
HOURS_AGO = Part("relative_time", ("hour",), (-3,))


@pytest.fixture(scope="module")
def training() -> list[Clause]:
    config = CldrConfig(train_pairs={"de": 15_000})
    return training_clauses(config, language="de")


@pytest.fixture(scope="module")
def phrases() -> PhraseSplits:
    return make_phrases(CONFIG)


@pytest.fixture(scope="module")
def held_out() -> list[Clause]:
    return held_out_clauses(CldrConfig(valid_phrases=500, test_phrases=1000))


def parts_of(clauses: list[Clause]) -> set[Part]:
    return {part for clause in clauses for part in clause.parts}


def combinations_of(clauses: list[Clause]) -> set[tuple[str, ...]]:
    return {
        tuple(sorted((first.template, second.template)))
        for clause in clauses
        for first, second in combinations(clause.parts, 2)
    }


def words(text: str) -> set[str]:
    return set(re.findall(r"[^\W\d]+", text))


@pytest.mark.parametrize(
    ("language", "text"),
    [
        *(("en", "3 hours ago"), ("de", "vor 3 Stunden"), ("ru", "3 часа назад")),
        *(("zh", "3小时前"), ("he", "לפני 3 שעות")),
    ],
)
def test_a_single_value_is_said_as_in_that_language(language: str, text: str) -> None:
    assert format_clause(Clause((HOURS_AGO,), ()), language) == text


@pytest.mark.parametrize(
    ("number", "text"), [(1, "1 километр"), (3, "3 километра"), (5, "5 километров")]
)
def test_nouns_take_the_plural_form_of_their_number(number: int, text: str) -> None:
    part = Part("long_quantity", ("length-kilometer",), (number,))
    assert format_clause(Clause((part,), ()), "ru") == text


def test_parts_are_joined_in_order_with_the_punctuation_of_the_script() -> None:
    parts = (Part("countries", ("DE", "FR"), ()), HOURS_AGO, Part("percent", (), (375,)))
    clause = Clause(parts, ("colon", "brackets"))
    assert format_clause(clause, "en") == "Germany and France: 3 hours ago (37.5%)"
    assert format_clause(clause, "fr") == "Allemagne et France: il y a 3 heures (37,5 %)"
    assert format_clause(clause, "zh") == "德国和法国：3小时前（37.5%）"


def test_names_that_are_held_out_together_stand_in_no_training_list(
    training: list[Clause], held_out: list[Clause]
) -> None:
    lists = {frozenset(part.names) for part in parts_of(training) if len(part.names) > 1}
    asked = {frozenset(part.names) for part in parts_of(held_out) if len(part.names) == 2}
    assert len(asked) > 100
    assert not any(pair <= listed for pair in asked for listed in lists)


def test_held_out_phrases_share_no_combination_of_templates_with_training(
    training: list[Clause], held_out: list[Clause]
) -> None:
    seen = combinations_of(training)
    assert len(seen) == 15 * 16 // 2 - 24
    for clause in held_out:
        assert not combinations_of([clause]) <= seen


@pytest.mark.parametrize("language", ["en", *LANGUAGES])
def test_no_text_of_a_held_out_value_is_in_training_and_all_of_its_words_are(
    language: str, training: list[Clause], held_out: list[Clause]
) -> None:
    seen, asked = (
        {format_part(part, language) for part in parts_of(clauses)}
        for clauses in (training, held_out)
    )
    assert seen.isdisjoint(asked)
    if language in ("en", "de", "ru"):
        assert words(" ".join(asked)) <= words(" ".join(seen))


def test_all_templates_units_and_currencies_occur_in_training_and_held_out(
    training: list[Clause], held_out: list[Clause]
) -> None:
    for clauses in (training, held_out):
        parts = parts_of(clauses)
        names = {name for part in parts for name in part.names}
        assert {part.template for part in parts} == set(TEMPLATES)
        assert names >= {*UNITS, *CURRENCIES}


def test_about_a_fifth_of_the_values_are_reserved_and_never_one_or_two() -> None:
    for unit in UNITS:
        assert not is_reserved(Part("long_quantity", (unit,), (1,)))
        assert not is_reserved(Part("short_quantity", (unit,), (2,)))
    days = [Part("full_date", (), (year, 6, day)) for year in range(30) for day in range(1, 31)]
    assert 0.15 < sum(map(is_reserved, days)) / len(days) < 0.25


def test_about_a_quarter_of_training_phrases_are_a_single_value(training: list[Clause]) -> None:
    singles = sum(len(clause.parts) == 1 for clause in training)
    assert 0.2 < singles / len(training) < 0.3


def test_phrases_are_clean_lines_in_every_language(phrases: PhraseSplits) -> None:
    kept = {"\u200c", "\u200d"}
    listed = [*phrases.valid, *phrases.test, *(p for of in phrases.train.values() for p in of)]
    for text in (text for phrase in listed for text in phrase.values()):
        assert text == text.strip()
        assert "  " not in text
        for character in set(text) - kept - {" "}:
            assert unicodedata.category(character) not in ("Cc", "Cf", "Zs", "Zl", "Zp")


def test_each_split_has_the_languages_and_sizes_asked_for(phrases: PhraseSplits) -> None:
    assert (len(phrases.valid), len(phrases.test)) == (100, 300)
    assert all(set(phrase) == {"en", *LANGUAGES} for phrase in phrases.valid + phrases.test)
    for code in LANGUAGES:
        assert len(phrases.train[code]) == 400
        assert all(set(phrase) == {"en", code} for phrase in phrases.train[code])


def test_each_pair_draws_its_own_training_phrases(phrases: PhraseSplits) -> None:
    german, french = ({phrase["en"] for phrase in phrases.train[code]} for code in ("de", "fr"))
    assert len(german & french) < 0.2 * len(german)


def test_pairs_of_the_same_phrases_have_equal_lines_in_the_pivot() -> None:
    sizes = {"de": 300, "fr": 300, "uk": 40}
    train = make_phrases(CldrConfig(train_pairs=sizes, same_phrases=True)).train
    english = {code: [phrase["en"] for phrase in phrases] for code, phrases in train.items()}
    assert english["fr"] == english["de"]
    assert english["uk"] == english["de"][:40]


def test_held_out_phrases_do_not_depend_on_the_other_languages(phrases: PhraseSplits) -> None:
    alone = make_phrases(CldrConfig(train_pairs={"tr": 10}, test_phrases=300))
    assert [phrase["tr"] for phrase in alone.test] == [phrase["tr"] for phrase in phrases.test]


def test_the_phrases_are_the_same_in_every_process() -> None:
    program = (
        "import hashlib; from data_prep.readers.cldr import make_phrases; "
        "from data_prep.settings import CldrConfig; "
        "phrases = make_phrases(CldrConfig(train_pairs={'de': 200, 'ja': 50})); "
        "print(hashlib.sha256(repr(phrases).encode()).hexdigest())"
    )
    config = CldrConfig(train_pairs={"de": 200, "ja": 50})
    expected = hashlib.sha256(repr(make_phrases(config)).encode()).hexdigest()
    other = {
        **os.environ,
        "PYTHONHASHSEED": "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1",
    }
    command = [sys.executable, "-c", program]
    found = subprocess.run(command, env=other, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == expected


def test_a_drawn_clause_obeys_its_side_of_the_split() -> None:
    random = Random("clauses")
    for held_out in (False, True):
        for _ in range(300):
            clause = draw_clause(random, held_out=held_out)
            assert len(clause.joints) == len(clause.parts) - 1
            assert all(is_reserved(part) is held_out for part in clause.parts)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (CldrConfig(), "train_pairs is empty"),
        (CldrConfig(train_pairs={"qx": 5}), "no locale for 'qx'"),
        (CldrConfig(train_pairs={"en": 5}), "the pivot 'en'"),
        (CldrConfig(train_pairs={"he": 5, "iw": 5}), "one language twice"),
        (CldrConfig(train_pairs={"de": 5}, zero_shot=("de", "fr")), "names fr"),
        (CldrConfig(train_pairs={"ilo": 5}), "no locale for 'ilo'"),
    ],
)
def test_settings_that_cannot_be_met_are_refused(settings: CldrConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_languages(settings)


@pytest.mark.parametrize(
    ("spelling", "code", "text"),
    [
        *(("zh_Hant", "zh_Hant", "3 小時前（37.5%）"), ("zho-CN", "zh", "3小时前（37.5%）")),
        *(("sr_Latn", "sr_Latn", "pre 3 sata (37,5%)"), ("srp_Cyrl", "sr", "пре 3 сата (37,5%)")),
        *(("de_CH", "de_CH", "vor 3 Stunden (37.5%)"), ("de_DE", "de", "vor 3 Stunden (37,5 %)")),
    ],
)
def test_phrases_are_in_the_script_and_region_asked_for(
    spelling: str, code: str, text: str
) -> None:
    config = check_languages(CldrConfig(train_pairs={spelling: 5}, zero_shot=(spelling, code)))
    assert (config.train_pairs, config.zero_shot) == ({code: 5}, (code,))
    assert make_phrases(config).train.keys() == {code}
    clause = Clause((HOURS_AGO, Part("percent", (), (375,))), ("brackets",))
    assert format_clause(clause, code) == text


def test_a_language_that_lacks_a_name_in_cldr_is_refused() -> None:
    with pytest.raises(ConfigError, match="no currencies EUR for 'vo'"):
        format_part(Part("currencies", ("EUR",), ()), "vo")
