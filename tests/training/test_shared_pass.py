"""Micro-batches that share a pass have the loss and the gradient of separate passes.

The reference runs one micro-batch after the other through the same model, as training does without
``micro_batches_per_pass``.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.fronted_models import FRONTS, fronted_spec
from support.passes import join
from support.plain_training import MOE, micro_batches
from support.sigmoid_router import SigmoidRouter
from support.tiny_models import EVERYWHERE, tiny_model, tiny_spec
from torch import Tensor

from pipeline.batching.batch import Batch
from pipeline.model.moe.layer import MixtureOfExperts
from pipeline.model.settings import MoEConfig
from pipeline.model.spec import ModelSpec
from pipeline.model.sublayer import Regularization
from pipeline.model.transformer import Transformer
from pipeline.training.losses import training_loss
from pipeline.training.settings import LossConfig

NOISY = Regularization(
    dropout=0.3,
    attention_dropout=0.3,
    moe_dropout=0.2,
    expert_output_masking=0.3,
    router_jitter=0.2,
)
LOSS = {"balance_weight": 0.5, "router_z_weight": 0.1, "label_smoothing": 0.1}
DISTILLED = {"objective": "fuse_distillation"}
TIGHT = MOE.model_copy(update={"dispatch": "capacity", "capacity_factor": 0.6})
"""Most micro-batches drop routes, and another one than all of them together would."""


def with_modules(**modules: Any) -> ModelSpec:
    return tiny_spec(moe=MoEConfig(num_experts=4), model={"language_modules": modules})


SPECS: dict[str, tuple[ModelSpec, dict[str, Any]]] = {
    "dense": (tiny_spec(), {}),
    "dense, post-norm": (tiny_spec(model={"norm": "post"}), {}),
    "moe": (tiny_spec(moe=MOE), {}),
    "moe, language groups": (tiny_spec(moe=MOE, groups=2), {}),
    "capacity": (tiny_spec(moe=TIGHT, groups=2), {}),
    "capacity by position": (
        tiny_spec(moe=TIGHT.model_copy(update={"batch_prioritized": False})),
        {},
    ),
    "capacity, weights as they are": (
        tiny_spec(moe=TIGHT.model_copy(update={"combine_weights": "probability"})),
        {},
    ),
    "low rank": (with_modules(kind="low_rank", rank=2, within=EVERYWHERE), {}),
    "distilled": (with_modules(kind="low_rank", rank=2, shared=True), DISTILLED),
    "language experts": (with_modules(kind="language_experts"), {}),
    "clsr": (
        with_modules(kind="clsr", gate_width=4),
        {},
    ),
    **{
        f"front {name}": (fronted_spec(front, moe=MOE, groups=2), {})
        for name, front in FRONTS.items()
    },
}


def gradients(model: Transformer) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        found[name] = parameter.grad
        parameter.grad = None
    return found


def run(
    model: Transformer,
    passes: Sequence[Batch],
    loss: LossConfig,
    *,
    progress: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """(Objective, cross entropy, balance by label) of all passes, and the gradients."""
    sums_3 = torch.zeros(3, dtype=torch.float64)
    for batch in passes:
        terms = training_loss(model, batch, loss, progress=progress)
        terms.objective.backward()
        each = terms.objective.detach(), terms.cross_entropy, terms.balance * batch.num_labels
        sums_3 += torch.stack(each)
    return sums_3, gradients(model)


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        rounding = 1e-6  # all that there is of the gradients of key biases
        assert (found[name] - value).abs().max() <= 1e-5 * value.abs().max() + rounding, name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rates"),
    [
        *[(name, NOISY) for name in SPECS],
        *[(name, Regularization()) for name in ("moe", "capacity", "distilled")],
    ],
)
def test_a_shared_pass_is_the_sum_of_its_micro_batches(name: str, rates: Regularization) -> None:
    spec, more = SPECS[name]
    loss = LossConfig.model_validate({**LOSS, **more})
    model = tiny_model(spec, regularization=rates).train()
    batches = [batch.keyed(seed) for seed, batch in enumerate(micro_batches(spec, 1)[1:])]
    expected, expected_gradients = run(model, batches, loss, progress=0.5)
    found, found_gradients = run(model, [join(batches)], loss, progress=0.5)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-5)
    assert_close(found_gradients, expected_gradients)


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
def test_a_shared_pass_draws_the_same_numbers_again(name: str) -> None:
    spec, more = SPECS[name]
    loss = LossConfig.model_validate({**LOSS, **more})
    model = tiny_model(spec, regularization=NOISY).train()
    parts = micro_batches(spec, 1)[1:]
    batch = join([part.keyed(seed) for seed, part in enumerate(parts)])
    first, first_gradients = run(model, [batch], loss, progress=0.5)
    again, again_gradients = run(model, [batch], loss, progress=0.5)
    assert torch.equal(first, again)
    for parameter, value in first_gradients.items():
        assert torch.equal(again_gradients[parameter], value), parameter
    model.recomputes = True
    recomputed, recomputed_gradients = run(model, [batch], loss, progress=0.5)
    assert torch.equal(first, recomputed)
    assert_close(recomputed_gradients, first_gradients)
    others, _ = run(model, [join([part.keyed(9) for part in parts])], loss, progress=0.5)
    assert not torch.allclose(others, first, rtol=1e-4), "the seed must matter"


@pytest.mark.parametrize("shares", [False, True], ids=["one", "shared"])
def test_a_second_call_draws_the_same_numbers_unless_its_batch_is_noisy_anew(shares: bool) -> None:
    spec = SPECS["moe"][0]
    model = tiny_model(spec, regularization=NOISY).train()
    parts = [batch.keyed(seed) for seed, batch in enumerate(micro_batches(spec, 1)[1:])]
    batches = [join(parts)] if shares else parts
    anew = [replace(b, source=b.source.noisy(2), target=b.target.noisy(2)) for b in batches]
    first, again, other = (
        torch.cat([model(batch).logits_LV for batch in each]) for each in (batches, batches, anew)
    )
    assert torch.equal(first, again)
    assert not torch.isclose(first, other).all(-1).any()


def with_sigmoid_routers(spec: ModelSpec) -> Transformer:
    """A tiny model whose routers compute scores, weights and balance losses of their own."""
    model, generator = tiny_model(spec).train(), torch.Generator().manual_seed(3)
    for module in model.modules():
        if isinstance(module, MixtureOfExperts):
            module.router = SigmoidRouter(module.config, spec)
            for parameter in module.router.parameters():
                torch.nn.init.normal_(parameter, std=0.25, generator=generator)
    return model


@pytest.mark.parametrize("moe", [MOE, TIGHT], ids=["dropless", "capacity"])
def test_a_routers_own_balance_loss_is_that_of_separate_passes(moe: MoEConfig) -> None:
    """Sigmoid scores: Σ of E · (mean share of scores) · (share of first choices), by labels."""
    spec = tiny_spec(moe=moe)
    model, batches = with_sigmoid_routers(spec), micro_batches(spec, 1)[1:]
    expected_balance = 0.0
    for batch in batches:
        for record in model(batch).routing:
            score_NE = record.logits_NE.detach().double().sigmoid()
            mean_E = (score_NE / score_NE.sum(-1, keepdim=True)).mean(0)
            first_E = F.one_hot(score_NE.argmax(-1), moe.num_experts).double().mean(0)
            expected_balance += batch.num_labels * moe.num_experts * float(mean_E @ first_E)
    expected, expected_gradients = run(model, batches, LossConfig.model_validate(LOSS))
    assert expected[2].item() == pytest.approx(expected_balance, rel=1e-5)
    found, found_gradients = run(model, [join(batches)], LossConfig.model_validate(LOSS))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert_close(found_gradients, expected_gradients)
