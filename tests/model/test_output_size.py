"""A model whose translations consist of the first ids alone, the others being of source text."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from support.tiny_models import (
    EOS_ID,
    random_batch,
    random_examples,
    source_of,
    tiny_model,
    tiny_spec,
)
from support.tiny_training import changed

from pipeline.batching.batch import collate
from pipeline.config.ds_config import load_ds_config
from pipeline.config.recipe import load_recipe
from pipeline.decoding.beam_search import beam_search
from pipeline.decoding.hypotheses import Translation, forced_pass
from pipeline.decoding.quantization import quantize
from pipeline.decoding.settings import DecodingConfig
from pipeline.estimates.memory import estimate
from pipeline.model.building import build_model
from pipeline.model.parameters import count_parameters
from pipeline.model.spec import ModelSpec
from pipeline.model.transformer import Transformer
from pipeline.training.losses import training_loss
from pipeline.training.settings import LossConfig

OUTPUT = 20
UNTIED = {"embedding": {"output": "untied"}}


def spec_of(**model: object) -> ModelSpec:
    return tiny_spec(model=model).model_copy(update={"output_size": OUTPUT})


def whole_beside(model: Transformer) -> Transformer:
    """The same weights with logits of all ids; an untied table's further rows are noise."""
    whole = build_model(model.spec.model_copy(update={"output_size": None}))
    state = model.state_dict()
    for name, value in whole.state_dict().items():
        if name == "embedding.output_weight":
            state[name] = torch.cat([state[name], torch.randn(len(value) - OUTPUT, 16)])
    whole.load_state_dict(state)
    return whole


@pytest.mark.parametrize("model", [{}, UNTIED], ids=["tied", "untied"])
def test_logits_are_those_of_the_first_ids(model: dict[str, object]) -> None:
    ours = tiny_model(spec_of(**model)).eval()
    batch = random_batch(ours.spec, sentences=4, seed=1)
    with torch.no_grad():
        found, every = ours(batch).logits_LV, whole_beside(ours).eval()(batch).logits_LV
    assert found.shape[1] == OUTPUT
    torch.testing.assert_close(found, every[:, :OUTPUT], rtol=1e-5, atol=1e-6)


def test_source_pieces_have_no_share_in_the_loss_and_a_gradient_as_input_alone() -> None:
    """Against a softmax over the first ids, written out in float64."""
    model = tiny_model(spec_of()).double()
    batch = random_batch(model.spec, sentences=4, seed=1)
    batch.labels_L.clamp_(max=OUTPUT - 1)
    loss = training_loss(model, batch, LossConfig(label_smoothing=0.1)).objective
    loss.backward()
    ours = {name: one.grad for name, one in model.named_parameters()}
    model.zero_grad()
    whole = whole_beside(model).double()
    log_p_LV = F.log_softmax(whole(batch).logits_LV[:, :OUTPUT], dim=-1)
    of_labels = log_p_LV.gather(1, batch.labels_L[:, None]).sum()
    expected = -(0.9 * of_labels + 0.1 * log_p_LV.mean(-1).sum())
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-9)
    for name, one in whole.named_parameters():
        torch.testing.assert_close(ours[name], one.grad, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("is_quantized", [False, True])
def test_translations_have_ids_of_the_output_alone(is_quantized: bool) -> None:
    model = tiny_model(spec_of()).eval()
    if is_quantized:
        quantize(model)
    sources = [source_of(one) for one in random_examples(model.spec, sentences=12, seed=2)]
    with torch.inference_mode():
        found = beam_search(model, sources, DecodingConfig(beam_size=3), eos_id=EOS_ID)
    tokens = [token for one in found for token in one.tokens]
    assert tokens
    assert max(tokens) < OUTPUT


def test_a_forced_translation_is_scored_though_its_tags_cannot_be_predicted() -> None:
    """Against the model with logits of all ids, renormalised over the first."""
    model = tiny_model(spec_of()).eval()
    (example,) = random_examples(model.spec, sentences=1, seed=3)
    tokens = [min(token, OUTPUT - 1) for token in example.target]
    assert max(example.decoder_prompt) >= OUTPUT
    source = source_of(example)
    with torch.inference_mode():
        translation = Translation(tuple(tokens), 0.0)
        (found,) = forced_pass(model, [source], [translation], eos_id=EOS_ID)
        batch = collate([replace(example, target=tokens)], eos_id=EOS_ID)
        log_p_LV = whole_beside(model).eval()(batch).logits_LV[:, :OUTPUT].log_softmax(-1)
    expected = log_p_LV.gather(1, batch.labels_L[:, None])[:, 0]
    assert list(found.log_p) == pytest.approx(expected.tolist(), abs=1e-5)


def test_parameters_and_memory_are_those_of_the_output() -> None:
    recipe = load_recipe("bytes_lobef+subwords_64k+english_8k")
    counted = count_parameters(
        recipe.model,
        vocabulary_size=recipe.tokenizer.ids + 8,
        num_groups=0,
        output_size=recipe.tokenizer.output_ids,
    )
    joint = changed(recipe, "tokenizer", target_languages=())
    ours, whole = (
        estimate(
            one,
            vocabulary_size=recipe.tokenizer.ids + 8,
            num_groups=0,
            processes=1,
            ds_config=load_ds_config("zero1_bf16"),
        )
        for one in (recipe, joint)
    )
    assert whole.device_bytes - ours.device_bytes > 2 * recipe.batches.tokens * 64_000
    assert counted["embeddings"] == 512 * (64_000 + 8_000 - 4 + 8 + 8_000)


@pytest.mark.parametrize("size", [1, 41])
def test_an_output_that_the_vocabulary_cannot_have_is_refused(size: int) -> None:
    with pytest.raises(ValidationError, match=f"output_size {size} does not lie above pad_id 1"):
        ModelSpec(**{**tiny_spec().model_dump(), "output_size": size})
