"""What is exported is loaded by transformers as it is: ids, logits, translations, and back."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.exported_models import BEYOND, HUNDRED, own_checkpoint
from support.foreign_models import (
    LINES,
    model_of,
    our_logits,
    our_translations,
    their_logits,
    their_translations,
)
from transformers import (
    M2M100ForConditionalGeneration,
    M2M100Tokenizer,
    NllbMoeForConditionalGeneration,
    NllbTokenizer,
)

from pipeline.checkpoints.exporting import Export, Format, export_checkpoint
from pipeline.checkpoints.foreign.layouts import chosen_layout, entries_of
from pipeline.checkpoints.sources import ModelSource
from pipeline.model.settings import MoEConfig

PAIRS = [("one sentence more", "Das ist ein Satz."), ("x", "Sätze"), (LINES[5], LINES[1])]
MOE = MoEConfig(num_experts=4, every=2)
PEERS = {
    "hf-m2m100": M2M100ForConditionalGeneration,
    "hf-nllb-moe": NllbMoeForConditionalGeneration,
}


@dataclass(frozen=True)
class Exported:
    """A model of ours, and what transformers loads."""

    source: ModelSource
    model: Any
    tokenizer: Any
    loading: dict[str, Any]

    @property
    def rows(self) -> Sequence[int | None]:
        return chosen_layout(entries_of(self.source.tokenizer, self.source.origin)).rows

    @property
    def tag(self) -> int:
        name = "__de__" if self.tokenizer.src_lang == "en" else "deu_Latn"
        return int(self.tokenizer.convert_tokens_to_ids(name))


@pytest.fixture(
    scope="module",
    params=[
        ("hf-m2m100", HUNDRED, {}),
        ("hf-m2m100", BEYOND, {"activation": "gelu", "scale_embedding": False}),
        ("hf-nllb-moe", HUNDRED, {"moe": MOE}),
        ("hf-nllb-moe", BEYOND, {"moe": MOE.model_copy(update={"every": 1})}),
        ("hf-nllb-moe", HUNDRED, {"moe": MOE, "groups": (1, 0, 0)}),
    ],
    ids=["dense", "dense, other languages", "moe", "moe, other languages", "one group"],
)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    to, languages, model = request.param
    folder = tmp_path_factory.mktemp("exported")
    grouped = "groups" in model
    if grouped:
        moe = model["moe"].model_copy(update={"decoder_router": "language_group"})
        model = {**model, "moe": moe}
    source = own_checkpoint(folder / "checkpoint", languages=languages, **model)
    export_checkpoint(
        source.origin,
        out_dir=folder / "out",
        export=Export(to=to, target_group="de" if grouped else None),
    )
    return loaded(folder / "out", source, to=to, hundred=languages == HUNDRED)


def loaded(directory: Path, source: ModelSource, *, to: Format, hundred: bool) -> Exported:
    peer_type: Any = PEERS[to]
    peer, loading = peer_type.from_pretrained(directory, output_loading_info=True)
    tokenizer_type: Any = M2M100Tokenizer if hundred else NllbTokenizer
    names = ("en", "de") if hundred else ("eng_Latn", "deu_Latn")
    tokenizer = tokenizer_type.from_pretrained(directory, src_lang=names[0], tgt_lang=names[1])
    return Exported(source, peer.eval(), tokenizer, loading)


def test_nothing_is_missing_when_it_is_loaded(exported: Exported) -> None:
    assert not exported.loading["missing_keys"]
    assert not exported.loading["unexpected_keys"]
    assert not exported.loading["mismatched_keys"]
    assert not exported.loading["error_msgs"]


def test_ids_of_text_are_ours_in_another_order(exported: Exported) -> None:
    ours = exported.source.tokenizer.build()
    prompt = ours.language_token_id("en")
    for line in [*LINES, "щ unknown щ漢字 letters", "  many   spaces ", "", "a\u0300 é"]:
        theirs = exported.tokenizer(line)["input_ids"]
        assert [exported.rows[index] for index in theirs] == [
            prompt,
            *ours.encode(line),
            ours.eos_id,
        ]


def test_ids_become_the_text_they_are_here(exported: Exported) -> None:
    for line in LINES:
        theirs = exported.tokenizer(line)["input_ids"]
        assert exported.tokenizer.decode(theirs, skip_special_tokens=True) == line


def test_logits_are_ours(exported: Exported) -> None:
    source = exported.source
    found = our_logits(
        model_of(source), source.tokenizer.build(), PAIRS, scheme=source.spec.tag_scheme
    )
    theirs = their_logits(exported.model, exported.tokenizer, PAIRS)
    places = [index for index, row in enumerate(exported.rows) if row is not None]
    rows = [row for row in exported.rows if row is not None]
    assert sorted(rows) == list(range(source.spec.vocabulary_size)), "every id of ours is there"
    for ours, others in zip(found, theirs, strict=True):
        scale = ours.abs().max()
        torch.testing.assert_close(
            others[:, places] / scale, ours[:, rows] / scale, rtol=0, atol=1e-5
        )


@pytest.mark.parametrize("beams", [1, 5])
def test_translations_are_ours_token_for_token(beams: int, exported: Exported) -> None:
    source = exported.source
    ours = our_translations(
        model_of(source, dtype=torch.float64),
        source.tokenizer.build(),
        LINES,
        beams=beams,
        limit=20,
    )
    theirs = their_translations(
        exported.model.double(),
        exported.tokenizer,
        LINES,
        beams=beams,
        limit=20,
        tag=exported.tag,
    )
    exported.model.float()
    assert [tuple(exported.rows[index] for index in one) for one in theirs] == ours
    assert len(set(ours)) > 2, "sentences are told apart"
