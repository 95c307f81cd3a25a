"""Spelling: rules of normalization against unicodedata and SentencePiece, and blank lines."""

import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from sentencepiece import SentencePieceNormalizer, SentencePieceProcessor
from support.pieces import train_pieces

from pipeline.artifacts.spelling import is_blank, rule_of, with_any_rule, with_rule

LINES = ["3 hours ago", "18. März 2020", "Việt Nam ệ", "한국 ガード", "می\u200cخواهم"] * 20
TYPED = {
    "3\thours ago": "3 hours ago",
    "3\u00a0hours\u202fago": "3 hours ago",
    "3\u3000hours\u2009ago \x0b": "3 hours ago",
    unicodedata.normalize("NFD", "18. März 2020"): "18. März 2020",
    unicodedata.normalize("NFD", "Việt Nam ệ"): "Việt Nam ệ",
    "Vi\u00ea\u0323t Nam e\u0302\u0323": "Việt Nam ệ",  # as Windows keyboards write them
    unicodedata.normalize("NFD", "한국 ガード"): "한국 ガード",
}
"""Text as people type it → text as it is in the training text."""
COMPATIBLE = {
    "３ hours ago": "3 hours ago",
    "3 ho\u00adurs a\u00adgo": "3 hours ago",
    "\ufeff\u200e3 hours\u200b ago\u200f\u2060": "3 hours ago",
    "3 \u2067hours\u2069 ago\x07": "3 hours ago",
    "한국 ｶﾞｰﾄﾞ": "한국 ガード",
}


def model(rule: str, *, lines: Sequence[str] = LINES, **options: Any) -> bytes:
    """Train SentencePiece with a rule that it brings."""
    return train_pieces(lines, size=200, normalization_rule_name=rule, **options)


@pytest.mark.parametrize("model_type", ["unigram", "bpe", "char"])
@pytest.mark.parametrize("form", ["nfc", "plain"])
def test_typed_text_has_the_pieces_of_training_text(form: Any, model_type: str) -> None:
    processor = SentencePieceProcessor(
        model_proto=with_rule(model("identity", model_type=model_type), rule_of(form))
    )
    for typed, plain in (TYPED if form == "nfc" else TYPED | COMPATIBLE).items():
        assert processor.encode(typed, out_type=str) == processor.encode(plain, out_type=str)
        assert processor.unk_id() not in processor.encode(typed)
    for typed, plain in COMPATIBLE.items() if form == "nfc" else ():
        assert processor.encode(typed, out_type=str) != processor.encode(plain, out_type=str)


def test_a_joiner_that_persian_needs_stays() -> None:
    for form in ("nfc", "plain"):
        processor = SentencePieceProcessor(model_proto=with_rule(model("identity"), rule_of(form)))
        assert processor.decode(processor.encode("می\u200cخواهم")) == "می\u200cخواهم"


def test_a_rule_of_nfc_composes_as_unicode_does_and_leaves_all_else() -> None:
    normalizer = SentencePieceNormalizer(normalizer_spec=rule_of("nfc"))
    for character in map(chr, range(1, 0x30000)):
        if 0xD800 <= ord(character) < 0xE000 or character == "▁":
            continue
        composed = unicodedata.normalize("NFC", character)
        expected = "§▁§" if character.isspace() else f"§{composed}§"
        for spelled in (character, unicodedata.normalize("NFD", character)):
            assert normalizer.normalize(f"§{spelled}§") == f"▁{expected}", ascii(spelled)


def test_plain_spelling_replaces_what_sentencepieces_rule_replaces_but_no_punctuation() -> None:
    """What nobody sees is dropped, where ``nmt_nfkc`` writes spaces or keeps it."""
    ours = SentencePieceNormalizer(normalizer_spec=rule_of("plain"))
    theirs = SentencePieceNormalizer(rule_name="nmt_nfkc")
    replaced = set()
    for character in map(chr, range(1, 0x30000)):
        category = unicodedata.category(character)
        if category in ("Cn", "Cs", "Cc", "Cf") or character.isspace() or character == "▁":
            continue
        found = ours.normalize(f"§{character}§")
        if found != f"▁§{unicodedata.normalize('NFC', character)}§":
            replaced.add(character)
            assert found == theirs.normalize(f"§{character}§"), ascii(character)
    assert replaced > {*"０９ＡＺａｚｱﾝﬁﬃﻻﷲ𝐇𝟗"}
    kept = "（注）：，～！5％ 25 m² ½ № 5 … ㅋㅋ"
    assert ours.normalize(kept) == "▁" + kept.replace(" ", "▁")


@pytest.mark.parametrize("rule", ["nmt_nfkc", "nfkc_cf"])
def test_a_model_keeps_its_rule_or_gets_one_that_changes_no_clean_text(rule: str) -> None:
    assert with_any_rule(model(rule)) == model(rule)
    plain = model("identity")
    given = with_any_rule(plain)
    assert with_any_rule(given) == given
    fields = SentencePieceNormalizer(model_proto=given).serialized_normalizer_spec()
    assert with_any_rule(plain).endswith(fields[-1000:])
    before, after = (SentencePieceProcessor(model_proto=one) for one in (plain, given))
    assert before.encode(LINES) == after.encode(LINES)
    assert before.encode("18. Ma\u0308rz") != after.encode("18. Ma\u0308rz")


@pytest.mark.parametrize("model_type", ["unigram", "char"])
def test_a_model_of_letters_in_parts_knows_the_text_that_it_was_trained_on(model_type: str) -> None:
    lines = [unicodedata.normalize("NFD", line) for line in (*LINES, "Mo lọ sí ọjà")] * 20
    in_parts = model("identity", lines=lines, model_type=model_type)
    given = SentencePieceProcessor(model_proto=with_any_rule(in_parts))
    before = SentencePieceProcessor(model_proto=in_parts)
    assert given.encode(lines) == before.encode(lines)
    assert given.encode("Mo\tlo\u0323\u00a0si\u0301") == given.encode("Mo lo\u0323 si\u0301")


def test_a_rule_of_somebody_that_touches_no_accents_is_kept(tmp_path: Path) -> None:
    (tmp_path / "rule.tsv").write_text("2019\t27\n201C\t22\n", encoding="utf-8")
    own = model("identity", normalization_rule_tsv=str(tmp_path / "rule.tsv"))
    assert SentencePieceProcessor(model_proto=own).normalize("it’s") == "▁it's"
    assert with_any_rule(own) == own


BLANK = ["", " \t", "\u3164", "\uffa0 \u2800", "\u200b", "\ufeff", "\u00ad", "\u200e", "\u2060"]


@pytest.mark.parametrize("line", [*BLANK, "\u00a0\u200f\u3000", "\u200d"])
def test_a_line_of_invisible_characters_is_blank_and_one_with_a_letter_is_not(line: str) -> None:
    assert is_blank(line)
    for visible in (line + "a", "." + line, line + "ا" + line, f"{line}\ufffd"):
        assert not is_blank(visible)
