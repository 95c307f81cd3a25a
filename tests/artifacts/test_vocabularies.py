"""Bytes, characters and pieces of bytes: what is encoded comes back, what is no UTF-8 does not."""

import gzip
import io
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sentencepiece import SentencePieceTrainer

from pipeline.artifacts.tokenizer import Tokenizer, TokenizerDescription, build_tokenizer
from pipeline.artifacts.vocabularies import (
    BYTE_LINE,
    ByteLevelVocabulary,
    ByteVocabulary,
    SampledSegmentation,
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
LINES = [
    "the cat sat on the mat",
    "the dog sat on the cat",
    "ein Hund und eine Katze",
    "Привет мир",
]


def trained(lines: list[str], **options: Any) -> bytes:
    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        normalization_rule_name="identity",
        num_threads=1,
        minloglevel=2,
        hard_vocab_limit=False,
        pad_id=0,
        bos_id=1,
        eos_id=2,
        unk_id=3,
        **options,
    )
    return model.getvalue()


@pytest.fixture(scope="module")
def byte_level() -> ByteLevelVocabulary:
    return ByteLevelVocabulary(
        trained(
            [BYTE_LINE, *(write_bytes(line) for line in LINES * 5)],
            model_type="bpe",
            vocab_size=300,
            split_by_unicode_script=False,
            split_by_number=False,
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
        )
    )


@pytest.fixture(scope="module")
def with_fallback() -> SentencePieceVocabulary:
    model = trained(LINES * 5, model_type="bpe", vocab_size=320, byte_fallback=True)
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


def test_every_script_comes_back_from_bytes_and_from_pieces_of_them(
    byte_level: ByteLevelVocabulary,
) -> None:
    texts = bible_lines()
    assert_comes_back(ByteVocabulary(), texts)
    assert_comes_back(byte_level, texts)


def test_odd_characters_and_spaces_come_back(byte_level: ByteLevelVocabulary) -> None:
    assert_comes_back(ByteVocabulary(), ODD)
    assert_comes_back(byte_level, ODD)


@given(st.text())
def test_any_text_comes_back_from_pieces_of_bytes(
    byte_level: ByteLevelVocabulary, text: str
) -> None:
    assert_comes_back(byte_level, [text])


def test_pieces_of_bytes_are_fewer_than_the_bytes(byte_level: ByteLevelVocabulary) -> None:
    [ids] = byte_level.encode_batch([LINES[0]])
    assert len(ids) < len(LINES[0].encode()) / 2


def test_bytes_are_ids_from_four_on_behind_the_specials() -> None:
    vocabulary = ByteVocabulary()
    everything = "".join(map(chr, range(128)))
    assert vocabulary.encode_batch([everything]) == [list(range(4, 132))]
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


def test_characters_that_a_vocabulary_lacks_come_back_from_its_bytes(
    with_fallback: SentencePieceVocabulary,
) -> None:
    assert_comes_back(with_fallback, ["the \U0001f680 sat", "猫 on", "\ufffd"])


def test_fallen_back_bytes_that_are_no_utf8_are_dropped_and_counted(
    with_fallback: SentencePieceVocabulary,
) -> None:
    [ids] = with_fallback.encode_batch(["cat 猫 dog"])
    pieces = [with_fallback.piece(index) for index in ids]
    cut = [index for index, piece in zip(ids, pieces, strict=True) if piece != "<0xAB>"]
    assert len(cut) == len(ids) - 1
    assert with_fallback.decode(cut) == ("cat  dog", 1)
    assert with_fallback.decode([*cut, *ids]) == ("cat  dog cat 猫 dog", 1)


def test_a_model_of_text_is_not_taken_for_one_of_bytes() -> None:
    with pytest.raises(ArtifactError, match="pieces of text"):
        ByteLevelVocabulary(trained(["abc abd"] * 9, vocab_size=20))
    with pytest.raises(ArtifactError, match="pieces of text"):
        ByteLevelVocabulary(trained(["猫 犬"] * 9, vocab_size=20))


def test_pieces_of_bytes_are_spelled_as_text_where_they_are(
    byte_level: ByteLevelVocabulary,
) -> None:
    spelled = [byte_level.piece(index) for index in range(byte_level.size)]
    assert spelled[:4] == [None] * 4
    assert {"a", "▁", "▁the", "<0xD0>", "<0xFF>"} <= set(spelled)
    assert len(set(spelled[4:])) == len(spelled) - 4


def test_sampled_pieces_are_the_same_text_and_depend_on_the_seed_alone(
    with_fallback: SentencePieceVocabulary, byte_level: ByteLevelVocabulary
) -> None:
    unigram = SentencePieceVocabulary(trained(LINES * 5, model_type="unigram", vocab_size=60))
    for vocabulary in (unigram, with_fallback, byte_level):
        lines = LINES * 2
        drawn = SampledSegmentation(alpha=0.3, nbest=64, seeds=range(len(lines)))
        once = vocabulary.sample_batch(lines, drawn)
        assert [vocabulary.decode(ids).text for ids in once] == lines
        assert once != vocabulary.encode_batch(lines)
        assert once[:4] != once[4:]
        alone = SampledSegmentation(alpha=0.3, nbest=64, seeds=[5])
        assert vocabulary.sample_batch(lines[5:6], alone) == [once[5]]
    assert ByteVocabulary().sample_batch(lines, drawn) == ByteVocabulary().encode_batch(lines)


def test_a_tokenizer_counts_what_it_drops() -> None:
    description = TokenizerDescription(
        kind="bytes", languages=("de",), language_token_scheme="underscores"
    )
    tokenizer: Tokenizer = build_tokenizer(description, None)
    ids = [tokenizer.language_token_id("de"), *tokenizer.encode("é")[:1], *tokenizer.encode("b")]
    assert tokenizer.decode_counted(ids) == ("b", 1)
    assert tokenizer.decode(ids) == "b"
