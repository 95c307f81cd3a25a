"""Rules of clean: medians as numpy's, repeats as a set finds them, and languages of lines."""

import random
import tracemalloc
from pathlib import Path
from tempfile import TemporaryFile

import fasttext
import numpy as np
import pytest
from langdetect import DetectorFactory, detect
from langdetect.lang_detect_exception import LangDetectException

from data_prep import pair_rules as module
from data_prep.pair_rules import (
    Duplicates,
    LanguageRule,
    LengthRatios,
    LineDigests,
    line_identifier,
)
from data_prep.settings import CleanConfig
from pipeline.errors import ConfigError
from pipeline.languages import written_script


def median(lines: list[tuple[str, str]]) -> float:
    ratios = LengthRatios()
    for first in range(0, len(lines), 7):
        ratios.add(lines[first : first + 7])
    return ratios.median()


def test_lines_with_an_empty_side_do_not_count_and_the_median_of_none_is_1() -> None:
    assert median([("ab", "a"), ("abc", "a"), ("aaaaaaaa", "a"), ("", "a"), ("a", "")]) == 3.0
    assert median([]) == median([("", "a")]) == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("counted", [1, 5, 100])
@pytest.mark.parametrize("number", [1, 2, 30, 31])
def test_the_median_is_numpys_whether_lengths_are_counted_or_kept(
    number: int, counted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "COUNTED", counted)
    draw = random.Random(f"{number} {counted}")
    lines = [("x" * draw.randint(1, 9), "y" * draw.randint(1, 9)) for _ in range(number)]
    assert median(lines) == np.median([len(one) / len(other) for one, other in lines])


def duplicates_of(lines: list[tuple[str, str]]) -> Duplicates:
    with TemporaryFile() as file:
        digests = LineDigests(file)
        for first in range(0, len(lines), 10):
            digests.add(["\n".join(line) for line in lines[first : first + 10]])
        return digests.duplicates()


@pytest.mark.parametrize("part", [1, 3, 10, 1000])
@pytest.mark.parametrize("kinds", [1, 5, 40, 10_000])
def test_a_line_repeats_those_that_were_asked_for_before_it(
    kinds: int, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PART", part)
    draw = random.Random(f"{kinds} {part}")
    lines = [(str(draw.randrange(kinds)), str(draw.randrange(2))) for _ in range(100)]
    asked = [number for number in range(100) if draw.random() < 0.7]  # others break a rule
    seen: set[tuple[str, str]] = set()
    duplicates = duplicates_of(lines)
    for number in asked:
        assert duplicates.is_repeated(number) == (lines[number] in seen)
        seen.add(lines[number])


def test_sides_are_told_apart() -> None:
    duplicates_of([])
    duplicates = duplicates_of([("a", "b c"), ("a b", "c"), ("b c", "a"), ("a", "b c")])
    assert [duplicates.is_repeated(number) for number in range(4)] == [False, False, False, True]


def test_lines_that_are_never_repeated_take_a_byte_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PART", 1000)
    lines = 50_000
    tracemalloc.start()
    try:
        with TemporaryFile() as file:
            digests = LineDigests(file)
            for number in range(lines):
                digests.add([f"line {number}"])
            duplicates = digests.duplicates()
        assert not any(duplicates.is_repeated(number) for number in range(lines))
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 1.1 * lines + 50_000
    assert peak < 1.1 * lines + 400_000


GERMAN = "Der Rat der Gemeinde hat gestern beschlossen, die Schule neu zu bauen."
ENGLISH = "The council of the community decided yesterday to build the school anew."
FRENCH = "Le conseil de la commune a décidé hier de reconstruire toute l'école."
TRADITIONAL = (
    "委員會昨天決定重新修建那座在地震中倒塌的學校,並且邀請了附近的居民參加討論與投票表決。",
    "政府宣布將於明年起調高最低工資,並要求各地的企業主在三個月之內提出新的勞動契約與說明。",
    "研究人員在實驗室裡觀察了數百種植物的生長,發現陽光與水分的變化會影響葉片的顏色和厚度。",
    "這場比賽吸引了超過三萬名觀眾前往體育館,主隊在最後一分鐘攻進致勝的一球並取得冠軍獎盃。",
    "醫生建議老年人每天散步三十分鐘,少吃鹽與油炸的食物,並且定期到醫院檢查血壓以及視力狀況。",
    "圖書館的開放時間從本週起延長到晚上十點鐘,讀者可以在閱覽室裡借閱最新的雜誌與報紙資料。",
)


def rule_for(
    languages: tuple[str, str], settings: CleanConfig | None = None, *, min_characters: int = 40
) -> LanguageRule:
    identifier = line_identifier(settings or CleanConfig(identify_languages="langdetect"))
    assert identifier is not None
    scripts = written_script(languages[0]), written_script(languages[1])
    return LanguageRule(identifier, languages, scripts, min_characters)


def test_languages_are_not_identified_unless_asked_for() -> None:
    assert line_identifier(CleanConfig()) is None


def test_lines_that_both_identifiers_place_elsewhere_are_dropped() -> None:
    rule = rule_for(("de", "en"))
    lines = [(GERMAN, ENGLISH), (ENGLISH, ENGLISH), (GERMAN, FRENCH), (FRENCH, GERMAN)]
    expected = [(False, False), (True, False), (False, True), (True, True)]
    assert rule.wrong_sides(lines) == expected
    for (first, second), sides in zip(lines, expected, strict=True):
        assert (plainly(first) != "de", plainly(second) != "en") == sides
    assert rule.not_known == {}


def plainly(text: str) -> str | None:
    DetectorFactory.seed = 1
    try:
        return str(detect(text))
    except LangDetectException:
        return None


@pytest.mark.parametrize(
    ("language", "text", "confused_with"),
    [
        *(("zh_Hant", text, "ko") for text in TRADITIONAL),
        ("en", "ALL PASSENGERS MUST LEAVE THE TRAIN AT THE NEXT STATION PLEASE", "vi"),
        ("fr", "TOUS LES VOYAGEURS DOIVENT DESCENDRE DU TRAIN À LA PROCHAINE GARE.", "de"),
        ("sv", "ALLA RESENÄRER MÅSTE LÄMNA TÅGET VID NÄSTA STATION OCH TA BUSSEN.", "en"),
        ("nl", "Download Mozilla Firefox, Thunderbird en LibreOffice voor Windows.", "en"),
    ],
)
def test_a_confusion_of_langdetect_drops_no_line(
    language: str, text: str, confused_with: str
) -> None:
    assert plainly(text) == confused_with
    assert rule_for((language, "de")).wrong_sides([(text, GERMAN)]) == [(False, False)]


MALAY = "Sila pilih fail yang hendak dibuka dan tekan butang untuk meneruskan."


def test_a_language_that_only_lid176_knows_is_not_taken_for_a_near_one() -> None:
    rule = rule_for(("ms", "en"))
    lines = [(MALAY, ENGLISH), (GERMAN, ENGLISH)]
    assert rule.wrong_sides(lines) == [(False, False), (True, False)]


@pytest.mark.parametrize("language", ["ko", "ja", "el", "th", "yi"])
@pytest.mark.parametrize("text", [TRADITIONAL[0], ENGLISH])
def test_a_text_without_a_letter_of_its_script_is_dropped(language: str, text: str) -> None:
    assert rule_for((language, "de")).wrong_sides([(text, GERMAN)]) == [(True, False)]


def test_the_script_of_the_corpus_counts() -> None:
    serbian = "Savet zajednice je juče odlučio da ponovo sagradi školu u našem selu."
    rule = rule_for(("sr_Latn", "de"))
    assert rule.wrong_sides([(serbian, GERMAN)]) == [(False, False)]


def test_short_lines_and_lines_without_letters_stay() -> None:
    assert rule_for(("de", "en")).wrong_sides([]) == []
    line = (ENGLISH[:39], "12 34 56 – 78 90, 12 34 56 78 90; 12 34 56 78 90")
    assert rule_for(("de", "en")).wrong_sides([line]) == [(False, False)]
    assert rule_for(("de", "en"), min_characters=39).wrong_sides([line]) == [(True, False)]


def test_a_language_that_nobody_can_tell_is_never_dropped_and_counted() -> None:
    rule = rule_for(("chr", "en"), min_characters=10)
    assert rule.wrong_sides([(FRENCH, ENGLISH), (GERMAN, GERMAN)]) == [
        (False, False),
        (False, True),
    ]
    assert rule.not_known == {"chr": 2}


class FakeModel:
    """Answers like fastText's ``predict`` for a line."""

    def predict(
        self, text: str, k: int, threshold: float
    ) -> tuple[tuple[str, ...], tuple[float, ...]]:
        assert "\n" not in text
        answers = {
            "sure": {"deu_Latn": 0.9, "eng_Latn": 0.1},
            "unsure": {"deu_Latn": 0.4, "eng_Latn": 0.3, "fra_Latn": 0.3},
            "parts": {"deu_Latn": 0.4, "zho_Hans": 0.35, "zho_Hant": 0.25},
            "near": {"deu_Latn": 0.9, "als": 0.1},
            "far": {"deu_Latn": 0.9, "eng_Latn": 0.09},
            "這個城市的人口在過去十年裡增長了一倍": {"deu_Latn": 0.9},
            "odd": {"?!": 0.99, "als_Latn": 0.01},
        }
        labels = [*dict.fromkeys(label for shares in answers.values() for label in shares)]
        shares = answers.get(text.split()[0] if text else "", dict.fromkeys(labels, 0.0))
        found = sorted(((p, label) for label, p in shares.items() if p >= threshold), reverse=True)
        return tuple(f"__label__{label}" for _, label in found[:k]), tuple(p for p, _ in found[:k])


@pytest.fixture
def custom(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CleanConfig:
    def load_model(path: str) -> FakeModel:
        if Path(path).read_bytes() != b"model":
            raise ValueError(f"{path} has wrong file format!")
        return FakeModel()

    monkeypatch.setattr(fasttext, "load_model", load_model)
    path = tmp_path / "lid.bin"
    path.write_bytes(b"model")
    return CleanConfig(identify_languages=str(path))


def test_labels_of_lid176_and_glotlid_are_our_codes(custom: CleanConfig) -> None:
    identifier = line_identifier(custom)
    assert identifier is not None
    assert identifier.known == {"de", "en", "fr", "zh", "gsw", "sq"}, "als is Alemannic in lid.176"


@pytest.mark.parametrize(
    ("language", "text", "is_dropped"),
    [
        ("en", f"sure {GERMAN}", True),
        ("en", f"sure {ENGLISH}", False),  # langdetect contradicts
        ("en", f"unsure {GERMAN}", False),
        ("en", "這個城市的人口在過去十年裡增長了一倍", False),  # German has no such letters
        ("zh", "parts 這個城市的人口在過去十年裡增長了一倍", False),  # its two scripts add up
        ("zh", f"sure {GERMAN}", True),
        ("gsw", f"near {GERMAN}", False),  # langdetect knows no Alemannic, the model doubts
        ("gsw", f"far {GERMAN}", True),
        ("gsw", f"far {ENGLISH}", False),  # they find different languages
        ("de", f"odd {ENGLISH}", False),
    ],
)
def test_a_model_of_the_user_needs_the_same_support(
    custom: CleanConfig, language: str, text: str, is_dropped: bool
) -> None:
    rule = rule_for((language, "ar"), custom, min_characters=1)
    assert rule.wrong_sides([(text, "نص")]) == [(is_dropped, False)]
    assert rule.not_known == {"ar": 1}


@pytest.mark.parametrize(
    ("name", "said"),
    [("none.bin", "is not a file"), (".", "not a file"), ("other.bin", "wrong file format")],
)
def test_a_model_that_cannot_be_read_is_refused_in_a_sentence(
    custom: CleanConfig, tmp_path: Path, name: str, said: str
) -> None:
    (tmp_path / "other.bin").write_bytes(b"no model")
    with pytest.raises(ConfigError, match=said):
        line_identifier(custom.model_copy(update={"identify_languages": str(tmp_path / name)}))
