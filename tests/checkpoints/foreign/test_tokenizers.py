"""Tokenizers of other software give the ids that their own library gives, in every script."""

import gzip
import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from support.foreign_families import VOCABULARY_FILE
from support.foreign_models import SPECIALS, pieces_of, sentencepiece_model
from transformers import M2M100Tokenizer, MBart50Tokenizer, NllbTokenizer

from pipeline.artifacts.tokenizer import Tokenizer
from pipeline.checkpoints.foreign.model_folder import ModelFolder
from pipeline.checkpoints.foreign.vocabularies import (
    MBART50_LANGUAGES,
    NLLB_LANGUAGES,
    folder_tokenizer,
    model_codes,
)

BIBLE = Path(__file__).parents[4] / "shared" / "data" / "bible"
needs_bible = pytest.mark.skipif(
    not BIBLE.is_dir(), reason="the Bible corpus is not beside the repository"
)
PIECES = 3000
TRAINED_LINES, TEST_LINES = 60, 200
"""Of each of 25 languages."""
BEYOND = 400
"""Rows of an embedding beyond the pieces: room for all languages."""

MAKERS: dict[str, Any] = {
    "M2M100Tokenizer": M2M100Tokenizer,
    "NllbTokenizer": NllbTokenizer,
    "MBart50Tokenizer": MBart50Tokenizer,
}


def bible_lines(split: str, count: int) -> list[str]:
    """The first lines of a split in every language."""
    paths = [BIBLE / "en-de" / f"{split}.en.gz"]
    paths += [
        folder / f"{split}.{folder.name.removeprefix('en-')}.gz"
        for folder in sorted(BIBLE.glob("en-*"))
    ]
    lines: list[str] = []
    for path in paths:
        with gzip.open(path, "rt", encoding="utf-8") as stream:
            lines += [line.rstrip("\n") for line in islice(stream, count)]
    return lines


@pytest.fixture(scope="module")
def bible_model() -> bytes:
    """A vocabulary that lacks some characters of the lines that it is tested with."""
    return sentencepiece_model(vocabulary=PIECES, lines=bible_lines("valid", TRAINED_LINES))


def both(kind: str, model: bytes, folder: Path) -> tuple[Any, Tokenizer]:
    """The library's tokenizer of a SentencePiece model, and what we read of its files."""
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
    return theirs, found.files.build()


def reversed_vocabulary(model: bytes) -> dict[str, int]:
    """Another order than SentencePiece's, as M2M-100 has one."""
    ordinary = [piece for piece in pieces_of(model) if piece not in SPECIALS]
    return SPECIALS | {piece: 4 + index for index, piece in enumerate(reversed(ordinary))}


@pytest.mark.slow
@needs_bible
@pytest.mark.parametrize("kind", MAKERS)
def test_ids_of_lines_in_all_scripts_are_those_of_the_library(
    kind: str, bible_model: bytes, tmp_path: Path
) -> None:
    theirs, ours = both(kind, bible_model, tmp_path)
    lines = bible_lines("test", TEST_LINES)
    assert len(lines) >= 5000
    found = ours.encode_batch(lines)
    for line, ids in zip(lines, found, strict=True):
        assert ids == theirs.convert_tokens_to_ids(theirs.tokenize(line)), line
    unknown = sum(ours.unk_id in ids for ids in found)
    assert 0 < unknown < len(lines) / 2, "some lines have characters that it does not know"


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize(
    "line", ["", " ", "  two  spaces ", "a\tb", "ﬁ ½ Å", "日本", "\u200b", "x" * 300]
)
def test_odd_lines_have_the_ids_of_the_library(kind: str, line: str, tmp_path: Path) -> None:
    theirs, ours = both(kind, sentencepiece_model(), tmp_path)
    assert ours.encode(line) == theirs.convert_tokens_to_ids(theirs.tokenize(line))


@pytest.mark.parametrize(
    ("kind", "spellings"),
    [("NllbTokenizer", NLLB_LANGUAGES), ("MBart50Tokenizer", MBART50_LANGUAGES)],
)
def test_every_language_has_its_token_and_a_code_of_its_own(
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


@pytest.mark.parametrize(
    ("spelling", "code"),
    [
        ("eng_Latn", "en"),
        ("zho_Hans", "zh"),
        ("zho_Hant", "zh_Hant"),
        ("pes_Arab", "fa"),
        ("prs_Arab", "prs"),
        ("aka_Latn", "ak"),
        ("twi_Latn", "twi"),
    ],
)
def test_nllb_s_languages_have_the_registry_s_codes_and_stay_apart(
    spelling: str, code: str
) -> None:
    assert model_codes(NLLB_LANGUAGES)[spelling] == code


WHERE = {
    "tokenizer_config.json": {"added_tokens_decoder": {"70": {"content": "deu_Latn"}}},
    "added_tokens.json": {"deu_Latn": 70},
    "tokenizer.json": {"added_tokens": [{"id": 70, "content": "deu_Latn"}]},
}
"""Where the versions of transformers write ids of added tokens."""


@pytest.mark.parametrize("name", WHERE)
def test_a_language_s_id_is_read_from_the_file_that_has_it(name: str, tmp_path: Path) -> None:
    (tmp_path / VOCABULARY_FILE).write_bytes(sentencepiece_model())
    (tmp_path / name).write_text(json.dumps(WHERE[name]))
    found = folder_tokenizer(ModelFolder(tmp_path), usual_class="NllbTokenizer", size=BEYOND)
    assert found.files.build().language_token_id("de") == 70


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
def test_listed_languages_follow_the_pieces_in_the_order_of_the_list(
    name: str, tmp_path: Path
) -> None:
    model = sentencepiece_model()
    (tmp_path / VOCABULARY_FILE).write_bytes(model)
    listed = {"additional_special_tokens": ["fra_Latn", {"content": "deu_Latn"}, "<other>"]}
    (tmp_path / name).write_text(json.dumps(listed))
    found = folder_tokenizer(ModelFolder(tmp_path), usual_class="NllbTokenizer", size=BEYOND)
    first = len(pieces_of(model)) + 1
    tokens = {"fr": first, "de": first + 1}
    assert found.files.description.numbering is not None
    assert found.files.description.numbering.language_tokens == tokens


def test_languages_of_a_folder_that_lists_none_are_those_of_the_published_models(
    tmp_path: Path,
) -> None:
    model = sentencepiece_model()
    (tmp_path / VOCABULARY_FILE).write_bytes(model)
    found = folder_tokenizer(ModelFolder(tmp_path), usual_class="NllbTokenizer", size=BEYOND)
    tokenizer = found.files.build()
    first = len(pieces_of(model)) + 1
    assert tokenizer.language_token_id("ace_Arab") == first
    assert tokenizer.language_token_id("zu") == first + 201
    assert tokenizer.language_token_id("en") - first == 256047 - 256001, "as NLLB-200's pages say"
