"""Words of languages without spaces: where they begin, who finds them, what is refused."""

import json
import pickle
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.corpora import bytes_of
from support.pieces import train_pieces

from data_prep.settings import TokenizerConfig
from pipeline.artifacts.segmenters import Segmenters, characters, punctuation, segmenter_records
from pipeline.artifacts.tokenizer import (
    Tokenizer,
    TokenizerDescription,
    TokenizerFiles,
    load_tokenizer,
)
from pipeline.artifacts.vocabularies import SPECIALS
from pipeline.errors import ArtifactError, ConfigError

LANGUAGES = ("de", "ja", "th", "zh")
PAIRS_OF_LETTERS = """
from __future__ import annotations
from dataclasses import dataclass

@dataclass
class Word:
    text: str

def pairs(text):
    return [text[i:i + 2] for i in range(0, len(text), 2)]

def shouted(text):
    return [text.upper()]

def joined(text):
    return text

def broken(text):
    raise ValueError("two\\nlines")
"""


def character_model(*, byte_fallback: bool = False) -> bytes:
    settings: dict[str, Any] = {f"{name}_id": number for name, number in SPECIALS.items()}
    settings |= {"model_type": "char", "normalization_rule_name": "identity"}
    lines = ["abcd ef", "猫は魚を食べる"] * 5
    return train_pieces(lines, size=300, byte_fallback=byte_fallback, **settings)


MODELS = {
    "bytes": None,
    "characters": character_model(),
    "characters, else bytes": character_model(byte_fallback=True),
}


def described(named: Mapping[str, str], kind: str = "bytes") -> TokenizerDescription:
    changes = {"kind": kind, "segmenters": segmenter_records(named, LANGUAGES)}
    return bytes_of(LANGUAGES).model_copy(update=changes)


def tokenizer_with(named: Mapping[str, str], model: bytes | None = None) -> Tokenizer:
    return TokenizerFiles(described(named, "sentencepiece" if model else "bytes"), model).build()


def words_of(segmenters: Segmenters, tokenizer: Tokenizer, language: str, line: str) -> list[str]:
    """The texts of the tokens from one beginning to the next; white space belongs to none."""
    (begins,) = segmenters.begins(language, [line])
    ids = tokenizer.encode(line)
    assert len(begins) == len(ids)
    words: list[list[int]] = []
    for index, is_begin in zip(ids, begins, strict=True):
        if is_begin:
            words.append([])
        words[-1].append(index)
    texts = [tokenizer.decode(word).strip() for word in words]
    return [text for text in texts if text]


@pytest.fixture
def function_file(tmp_path: Path) -> Path:
    path = tmp_path / "words of mine.py"
    path.write_text(PAIRS_OF_LETTERS, encoding="utf-8")
    return path


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(
    ("language", "line", "expected"),
    [
        ("zh", "猫は魚 を", ["猫", "は", "魚", "を"]),
        ("zh", "", []),
        ("zh", "  ", []),
        ("th", "abcde  f\u3000gh", ["ab", "cd", "e", "f", "gh"]),
        ("ja", "猫は魚を食べる。", ["猫", "は", "魚", "を", "食べる", "。"]),
        ("ja", "猫は 魚を\t食べる", ["猫", "は", "魚", "を", "食べる"]),
    ],
)
def test_tokens_from_one_beginning_to_the_next_are_a_word(
    kind: str, language: str, line: str, expected: list[str], function_file: Path
) -> None:
    if kind == "characters":  # what it lacks is one unknown token
        line, expected = line.replace("。", ""), [word for word in expected if word != "。"]
        line, expected = line.replace("gh", "f"), [word.replace("gh", "f") for word in expected]
        line = line.replace("\u3000", " ")
    named = {"zh": "characters", "ja": "mecab", "th": f"{function_file}:pairs"}
    tokenizer = tokenizer_with(named, MODELS[kind])
    assert words_of(Segmenters(tokenizer, named), tokenizer, language, line) == expected


@settings(deadline=None)
@given(st.text(st.sampled_from("猫犬ab \u3000\u0301\u200dก\u0e34\U0001f680\t"), max_size=12))
def test_words_of_bytes_begin_where_words_of_characters_do(line: str) -> None:
    named = {"zh": "characters"}
    tokenizer = tokenizer_with(named)
    (begins,) = Segmenters(tokenizer, named).begins("zh", [line])
    expected: set[int] = set()
    place = 0
    for part in line.split():
        start = line.index(part, place)
        word_starts = [start + len("".join(characters(part)[:i])) for i in range(len(part))]
        expected |= {at for at in word_starts if at < start + len(part)}
        place = start + len(part)
    expected |= {at for at, letter in enumerate(line) if letter.isspace()}
    in_bytes = {len(line[:at].encode()) for at in expected}
    assert {int(at) for at in begins.nonzero()[0]} == in_bytes


def test_marks_and_joined_characters_belong_to_the_character_before() -> None:
    assert characters("ก\u0e34น") == ["ก\u0e34", "น"]
    assert characters("e\u0301\u0323x") == ["e\u0301\u0323", "x"]
    assert characters("\U0001f469\u200d\U0001f680a") == ["\U0001f469\u200d\U0001f680", "a"]
    assert characters("\u0301") == ["\u0301"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        *(("Haus,", ["Haus", ","]), ("(»Ja!«)", ["(", "»", "Ja", "!", "«", ")"])),
        *((whole, [whole]) for whole in ("1,000.5", "well-known", "it’s", "plain", "-")),
        *(("end...", ["end", ".", ".", "."]), ("हिन्दी।", ["हिन्दी", "।"]), ("a+b", [*"a+b"])),
    ],
)
def test_punctuation_is_parted_from_words_but_not_within_them(text: str, words: list[str]) -> None:
    assert punctuation(text) == words


@pytest.mark.slow
@given(st.text(min_size=1))
def test_words_without_punctuation_join_to_any_text(text: str) -> None:
    assert "".join(punctuation(text)) == text


def test_an_unknown_token_that_reaches_into_several_words_belongs_to_the_first() -> None:
    named = {"zh": "characters"}
    tokenizer = tokenizer_with(named, MODELS["characters"])
    (begins,) = Segmenters(tokenizer, named).begins("zh", ["犬犬猫"])
    assert tokenizer.encode("犬犬猫")[1] == tokenizer.unk_id
    assert begins.tolist() == [True, False, True]  # the mark of a space, unknown, 猫


def test_japanese_words_join_to_any_text_they_are_given() -> None:
    named = {"ja": "mecab"}
    tokenizer = tokenizer_with(named)
    segmenters = Segmenters(tokenizer, named)
    for line in ("a\0猫は", "Ð猫Ð", "𠀀𠀀か", "\u200b", "猫は魚を" * 3000):
        (begins,) = segmenters.begins("ja", [line])
        assert begins[0]
        assert words_of(segmenters, tokenizer, "ja", line)
    assert words_of(segmenters, tokenizer, "ja", "猫Ðは") == ["猫", "Ð", "は"]


def test_a_line_has_the_same_words_alone_and_among_others() -> None:
    named = {"ja": "mecab", "zh": "characters"}
    segmenters = Segmenters(tokenizer_with(named), named)
    lines = ["猫は魚を食べる", "", "魚 を", "a"]
    for code in named:
        together = segmenters.begins(code, lines)
        for line, found in zip(lines, together, strict=True):
            assert found.tolist() == segmenters.begins(code, [line])[0].tolist()


def test_a_file_and_a_fingerprint_have_the_segmenters(tmp_path: Path, function_file: Path) -> None:
    named = {"jpn": "mecab", "th": f"{function_file}:pairs"}
    description = described(named)
    TokenizerFiles(description).write(tmp_path)
    found = load_tokenizer(tmp_path)
    assert found.segmenters.keys() == {"ja", "th"}
    assert found.segmenters == description.segmenters
    assert str(tmp_path) not in (tmp_path / "tokenizer.json").read_text()
    plain = tokenizer_with({})
    TokenizerFiles(bytes_of(LANGUAGES)).write(tmp_path)
    document = json.loads((tmp_path / "tokenizer.json").read_text())
    assert document.keys() == {"kind", "languages", "language_token_scheme"}, "as of old"
    assert len({plain.fingerprint, found.fingerprint, tokenizer_with(named).fingerprint}) == 2
    assert pickle.loads(pickle.dumps(found)).segmenters == found.segmenters


@pytest.mark.parametrize(
    "record", ['{"name": "os:system"}', '{"name": "pairs"}', '{"path": "/tmp/x.py"}']
)
def test_a_strangers_tokenizer_names_no_code(tmp_path: Path, record: str) -> None:
    (tmp_path / "tokenizer.json").write_text(
        '{"kind": "bytes", "languages": ["ja"], "language_token_scheme": "underscores", '
        f'"segmenters": {{"ja": {record}}}}}'
    )
    with pytest.raises(ArtifactError, match="does not describe a tokenizer"):
        load_tokenizer(tmp_path)


def test_a_function_is_run_only_where_the_recipe_names_its_file_with_the_same_contents(
    tmp_path: Path, function_file: Path
) -> None:
    named = {"th": f"{function_file}:pairs"}
    tokenizer = tokenizer_with(named)
    for others in ({}, {"zh": named["th"]}, {"th": "characters"}):
        with pytest.raises(ConfigError, match=r"which no model includes. .* th = .path/to"):
            Segmenters(tokenizer, others).load(["th"])
    moved = tmp_path / "moved.py"
    moved.write_text(PAIRS_OF_LETTERS, encoding="utf-8")
    (begins,) = Segmenters(tokenizer, {"tha": f"{moved}:pairs"}).begins("th", ["abcd"])
    assert begins.tolist() == [True, False, True, False]
    ran = tmp_path / "ran"
    moved.write_text(f"{PAIRS_OF_LETTERS}\nopen({str(ran)!r}, 'w')\n", encoding="utf-8")
    for other in (f"{moved}:pairs", f"{function_file}:shouted"):
        with pytest.raises(ConfigError, match="with other contents"):
            Segmenters(tokenizer, {"th": other}).load(["th"])
    assert not ran.exists()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"segmenters": {"zh": "jieba"}}, "names 'jieba' for zh, which is none. Name cha"),
        ({"segmenters": {"zh": "os:system"}}, "which is none"),
        ({"segmenters": {"zh": "words.py"}}, "which is none"),
        ({"segmenters": {"zh": "words.py:a.b"}}, "which is none"),
        ({"segmenters": {"zh": "mecab"}, "kind": "byte_bpe"}, "kind 'byte_bpe' has others"),
        ({"segmenters": {"zh": "mecab"}, "kind": "sentencepiece"}, 'or name kind "bytes"'),
    ],
)
def test_settings_of_no_segmenter_are_refused(settings: dict[str, object], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        TokenizerConfig.model_validate({"kind": "bytes", **settings})


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ({"jp": "mecab"}, r"names 'jp', and the corpus has no such language \(.*ja"),
        ({"ko": "characters"}, "names 'ko', and the corpus has no such language"),
        ({"no code": "characters"}, "names 'no code', and the corpus has no such language"),
        ({"zh": "characters", "zho": "characters"}, "names 'zho', a second time"),
        ({"zh": "mecab"}, "names mecab for zh, and its dictionary is of Japanese"),
        ({"th": "nowhere.py:pairs"}, "nowhere.py .*Correct tokenizer.segmenters"),
        ({"th": "{file}:syllables"}, "and the file has no such function"),
        ({"th": "{file}:PAIRS"}, "and the file has no such function"),
    ],
)
def test_segmenters_that_cannot_be_had_are_refused_when_the_tokenizer_is_made(
    named: dict[str, str], expected: str, function_file: Path
) -> None:
    filled = {code: name.replace("{file}", str(function_file)) for code, name in named.items()}
    with pytest.raises(ConfigError, match=expected) as raised:
        segmenter_records(filled, LANGUAGES)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("content", ["def pairs(text:", "raise SystemExit(3)", "import nothing_x"])
def test_a_file_that_fails_is_named_in_one_sentence(tmp_path: Path, content: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"names .*mine.py, which fails \(\w+: ") as raised:
        segmenter_records({"th": f"{path}:pairs"}, LANGUAGES)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("shouted", r"shouted of th changes 'abcd' to 'ABCD'"),
        ("joined", r"joined of th failed on 'abcd' \(TypeError: it returns a text"),
        ("broken", r"broken of th failed on 'abcd' \(ValueError: two lines\)"),
    ],
)
def test_a_function_that_fails_or_changes_the_text_is_named_with_the_text(
    function: str, expected: str, function_file: Path
) -> None:
    named = {"th": f"{function_file}:{function}"}
    segmenters = Segmenters(tokenizer_with(named), named)
    with pytest.raises(ConfigError, match=expected):
        segmenters.begins("th", ["xy".upper() + " abcd" if function == "shouted" else "abcd"])


def test_a_missing_library_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tokenizer_with({"ja": "mecab", "zh": "characters"})
    monkeypatch.setitem(sys.modules, "MeCab", None)
    with pytest.raises(ConfigError, match=r"MeCab is not installed here .*pip install mecab"):
        segmenter_records({"ja": "mecab"}, LANGUAGES)
    segmenters = Segmenters(tokenizer, {})
    segmenters.load(["zh", "de"])  # what is not needed is not missed
    with pytest.raises(ConfigError, match="MeCab is not installed here"):
        segmenters.load(LANGUAGES)
