"""Tests of pipeline/decoding/sentences.py."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.corpora import bytes_of
from support.pieces import train_pieces

from pipeline.artifacts.tokenizer import Tokenizer, TokenizerFiles
from pipeline.artifacts.vocabularies import (
    BYTE_LINE,
    SPACE,
    ByteVocabulary,
    piece_field,
    write_bytes,
)
from pipeline.decoding.sentences import (
    align,
    join_sentences,
    split_sentences,
    split_to_fit,
    texts_of,
    word_spans,
)

UNTOUCHED = dict.fromkeys(("add_dummy_prefix", "remove_extra_whitespaces"), False) | {
    **{"normalization_rule_name": "identity", "split_by_unicode_script": False},
    **{"pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3},
}
BYTES: Tokenizer = TokenizerFiles(bytes_of(("de", "zh"))).build()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello there. How are you?  Fine!", ["Hello there.", "How are you?", "Fine!"]),
        ("Wait?! No … Yes", ["Wait?!", "No …", "Yes"]),
        ("你好。你是谁？好！", ["你好。", "你是谁？", "好！"]),
        ("「走吧。」他说。", ["「走吧。」", "他说。"]),
        ("そうですか。はい。", ["そうですか。", "はい。"]),
        ("यह पहला है। यह दूसरा है॥", ["यह पहला है।", "यह दूसरा है॥"]),
        ("هل هذا صحيح؟ نعم.", ["هل هذا صحيح؟", "نعم."]),
        ("یہ پہلا ہے۔ یہ دوسرا ہے۔", ["یہ پہلا ہے۔", "یہ دوسرا ہے۔"]),
        ("ပထမ။ဒုတိယ။", ["ပထမ။", "ဒုတိယ။"]),
        ("ទីមួយ។ ទីពីរ។", ["ទីមួយ។", "ទីពីរ។"]),
        ("አንደኛ። ሁለተኛ፧", ["አንደኛ።", "ሁለተኛ፧"]),
        ("Առաջինը։ Երկրորդը։", ["Առաջինը։", "Երկրորդը։"]),
        ("དང་པོ།གཉིས་པ།", ["དང་པོ།", "གཉིས་པ།"]),
        ('He said "Go." Then (he left.) End', ['He said "Go."', "Then (he left.)", "End"]),
        ("No end", ["No end"]),
    ],
)
def test_a_sentence_ends_with_the_marks_of_its_script(text: str, expected: list[str]) -> None:
    assert split_sentences(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "Version 3.5 is at www.example.org now",
        "Herr J. Smith kam z. B. gestern",
        "about 5 approx. six",
        "1,000.50",
        "(J. Smith)",
    ],
)
def test_a_full_stop_within_a_sentence_does_not_end_it(text: str) -> None:
    assert split_sentences(text) == [text]


@pytest.mark.parametrize("text", ["", " ", "\u3000\t"])
def test_a_blank_text_has_no_sentences(text: str) -> None:
    assert split_sentences(text) == split_to_fit(text, fits=lambda _: False) == []


def shorter_than(length: int) -> st.SearchStrategy[str]:
    return st.text(st.sampled_from("ab.!?。।  ,，\u0301é中\u200d\n"), max_size=length)


@given(shorter_than(80), st.integers(1, 12))
def test_parts_fit_and_together_are_the_text_but_for_spaces(text: str, limit: int) -> None:
    parts = split_to_fit(text, fits=lambda part: len(part) <= limit)
    assert all(0 < len(part) <= limit for part in parts)
    assert all(part == part.strip() for part in parts)
    assert "".join("".join(parts).split()) == "".join(text.split())


@given(shorter_than(80), st.integers(0, 12))
def test_parts_end_even_where_nothing_fits_and_bytes_count(text: str, limit: int) -> None:
    parts = split_to_fit(text, fits=lambda part: len(part.encode()) <= limit)
    assert all(len(part.encode()) <= limit or len(part) == 1 for part in parts)
    assert "".join("".join(parts).split()) == "".join(text.split())


def test_a_long_sentence_is_cut_at_spaces_then_between_clauses_then_between_characters() -> None:
    assert split_to_fit("one two three four", fits=lambda t: len(t) <= 10) == [
        "one two",
        "three four",
    ]
    assert split_to_fit("一二三四，五六七八", fits=lambda t: len(t) <= 6) == [
        "一二三四，",
        "五六七八",
    ]
    assert split_to_fit("x" * 10, fits=lambda t: len(t) <= 6) == ["x" * 5, "x" * 5]


@pytest.mark.parametrize("character", ["e\u0301", "कि", "👩\u200d🌾", "ก่"])
def test_an_accent_is_not_cut_from_its_letter(character: str) -> None:
    size = len(character)
    text = character * 15
    parts = split_to_fit(text, fits=lambda part: len(part) <= 4 * size + 1)
    assert len(parts) > 2
    assert all(len(part) % size == 0 for part in parts)
    assert set("".join(parts[i][:size] for i in range(len(parts)))) == set(character)


@pytest.mark.parametrize(
    ("run", "end"), [(".", "x"), (".)", "x"), ("。.", ""), (" ", "x"), ("x", "")]
)
@pytest.mark.timeout(60)  # quadratic time would be many minutes
def test_a_long_run_of_one_mark_is_split_in_linear_time(run: str, end: str) -> None:
    text = run * (200_000 // len(run)) + end
    parts = split_to_fit(text, fits=lambda part: len(part) <= 500)
    assert "".join(parts) == "".join(text.split())


def test_parts_are_joined_as_their_language_writes() -> None:
    assert join_sentences([" Eins. ", "", "Zwei."], language="de") == "Eins. Zwei."
    for language in ("zh", "ja", "th", "km", "lo", "my", "wuu", "lzh", "gan", "zho_Hant", "shn"):
        assert join_sentences(["一。", " ", "二。"], language=language) == "一。二。"
    assert join_sentences(["Yī.", "Èr."], language="zh_Latn") == "Yī. Èr."
    assert join_sentences([], language="de") == ""


def words(text: str, *, language: str = "de") -> list[str]:
    tokens = BYTES.encode(text)
    spans = word_spans(tokens, BYTES, language=language)
    assert [index for span in spans for index in span] == list(range(len(tokens)))
    return texts_of(tokens, spans, BYTES)


@pytest.mark.parametrize("text", ["Ein kurzer Satz, über Öl.", "  Ein   Wort ", ""])
def test_words_stand_between_spaces(text: str) -> None:
    assert words(text) == text.split()


@pytest.mark.parametrize("language", ["zh", "wuu"])
def test_where_no_spaces_are_written_every_character_is_a_word(language: str) -> None:
    assert words("我们 回家", language=language) == list("我们回家")


@pytest.mark.parametrize(
    ("text", "language", "expected"),
    [
        ("да не пять", "ru", ["да", "не", "пять"]),
        ("国际 中国", "zh", ["国", "际", "中", "国"]),
    ],
)
def test_pieces_of_a_part_of_a_character_begin_and_end_no_other_word(
    text: str, language: str, expected: list[str]
) -> None:
    """Byte pairs join a space and the first byte of a letter, or the last bytes of a letter."""
    model = train_pieces([BYTE_LINE], size=400, model_type="bpe", **UNTOUCHED)
    for piece in (write_bytes("д"), write_bytes("国")[1:], write_bytes("中")[1:]):
        model += piece_field(piece)
    model += piece_field(SPACE + write_bytes("д")[:1])
    description = bytes_of(("ru", "zh")).model_copy(update={"kind": "byte_bpe"})
    tokenizer = TokenizerFiles(description, model).build()
    tokens = tokenizer.encode(text)
    assert any(len(tokenizer.piece(token) or "") > len("<0x20>") for token in tokens)
    spans = word_spans(tokens, tokenizer, language=language)
    assert texts_of(tokens, spans, tokenizer) == expected


def test_a_word_of_unknown_pieces_is_marked_and_still_one() -> None:
    space = ByteVocabulary().encode_batch([" "])[0][0]
    tokens = [*BYTES.encode("Ja"), space, BYTES.unk_id, space, *BYTES.encode("so")]
    spans = word_spans(tokens, BYTES, language="de")
    assert texts_of(tokens, spans, BYTES) == ["Ja", "⁇", "so"]


def test_where_tokens_are_words_alignments_are_fairseqs() -> None:
    """``extract_hard_alignment`` takes every target token's source token of most weight."""
    attention_TS = torch.rand(6, 9, generator=torch.Generator().manual_seed(1))
    source, target = ([range(i, i + 1) for i in range(count)] for count in (9, 6))
    found = align(attention_TS, source=source, target=target)
    assert found == [(int(attention_TS[i].argmax()), i) for i in range(6)]


def test_a_word_s_attention_is_the_mean_over_its_tokens_of_what_a_source_word_s_get() -> None:
    attention_TS = torch.tensor([[0.4, 0.3, 0.3], [0.9, 0.05, 0.05], [0.1, 0.5, 0.4]])
    source = [range(0, 1), range(1, 3)]
    assert align(attention_TS[:1], source=source, target=[range(0, 1)]) == [(1, 0)]
    assert align(attention_TS, source=source, target=[range(0, 2), range(2, 3)]) == [(0, 0), (1, 1)]
    assert align(attention_TS, source=[], target=[range(0, 3)]) == []
