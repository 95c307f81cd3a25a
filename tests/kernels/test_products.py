"""Linear layers and other products against PyTorch's."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.kernels import products as linear_module
from pipeline.kernels.products import (
    OUTPUT_MULTIPLE,
    Linear,
    _product_in_padded_rows,
    linear,
    padded_product,
)


def pair() -> tuple[Linear, nn.Linear]:
    """The same weights in ours and in PyTorch's."""
    torch.manual_seed(1)
    ours, theirs = Linear(12, 20), nn.Linear(12, 20)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def tokens(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7, 12), (2, 3, 12), (1, 12), (0, 12)])
def test_values_and_gradients_are_those_of_pytorchs_layer(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    atol = 1e-5 if dtype == torch.float32 else 2e-1
    results = []
    for layer in pair():
        layer.to(dtype)
        x = tokens(*shape).to(dtype).requires_grad_()
        y = layer(x)
        (y * torch.arange(y.numel()).view_as(y).cos()).sum().backward()
        results.append([y, x.grad, layer.weight.grad, layer.bias.grad])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)


@pytest.mark.parametrize("wanted", ["x", "weight", "bias"])
def test_only_what_wants_a_gradient_gets_one(wanted: str) -> None:
    values = {"x": tokens(5, 12), "weight": tokens(20, 12), "bias": tokens(20)}
    others = {name: value.clone() for name, value in values.items()}
    values[wanted].requires_grad_()
    others[wanted].requires_grad_()
    linear(values["x"], values["weight"], values["bias"]).sum().backward()
    F.linear(others["x"], others["weight"], others["bias"]).sum().backward()
    torch.testing.assert_close(values[wanted].grad, others[wanted].grad, rtol=0, atol=1e-5)
    assert all(value.grad is None for name, value in values.items() if name != wanted)


@pytest.mark.parametrize("is_fast", [True, False])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 64, 65])
def test_few_rows_of_a_search_are_multiplied_by_onednn_as_many_are(
    monkeypatch: pytest.MonkeyPatch, rows: int, is_fast: bool
) -> None:
    if is_fast and not torch.backends.mkldnn.is_available():
        pytest.skip("this build of PyTorch has no oneDNN")
    monkeypatch.setattr(linear_module, "_has_fast_onednn", lambda: is_fast)
    monkeypatch.setattr(linear_module, "LARGE", 20 * 12)
    layer, _ = pair()
    x_NI = tokens(rows, 12)
    expected = x_NI.double() @ layer.weight.double().t() + layer.bias.double()
    by_onednn = mock.patch.object(
        linear_module, "_linear_pointwise", wraps=linear_module._linear_pointwise
    )
    with by_onednn as calls:
        assert not layer(x_NI).detach().sub(expected).abs().gt(1e-5).any()
        assert calls.call_count == 0
        with torch.no_grad():
            layer(x_NI)  # as experts in training
        assert calls.call_count == 0
        with torch.inference_mode():
            torch.testing.assert_close(layer(x_NI).double(), expected, rtol=0, atol=1e-5)
            strided = linear(x_NI.t().contiguous().t(), layer.weight, layer.bias)
            torch.testing.assert_close(strided.double(), expected, rtol=0, atol=1e-5)
    is_expected = is_fast and 3 <= rows <= 64
    assert calls.call_count == (2 if is_expected else 0)


def test_a_product_with_padded_outputs_and_its_gradients_are_those_without() -> None:
    x, weight = (tokens(rows, 12).requires_grad_() for rows in (7, 101))
    slope = tokens(7, 101)
    results = [
        (y, *torch.autograd.grad((y * slope).sum(), (x, weight)))
        for y in (padded_product(x, weight), F.linear(x, weight))
    ]
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("outputs", [40, 64, 101, 300])
def test_a_product_into_padded_rows_is_the_product(outputs: int) -> None:
    """As a search on a GPU has it, without gradients and without a copy of the matrix."""
    x, weight = tokens(7, 12), tokens(outputs, 12)
    with torch.no_grad():
        found = _product_in_padded_rows(x, weight)
    torch.testing.assert_close(found, F.linear(x, weight))
    assert found.stride(0) % OUTPUT_MULTIPLE == 0
