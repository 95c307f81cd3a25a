"""Tokenizers that are imported or exported give the ids of their own library, in every script."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
from support.bible_lines import bible_lines
from support.exported_models import BEYOND as OTHER_LANGUAGES
from support.exported_models import own_sentencepiece, own_tokenizer
from support.foreign_families import VOCABULARY_FILE
from support.foreign_models import SPECIALS, pieces_of, sentencepiece_model
from transformers import M2M100Tokenizer, MBart50Tokenizer, NllbTokenizer

from pipeline.artifacts.spelling import with_any_rule
from pipeline.artifacts.tokenizer import Tokenizer
from pipeline.checkpoints.foreign.export_to_hugging_face import write_vocabulary
from pipeline.checkpoints.foreign.files import ModelFolder
from pipeline.checkpoints.foreign.hugging_face_tokenizer import (
    M2M100_LANGUAGES,
    MBART50_LANGUAGES,
    NLLB_LANGUAGES,
    chosen_layout,
    entries_of,
    folder_tokenizer,
    model_codes,
)

PIECES = 3000
TRAINED_LINES, TEST_LINES = 60, 80
"""Lines per language, of 25 languages. The vocabularies lack some characters of the test lines."""
BEYOND = 400
"""Rows of an embedding after the pieces: room for all languages."""
MAKERS: dict[str, Any] = {
    "M2M100Tokenizer": M2M100Tokenizer,
    "NllbTokenizer": NllbTokenizer,
    "MBart50Tokenizer": MBart50Tokenizer,
}
ODD_LINES = ["", " ", "  two  spaces ", "a\tb", "ﬁ ½ Å", "日本", "\u200b", "x" * 300]


@cache
def lines_of(split: str, count: int) -> list[str]:
    groups = bible_lines(count, split=split, english=True).values()
    return [line for group in groups for line in group]


@cache
def bible_model() -> bytes:
    return sentencepiece_model(vocabulary=PIECES, lines=lines_of("valid", TRAINED_LINES))


@cache
def own_bible_model(model_type: str) -> bytes:
    lines = lines_of("valid", TRAINED_LINES)
    return own_sentencepiece(lines, size=PIECES, model_type=model_type)


def both(kind: str, model: bytes, folder: Path) -> tuple[Any, Tokenizer]:
    """Return the library's tokenizer of a SentencePiece model, and ours of the files it saves."""
    (folder / VOCABULARY_FILE).write_bytes(model)
    if kind == "M2M100Tokenizer":
        (folder / "spm.model").write_bytes(model)
        (folder / "vocab.json").write_text(json.dumps(reversed_vocabulary(model)))
        theirs = M2M100Tokenizer(str(folder / "vocab.json"), str(folder / "spm.model"))
    else:
        theirs = MAKERS[kind](str(folder / VOCABULARY_FILE))
    theirs.save_pretrained(folder)
    size = len(pieces_of(model)) + BEYOND
    found = folder_tokenizer(ModelFolder(folder), usual_class="", size=size)
    return theirs, found[0].build()


def reversed_vocabulary(model: bytes) -> dict[str, int]:
    """Return another order than SentencePiece's, as M2M-100 has one."""
    ordinary = [piece for piece in pieces_of(model) if piece not in SPECIALS]
    return SPECIALS | {piece: 4 + index for index, piece in enumerate(reversed(ordinary))}


@pytest.mark.slow
@pytest.mark.parametrize("kind", MAKERS)
def test_ids_of_lines_in_all_scripts_are_those_of_the_library(kind: str, tmp_path: Path) -> None:
    theirs, ours = both(kind, bible_model(), tmp_path)
    lines = lines_of("test", TEST_LINES)
    assert len(lines) >= 2000
    found = ours.encode_batch(lines)
    for line, ids in zip(lines, found, strict=True):
        assert ids == theirs.convert_tokens_to_ids(theirs.tokenize(line)), line
    unknown = sum(ours.unk_id in ids for ids in found)
    assert 0 < unknown < len(lines) / 2, "some lines have characters that it does not know"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "model_type"),
    [("M2M100Tokenizer", "unigram"), ("NllbTokenizer", "unigram"), ("NllbTokenizer", "bpe")],
)
def test_exported_ids_are_ours_in_all_scripts(kind: str, model_type: str, tmp_path: Path) -> None:
    """M2M-100 has all languages of the lines; Cherokee makes the layout NLLB's."""
    codes = {*bible_lines(0, english=True), *(["chr"] if kind == "NllbTokenizer" else [])}
    model = own_bible_model(model_type)
    ours = own_tokenizer(sorted(codes), model)
    layout = chosen_layout(entries_of(ours, tmp_path))
    assert layout.of_hundred == (kind == "M2M100Tokenizer")
    write_vocabulary(tmp_path, model, layout, max_length=1024)
    theirs = MAKERS[kind].from_pretrained(tmp_path)
    lines = lines_of("test", TEST_LINES)
    assert len(lines) == 2000
    built = ours.build()
    found = built.encode_batch(lines)
    for line, expected in zip(lines, found, strict=True):
        ids = theirs(line, add_special_tokens=False)["input_ids"]
        assert [layout.rows[index] for index in ids] == expected, line
    assert any(built.unk_id in ids for ids in found)
    for code in codes:
        index = theirs.convert_tokens_to_ids(layout.token_of[code])
        assert layout.rows[index] == built.language_token_id(code)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"normalization": "nmt_nfkc"},
        {"model_type": "bpe", "normalization": "nmt_nfkc"},
        {"model_type": "bpe", "byte_fallback": True},
        {"byte_fallback": True, "add_dummy_prefix": False, "remove_extra_whitespaces": False},
    ],
    ids=str,
)
def test_tokenizer_json_has_sentencepiece_s_pieces(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """The tokenizers library reads it, of which transformers' fast tokenizers are made."""
    model = with_any_rule(own_sentencepiece(lines_of("valid", 4), size=1200, **settings))
    ours = own_tokenizer(OTHER_LANGUAGES, model)
    layout = chosen_layout(entries_of(ours, tmp_path))
    assert write_vocabulary(tmp_path, model, layout, max_length=64) == "NllbTokenizerFast"
    read: Any = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    built = ours.build()
    for line in [*lines_of("test", 2), *ODD_LINES, "e\u0301 ＡＢ　Ｃ"]:
        ids, expected = read.encode(line).ids, built.encode(line)
        assert [layout.rows[index] for index in ids] == expected, line
        assert built.unk_id in expected or read.decode(ids) == built.decode(expected), line
    ids = read.encode("▁x a▁b").ids
    assert [layout.rows[index] for index in ids] == built.encode("▁x a▁b")


@pytest.mark.parametrize("settings", [{"model_type": "char"}, {"user_defined_symbols": ["the"]}])
def test_other_vocabularies_have_no_tokenizer_json(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    model = own_sentencepiece(**settings)
    layout = chosen_layout(entries_of(own_tokenizer(OTHER_LANGUAGES, model), tmp_path))
    assert write_vocabulary(tmp_path, model, layout, max_length=64) == "NllbTokenizer"
    assert not (tmp_path / "tokenizer.json").exists()


@pytest.mark.parametrize("kind", MAKERS)
def test_odd_lines_have_the_ids_of_the_library(kind: str, tmp_path: Path) -> None:
    theirs, ours = both(kind, sentencepiece_model(), tmp_path)
    for line in ODD_LINES:
        assert ours.encode(line) == theirs.convert_tokens_to_ids(theirs.tokenize(line)), line


@pytest.mark.parametrize("kind", MAKERS)
def test_text_like_a_token_is_text_also_where_the_library_makes_a_token_of_it(
    kind: str, tmp_path: Path
) -> None:
    """The pieces are SentencePiece's own; the library's classes look for their tokens in text."""
    theirs, ours = both(kind, sentencepiece_model(), tmp_path)
    pieces: Any = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model())
    controls = {ours.bos_id, ours.pad_id, ours.eos_id, *map(ours.language_token_id, ours.languages)}
    of_library = set()
    for token in ("<s>", "</s>", "<pad>", "<mask>", "__de__", "deu_Latn", "de_DE"):
        for line in (token, f"x {token} x", f"x{token}x"):
            ids = ours.encode(line)
            assert ids == theirs.convert_tokens_to_ids(pieces.encode(line, out_type=str)), line
            assert not controls & {*ids}, line
            of_library |= controls & {*theirs.convert_tokens_to_ids(theirs.tokenize(line))}
    assert {ours.bos_id, ours.pad_id, ours.eos_id} <= of_library


@pytest.mark.parametrize(
    ("kind", "spellings"),
    [("NllbTokenizer", NLLB_LANGUAGES), ("MBart50Tokenizer", MBART50_LANGUAGES)],
)
def test_every_language_has_a_token_and_code(
    kind: str, spellings: list[str], tmp_path: Path
) -> None:
    theirs, ours = both(kind, sentencepiece_model(), tmp_path)
    codes = model_codes(spellings)
    assert len(ours.languages) == len(spellings)
    for spelling in spellings:
        expected = theirs.convert_tokens_to_ids(spelling)
        assert ours.language_token_id(codes[spelling]) == expected != theirs.unk_token_id
    specials = [ours.bos_id, ours.pad_id, ours.eos_id, ours.unk_id]
    assert specials == theirs.convert_tokens_to_ids(["<s>", "<pad>", "</s>", "<unk>"])


def test_nllb_s_languages_have_codes_of_their_own() -> None:
    codes = {"eng_Latn": "en", "zho_Hans": "zh", "zho_Hant": "zh_Hant", "pes_Arab": "fa"}
    codes |= {"prs_Arab": "prs", "aka_Latn": "ak", "twi_Latn": "twi"}
    found = model_codes(NLLB_LANGUAGES)
    assert {spelling: found[spelling] for spelling in codes} == codes


LISTED = {"additional_special_tokens": ["fra_Latn", {"content": "deu_Latn"}, "<other>"]}


@pytest.mark.parametrize(
    ("name", "content", "offsets"),
    [
        # where the versions of transformers write ids of added tokens
        ("tokenizer_config.json", {"added_tokens_decoder": {"70": {"content": "deu_Latn"}}}, None),
        ("added_tokens.json", {"deu_Latn": 70}, None),
        ("tokenizer.json", {"added_tokens": [{"id": 70, "content": "deu_Latn"}]}, None),
        # lists, in the order of which they follow the pieces
        ("tokenizer_config.json", LISTED, {"fr": 0, "de": 1}),
        ("special_tokens_map.json", LISTED, {"fr": 0, "de": 1}),
    ],
)
def test_ids_of_languages_are_read_from_the_file_that_has_them(
    name: str, content: dict[str, Any], offsets: dict[str, int] | None, tmp_path: Path
) -> None:
    model = sentencepiece_model()
    (tmp_path / VOCABULARY_FILE).write_bytes(model)
    (tmp_path / name).write_text(json.dumps(content))
    found = folder_tokenizer(ModelFolder(tmp_path), usual_class="NllbTokenizer", size=BEYOND)
    numbering = found.files.description.numbering
    first = len(pieces_of(model)) + 1
    tokens = {code: first + offset for code, offset in (offsets or {}).items()}
    assert numbering is not None
    assert numbering.language_tokens == (tokens or {"de": 70})


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("offset", [202, 203])
def test_a_language_that_was_added_leaves_the_others_that_only_a_list_has(
    name: str, offset: int, tmp_path: Path
) -> None:
    model = sentencepiece_model()
    first = len(pieces_of(model)) + 1
    (tmp_path / VOCABULARY_FILE).write_bytes(model)
    listed = {"additional_special_tokens": [*NLLB_LANGUAGES, "gsw_Latn"]}
    (tmp_path / name).write_text(json.dumps(listed))
    added = {"<mask>": first + 405 - offset, "gsw_Latn": first + offset}
    (tmp_path / "added_tokens.json").write_text(json.dumps(added))
    found = folder_tokenizer(ModelFolder(tmp_path), usual_class="NllbTokenizer", size=BEYOND)
    tokenizer = found.files.build()
    assert len(tokenizer.languages) == 203
    assert tokenizer.language_token_id("gsw") == first + offset
    assert tokenizer.language_token_id("zu") == first + 201


@pytest.mark.parametrize("listed", [True, False])
def test_a_language_that_was_added_to_m2m_100_has_its_id_in_the_library(
    listed: bool, tmp_path: Path
) -> None:
    model = sentencepiece_model()
    both("M2M100Tokenizer", model, tmp_path)
    published = [f"__{code}__" for code in M2M100_LANGUAGES]
    options: dict[str, Any] = {"additional_special_tokens": [*published]} if listed else {}
    theirs = M2M100Tokenizer.from_pretrained(tmp_path, **options)
    theirs.add_tokens(["__gsw__"], special_tokens=True)
    theirs.save_pretrained(tmp_path)
    found = folder_tokenizer(ModelFolder(tmp_path), usual_class="", size=BEYOND)
    ours = found.files.build()
    # transformers has one id for Swiss German and Afrikaans where no file lists the languages.
    assert len(ours.languages) == (101 if listed else 100)
    assert ("af" in ours.languages) == listed
    for code in ("gsw", "am", "zu"):
        assert ours.language_token_id(code) == theirs.convert_tokens_to_ids(f"__{code}__")


def test_a_folder_that_lists_no_languages_has_the_published_ones(tmp_path: Path) -> None:
    model = sentencepiece_model()
    (tmp_path / VOCABULARY_FILE).write_bytes(model)
    found = folder_tokenizer(ModelFolder(tmp_path), usual_class="NllbTokenizer", size=BEYOND)
    tokenizer = found[0].build()
    first = len(pieces_of(model)) + 1
    assert tokenizer.language_token_id("ace_Arab") == first
    assert tokenizer.language_token_id("zu") == first + 201
    assert tokenizer.language_token_id("en") - first == 256047 - 256001, "as NLLB-200's pages say"
