"""Kernels chosen by measurement."""

from collections.abc import Callable, Sequence

import pytest
import torch

from pipeline.kernels import cpu_timing
from pipeline.kernels.cpu_choice import FEW_QUERIES, by_processor, cpu_kernels
from pipeline.kernels.cpu_timing import NEVER, Shape, measured_kernels

SHAPE = Shape(tokens=64, width=16, hidden_width=32, num_heads=2)
HEAD_WIDTH = 8
Times = Callable[[Sequence[Callable[[], None]]], list[float]]


def times(first: float, second: float) -> Times:
    def measured(contestants: Sequence[Callable[[], None]]) -> list[float]:
        for work in contestants:
            work()
        return [first, second]

    return measured


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_kernel_that_is_clearly_faster_takes_the_place_of_the_tables(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = by_processor()
    changed = "float32_products" if dtype == torch.float32 else "bfloat16_products"
    monkeypatch.setattr(cpu_timing, "_seconds", times(1.0, 0.5))
    found = measured_kernels(SHAPE, dtype=dtype)
    assert getattr(found, changed) != getattr(table, changed)
    monkeypatch.setattr(cpu_timing, "_seconds", times(1.0, 0.99))
    found = measured_kernels(SHAPE, dtype=dtype)
    assert getattr(found, changed) == getattr(table, changed)


def test_attention_is_fused_from_where_it_is_the_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_timing, "_seconds", times(0.5, 1.0))
    found = measured_kernels(SHAPE, dtype=torch.float32)
    assert found.fused_attention_from == FEW_QUERIES * HEAD_WIDTH
    monkeypatch.setattr(cpu_timing, "_seconds", times(1.0, 1.0))
    assert measured_kernels(SHAPE, dtype=torch.float32).fused_attention_from == NEVER


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_measuring_leaves_kernels_and_random_numbers_as_they_were(dtype: torch.dtype) -> None:
    before, state = cpu_kernels(), torch.get_rng_state()
    measured_kernels(SHAPE, dtype=dtype)
    assert cpu_kernels() == before
    assert torch.equal(torch.get_rng_state(), state)
