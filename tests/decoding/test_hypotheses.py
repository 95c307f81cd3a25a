"""Tests of pipeline/decoding/hypotheses.py."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from support.m2m100_peer import m2m100_peer, padded
from support.searched_models import Kind, model_of, next_log_p, rounded, translate
from support.tiny_models import EOS_ID, EVERYWHERE, PAD_ID, random_examples, source_of

from pipeline.batching.batch import collate
from pipeline.config.settings import Route
from pipeline.decoding import hypotheses as module
from pipeline.decoding.beam_search import beam_search
from pipeline.decoding.hypotheses import Translation, forced_pass, stopping_rule
from pipeline.decoding.settings import DecodingConfig
from pipeline.errors import ConfigError
from pipeline.model.parameters import named_slices
from pipeline.model.transformer import Transformer
from pipeline.seeds import named_generator


@pytest.mark.parametrize(("rows", "kind"), [(3, "dense"), (256, "moe"), (256, "moe-lgr")])
def test_log_probabilities_are_those_of_one_pass_per_token(
    kind: Kind, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOGIT_ROWS", rows)
    model = model_of(kind)
    examples = random_examples(model.spec, sentences=5, seed=2)
    given = [Translation(tuple(map(int, one.target)), 0.0) for one in examples]
    found = forced_pass(model, [source_of(one) for one in examples], given, eos_id=EOS_ID)
    for example, translation, forced in zip(examples, given, found, strict=True):
        log_p_TV = next_log_p(model, example, translation.tokens)
        ended = (*translation.tokens, EOS_ID)
        expected = [float(log_p_TV[index, token]) for index, token in enumerate(ended)]
        assert forced.log_p == pytest.approx(expected, rel=1e-5, abs=1e-5)
        assert forced.attention_TS is None


def test_what_a_search_found_has_its_score_as_the_mean_of_the_log_probabilities() -> None:
    model = model_of("moe", seed=3)
    examples = random_examples(model.spec, sentences=6, seed=3)
    found = translate(model, examples, length_penalty=1.0)
    forced = forced_pass(model, [source_of(one) for one in examples], found, eos_id=EOS_ID)
    for translation, one in zip(found, forced, strict=True):
        assert sum(one.log_p) / len(one.log_p) == rounded(translation.score)


@pytest.mark.parametrize("layer", [0, 1])
def test_attention_is_the_mean_of_the_heads_of_the_peer_s_layer(layer: int) -> None:
    model = model_of("dense")
    examples = random_examples(model.spec, sentences=5, seed=5)
    given = [Translation(tuple(map(int, one.target)), 0.0) for one in examples]
    sources = [source_of(one) for one in examples]
    found = forced_pass(model, sources, given, eos_id=EOS_ID, attention_of=layer)
    batch = collate(
        [replace(one, target=t.tokens) for one, t in zip(examples, given, strict=True)],
        eos_id=EOS_ID,
    )
    ids = padded(batch.source_N, batch.source, fill=PAD_ID)
    with torch.no_grad():
        output = m2m100_peer(model, eos_id=EOS_ID, kernel="eager")(
            input_ids=ids,
            attention_mask=ids.ne(PAD_ID).long(),
            decoder_input_ids=padded(batch.target_N, batch.target, fill=PAD_ID),
            output_attentions=True,
        )
    expected = output.cross_attentions[layer].mean(1)
    for row, (example, forced) in enumerate(zip(examples, found, strict=True)):
        assert forced.attention_TS is not None
        tokens, source = len(example.target), len(sources[row].tokens)
        assert forced.attention_TS.shape == (tokens, source)
        first = len(example.decoder_prompt) - 1
        wanted = expected[row, first : first + tokens, :source]
        torch.testing.assert_close(forced.attention_TS, wanted, rtol=1e-4, atol=1e-5)


MODULES: dict[str, dict[str, Any]] = {
    "low_rank": {"kind": "low_rank", "rank": 3, "within": EVERYWHERE, "shared": True},
    "language_experts": {"kind": "language_experts", "shared": True},
    "clsr": {"kind": "clsr", "gate_width": 4},
}


def with_modules(kind: str) -> Transformer:
    model = model_of("dense", language_modules=MODULES[kind])
    for entry in named_slices(model):
        if entry.name.endswith(".flat"):
            entry.value.normal_(0, 1, generator=named_generator("flat", entry.name))
    return model


@pytest.mark.parametrize(
    ("kind", "route"),
    [*product(("low_rank", "language_experts"), ("specific", "shared")), ("clsr", "specific")],
)
def test_a_beams_score_is_that_of_one_pass_over_its_tokens(kind: str, route: Route) -> None:
    model = with_modules(kind)
    sources = [source_of(one) for one in random_examples(model.spec, sentences=7, seed=1)]
    found = beam_search(model, sources, DecodingConfig(beam_size=3, route=route), eos_id=EOS_ID)
    forced = forced_pass(model, sources, found, eos_id=EOS_ID, route=route)
    for translation, told in zip(found, forced, strict=True):
        mean = sum(told.log_p) / len(told.log_p)
        assert translation.score == pytest.approx(mean, abs=1e-4)


@pytest.mark.parametrize("tables", ["per_side", "per_sublayer"])
@pytest.mark.parametrize("layer", [0, 1])
def test_attention_is_what_the_layer_pays_behind_the_gates_of_language_modules(
    layer: int, tables: str
) -> None:
    model = model_of("dense", language_modules=MODULES["clsr"] | {"tables": tables})
    (example,) = random_examples(model.spec, sentences=1, seed=5)
    source, given = source_of(example), Translation(tuple(map(int, example.target)), 0.0)
    cross = list(model.decoder_layers())[layer].cross_attention
    heads: dict[torch.nn.Module, torch.Tensor] = {}
    for one in (cross.query, cross.key):
        one.register_forward_hook(lambda own, _, x: heads.update({own: cross.heads(x[None])[0]}))
    forced_pass(model, [source], [given], eos_id=EOS_ID)
    query_HTK, key_HSK = heads[cross.query], heads[cross.key]
    expected_TS = (query_HTK @ key_HSK.mT / query_HTK.shape[2] ** 0.5).softmax(2).mean(0)
    (found,) = forced_pass(model, [source], [given], eos_id=EOS_ID, attention_of=layer)
    assert found.attention_TS is not None
    wanted_TS = expected_TS[len(source.prompt) - 1 : -1]
    torch.testing.assert_close(found.attention_TS, wanted_TS, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["low_rank", "language_experts"])
def test_the_routes_of_a_model_translate_differently(kind: str) -> None:
    model = with_modules(kind)
    sources = [source_of(one) for one in random_examples(model.spec, sentences=7, seed=1)]
    routes: tuple[Route, ...] = ("specific", "shared")
    found = [
        beam_search(model, sources, DecodingConfig(route=route), eos_id=EOS_ID) for route in routes
    ]
    assert found[0] != found[1]


@pytest.mark.parametrize("name", ["ctranslate2", ""])
def test_a_stopping_rule_without_a_case_is_no_rule_of_none(name: str) -> None:
    with pytest.raises(ConfigError, match=f"no case for {name!r}"):
        stopping_rule(DecodingConfig.model_construct(stopping=name))  # type: ignore[arg-type]
