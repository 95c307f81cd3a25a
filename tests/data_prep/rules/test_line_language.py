"""Language identification as a rule: who is asked, what is dropped, and what never is."""

import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest
from langdetect import DetectorFactory, detect
from langdetect.lang_detect_exception import LangDetectException

from data_prep.rules.line_language import FastText, LanguageRule, line_identifier
from data_prep.settings import CleanConfig
from pipeline.errors import ConfigError

GERMAN = "Der Rat der Gemeinde hat gestern beschlossen, die Schule neu zu bauen."
ENGLISH = "The council of the community decided yesterday to build the school anew."
FRENCH = "Le conseil de la commune a décidé hier de reconstruire toute l'école."


def test_languages_are_not_identified_unless_asked_for() -> None:
    assert line_identifier(CleanConfig()) is None


def test_langdetect_is_asked_and_lines_it_places_elsewhere_are_dropped() -> None:
    identifier = line_identifier(CleanConfig(identify_languages="langdetect"))
    assert identifier is not None
    rule = LanguageRule(identifier, ("de", "en"), min_characters=40)
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


def test_short_lines_and_lines_without_letters_stay() -> None:
    identifier = line_identifier(CleanConfig(identify_languages="langdetect"))
    assert identifier is not None
    rule = LanguageRule(identifier, ("de", "en"), min_characters=40)
    line = (ENGLISH[:39], "12 34 56 – 78 90, 12 34 56 78 90; 12 34 56 78 90")
    assert rule.wrong_sides([line]) == [(False, False)]
    assert LanguageRule(identifier, ("de", "en"), min_characters=39).wrong_sides([line]) == [
        (True, False)
    ]


def test_a_language_that_nobody_can_tell_is_never_dropped_and_counted() -> None:
    identifier = line_identifier(CleanConfig(identify_languages="langdetect"))
    assert identifier is not None
    rule = LanguageRule(identifier, ("chr", "en"), min_characters=10)
    assert rule.wrong_sides([(FRENCH, ENGLISH), (GERMAN, GERMAN)]) == [
        (False, False),
        (False, True),
    ]
    assert rule.not_known == {"chr": 2}


class FakeModel:
    """Answers like fastText's ``predict`` for a list of lines."""

    def get_labels(self) -> list[str]:
        return ["__label__deu_Latn", "__label__eng_Latn", "__label__zho_Hant", "__label__?!"]

    def predict(self, texts: list[str], k: int) -> tuple[list[list[str]], list[list[float]]]:
        assert type(texts) is list
        assert k == 1
        assert not any("\n" in text for text in texts)
        answers = {"sure": ("__label__deu_Latn", 0.9), "unsure": ("__label__deu_Latn", 0.4)}
        answers |= {"chinese": ("__label__zho_Hant", 1.0), "odd": ("__label__?!", 0.99)}
        found = [answers[text.split()[0]] for text in texts]
        return [[label] for label, _ in found], [[share] for _, share in found]


@pytest.fixture
def fasttext(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CleanConfig:
    module = ModuleType("fasttext")

    def load_model(path: str) -> FakeModel:
        if Path(path).read_bytes() != b"model":
            raise ValueError(f"{path} has wrong file format!")
        return FakeModel()

    module.load_model = load_model  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fasttext", module)
    path = tmp_path / "lid.bin"
    path.write_bytes(b"model")
    return CleanConfig(identify_languages="fasttext", language_model=str(path))


def test_labels_of_fasttext_and_glotlid_are_our_codes_and_uncertain_ones_count_for_nothing(
    fasttext: CleanConfig,
) -> None:
    identifier = line_identifier(fasttext)
    assert isinstance(identifier, FastText)
    assert identifier.known == {"de", "en", "zh"}
    assert identifier.identify(["sure x", "unsure x", "chinese x", "odd x"]) == [
        "de",
        None,
        "zh",
        None,
    ]
    rule = LanguageRule(identifier, ("en", "zh_Hant"), min_characters=1)
    assert rule.wrong_sides([("sure a", "chinese b"), ("unsure a", "sure b")]) == [
        (True, False),
        (False, True),
    ]


def broken_settings(fasttext: CleanConfig, problem: str, tmp_path: Path) -> CleanConfig:
    path = tmp_path / "other.bin"
    path.write_bytes(b"no model")
    paths = {"no file": tmp_path / "none.bin", "a folder": tmp_path, "no model": path}
    return fasttext.model_copy(update={"language_model": str(paths[problem])})


@pytest.mark.parametrize(
    ("problem", "said"),
    [("no file", "is not a file"), ("a folder", "not a file"), ("no model", "wrong file format")],
)
def test_a_model_that_cannot_be_read_is_refused_in_a_sentence(
    fasttext: CleanConfig, tmp_path: Path, problem: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        line_identifier(broken_settings(fasttext, problem, tmp_path))


def test_fasttext_that_is_not_installed_is_said(
    fasttext: CleanConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "fasttext", None)
    with pytest.raises(ConfigError, match="which is not installed"):
        line_identifier(fasttext)


def test_nothing_is_asked_of_a_block_without_lines() -> None:
    class Silent:
        known = frozenset({"de", "en"})

        def identify(self, texts: Sequence[str]) -> list[str | None]:
            raise AssertionError(texts)

    assert LanguageRule(Silent(), ("de", "en"), min_characters=1).wrong_sides([]) == []
    assert LanguageRule(Silent(), ("de", "en"), min_characters=9).wrong_sides([("a", "b")]) == [
        (False, False)
    ]
