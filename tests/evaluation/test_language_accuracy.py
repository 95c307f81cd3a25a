"""Languages of lines are those langdetect itself finds, independent of order and file system."""

import pytest
from langdetect import DetectorFactory, detect_langs

from pipeline.errors import ConfigError
from pipeline.evaluation.language_accuracy import LanguageDetector, detectable_languages
from pipeline.languages import PAPER_GROUPS

GERMAN = "Die Kinder spielen heute Nachmittag im Garten hinter dem Haus."
ENGLISH = "The children are playing in the garden behind the house this afternoon."
FRENCH = "Les enfants jouent cet après-midi dans le jardin derrière la maison."


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
