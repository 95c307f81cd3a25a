"""Gradients of experts that are added to float32 sums while a pass runs."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch
from support.tiny_models import random_batch, tiny_model, tiny_spec
from torch import Tensor, nn

from pipeline.kernels.gradient_sums import add_gradients_to, keeping_gradients
from pipeline.model.moe.experts import expert_parameters
from pipeline.model.moe.layer import MixtureOfExperts
from pipeline.model.settings import MoEConfig
from pipeline.model.transformer import Transformer


@contextmanager
def adding_gradients(sums: Mapping[nn.Parameter, Tensor]) -> Iterator[None]:
    for parameter, total in sums.items():
        add_gradients_to(total, parameter)
    yield
    for parameter in sums:
        del cast(Any, parameter).main_gradient


def model_of_experts() -> tuple[Transformer, dict[nn.Parameter, Tensor]]:
    """A model with experts in each layer, and sums for the gradients of their parameters."""
    model = tiny_model(tiny_spec(moe=MoEConfig(num_experts=4, every=1))).train()
    parameters = expert_parameters(model)
    assert len(parameters) == 4 * len([*model.encoder.layers, *model.decoder.layers])
    return model, {parameter: torch.zeros_like(parameter) for parameter in parameters}


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


def test_gradients_that_are_to_be_kept_leave_the_sums_as_they_are() -> None:
    model, sums = model_of_experts()
    with adding_gradients(sums), keeping_gradients():
        objective(model, 1).backward()
    assert all(parameter.grad is not None for parameter in sums)
    assert not any(total.any() for total in sums.values())


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
