"""Which of several kernels for the same result a process takes on its CPU.

Processors differ in what they are fast at, and kernels in how they round. So the kernels are those
of a table by what the processor has. All ranks of a run take those of rank 0.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import torch

FEW_QUERIES = 16
"""Up to here (decoding: one per beam) attention by plain products is the faster kernel."""

NO_AVX512 = ("DEFAULT", "AVX2")
"""What PyTorch calls x86 processors on which MKL's float32 products are taken, not oneDNN's."""


@dataclass(frozen=True)
class CpuKernels:
    """A kernel for every operation that has several on CPU.

    Attributes:
        float32_products: of matrices in float32: oneDNN's, or the library that PyTorch takes (MKL,
            in its builds for x86).
        bfloat16_products: computed on bfloat16, or, where the processor has no instructions for
            that, on float32 and rounded (PyTorch adds up in float32, too).
        fused_attention_from: queries times the width of a head from which fused attention is
            faster in float32 without dropout (with dropout it is not fused on CPU).
    """

    float32_products: Literal["onednn", "blas"]
    bfloat16_products: Literal["bfloat16", "float32"]
    fused_attention_from: int

    def fuses_attention(self, dtype: torch.dtype, *, queries: int, width: int) -> bool:
        """Whether attention without dropout is fused, for heads of a width."""
        is_large = queries * width >= self.fused_attention_from
        return dtype != torch.bfloat16 and queries > FEW_QUERIES and is_large


@cache
def by_processor() -> CpuKernels:
    """The kernels of a processor by what it has, as measured: always the same on one machine."""
    has_onednn = torch.backends.mkldnn.is_available()
    has_avx512 = torch.backends.cpu.get_cpu_capability() not in NO_AVX512
    is_onednn_faster = has_avx512 or not torch.backends.mkl.is_available()
    return CpuKernels(
        float32_products="onednn" if has_onednn and is_onednn_faster else "blas",
        bfloat16_products="bfloat16" if has_bfloat16_products() else "float32",
        fused_attention_from=1536,
    )


@cache
def has_bfloat16_products() -> bool:
    """Whether this build and processor have oneDNN's matrix product of bfloat16."""
    return torch.backends.mkldnn.is_available() and bool(
        torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


class _InUse:
    """The kernels of this process, where they are not those of its processor."""

    kernels: CpuKernels | None = None


def cpu_kernels() -> CpuKernels:
    """The kernels that this process takes."""
    return _InUse.kernels or by_processor()


def use_cpu_kernels(kernels: CpuKernels | None) -> None:
    """Take these from now on; None: those of the processor.

    Where this build of PyTorch has no oneDNN, its own library stands in.
    """
    if kernels is not None and not torch.backends.mkldnn.is_available():
        kernels = replace(kernels, float32_products="blas")
    _InUse.kernels = kernels


@contextmanager
def using_cpu_kernels(kernels: CpuKernels) -> Iterator[None]:
    """Take these for a while."""
    before = _InUse.kernels
    use_cpu_kernels(kernels)
    try:
        yield
    finally:
        _InUse.kernels = before
