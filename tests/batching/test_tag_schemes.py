"""Tag schemes of a model family: the ids that its own tokenizer would give a sentence."""

from pathlib import Path

import pytest
from support.exported_models import own_tokenizer
from transformers import NllbTokenizer

from pipeline.artifacts.tokenizer import Tokenizer, tags
from pipeline.artifacts.vocabularies import MODEL_NAME
from pipeline.batching.batch import Batch, Example, collate
from pipeline.batching.settings import BatchesConfig

SOURCE, TARGET = "an old house", "a new one"


def batch_of(tokenizer: Tokenizer, config: BatchesConfig) -> Batch:
    """One sentence from German to English."""
    found = tags(tokenizer, config.tag_scheme, source="de", target="en")
    example = Example(
        source=tokenizer.encode(SOURCE),
        target=tokenizer.encode(TARGET),
        source_prefix=found.source_prefix,
        source_suffix=found.source_suffix,
        decoder_prompt=found.decoder_prompt,
        source_language=0,
        target_language=1,
    )
    return collate([example], eos_id=tokenizer.eos_id, tag_is_label=config.tag_is_label)


@pytest.mark.parametrize(("scheme", "legacy"), [("src-tgt", False), ("src-suffix-tgt", True)])
def test_nllb_s_own_tokenizer_lays_a_sentence_out_as_the_scheme(
    scheme: str, legacy: bool, tmp_path: Path
) -> None:
    """Source and labels; pieces, which it numbers in its own way, are only counted."""
    files = own_tokenizer(["de", "en"])
    files.write(tmp_path)
    theirs = NllbTokenizer(
        str(tmp_path / MODEL_NAME),
        src_lang="deu_Latn",
        tgt_lang="eng_Latn",
        legacy_behaviour=legacy,
    )
    encoded = theirs(SOURCE, text_target=TARGET)
    ours = files.build()
    names = {
        ours.language_token_id("de"): "deu_Latn",
        ours.language_token_id("en"): "eng_Latn",
        ours.eos_id: "</s>",
    }
    config = BatchesConfig.model_validate({"tag_scheme": scheme, "tag_is_label": True})
    batch = batch_of(ours, config)

    def framed(ids: list[int]) -> list[str]:
        return [names.get(index, "piece") for index in ids]

    def their_frame(ids: list[int]) -> list[str]:
        tokens = theirs.convert_ids_to_tokens(ids)
        return [token if token in names.values() else "piece" for token in tokens]

    assert framed(batch.source_N.tolist()) == their_frame(encoded["input_ids"])
    if not legacy:  # the older one puts the target's token last, and its model moves it
        assert framed(batch.labels_L.tolist()) == their_frame(encoded["labels"])
