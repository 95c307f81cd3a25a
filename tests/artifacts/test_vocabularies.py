"""Vocabularies: text comes back exactly, imported ids stay, and draws agree between processes."""

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.corpora import bytes_of
from support.foreign_models import pieces_of
from support.pieces import train_pieces
from transformers import M2M100Tokenizer

from pipeline.artifacts.tokenizer import TokenizerDescription, TokenizerFiles, load_tokenizer, tags
from pipeline.artifacts.vocabularies import (
    BYTE_LINE,
    ByteLevelVocabulary,
    ByteVocabulary,
    Numbering,
    SentencePieceVocabulary,
    Vocabulary,
    decode_bytes,
    write_bytes,
)
from pipeline.errors import ArtifactError

BIBLE = Path(__file__).parents[3] / "shared" / "data" / "bible"
ODD = [
    "\U0001f9d1\U0001f3fd\u200d\U0001f680 \U00020000",  # four-byte characters, joined
    "e\u0301 a\u030a\u0323 \u05e9\u05c1\u05b8",  # combining marks
    "  two  spaces, and at the ends  ",
    "\u2581 is text, \ufffd too, <0xE2>, </s>",
    "\t\x01\x7f\u00a0\u00ad",
    "",
]
LINES = ["the cat sat on the mat", "the dog sat on the cat", "ein Hund und eine Katze"]
LINES += ["Привет мир"]


OWN = {"normalization_rule_name": "identity", "pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3}
UNTOUCHED = dict.fromkeys(("split_by_unicode_script", "split_by_number"), False)
UNTOUCHED |= dict.fromkeys(("add_dummy_prefix", "remove_extra_whitespaces"), False)


@pytest.fixture(scope="module")
def byte_level() -> ByteLevelVocabulary:
    lines = [BYTE_LINE, *(write_bytes(line) for line in LINES * 5)]
    return ByteLevelVocabulary(train_pieces(lines, size=300, model_type="bpe", **OWN, **UNTOUCHED))


@pytest.fixture(scope="module")
def with_fallback() -> SentencePieceVocabulary:
    model = train_pieces(LINES * 5, size=320, model_type="bpe", byte_fallback=True, **OWN)
    return SentencePieceVocabulary(model)


def bible_lines() -> list[str]:
    if not BIBLE.is_dir():
        pytest.skip("the Bible's text is not there")
    files = sorted(BIBLE.glob("*/valid.*.gz"))
    assert len(files) > 40
    return [gzip.decompress(file.read_bytes()).decode().split("\n")[0] for file in files]


def assert_comes_back(vocabulary: Vocabulary, texts: list[str]) -> None:
    for text, ids in zip(texts, vocabulary.encode_batch(texts), strict=True):
        assert vocabulary.decode(ids) == (text, 0)
        assert vocabulary.unk_id not in ids


@pytest.mark.parametrize("texts", [bible_lines, lambda: ODD], ids=["every script", "odd"])
def test_text_comes_back_from_bytes_and_from_pieces_of_them(
    byte_level: ByteLevelVocabulary, texts: Callable[[], list[str]]
) -> None:
    assert_comes_back(ByteVocabulary(), texts())
    assert_comes_back(byte_level, texts())


@given(st.text())
def test_any_text_comes_back_from_byte_pieces(byte_level: ByteLevelVocabulary, text: str) -> None:
    assert_comes_back(byte_level, [text])
    assert_comes_back(ByteVocabulary(), [text])
    assert ByteVocabulary().encode_batch([text]) == [[byte + 4 for byte in text.encode()]]


def test_bytes_are_ids_from_four_on_behind_the_specials() -> None:
    vocabulary = ByteVocabulary()
    specials = (vocabulary.pad_id, vocabulary.bos_id, vocabulary.eos_id, vocabulary.unk_id)
    assert (sorted(specials), vocabulary.size) == ([0, 1, 2, 3], 260)


@given(st.binary())
def test_bytes_that_are_no_utf8_are_dropped_and_counted(content: bytes) -> None:
    text, dropped = decode_bytes(content)
    assert text == content.decode(errors="ignore")
    marked = content.decode(errors="replace")
    assert len(marked) == len(text) + dropped


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"a\xc3b", ("ab", 1)),
        (b"\xe2\x82", ("", 1)),
        (b"\xff\xfe", ("", 2)),
        (b"\xed\xa0\x80", ("", 3)),  # half of a pair of UTF-16
        ("\ufffd".encode() + b"\xff", ("\ufffd", 1)),
        ("\U0001f680".encode()[:3] + "é".encode(), ("é", 1)),
    ],
)
def test_invalid_sequences_are_told_from_replacement_characters_that_are_text(
    content: bytes, expected: tuple[str, int], byte_level: ByteLevelVocabulary
) -> None:
    assert decode_bytes(content) == expected
    assert ByteVocabulary().decode([byte + 4 for byte in content]) == expected
    characters = [write_bytes(chr(byte)) for byte in range(128)]
    assert len(set(characters)) == 128
    ids = {byte_level.piece(index): index for index in range(byte_level.size)}
    single = [ids.get(f"<0x{byte:02X}>", ids.get(chr(byte))) for byte in content]
    assert byte_level.decode([index for index in single if index is not None]) == expected


def test_lacking_characters_come_back_from_bytes(with_fallback: SentencePieceVocabulary) -> None:
    assert_comes_back(with_fallback, ["the \U0001f680 sat", "猫 on", "\ufffd"])


def test_fallen_back_bytes_of_no_text_are_counted(with_fallback: SentencePieceVocabulary) -> None:
    [ids] = with_fallback.encode_batch(["cat 猫 dog"])
    pieces = [with_fallback.piece(index) for index in ids]
    cut = [index for index, piece in zip(ids, pieces, strict=True) if piece != "<0xAB>"]
    assert len(cut) == len(ids) - 1
    assert with_fallback.decode(cut) == ("cat  dog", 1)
    assert with_fallback.decode([*cut, *ids]) == ("cat  dog cat 猫 dog", 1)


def test_a_model_of_text_is_not_taken_for_one_of_bytes() -> None:
    for line in ("abc abd", "猫 犬"):
        with pytest.raises(ArtifactError, match="pieces of text"):
            ByteLevelVocabulary(train_pieces([line] * 9, size=20, **OWN))


def test_pieces_of_bytes_are_spelled_as_text_if_they_are(byte_level: ByteLevelVocabulary) -> None:
    spelled = [byte_level.piece(index) for index in range(byte_level.size)]
    assert spelled[:4] == [None] * 4
    assert {"a", "▁", "▁the", "<0xD0>", "<0xFF>"} <= set(spelled)
    assert len(set(spelled[4:])) == len(spelled) - 4
    [ids] = byte_level.encode_batch([LINES[0]])
    assert len(ids) < len(LINES[0].encode()) / 2


def test_a_tokenizer_counts_what_it_drops() -> None:
    tokenizer = TokenizerFiles(bytes_of(("de",))).build()
    ids = [tokenizer.language_token_id("de"), *tokenizer.encode("é")[:1], *tokenizer.encode("b")]
    assert tokenizer.decode_counted(ids) == ("b", 1)
    assert tokenizer.decode(ids) == "b"


NUMBERED_LINES = ["Das ist ein Satz.", "one sentence more", "три слова здесь", "the the the"]
NUMBERED_LINES += ["Sätze über"]
LANGUAGES = ("de", "en", "ru")
SPECIALS = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}
SPARE = 8
"""Rows of the embedding that M2M-100 has beside its ids."""


@pytest.fixture(scope="module")
def model() -> bytes:
    return train_pieces(NUMBERED_LINES * 20, size=38, pad_id=3)


@pytest.fixture(scope="module")
def vocabulary(model: bytes) -> dict[str, int]:
    """Piece → id in an order of its own, without two pieces that the model was not trained on."""
    ordinary = [piece for piece in pieces_of(model) if piece not in SPECIALS]
    random.Random(1).shuffle(ordinary)
    return SPECIALS | {piece: 4 + index for index, piece in enumerate(ordinary[2:])}


@pytest.fixture(scope="module")
def peer(model: bytes, vocabulary: dict[str, int], tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("m2m100")
    (folder / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    (folder / "sentencepiece.bpe.model").write_bytes(model)
    return M2M100Tokenizer(
        vocab_file=str(folder / "vocab.json"), spm_file=str(folder / "sentencepiece.bpe.model")
    )


def description(model: bytes, vocabulary: dict[str, int], peer: Any) -> TokenizerDescription:
    numbering = Numbering(
        size=len(vocabulary) + len(peer.lang_code_to_token) + SPARE,
        bos=0,
        pad=1,
        eos=2,
        unk=3,
        pieces=tuple(vocabulary.get(piece) for piece in pieces_of(model)),
        language_tokens={code: peer.get_lang_id(code) for code in LANGUAGES},
    )
    return TokenizerDescription(
        kind="sentencepiece",
        languages=LANGUAGES,
        language_token_scheme="underscores",
        numbering=numbering,
    )


def test_ids_are_those_of_hugging_faces_tokenizer(
    model: bytes, vocabulary: dict[str, int], peer: Any, tmp_path: Path
) -> None:
    """Text, tags and specials; from a folder of our own, and back to text."""
    described = description(model, vocabulary, peer)
    TokenizerFiles(described, model).write(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.size == len(vocabulary) + len(peer.lang_code_to_token) + SPARE
    unknown = 0
    for source in LANGUAGES:
        peer.src_lang = source
        found = tags(tokenizer, "src-tgt", source=source, target="en")
        assert found.decoder_prompt == (peer.eos_token_id, peer.get_lang_id("en"))
        for line in [*NUMBERED_LINES, "völlig unbekannt Ω"]:
            ids = [*found.source_prefix, *tokenizer.encode(line), tokenizer.eos_id]
            assert ids == peer(line).input_ids
            unknown += ids.count(tokenizer.unk_id)
            text = peer.decode(ids[len(found.source_prefix) :], skip_special_tokens=True)
            assert tokenizer.decode(ids).strip() == text
    assert unknown > 0


def test_ids_of_nothing_mean_nothing(model: bytes, vocabulary: dict[str, int], peer: Any) -> None:
    tokenizer = TokenizerFiles(description(model, vocabulary, peer), model).build()
    spare = range(tokenizer.size - SPARE, tokenizer.size)
    assert tokenizer.decode(spare) == ""
    assert all(tokenizer.language_of_token(index) is None for index in spare)
    assert tokenizer.language_of_token(peer.get_lang_id("ru")) == "ru"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"eos": 1}, "have one id"),
        ({"language_tokens": {"de": 500, "en": 500, "ru": 501}}, "have one id"),
        ({"size": 10}, "beyond size 10"),
        ({"pad": -1}, "greater than or equal to 0"),
    ],
)
def test_a_numbering_that_contradicts_itself_is_refused(
    change: dict[str, object], complaint: str, model: bytes, vocabulary: dict[str, int], peer: Any
) -> None:
    good = description(model, vocabulary, peer).numbering
    assert good is not None
    with pytest.raises(ValueError, match=complaint):
        Numbering.model_validate({**good.model_dump(), **change})


def test_a_numbering_of_another_vocabulary_is_one_sentence(
    model: bytes, vocabulary: dict[str, int], peer: Any, tmp_path: Path
) -> None:
    described = description(model, vocabulary, peer)
    assert described.numbering is not None
    shorter = described.numbering.model_copy(update={"pieces": described.numbering.pieces[:-1]})
    TokenizerFiles(described.model_copy(update={"numbering": shorter}), model).write(tmp_path)
    with pytest.raises(ArtifactError, match="numbers 37 pieces, and the vocabulary has 38"):
        load_tokenizer(tmp_path)
