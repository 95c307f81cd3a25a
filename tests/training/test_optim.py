"""The learning rate's closed forms, and Adam by hand."""

import math

import pytest
import torch
from torch import nn

from pipeline.training.optim import learning_rate, make_optimizer
from pipeline.training.settings import OptimizerConfig

POLYNOMIAL = OptimizerConfig(learning_rate=2e-4, final_learning_rate=1e-5, warmup_updates=4000)
INVERSE_SQUARE_ROOT = OptimizerConfig(
    learning_rate=5e-4, warmup_updates=100, schedule="inverse_sqrt"
)


@pytest.mark.parametrize(
    ("update", "expected"),
    [
        (1, 2e-4 / 4000),
        (1000, 5e-5),
        (4000, 2e-4),
        (52_000, (2e-4 + 1e-5) / 2),
        (76_000, 1e-5 + (2e-4 - 1e-5) / 4),
        (100_000, 1e-5),
        (150_000, 1e-5),
    ],
)
def test_the_polynomial_schedule_warms_up_and_falls_in_a_line(update: int, expected: float) -> None:
    found = learning_rate(POLYNOMIAL, update, total_updates=100_000)
    assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("update", "expected"), [(1, 5e-6), (50, 2.5e-4), (100, 5e-4), (400, 2.5e-4), (10_000, 5e-5)]
)
def test_the_inverse_square_root_schedule_halves_at_four_times_the_updates(
    update: int, expected: float
) -> None:
    found = learning_rate(INVERSE_SQUARE_ROOT, update, total_updates=1000)
    assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("config", [POLYNOMIAL, INVERSE_SQUARE_ROOT])
def test_the_schedule_has_no_jump_at_the_end_of_the_warm_up(config: OptimizerConfig) -> None:
    warmup = config.warmup_updates
    before, at, after = (
        learning_rate(config, warmup + d, total_updates=100_000) for d in (-1, 0, 1)
    )
    assert before < at > after
    assert at == config.learning_rate
    assert after == pytest.approx(at, rel=0.01)


def test_without_warm_up_the_first_update_is_nearly_at_full_rate() -> None:
    polynomial = POLYNOMIAL.model_copy(update={"warmup_updates": 0})
    inverse = INVERSE_SQUARE_ROOT.model_copy(update={"warmup_updates": 0})
    expected = 1e-5 + (2e-4 - 1e-5) * 0.99
    assert learning_rate(polynomial, 1, total_updates=100) == pytest.approx(expected)
    assert learning_rate(inverse, 1, total_updates=100) == 5e-4


def test_a_run_shorter_than_its_warm_up_never_leaves_it() -> None:
    rates = [learning_rate(POLYNOMIAL, update, total_updates=10) for update in range(1, 11)]
    assert rates == pytest.approx([2e-4 * update / 4000 for update in range(1, 11)])


def test_the_optimizer_is_adam_with_decoupled_weight_decay() -> None:
    config = OptimizerConfig(learning_rate=0.1, betas=(0.8, 0.95), epsilon=1e-3, weight_decay=0.2)
    parameter = nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    optimizer = make_optimizer([parameter], config)
    value, first, second = [1.0, -2.0], [0.0, 0.0], [0.0, 0.0]
    for step, gradient in enumerate([[0.5, -1.0], [0.1, 3.0], [0.0, -0.2]], start=1):
        parameter.grad = torch.tensor(gradient, dtype=torch.float64)
        optimizer.step()
        for i, g in enumerate(gradient):
            first[i] = 0.8 * first[i] + 0.2 * g
            second[i] = 0.95 * second[i] + 0.05 * g * g
            slope = first[i] / (1 - 0.8**step)
            scale = math.sqrt(second[i] / (1 - 0.95**step)) + 1e-3
            value[i] = value[i] - 0.1 * 0.2 * value[i] - 0.1 * slope / scale
        assert parameter.tolist() == pytest.approx(value, rel=1e-9)


def test_the_optimizer_takes_groups_of_parameters_as_they_come() -> None:
    groups: list[dict[str, object]] = [
        {"params": [nn.Parameter(torch.ones(2))], "name": name} for name in ("a", "b")
    ]
    optimizer = make_optimizer(groups, POLYNOMIAL)
    assert [group["name"] for group in optimizer.param_groups] == ["a", "b"]
    assert all(group["betas"] == (0.9, 0.98) for group in optimizer.param_groups)
