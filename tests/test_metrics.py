"""Scores agree with sacreBLEU and langdetect themselves, and averages with hand calculation."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import sacrebleu
import sacrebleu.tokenizers.tokenizer_spm as sacrebleu_models
from hypothesis import given, settings
from hypothesis import strategies as st
from langdetect import DetectorFactory, detect_langs
from sacrebleu.metrics.bleu import BLEU

from pipeline import metrics
from pipeline.artifacts import Artifact, new_artifact, open_artifact
from pipeline.corpus import Direction, Resource
from pipeline.errors import ConfigError
from pipeline.languages import PAPER_GROUPS
from pipeline.metrics import (
    DirectionProfile,
    LanguageAccuracy,
    LanguageDetector,
    Scores,
    average_scores,
    bleu_tokenizer,
    corpus_bleu,
    corpus_chrf,
    describe_directions,
    detectable_languages,
    find_pivot,
    line_statistics,
    mean_scores,
)

TEXTS = {
    "13a": (
        ["The cat sat on the mat.", "", "It's 5,000 km away!", "He did not go home today."],
        ["The cat is on the mat.", "Not empty.", "It is 5,000 km away!", "He did not go home."],
    ),
    "zh": (["我们明天去北京。", "他 said 你好"], ["我们后天去北京。", "他说你好"]),
    "ja-mecab": (["私は学生です。", "猫が好きだ"], ["彼は学生です。", "犬が好きだ"]),
    "char": (["나는 학교에 간다", "물"], ["나는 집에 간다", "물을 마신다"]),
}

GERMAN = "Die Kinder spielen heute Nachmittag im Garten hinter dem Haus."
ENGLISH = "The children are playing in the garden behind the house this afternoon."
FRENCH = "Les enfants jouent cet après-midi dans le jardin derrière la maison."


def corpus(
    tmp_path: Path, pairs: dict[str, dict[str, int]], *, emptied: Sequence[str] = ()
) -> Artifact:
    with new_artifact(
        tmp_path / "corpus", kind="corpus", stage="clean", config={}, inputs={}
    ) as writer:
        writer.statistics |= {"pairs": pairs, "emptied": list(emptied)}
    return open_artifact(tmp_path / "corpus", kind="corpus")


# BLEU and chrF++


@pytest.mark.parametrize("tokenizer", TEXTS)
def test_scores_from_line_statistics_equal_sacrebleus_corpus_scores(tokenizer: str) -> None:
    hypotheses, references = TEXTS[tokenizer]
    found = line_statistics(hypotheses, references, tokenizer=tokenizer)
    bleu = sacrebleu.corpus_bleu(hypotheses, [references], tokenize=tokenizer)
    chrf = sacrebleu.corpus_chrf(hypotheses, [references], word_order=2)
    assert corpus_bleu(found.bleu) == bleu.score
    assert corpus_chrf(found.chrf) == chrf.score


words = st.lists(st.sampled_from("a cat the dog sat . , 12".split()), max_size=7).map(" ".join)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(words, words), min_size=1, max_size=6), st.data())
def test_any_selection_of_lines_can_be_scored_from_its_statistics(
    pairs: list[tuple[str, str]], data: st.DataObject
) -> None:
    chosen = data.draw(st.lists(st.sampled_from(range(len(pairs))), min_size=1, max_size=8))
    rows = line_statistics([one for one, _ in pairs], [two for _, two in pairs], tokenizer="13a")
    hypotheses = [pairs[line][0] for line in chosen]
    references = [pairs[line][1] for line in chosen]
    expected = sacrebleu.corpus_bleu(hypotheses, [references])
    assert corpus_bleu(rows.bleu[chosen]) == expected.score
    expected_chrf = sacrebleu.corpus_chrf(hypotheses, [references], word_order=2)
    assert corpus_chrf(rows.chrf[chosen]) == pytest.approx(expected_chrf.score, abs=1e-9)


def test_signatures_name_the_tokenizer_and_the_orders_of_chrf() -> None:
    found = line_statistics(["a"], ["a"], tokenizer="zh")
    assert "|tok:zh|" in found.bleu_signature
    assert "|nc:6|nw:2|" in found.chrf_signature


@pytest.mark.parametrize(
    ("language", "tokenizer"),
    [("de", "13a"), ("zh", "zh"), ("zh_Hant", "zh"), ("ja", "ja-mecab"), ("th", "13a")],
)
def test_the_bleu_tokenizer_follows_the_target_language(language: str, tokenizer: str) -> None:
    assert bleu_tokenizer(language, option="per-language") == tokenizer


def test_one_tokenizer_can_be_asked_for_in_all_languages() -> None:
    assert {bleu_tokenizer(code, option="13a") for code in ("de", "zh", "ja", "ko")} == {"13a"}


def test_a_missing_korean_tokenizer_is_replaced_by_characters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class WithoutMecab(BLEU):
        def __init__(self, tokenize: str) -> None:
            if tokenize == "ko-mecab":
                raise RuntimeError("Korean tokenization requires extra dependencies")
            super().__init__(tokenize=tokenize)

    monkeypatch.setattr(metrics, "BLEU", WithoutMecab)
    assert bleu_tokenizer("ko", option="per-language") == "char"


def test_an_unavailable_flores_tokenizer_is_a_config_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(sacrebleu_models, "SACREBLEU_DIR", str(tmp_path))
    monkeypatch.setattr(sacrebleu_models, "download_file", refuse)
    with pytest.raises(ConfigError, match=r"flores200.*no route to host.*bleu_tokenizer"):
        bleu_tokenizer("de", option="flores200")


# Language accuracy


def test_langdetect_misses_44_of_the_papers_95_languages() -> None:
    languages = {code for codes in PAPER_GROUPS.values() for code in codes}
    assert len(languages) == 95
    assert len(languages - detectable_languages()) == 44


@pytest.mark.parametrize("text", [GERMAN, ENGLISH, FRENCH, "Привет, как у вас дела сегодня?"])
def test_detection_agrees_with_langdetects_own_function(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DetectorFactory, "seed", 3)
    assert LanguageDetector(None, seed=3).detect(text) == detect_langs(text)[0].lang


SIMPLIFIED = "这个城市的人口在过去十年里增长了一倍,因为许多年轻人来这里工作和学习。"
TRADITIONAL = "這個城市的人口在過去十年裡增長了一倍,因為許多年輕人來這裡工作和學習。"


@pytest.mark.parametrize(("text", "profile_name"), [(SIMPLIFIED, "zh-cn"), (TRADITIONAL, "zh-tw")])
def test_both_chinese_scripts_count_as_chinese(
    text: str, profile_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DetectorFactory, "seed", 2)
    assert detect_langs(text)[0].lang == profile_name
    assert LanguageDetector(None, seed=2).detect(text) == "zh"
    assert LanguageDetector({"de", "zh"}, seed=1).detect(text) == "zh"


def test_a_restricted_prior_finds_nothing_outside_its_languages() -> None:
    detector = LanguageDetector({"en", "fr"}, seed=1)
    texts = [GERMAN, ENGLISH, FRENCH, "Gisteren ging hij naar huis", "ab", "zzz"]
    assert {detector.detect(text) for text in texts} <= {"en", "fr"}
    assert LanguageDetector(None, seed=1).detect(GERMAN) == "de"


def test_languages_that_langdetect_does_not_know_cannot_be_the_only_candidates() -> None:
    with pytest.raises(ConfigError, match="mg, yi"):
        LanguageDetector({"yi", "mg"}, seed=1)


def test_detection_of_a_line_does_not_depend_on_the_lines_before_it() -> None:
    short = ["no", "Haus", "la casa", "gras", "on", "se", "va bene"]
    forwards = [LanguageDetector(None, seed=5).detect(text) for text in short]
    detector = LanguageDetector(None, seed=5)
    assert [detector.detect(text) for text in reversed(short)] == forwards[::-1]


def test_lines_without_letters_are_in_no_language() -> None:
    detector = LanguageDetector(None, seed=1)
    assert detector.hits(["", "12 – 34", ENGLISH, ENGLISH], language="en").tolist() == [
        False,
        False,
        True,
        True,
    ]


# Directions and averages


@pytest.mark.parametrize(
    ("pairs", "pivot"),
    [
        ({"de-en", "en-fr", "en-zh"}, "en"),
        ({"de-fr", "fr-zh"}, "fr"),
        ({"de-en", "en-fr", "de-fr"}, None),
        ({"de-en"}, "en"),
        ({"de-fr"}, None),
        (set(), None),
    ],
)
def test_the_pivot_is_the_language_of_every_training_pair(
    pairs: set[str], pivot: str | None
) -> None:
    assert find_pivot(pairs) == pivot


def test_directions_are_sorted_into_families_by_the_training_lines_of_their_pair(
    tmp_path: Path,
) -> None:
    pairs = {
        "de-en": {"train": 9, "test": 2},
        "en-fr": {"train": 3, "test": 2},
        "de-fr": {"train": 0, "test": 1},
        "en-yi": {"train": 5},
    }
    profiles = describe_directions(corpus(tmp_path, pairs), thresholds=(3, 9))
    assert {str(one.direction): (one.family, one.resource, one.test_lines) for one in profiles} == {
        "de-en": ("into_pivot", "high", 2),
        "de-fr": ("zero_shot", None, 1),
        "en-de": ("out_of_pivot", "high", 2),
        "en-fr": ("out_of_pivot", "low", 2),
        "fr-de": ("zero_shot", None, 1),
        "fr-en": ("into_pivot", "low", 2),
    }


def test_a_pair_that_lost_its_training_lines_is_no_zero_shot_pair(tmp_path: Path) -> None:
    pairs = {
        "de-en": {"train": 9, "test": 2},
        "de-fr": {"test": 1},
        "en-fr": {"train": 0, "test": 1},
    }
    made = corpus(tmp_path, pairs, emptied=["en-fr"])
    profiles = describe_directions(made, thresholds=(3, 9))
    assert {str(one.direction): one.family for one in profiles} == {
        "de-en": "into_pivot",
        "en-de": "out_of_pivot",
        "de-fr": "zero_shot",
        "fr-de": "zero_shot",
        "en-fr": "no_training_data",
        "fr-en": "no_training_data",
    }
    assert {one.resource for one in profiles if one.family == "no_training_data"} == {None}


def profile(name: str, family: metrics.Family, resource: Resource | None) -> DirectionProfile:
    source, target = name.split("-")
    return DirectionProfile(
        direction=Direction(source, target),
        family=family,
        resource=resource,
        training_lines=1,
        test_lines=1,
    )


def test_averages_weigh_directions_equally_and_skip_undetectable_languages() -> None:
    profiles = [
        profile("en-de", "out_of_pivot", "high"),
        profile("en-fr", "out_of_pivot", "high"),
        profile("en-yi", "out_of_pivot", "low"),
        profile("de-fr", "zero_shot", None),
    ]
    scores = {
        "en-de": Scores(30.0, 50.0, LanguageAccuracy(90.0, 100.0)),
        "en-fr": Scores(20.0, 40.0, LanguageAccuracy(80.0, 96.0)),
        "en-yi": Scores(1.0, 9.0, None),
        "de-fr": Scores(7.0, 8.0, LanguageAccuracy(5.0, 6.0)),
    }
    averages = average_scores(scores, profiles=profiles)
    assert averages == {
        "out_of_pivot": {
            "all": Scores(17.0, 33.0, LanguageAccuracy(85.0, 98.0)),
            "high": Scores(25.0, 45.0, LanguageAccuracy(85.0, 98.0)),
            "low": Scores(1.0, 9.0, None),
        },
        "zero_shot": {"all": scores["de-fr"]},
    }


@given(st.lists(st.floats(0, 100), min_size=1, max_size=20))
def test_the_mean_of_scores_is_numpys_mean(values: list[float]) -> None:
    found = mean_scores([Scores(value, value / 2, None) for value in values])
    assert found.bleu == pytest.approx(float(np.mean(values)))
    assert found.chrf == pytest.approx(float(np.mean(values)) / 2)
