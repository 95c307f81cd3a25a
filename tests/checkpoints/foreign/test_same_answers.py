"""Models of other software are read as their own library reads them: ids, logits, translations."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.foreign_families import FAMILIES, Family, forced_logits
from support.foreign_models import (
    LINES,
    PAIRS,
    assert_same_logits,
    logits_of,
    model_of,
    our_translations,
    their_translations,
)

from pipeline.artifacts.tokenizer import tags
from pipeline.checkpoints.importing import open_foreign


class Opened:
    def __init__(self, name: str, folder: Path) -> None:
        self.family: Family = FAMILIES[name]
        self.folder = folder
        self.peer = self.family.make(folder)
        self.peer.generation_config.forced_eos_token_id = None
        """mBART's would end what is cut off, which ours does not."""
        self.tokenizer: Any = self.family.read_tokenizer(folder)
        self.tag = self.family.tag(self.tokenizer)


@pytest.fixture(scope="module", params=FAMILIES)
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Opened:
    return Opened(request.param, tmp_path_factory.mktemp("foreign") / "model")


def test_logits_of_a_padded_batch_are_those_of_the_library(opened: Opened) -> None:
    expected = forced_logits(opened.peer, opened.tokenizer, PAIRS, tag=opened.tag)
    assert_same_logits(logits_of(open_foreign(opened.folder), PAIRS), expected)


@pytest.mark.parametrize("beams", [1, 5])
def test_translations_are_those_of_the_library_token_for_token(beams: int, opened: Opened) -> None:
    source = open_foreign(opened.folder)
    tokenizer = source.tokenizer.build()
    found = our_translations(
        model_of(source, dtype=torch.float64), tokenizer, LINES, beams=beams, limit=20
    )
    expected = their_translations(
        opened.peer.double(), opened.tokenizer, LINES, beams=beams, limit=20, tag=opened.tag
    )
    opened.peer.float()
    assert found == expected
    assert len(set(found)) > len(LINES) // 2, "sentences are told apart"


def test_a_source_is_encoded_with_its_tags_as_the_library_does(opened: Opened) -> None:
    source = open_foreign(opened.folder)
    tokenizer = source.tokenizer.build()
    found = tags(tokenizer, source.spec.tag_scheme, source="en", target="de")
    for line in LINES:
        ours = [*found.source_prefix, *tokenizer.encode(line), tokenizer.eos_id]
        assert [*ours, *found.source_suffix] == opened.tokenizer(line)["input_ids"]
    assert found.decoder_prompt == (tokenizer.eos_id, opened.tag)


@pytest.mark.parametrize("name", ["M2M-100", "NLLB-MoE", "mBART-50"])
def test_the_inner_model_without_its_head_is_read_as_the_whole(name: str, tmp_path: Path) -> None:
    """As M2M100Model and its like save themselves: names without ``model.``, and no lm_head."""
    peer = FAMILIES[name].make(tmp_path)
    whole = open_foreign(tmp_path).tensors
    values = {name: whole.read(name) for name in whole.names()}
    peer.model.save_pretrained(tmp_path)
    inner = open_foreign(tmp_path).tensors
    assert inner.names() == [*values]
    assert all(torch.equal(inner.read(name), value) for name, value in values.items())
