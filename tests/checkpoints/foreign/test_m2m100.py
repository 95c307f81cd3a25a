"""M2M-100 is read as its own library reads it: ids, logits, translations."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.foreign_models import (
    LINES,
    m2m100_folder,
    model_of,
    our_logits,
    our_translations,
    their_logits,
    their_translations,
)
from transformers import M2M100Tokenizer

from pipeline.checkpoints.foreign.choice import open_foreign

PAIRS = [("one sentence more", "Das ist ein Satz."), ("x", "Sätze"), (LINES[5], LINES[1])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("foreign") / "m2m100"


@pytest.fixture(scope="module")
def peer(folder: Path) -> Any:
    return m2m100_folder(folder)


@pytest.fixture(scope="module")
def peer_tokenizer(peer: Any, folder: Path) -> Any:
    del peer
    return M2M100Tokenizer.from_pretrained(folder, src_lang="en", tgt_lang="de")


def test_logits_are_those_of_the_library(peer: Any, peer_tokenizer: Any, folder: Path) -> None:
    source = open_foreign(folder)
    tokenizer = source.tokenizer.build()
    found = our_logits(model_of(source), tokenizer, PAIRS, scheme=source.spec.tag_scheme)
    expected = their_logits(peer, peer_tokenizer, PAIRS)
    for ours, theirs in zip(found, expected, strict=True):
        scale = theirs.abs().max()
        torch.testing.assert_close(ours / scale, theirs / scale, rtol=0, atol=1e-5)


@pytest.mark.parametrize("beams", [1, 5])
def test_translations_are_those_of_the_library_token_for_token(
    beams: int, peer: Any, peer_tokenizer: Any, folder: Path
) -> None:
    source = open_foreign(folder)
    tokenizer = source.tokenizer.build()
    found = our_translations(
        model_of(source, dtype=torch.float64), tokenizer, LINES, beams=beams, limit=20
    )
    expected = their_translations(
        peer.double(),
        peer_tokenizer,
        LINES,
        beams=beams,
        limit=20,
        tag=peer_tokenizer.get_lang_id("de"),
    )
    peer.float()
    assert found == expected
    assert len(set(found)) > len(LINES) // 2, "sentences are told apart"
