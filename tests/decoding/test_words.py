"""Tests of pipeline/decoding/sentences.py."""

import torch

from pipeline.artifacts.tokenizer import (
    ByteVocabulary,
    Tokenizer,
    TokenizerDescription,
    build_tokenizer,
)
from pipeline.decoding.sentences import align, texts_of, word_spans

BYTES: Tokenizer = build_tokenizer(
    TokenizerDescription(kind="bytes", languages=("de", "zh"), language_token_scheme="underscores"),
    None,
)


def words(text: str, *, language: str = "de") -> list[str]:
    tokens = BYTES.encode(text)
    spans = word_spans(tokens, BYTES, language=language)
    assert [index for span in spans for index in span] == list(range(len(tokens)))
    return texts_of(tokens, spans, BYTES)


def test_words_stand_between_spaces() -> None:
    text = "Ein kurzer Satz, über Öl."
    assert words(text) == text.split()


def test_further_spaces_make_no_further_words() -> None:
    assert words("  Ein   Wort ") == ["Ein", "Wort"]
    assert words("") == []


def test_where_no_spaces_are_written_every_piece_is_a_word_and_no_character_is_divided() -> None:
    assert words("我们 回家", language="zh") == list("我们回家")


def test_a_word_of_unknown_pieces_is_marked_and_still_one() -> None:
    space = ByteVocabulary().encode_batch([" "])[0][0]
    tokens = [*BYTES.encode("Ja"), space, BYTES.unk_id, space, *BYTES.encode("so")]
    spans = word_spans(tokens, BYTES, language="de")
    assert texts_of(tokens, spans, BYTES) == ["Ja", "⁇", "so"]


def test_where_tokens_are_words_alignments_are_fairseqs() -> None:
    """``extract_hard_alignment``: of every token of the target the source token of most weight."""
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
