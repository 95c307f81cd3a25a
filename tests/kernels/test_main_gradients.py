"""Gradients of experts that are added to float32 sums while a pass runs."""

from typing import cast

import pytest
import torch
from support.tiny_models import random_batch, tiny_model, tiny_spec
from torch import Tensor, nn

from pipeline.kernels.main_gradients import adding_gradients
from pipeline.model.moe.layer import MixtureOfExperts
from pipeline.model.settings import MoEConfig
from pipeline.model.transformer import Transformer


def model_of_experts() -> tuple[Transformer, dict[nn.Parameter, Tensor]]:
    """A model with experts in each layer, and sums for the gradients of their matrices."""
    model = tiny_model(tiny_spec(moe=MoEConfig(num_experts=4, every=1))).train()
    layers = [module for module in model.modules() if isinstance(module, MixtureOfExperts)]
    weights = [w for layer in layers for w in (layer.experts.up.weight, layer.experts.down.weight)]
    return model, {weight: torch.zeros_like(weight) for weight in weights}


def objective(model: Transformer, seed: int) -> Tensor:
    logits_LV: Tensor = model(random_batch(model.spec, sentences=3, seed=seed)).logits_LV
    return logits_LV.square().mean()


@pytest.mark.parametrize("recomputes", [False, True])
def test_sums_over_passes_are_the_gradients_that_parameters_would_accumulate(
    recomputes: bool,
) -> None:
    model, sums = model_of_experts()
    model.recomputes = recomputes
    for seed in (1, 2):
        objective(model, seed).backward()
    expected = {parameter: parameter.grad for parameter in model.parameters()}
    model.zero_grad()
    with adding_gradients(sums):
        for seed in (1, 2):
            objective(model, seed).backward()
    for parameter, gradient in expected.items():
        assert (parameter.grad is None) == (parameter in sums)
        torch.testing.assert_close(sums.get(parameter, parameter.grad), gradient)
    objective(model, 1).backward()
    assert all(weight.grad is not None for weight in sums), "outside, nothing has changed"


def test_gradients_that_are_asked_for_exist_but_for_those_that_were_added() -> None:
    model, sums = model_of_experts()
    parameters = list(model.parameters())
    expected = torch.autograd.grad(objective(model, 1), parameters)
    with adding_gradients(sums):
        found = torch.autograd.grad(objective(model, 1), parameters, allow_unused=True)
    for parameter, gradient, one in zip(parameters, expected, found, strict=True):
        assert (one is None) == (parameter in sums)
        torch.testing.assert_close(sums.get(parameter, one), gradient)


def test_a_gradient_has_been_added_before_the_layer_below_has_its_own() -> None:
    model, sums = model_of_experts()
    below, above = (
        cast(MixtureOfExperts, layer.feed_forward).experts.down.weight
        for layer in model.encoder.layers
    )
    added = []

    def note(_: nn.Module, __: object, output: tuple[Tensor, object]) -> None:
        output[0].register_hook(
            lambda _: added.append([bool(sums[w].any()) for w in (below, above)])
        )

    cast(nn.Module, model.encoder.layers[0].feed_forward).register_forward_hook(note)
    with adding_gradients(sums):
        objective(model, 1).backward()
    assert added == [[False, True]]


def test_sums_in_single_precision_take_gradients_in_half_precision() -> None:
    model, sums = model_of_experts()
    objective(model, 1).backward()
    expected = {weight: cast(Tensor, weight.grad) for weight in sums}
    half, single = model_of_experts()
    half.to(torch.bfloat16)
    with adding_gradients(single):
        objective(half, 1).backward()
    for gradient, total in zip(expected.values(), single.values(), strict=True):
        assert total.dtype == torch.float32
        assert (total - gradient).norm() < 0.1 * gradient.norm()
