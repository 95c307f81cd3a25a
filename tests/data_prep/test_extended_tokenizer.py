"""``train_tokenizer --base``: new pieces and languages beside old ids that stay."""

from pathlib import Path
from typing import Any

import pytest
from support.corpora import Texts, make_corpus, writing
from support.foreign_models import LINES, pieces_of, sentencepiece_model
from support.stage_runs import run_stage

from pipeline.artifacts.artifact import Artifact, open_artifact
from pipeline.artifacts.tokenizer import TokenizerFiles, load_tokenizer, read_tokenizer_files
from pipeline.checkpoints.foreign.hugging_face_tokenizer import numbered
from pipeline.errors import ConfigError

CHEROKEE = [
    "ᎠᏂᏣᎳᎩ ᎦᏬᏂᎯᏍᏗ",
    "ᎦᏬᏂᎯᏍᏗ ᎠᏂᏣᎳᎩ ﬁ",
    "ᎠᏂᏣᎳᎩ one sentence",
    "ᎠᏂᏣᎳᎩᎯ ᎳᎩᏂᏣ ᏍᏗᎯᏂ ᏬᏂᎦᏍ ᎯᏍᏗᎠᏂ ᏣᎳᏂᎦᏬ",
] * 9
"""Text with letters that the base lacks, a letter that its normalization rewrites (ﬁ), and pieces
that it has."""
TEXTS: Texts = {
    "train": {"chr-en": {"chr": CHEROKEE, "en": [f"{LINES[1]} {n}" for n in range(len(CHEROKEE))]}}
}
SIZE = 32


def base_of(folder: Path, *, model_type: str = "bpe", lacking: str = "") -> Artifact:
    """NLLB's ids for a small model; a piece that is ``lacking`` has none."""
    model = sentencepiece_model(specials={"model_type": model_type})
    pieces = pieces_of(model)
    ids = [None if n < 3 or piece == lacking else n + 1 for n, piece in enumerate(pieces)]
    count = len(pieces) + 1
    files = numbered(
        folder,
        model,
        size=count + 5,  # three spare rows
        specials={"bos": 0, "pad": 1, "eos": 2, "unk": 3},
        pieces=ids,
        languages={"eng_Latn": count, "deu_Latn": count + 1},
        written={"eng_Latn": "eng_Latn", "deu_Latn": "deu_Latn"},
    )
    return tokenizer_artifact(folder / "base", files)


def tokenizer_artifact(folder: Path, files: TokenizerFiles) -> Artifact:
    with writing(folder, "tokenizer", "train_tokenizer") as writer:
        files.write(writer.directory)
    return open_artifact(folder, kind="tokenizer")


def extend(base: Artifact, folder: Path, *, texts: Texts = TEXTS, **settings: Any) -> Artifact:
    return run_stage(
        "train_tokenizer",
        folder / "extended",
        {"corpus": make_corpus(folder / "corpus", texts), "base": base},
        tokenizer={"vocabulary_size": SIZE} | settings,
    )


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_new_text_gets_pieces_and_no_old_id_changes(model_type: str, tmp_path: Path) -> None:
    base = base_of(tmp_path, model_type=model_type)
    made = extend(base, tmp_path)
    old, new = load_tokenizer(base.directory), load_tokenizer(made.directory)
    assert set(new.languages) == {"chr", "de", "en"}
    kept, before = ([one.piece(index) for index in range(old.size)] for one in (new, old))
    assert kept == before
    for code in old.languages:
        assert new.language_token_id(code) == old.language_token_id(code)
    for line in LINES:
        assert new.encode(line) == old.encode(line)
    assert old.unk_id in old.encode(CHEROKEE[0])
    assert new.unk_id not in new.encode(CHEROKEE[0])
    assert len(new.encode(CHEROKEE[0])) < len(CHEROKEE[0]) / 2, "pieces are longer than letters"
    assert new.decode(new.encode(CHEROKEE[0])) == CHEROKEE[0]
    added = f"added {new.size - old.size - 1} pieces and 1 language token (chr)"
    assert added in made.manifest.summary[0]
    # Pieces that exist are not added again, and letters are normalized first.
    files = read_tokenizer_files(made.directory)
    assert files.model is not None
    pieces = pieces_of(files.model)
    assert len(set(pieces)) == len(pieces)
    assert not any("ﬁ" in piece for piece in pieces)
    assert new.decode(new.encode("ﬁ")) == "fi"


def test_a_piece_that_the_model_had_no_id_for_gets_one(tmp_path: Path) -> None:
    base = base_of(tmp_path, lacking="x")
    assert load_tokenizer(base.directory).unk_id in load_tokenizer(base.directory).encode("x")
    lines = {"chr": [f"{one}x" for one in CHEROKEE], "en": (LINES * 6)[: len(CHEROKEE)]}
    texts: Texts = {"train": {"chr-en": lines}}
    tokenizer = load_tokenizer(extend(base, tmp_path, texts=texts).directory)
    assert tokenizer.unk_id not in tokenizer.encode("x")
    assert tokenizer.decode(tokenizer.encode("x")) == "x"


def test_new_pieces_of_bpe_join_what_the_base_splits(tmp_path: Path) -> None:
    """In a text of any language the boundaries of the extended vocabulary are among the old."""
    base = base_of(tmp_path)
    old, new = load_tokenizer(base.directory), load_tokenizer(extend(base, tmp_path).directory)
    line = "one sentence more of the same, one sentence"
    before, after = (
        {sum(len(tokenizer.piece(index) or "") for index in ids[:n]) for n in range(len(ids) + 1)}
        for tokenizer in (old, new)
        for ids in [tokenizer.encode(line)]
    )
    assert after <= before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"texts": {"train": {"de-en": {"de": LINES, "en": LINES}}}}, "already has all languages"),
        ({"kind": "byte_bpe"}, "keeps its kind of pieces"),
        ({"vocabulary_size": 5000}, "vocabulary_size = 5000 is too large for the sample"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        extend(base_of(tmp_path, model_type="unigram"), tmp_path, **change)


def test_a_base_of_bytes_is_refused(tmp_path: Path) -> None:
    description = read_tokenizer_files(base_of(tmp_path).directory).description
    of_bytes = description.model_copy(
        update={"kind": "bytes", "numbering": None, "languages": ("de", "en")}
    )
    base = tokenizer_artifact(tmp_path / "bytes", TokenizerFiles(of_bytes, None))
    with pytest.raises(ConfigError, match="not one SentencePiece vocabulary of text"):
        extend(base, tmp_path)
