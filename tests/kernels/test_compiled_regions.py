"""Residual, dropout and norm as compiled, against the same operator by operator."""

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from support.tiny_models import random_batch, tiny_spec
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from pipeline.checkpoints.names import initialize_weights
from pipeline.errors import ConfigError
from pipeline.kernels import compiled_regions
from pipeline.kernels.compiled_regions import (
    check_compiler,
    norm_of_sum,
    sum_and_norm,
)
from pipeline.model.building import build_model
from pipeline.model.regularization import Regularization
from pipeline.model.settings import MoEConfig
from pipeline.model.spec import ModelSpec
from pipeline.model.sublayer import compile_regions
from pipeline.model.transformer import Transformer
from pipeline.training.losses import training_loss
from pipeline.training.settings import LossConfig

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
RATE = 0.3


def missing_compiler() -> str:
    """Return why nothing can be compiled here; empty where it can."""
    try:
        check_compiler(CPU)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def compiler() -> None:
    """Skip without a compiler; a fixture, so that collecting tests loads none."""
    if why := missing_compiler():
        pytest.skip(why)


@pytest.fixture
def forms() -> Iterator[dict[str, int]]:
    """Yield the counter of compiled forms of regions."""
    import torch._dynamo
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    yield counters["stats"]
    assert not counters["graph_break"]
    torch._dynamo.reset()


def values(num_rows: int, width: int = 64, *, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, width, generator=generator).requires_grad_()


def gradients(spec: ModelSpec, *, compiled: bool, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the loss of a micro-batch and its gradients, in float64."""
    model = build_model(spec)
    initialize_weights(model, seed=1)
    model = model.to(torch.bfloat16).to(dtype).train()  # weights that all types have
    if compiled:
        compile_regions(model)
    terms = training_loss(model, random_batch(spec, sentences=4, seed=1), LossConfig())
    terms.objective.backward()
    found = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": terms.objective.detach().double(), **found}


def distance(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """Return the relative distance of all gradients together."""
    return math.sqrt(
        sum(float((found[name] - exact[name]).square().sum()) for name in exact)
        / sum(float(exact[name].square().sum()) for name in exact)
    )


@pytest.mark.usefixtures("compiler", "forms")
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_without_dropout_a_compiled_model_has_the_loss_and_gradients_of_the_plain_one(
    norm: str,
) -> None:
    """In bfloat16 it is at most a little farther from the exact ones than the plain model."""
    spec = tiny_spec(width=64, model={"norm": norm})
    exact = gradients(spec, compiled=False, dtype=torch.float32)
    single = gradients(spec, compiled=True, dtype=torch.float32)
    assert single.keys() == exact.keys()
    for name, gradient in exact.items():
        torch.testing.assert_close(single[name], gradient, rtol=1e-3, atol=1e-4, msg=name)
    plain, half = (gradients(spec, compiled=c, dtype=torch.bfloat16) for c in (False, True))
    assert 0 < distance(half, exact) < 1.2 * distance(plain, exact) < 0.1


@cache
def traced(region: Callable[..., Any]) -> Callable[..., Any]:
    """Trace a region without generating code."""
    return torch.compile(region, backend="eager")


@pytest.fixture
def tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace regions as the compiler does, and run them as they are."""
    monkeypatch.setattr(compiled_regions, "_compiled", traced)


@pytest.mark.usefixtures("tracing")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_any_number_of_rows_takes_one_form_per_rate(device: str, forms: dict[str, int]) -> None:
    """On CUDA with tensors that have no values; autograd would need a CUDA build of PyTorch."""
    is_fake = device == "cuda"
    without_values = FakeTensorMode(allow_non_fake_inputs=True) if is_fake else nullcontext()
    with without_values, torch.set_grad_enabled(not is_fake):
        norm = nn.LayerNorm(64, device=device)
        for rate, forms_now, counts in ((RATE, 1, (40, 41, 7, 300, 1024)), (0.1, 2, (40, 41))):
            for num_rows in counts:
                x, y = (torch.randn(num_rows, 64, device=device) for _ in range(2))
                assert norm_of_sum(x, y, norm, rate=rate).device.type == device
            assert forms["unique_graphs"] == forms_now


@pytest.mark.usefixtures("tracing")
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_all_batches_of_a_model_with_experts_take_at_most_three_forms(
    norm: str, forms: dict[str, int]
) -> None:
    spec = tiny_spec(moe=MoEConfig(num_experts=4), model={"norm": norm})
    model = build_model(spec, regularization=Regularization(dropout=RATE, moe_dropout=0.1)).train()
    initialize_weights(model, seed=1)
    compile_regions(model)
    for sentences in (4, 1, 9, 16):
        batch = random_batch(spec, sentences=sentences, seed=sentences, longest=20)
        training_loss(model, batch, LossConfig()).objective.backward()
    assert 2 <= forms["unique_graphs"] <= 3


@pytest.mark.usefixtures("compiler", "forms")
def test_dropout_in_a_region_keeps_its_share_of_values_scaled_and_their_gradients() -> None:
    x, y, norm = values(400, seed=1), values(400, seed=2), nn.LayerNorm(64)
    torch.manual_seed(5)
    total, normed = sum_and_norm(x, y, norm, rate=RATE)
    torch.testing.assert_close(normed, F.layer_norm(total, (64,)), rtol=1e-4, atol=1e-5)
    kept = (total - x).detach()
    is_kept = kept.abs() > 1e-5
    share, deviation = float(is_kept.float().mean()), math.sqrt(RATE * (1 - RATE) / kept.numel())
    assert abs(share - (1 - RATE)) < 5 * deviation
    by_column = is_kept.float().mean(0) - (1 - RATE)
    assert by_column.abs().max() < 5 * math.sqrt(RATE * (1 - RATE) / len(kept))
    expected = torch.where(is_kept, y.detach() / (1 - RATE), 0.0)
    torch.testing.assert_close(kept, expected, rtol=1e-3, atol=1e-5)

    total.sum().backward()
    assert x.grad is not None
    assert y.grad is not None
    assert torch.equal(x.grad, torch.ones_like(x))
    torch.testing.assert_close(y.grad, is_kept.float() / (1 - RATE))

    for seed, is_same in ((5, True), (6, False)):  # no state but that of the process
        torch.manual_seed(seed)
        again, _ = sum_and_norm(x, y, norm, rate=RATE)
        assert torch.equal(again, total) == is_same


def trained_model() -> Transformer:
    model = build_model(tiny_spec(width=64), regularization=Regularization(dropout=RATE))
    initialize_weights(model, seed=1)
    compile_regions(model)
    return model


def test_a_model_that_is_not_being_trained_is_not_compiled() -> None:
    model, batch = trained_model().eval(), random_batch(tiny_spec(width=64), sentences=2, seed=1)
    with mock.patch.object(compiled_regions, "_compiled", side_effect=AssertionError):
        logits_LV = model(batch).logits_LV
    plain = build_model(tiny_spec(width=64)).eval()
    initialize_weights(plain, seed=1)
    assert torch.equal(logits_LV, plain(batch).logits_LV)


@pytest.mark.usefixtures("compiler", "forms")
def test_layers_that_are_recomputed_drop_out_what_they_did_before() -> None:
    batch, found = random_batch(tiny_spec(width=64), sentences=2, seed=1), []
    for recomputes in (False, True):
        model = trained_model().train()
        model.recomputes = recomputes
        torch.manual_seed(3)
        training_loss(model, batch, LossConfig()).objective.backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    for kept, recomputed in zip(*found, strict=True):
        torch.testing.assert_close(recomputed, kept)


def test_a_machine_without_a_compiler_is_refused_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch._inductor import cpp_builder
    from torch._inductor.exc import InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", mock.Mock(side_effect=InvalidCxxCompiler))
    with pytest.raises(ConfigError, match=r"no C\+\+ compiler\. Install g\+\+"):
        check_compiler(CPU)
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: False)
    with pytest.raises(ConfigError, match="Install triton"):
        check_compiler(torch.device("cuda"))
