"""Decoding with language modules: token by token as all positions at once, by each route."""

from typing import Any

import pytest
from support.searched_models import model_of, source_of
from support.tiny_models import EOS_ID, random_examples

from pipeline.checkpoints.names import named_slices
from pipeline.config.settings import Route
from pipeline.decoding.beam_search import beam_search
from pipeline.decoding.forced_pass import forced_pass
from pipeline.decoding.settings import DecodingConfig
from pipeline.model.transformer import Transformer
from pipeline.seeds import named_generator

MODULES: dict[str, dict[str, Any]] = {
    "low_rank": {"kind": "low_rank", "rank": 3, "within": "both", "shared": True},
    "language_experts": {"kind": "language_experts", "shared": True},
    "clsr": {"kind": "clsr", "gate_width": 4},
}


def searched(kind: str) -> Transformer:
    model = model_of("dense", language_modules=MODULES[kind])
    for entry in named_slices(model):
        if entry.name.endswith(".flat"):
            entry.value.normal_(0, 1, generator=named_generator("flat", entry.name))
    return model


@pytest.mark.parametrize(
    ("kind", "route"),
    [
        ("low_rank", "specific"),
        ("low_rank", "shared"),
        ("language_experts", "specific"),
        ("language_experts", "shared"),
        ("clsr", "specific"),
    ],
)
def test_a_beams_score_is_that_of_one_pass_over_its_tokens(kind: str, route: Route) -> None:
    model = searched(kind)
    sources = [source_of(one) for one in random_examples(model.spec, sentences=7, seed=1)]
    found = beam_search(model, sources, DecodingConfig(beam_size=3, route=route), eos_id=EOS_ID)
    forced = forced_pass(model, sources, found, eos_id=EOS_ID, route=route)
    for translation, told in zip(found, forced, strict=True):
        mean = sum(told.log_p) / len(told.log_p)
        assert translation.score == pytest.approx(mean, abs=1e-4)


@pytest.mark.parametrize("kind", ["low_rank", "language_experts"])
def test_the_routes_of_a_model_translate_differently(kind: str) -> None:
    model = searched(kind)
    sources = [source_of(one) for one in random_examples(model.spec, sentences=7, seed=1)]
    routes: tuple[Route, ...] = ("specific", "shared")
    found = [
        beam_search(model, sources, DecodingConfig(route=route), eos_id=EOS_ID) for route in routes
    ]
    assert found[0] != found[1]
