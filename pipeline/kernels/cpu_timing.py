"""Choosing kernels by the time that they take on the machine at hand.

Two machines, or two tries on one, may choose differently, and kernels differ in how they round: so
who measures tells the choice to all ranks, and keeps it for whoever goes on with the run.

Legend: N rows, D width, F hidden width of feed-forwards, B sentences, H heads, T queries, K head
width.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pipeline.kernels.cpu_choice import (
    FEW_QUERIES,
    CpuKernels,
    by_processor,
    using_cpu_kernels,
)
from pipeline.kernels.products import linear
from pipeline.kernels.scaled_dot_product import attend

ROUNDS = 5
LENGTHS = (32, 64, 128, 256)
"""Queries per sentence at which kernels of attention are compared."""
NEVER = 2**31
CLEARLY_FASTER = 0.97
"""Part of the other's time below which a kernel is taken in place of that of the table."""


@dataclass(frozen=True)
class Shape:
    """Of the matrices that most of a model's time goes into."""

    tokens: int
    width: int
    hidden_width: int
    num_heads: int


def measured_kernels(shape: Shape, *, dtype: torch.dtype) -> CpuKernels:
    """The fastest kernels for a model of a dtype; those of the table for what it does not use."""
    table = by_processor()
    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if dtype == torch.bfloat16:
            return _faster(shape, table, _other_bfloat16(table), dtype=dtype)
        return replace(
            _faster(shape, table, _other_float32(table), dtype=dtype),
            fused_attention_from=_fused_from(shape),
        )


def _other_float32(kernels: CpuKernels) -> CpuKernels:
    is_onednn = kernels.float32_products == "onednn"
    return replace(kernels, float32_products="blas" if is_onednn else "onednn")


def _other_bfloat16(kernels: CpuKernels) -> CpuKernels:
    is_direct = kernels.bfloat16_products == "bfloat16"
    return replace(kernels, bfloat16_products="float32" if is_direct else "bfloat16")


def _faster(
    shape: Shape, table: CpuKernels, other: CpuKernels, *, dtype: torch.dtype
) -> CpuKernels:
    """By forward and backward pass of the first product of a feed-forward."""
    x_ND = torch.randn(shape.tokens, shape.width).to(dtype).requires_grad_()
    weight_FD = torch.randn(shape.hidden_width, shape.width).to(dtype).requires_grad_()
    bias_F = torch.randn(shape.hidden_width).to(dtype).requires_grad_()
    gradient_NF = torch.randn(shape.tokens, shape.hidden_width).to(dtype)

    def work(kernels: CpuKernels) -> None:
        with using_cpu_kernels(kernels):
            linear(x_ND, weight_FD, bias_F).backward(gradient_NF)

    seconds = _seconds([lambda: work(table), lambda: work(other)])
    return other if seconds[1] < CLEARLY_FASTER * seconds[0] else table


def _fused_from(shape: Shape) -> int:
    """Queries times width of a head from which fused attention is the faster, in float32."""
    width = shape.width // shape.num_heads
    for length in LENGTHS:
        fused, plain = _attention_seconds(shape, length=length)
        if fused < plain:
            return length * width if length > LENGTHS[0] else FEW_QUERIES * width
    return NEVER


def _attention_seconds(shape: Shape, *, length: int) -> list[float]:
    width = shape.width // shape.num_heads
    size = (max(shape.tokens // length, 1), length, shape.num_heads, width)
    states = [torch.randn(size, requires_grad=True) for _ in range(3)]
    gradient_BHTK = torch.randn(size).transpose(1, 2)

    def work(fused_from: int) -> None:
        with using_cpu_kernels(replace(by_processor(), fused_attention_from=fused_from)):
            heads: list[Tensor] = [state.transpose(1, 2) for state in states]
            attend(*heads, mask=None).backward(gradient_BHTK)

    return _seconds([lambda: work(1), lambda: work(NEVER)])


def _seconds(contestants: Sequence[Callable[[], None]]) -> list[float]:
    """The least time of each, in interleaved rounds after one that warms up."""
    best = [float("inf")] * len(contestants)
    for turn in range(ROUNDS + 1):
        for index, work in enumerate(contestants):
            started = time.perf_counter()
            work()
            if turn:
                best[index] = min(best[index], time.perf_counter() - started)
    return best
