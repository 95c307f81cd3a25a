"""Checkpoints whose source and target have pieces of their own, upcycled and given other pieces."""

from pathlib import Path

import pytest
import torch
from support.corpora import writing
from support.exported_models import (
    own_checkpoint,
    own_sentencepiece,
    own_tokenizer,
    tokenizer_of_two,
)
from support.foreign_models import LINES

from pipeline.artifacts.artifact import open_artifact
from pipeline.artifacts.tokenizer import (
    Tokenizer,
    TokenizerDescription,
    TokenizerFiles,
    with_languages,
)
from pipeline.artifacts.vocabularies import BYTE_LINE, write_bytes
from pipeline.checkpoints.assembly.vocabulary import plan_rows
from pipeline.checkpoints.checkpoint import load_model
from pipeline.checkpoints.weights import TensorFiles
from pipeline.cli import main

UPCYCLED = """
[sources]
dense = "dense"
[parts]
embeddings = "dense"
encoder = "dense"
decoder = "dense"
[experts]
num_experts = 4
every = 2
[upcycling]
mask_ratio = 0.0
"""


def write_tokenizer_artifact(directory: Path, files: TokenizerFiles) -> None:
    with writing(directory, "tokenizer", "train_tokenizer") as writer:
        files.write(writer.directory)


def spelled(tokenizer: Tokenizer) -> dict[tuple[bool, str], int]:
    """(Is it the target's?, piece) → id."""
    assert tokenizer.output_size is not None
    pieces = {index: tokenizer.piece(index) for index in range(tokenizer.size)}
    return {(i < tokenizer.output_size, piece): i for i, piece in pieces.items() if piece}


def test_its_experts_compute_what_it_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    dense = own_checkpoint(Path("dense"), tokenizer=tokenizer_of_two())
    Path("assembly.toml").write_text(UPCYCLED, encoding="utf-8")
    assert main(["upcycle", "assembly.toml", "--out", "made"]) == 0
    made = open_artifact(Path("made"), kind="checkpoint")
    assert made.read_json("receipt.json")["function_check"]["largest"] < 1e-5
    assert load_model(made).spec.output_size == dense.spec.output_size


@pytest.mark.parametrize("output", ["tied", "untied"])
def test_rows_of_one_vocabulary_become_those_of_both_sides(
    output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    two = tokenizer_of_two()
    source = own_checkpoint(Path("dense"), embedding={"output": output})
    write_tokenizer_artifact(Path("two"), two)
    Path("assembly.toml").write_text('tokenizer = "two"\n' + UPCYCLED, encoding="utf-8")
    assert main(["upcycle", "assembly.toml", "--out", "made"]) == 0
    tensors = TensorFiles(open_artifact(Path("made"), kind="checkpoint"), "weights/")
    old, new = source.tokenizer.build(), two.build()
    old_ids = {piece: i for i in range(old.size) if (piece := old.piece(i))}
    shared = {key: index for key, index in spelled(new).items() if key[1] in old_ids}
    assert len({piece for _, piece in shared}) < len(shared), "some are of both sides"
    for table in ("embedding.weight", "embedding.output_weight")[: 1 + (output == "untied")]:
        before, after = source.tensors.read(table), tensors.read(table)
        for (_, piece), index in shared.items():
            if index < len(after):
                assert torch.equal(after[index], before[old_ids[piece]])


def test_a_piece_is_looked_for_on_its_own_side_first_and_else_among_the_targets() -> None:
    old = tokenizer_of_two().build()
    same = plan_rows(old, old, resembling={})
    assert all(rows in ((), (index,)) for index, rows in enumerate(same.sources))
    assert same.lost == same.fresh == same.averaged == 0
    joint = own_tokenizer(("de", "en", "fr")).build()
    back = plan_rows(old, joint, resembling={})
    by_side = spelled(old)
    for index in range(4, joint.size - 3):
        piece = joint.piece(index)
        assert piece is not None
        expected = by_side.get((True, piece), by_side[False, piece])
        assert back.sources[index] == (expected,)


@pytest.mark.parametrize("kind", ["sentencepiece", "bytes"])
def test_parts_of_characters_are_bytes_and_not_the_text_that_spells_them(kind: str) -> None:
    """Pieces of byte BPE may end within a character: <0xD0> and <0xB8> of и are no text."""
    lines = [write_bytes(line) for line in ("слово и слова", "中文的句子", "0123456789 ABCDEF <x>")]
    model = own_sentencepiece(
        (*lines * 30, BYTE_LINE),
        size=300,
        model_type="bpe",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        split_by_unicode_script=False,
    )
    languages = ("de", "en", "fr")
    description = TokenizerDescription(
        kind="byte_bpe", languages=languages, language_token_scheme="underscores"
    )
    new = TokenizerFiles(description, model).build()
    text = own_sentencepiece(("0123456789 < x > ABCDEF", *LINES) * 20, size=90)
    old = own_tokenizer(languages, text)
    if kind == "bytes":
        old = TokenizerFiles(description.model_copy(update={"kind": kind}))
    built = old.build()
    sources = plan_rows(built, new, resembling={}).sources
    parts = [index for index in range(new.size) if (new.piece(index) or "").count("<0x") > 1]
    assert len(parts) > 5
    for index in parts:
        of_bytes = tuple(built.bos_id + 3 + byte for byte in new.utf8(index))
        assert sources[index] == (of_bytes if kind == "bytes" else ())


def test_a_language_is_added_behind_all_ids_and_both_sides_stay() -> None:
    files = tokenizer_of_two()
    old, new = files.build(), with_languages(files, ["ru"]).build()
    assert (new.size, new.output_size) == (old.size + 1, old.output_size)
    for code, line in (("de", "ein Satz"), ("en", "a sentence")):
        assert new.encode(line, language=code) == old.encode(line, language=code)
        assert new.decode(new.encode(line, language=code)) == old.decode(
            old.encode(line, language=code)
        )
    assert new.encode("ein Satz", language="ru") == old.encode("ein Satz", language="de")
