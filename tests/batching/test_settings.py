"""Tags by the name of a model family: the ids that its own tokenizer would give a sentence."""

from pathlib import Path

import pytest
from support.exported_models import own_tokenizer
from transformers import NllbTokenizer

from pipeline.artifacts.tokenizer import MODEL_NAME, Tokenizer, tags
from pipeline.batching.batch import Batch, Example, collate
from pipeline.batching.settings import TAG_PRESETS, BatchesConfig
from pipeline.config.recipe import load_recipe
from pipeline.errors import ConfigError

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


@pytest.mark.parametrize(
    ("preset", "before", "behind"),
    [
        ("m2m100", ["de"], []),
        ("mrasp2", ["de"], []),
        ("nllb", ["de"], []),
        ("nllb-legacy", [], ["de"]),
    ],
)
def test_a_preset_is_the_layout_of_its_family(
    preset: str, before: list[str], behind: list[str]
) -> None:
    """Decoders start from end-of-sentence and the target's token, which is the first label."""
    tokenizer = own_tokenizer(["de", "en"]).build()
    config = BatchesConfig.model_validate({"tag_scheme": preset, "tag_is_label": True})
    assert config.tag_scheme == TAG_PRESETS[preset]
    batch = batch_of(tokenizer, config)
    prefix, suffix = (
        [tokenizer.language_token_id(code) for code in codes] for codes in (before, behind)
    )
    en, eos = tokenizer.language_token_id("en"), tokenizer.eos_id
    source, target = tokenizer.encode(SOURCE), tokenizer.encode(TARGET)
    assert batch.source_N.tolist() == [*prefix, *source, eos, *suffix]
    assert batch.target_N.tolist() == [eos, en, *target]
    assert batch.labels_L.tolist() == [en, *target, eos]


@pytest.mark.parametrize(("preset", "legacy"), [("nllb", False), ("nllb-legacy", True)])
def test_nllb_s_own_tokenizer_lays_a_sentence_out_as_the_preset(
    preset: str, legacy: bool, tmp_path: Path
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
    config = BatchesConfig.model_validate({"tag_scheme": preset, "tag_is_label": True})
    batch = batch_of(ours, config)

    def framed(ids: list[int]) -> list[str]:
        return [names.get(index, "piece") for index in ids]

    def their_frame(ids: list[int]) -> list[str]:
        tokens = theirs.convert_ids_to_tokens(ids)
        return [token if token in names.values() else "piece" for token in tokens]

    assert framed(batch.source_N.tolist()) == their_frame(encoded["input_ids"])
    if not legacy:  # the older one puts the target's token last, and its model moves it
        assert framed(batch.labels_L.tolist()) == their_frame(encoded["labels"])


def test_a_preset_that_there_is_not_is_refused_with_the_schemes(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text('[batches]\ntag_scheme = "nlb"\n', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"batches\.tag_scheme .*src-tgt"):
        load_recipe(str(path))
