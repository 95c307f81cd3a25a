"""Kernels of experts against plain PyTorch.

:mod:`test_triton_experts` runs this file in a process of its own with ``TRITON_INTERPRET=1``, which
Triton reads when it is loaded.
"""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from pipeline.kernels import triton_experts as kernels
from pipeline.kernels.expert_products import ExpertWeights, grouped_products
from pipeline.kernels.launching import fused_on_cpu, is_fused
from pipeline.kernels.placement import RouteNumbers, combine, gather, place_by_sorting
from pipeline.kernels.products import Activation

COUNTS = [5, 0, 17, 3]
WIDTH = 40
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def random(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(found: Tensor, expected: Tensor) -> None:
    half = found.dtype == torch.bfloat16
    torch.testing.assert_close(
        found.float(), expected.float(), rtol=1e-2 if half else 1e-5, atol=1e-2 if half else 1e-5
    )


def expert_of_rows() -> Tensor:
    return torch.arange(len(COUNTS), dtype=torch.int32).repeat_interleave(torch.tensor(COUNTS))


@DTYPES
@pytest.mark.parametrize("relu", [True, False])
def test_biases_are_those_of_each_rows_expert(dtype: torch.dtype, relu: bool) -> None:
    y_RW, bias_EW = random(25, WIDTH, seed=1, dtype=dtype), random(4, WIDTH, seed=2, dtype=dtype)
    y_RW[7, 3] = torch.nan
    expected_RW = y_RW.float() + bias_EW.float()[expert_of_rows().long()]
    kernels.add_expert_biases[(4, 2)](
        y_RW, bias_EW, expert_of_rows(), 25, WIDTH=WIDTH, RELU=relu, ROWS=8, BLOCK=32
    )
    expected_RW = expected_RW.relu() if relu else expected_RW
    assert y_RW.isnan().nonzero().tolist() == [[7, 3]]
    close(y_RW.nan_to_num(), expected_RW.nan_to_num())


@DTYPES
@pytest.mark.parametrize("relu", [True, False])
def test_gradients_of_biases_are_sums_over_each_experts_rows(
    dtype: torch.dtype, relu: bool
) -> None:
    d_RW, y_RW = random(25, WIDTH, seed=1, dtype=dtype), random(25, WIDTH, seed=2, dtype=dtype)
    y_RW = y_RW.relu()
    expected_RW = torch.where(y_RW > 0, d_RW, 0) if relu else d_RW.clone()
    bound_E = torch.tensor([0, *COUNTS], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    sum_EW = torch.full((4, WIDTH), torch.nan, dtype=dtype)
    kernels.expert_bias_gradients[(4, 2)](
        d_RW, y_RW, bound_E, sum_EW, WIDTH=WIDTH, RELU=relu, ROWS=8, BLOCK=32
    )
    assert torch.equal(d_RW, expected_RW)
    close(sum_EW, torch.stack([part.float().sum(0) for part in expected_RW.split(COUNTS)]))


@DTYPES
@pytest.mark.parametrize("weighted", [True, False])
def test_rows_are_combined_and_have_the_gradients_of_a_weighted_sum(
    dtype: torch.dtype, weighted: bool
) -> None:
    row_NC = torch.randperm(18, generator=torch.Generator().manual_seed(1)).view(9, 2)
    y_RW = random(18, WIDTH, seed=2, dtype=dtype)
    weight_NC = random(9, 2, seed=3, dtype=torch.float32)
    d_sum_NW = random(9, WIDTH, seed=4, dtype=dtype)
    leaves = [y_RW.float().requires_grad_(), weight_NC.clone().requires_grad_()]
    factor_NC = leaves[1] if weighted else torch.ones_like(weight_NC)
    expected_NW = (leaves[0][row_NC] * factor_NC[..., None]).sum(1)
    options = {"CHOICES": 2, "WIDTH": WIDTH, "BLOCK": 64}
    sum_NW = torch.empty(9, WIDTH, dtype=dtype)
    row_NC = row_NC.to(torch.int32)
    kernels.combine_rows[(9,)](y_RW, weight_NC if weighted else None, row_NC, sum_NW, **options)
    close(sum_NW, expected_NW.detach())
    if weighted:
        expected_NW.backward(d_sum_NW.float())
        d_y_RW, d_weight_NC = torch.empty_like(y_RW), torch.empty_like(weight_NC)
        kernels.combine_rows_backward[(9,)](
            d_sum_NW, y_RW, weight_NC, row_NC, d_y_RW, d_weight_NC, **options
        )
        for found, leaf in zip((d_y_RW, d_weight_NC), leaves, strict=True):
            assert leaf.grad is not None
            close(found, leaf.grad)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@DTYPES
def test_experts_by_fused_kernels_are_those_by_operators(
    dtype: torch.dtype, activation: Activation
) -> None:
    expert_NC = torch.stack(
        [torch.tensor([0, 2, 3]).repeat(7), torch.tensor([2, 3]).repeat(11)[:21]], 1
    )
    numbers = RouteNumbers(21, 2, 4, expert_NC.device)
    placement = place_by_sorting(expert_NC, numbers, top_N=None, spare_rows=True)
    shapes = (21, 16), (21, 2), (4, 24, 16), (4, 24), (4, 16, 24), (4, 16)
    results = []
    for fused in (False, True):
        leaves = [
            random(*shape, seed=seed, dtype=dtype).requires_grad_()
            for seed, shape in enumerate(shapes)
        ]
        leaves[1] = leaves[1].detach().float().requires_grad_()
        x_ND, weight_NC, *weights = leaves
        with fused_on_cpu() if fused else nullcontext():
            assert is_fused(x_ND) == fused
            assert placement.slices is not None
            y_RD = grouped_products(
                gather(x_ND, placement), ExpertWeights(*weights), placement.slices, activation
            )
            y_ND = combine(y_RD, weight_NC, placement)
            (y_ND * random(21, 16, seed=9, dtype=dtype)).sum().backward()
        results.append([y_ND.detach(), *(leaf.grad for leaf in leaves)])
    for found, expected in zip(*results, strict=True):
        assert found is not None
        assert expected is not None
        assert found.dtype == expected.dtype
        assert (found - expected).norm() <= (
            1e-6 if dtype == torch.float32 else 0.02
        ) * expected.norm()
