"""A vocabulary numbered elsewhere: the same ids as the library it comes from."""

import io
import json
import random
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from transformers import M2M100Tokenizer

from pipeline.artifacts.tokenizer import (
    Numbering,
    TokenizerDescription,
    build_tokenizer,
    load_tokenizer,
    tags,
    write_tokenizer,
)
from pipeline.errors import ArtifactError

LINES = ["Das ist ein Satz.", "one sentence more", "три слова здесь", "the the the", "Sätze über"]
LANGUAGES = ("de", "en", "ru")
SPECIALS = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}
SPARE = 8
"""Rows of the embedding that M2M-100 has beside its ids."""


@pytest.fixture(scope="module")
def model() -> bytes:
    stream = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES * 20),
        model_writer=stream,
        vocab_size=38,
        pad_id=3,
        character_coverage=1.0,
        minloglevel=2,
    )
    return stream.getvalue()


def pieces_of(model: bytes) -> list[str]:
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    return [processor.id_to_piece(index) for index in range(processor.get_piece_size())]


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
    write_tokenizer(tmp_path, description=described, model=model)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.size == len(vocabulary) + len(peer.lang_code_to_token) + SPARE
    unknown = 0
    for source in LANGUAGES:
        peer.src_lang = source
        found = tags(tokenizer, "src-tgt", source=source, target="en")
        assert found.decoder_prompt == (peer.eos_token_id, peer.get_lang_id("en"))
        for line in [*LINES, "völlig unbekannt Ω"]:
            ids = [*found.source_prefix, *tokenizer.encode(line), tokenizer.eos_id]
            assert ids == peer(line).input_ids
            unknown += ids.count(tokenizer.unk_id)
            text = peer.decode(ids[len(found.source_prefix) :], skip_special_tokens=True)
            assert tokenizer.decode(ids).strip() == text
    assert unknown > 0


def test_ids_that_nothing_has_mean_nothing(
    model: bytes, vocabulary: dict[str, int], peer: Any
) -> None:
    tokenizer = build_tokenizer(description(model, vocabulary, peer), model)
    spare = range(tokenizer.size - SPARE, tokenizer.size)
    assert tokenizer.decode(spare) == ""
    assert all(tokenizer.language_of_token(index) is None for index in spare)
    assert tokenizer.language_of_token(peer.get_lang_id("ru")) == "ru"


def test_a_tokenizer_without_numbering_is_written_as_before(model: bytes, tmp_path: Path) -> None:
    plain = TokenizerDescription(
        kind="sentencepiece", languages=LANGUAGES, language_token_scheme="underscores"
    )
    write_tokenizer(tmp_path, description=plain, model=model)
    document = json.loads((tmp_path / "tokenizer.json").read_text("utf-8"))
    assert set(document) == {"kind", "languages", "language_token_scheme"}


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
    write_tokenizer(
        tmp_path, description=described.model_copy(update={"numbering": shorter}), model=model
    )
    with pytest.raises(ArtifactError, match="numbers 37 pieces, and the vocabulary has 38"):
        load_tokenizer(tmp_path)
