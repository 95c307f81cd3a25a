"""Fuse distillation: two passes of one batch, against the same written out with two models."""

import copy
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from support.tiny_models import random_batch, tiny_model, tiny_spec
from torch import Tensor

from pipeline.batching.batch import Batch
from pipeline.config.recipe import Recipe
from pipeline.errors import ConfigError
from pipeline.model.parameters import named_slices
from pipeline.model.spec import ModelSpec
from pipeline.model.transformer import Transformer
from pipeline.training.losses import training_loss
from pipeline.training.settings import LossConfig

MODULES: dict[str, dict[str, object]] = {
    "low_rank": {"kind": "low_rank", "rank": 2, "shared": True},
    "language_experts": {"kind": "language_experts", "shared": True},
}


def model_of(kind: str) -> tuple[ModelSpec, Transformer]:
    spec = tiny_spec(model={"language_modules": MODULES[kind]})
    model = tiny_model(spec)
    torch.manual_seed(1)
    for entry in named_slices(model):
        if entry.name.endswith(".flat"):
            entry.value.normal_(0, 0.3)
    return spec, model.double()


def naive(specific: Transformer, shared: Transformer, batch: Batch, config: LossConfig) -> Tensor:
    first = specific(batch, route="specific").logits_LV
    second = shared(batch, route="shared").logits_LV
    smoothing = config.label_smoothing
    entropies = [
        F.cross_entropy(one, batch.labels_L, reduction="sum", label_smoothing=smoothing)
        for one in (first, second)
    ]
    p, q = first.softmax(-1), second.softmax(-1)
    if config.distillation == "to_shared":
        p = p.detach()
        apart = (p * (p / q).log()).sum()
    else:
        apart = ((p * (p / q).log()).sum() + (q * (q / p).log()).sum()) / 2
    total: Tensor = (entropies[0] + entropies[1]) / 2 + apart
    return total


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("distillation", ["symmetric", "to_shared"])
def test_the_gradient_is_that_of_two_models_written_out(
    kind: str, distillation: Literal["symmetric", "to_shared"]
) -> None:
    spec, model = model_of(kind)
    config = LossConfig(
        objective="fuse_distillation",
        distillation=distillation,
        label_smoothing=0.1,
    )
    batch = random_batch(spec, sentences=6, seed=1)
    twin = copy.deepcopy(model)
    ours = training_loss(model, batch, config).objective
    theirs = naive(model, twin, batch, config)
    assert ours.dtype == torch.float64
    assert float(ours.detach()) == pytest.approx(float(theirs.detach()), rel=1e-9)
    found = torch.autograd.grad(ours, list(model.parameters()))
    halves = [
        torch.autograd.grad(theirs, list(one.parameters()), retain_graph=True, allow_unused=True)
        for one in (model, twin)
    ]
    for gradient, *parts in zip(found, *halves, strict=True):
        expected = sum((part for part in parts if part is not None), torch.zeros(()))
        scale = max(float(expected.abs().max()), 1e-3)
        torch.testing.assert_close(gradient, expected.to(gradient), rtol=0, atol=1e-9 * scale)


def test_only_the_shared_module_learns_from_what_languages_know() -> None:
    spec, model = model_of("language_experts")
    batch = random_batch(spec, sentences=6, seed=1)

    config = LossConfig(objective="fuse_distillation", distillation="to_shared")
    parameters = [p for n, p in model.named_parameters() if ".of_language." in n]
    distilled = training_loss(model, batch, config).objective
    translated = training_loss(model, batch, LossConfig()).objective / 2
    for found, expected in zip(
        torch.autograd.grad(distilled, parameters),
        torch.autograd.grad(translated, parameters),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


def test_a_model_of_one_route_cannot_be_distilled() -> None:
    with pytest.raises(ValueError, match=r"Set model\.language_modules\.shared to true"):
        Recipe.model_validate({"name": "one", "loss": {"objective": "fuse_distillation"}})


def test_a_shared_module_that_nothing_teaches_is_refused() -> None:
    with pytest.raises(ValueError, match="the shared module would learn nothing"):
        Recipe.model_validate({"name": "two", "model": {"language_modules": MODULES["low_rank"]}})


@pytest.mark.parametrize("route", ["other", "Shared", None])
def test_a_route_that_there_is_not_is_told(route: Any) -> None:
    spec, model = model_of("low_rank")
    with pytest.raises(ConfigError, match=rf"There is no route '{route}'\..*shared"):
        model(random_batch(spec, sentences=2, seed=1), route=route)


@pytest.mark.parametrize("kind", MODULES)
def test_a_loss_of_ones_own_with_two_passes_may_train_both_routes(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.config.recipe.passes_of", lambda _: 2)
    Recipe.model_validate({"name": "two", "model": {"language_modules": MODULES[kind]}})
