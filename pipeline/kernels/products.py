"""Linear layers by the fastest matrix product that PyTorch has.

On CPU ``F.linear`` takes float32 to MKL, which on processors that are not Intel's is up to half as
fast as oneDNN with AVX-512, and a little faster without. The operator is the one that torch.compile
emits. bfloat16 is oneDNN's where the processor has instructions for it; elsewhere PyTorch's product
is a plain loop, and one in float32 takes a tenth of its time. Which of these is taken says
:mod:`pipeline.kernels.cpu_choice`. On CUDA nothing is different from ``nn.Linear``.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from pipeline.kernels.cpu_choice import cpu_kernels, has_bfloat16_products

WORTH_A_KERNEL = 2**22
"""Multiply-adds from which oneDNN is the faster: it generates code for every shape."""

WIDE_BLOCK = 2000
"""Outputs of a very wide matrix that BLAS is given at a time."""


class Linear(nn.Linear):
    """x Wᵀ + b, with the parameters of ``nn.Linear``."""

    def reset_parameters(self) -> None:
        """Values as PyTorch has them, which a layer without memory for them does without."""
        if not self.weight.is_meta:
            super().reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b over the last dimension, differentiable.

    Which kernel is faster depends on the number of rows, which differs between ranks and
    micro-batches. That choice is made inside one autograd node, so that a layer's gradients come in
    the same order on all of them (:mod:`pipeline.training.optim`).
    """
    if x.device.type != "cpu" or not (_is_float32_by_onednn(x.dtype) or _in_float32(x.dtype)):
        return F.linear(x, weight, bias)
    if not torch.is_grad_enabled():
        return _faster_product(x, weight)(x, weight, bias)
    y: Tensor = _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return y


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return _faster_product(x, weight)(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = gradients
        x, weight = ctx.saved_tensors
        multiply = _faster_product(x, weight)
        wants_dx, wants_d_weight, wants_d_bias = ctx.needs_input_grad
        dx = multiply(dy, weight.t(), None) if wants_dx else None
        dy, x = dy.flatten(0, -2), x.flatten(0, -2)
        d_weight = multiply(dy.t(), x.t(), None) if wants_d_weight else None
        return dx, d_weight, dy.sum(0) if wants_d_bias else None


def batched_product(x: Tensor, y: Tensor) -> Tensor:
    """The matrix products of two equally large batches of matrices, differentiable."""
    if x.device.type != "cpu" or not _in_float32(x.dtype):
        return x @ y
    z: Tensor = _BatchedProduct.apply(x, y)  # type: ignore[no-untyped-call]
    return z


class _BatchedProduct(torch.autograd.Function):
    """In float32, of bfloat16; of float32 nothing is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return (x.float() @ y.float()).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        dz = gradients[0].float()
        dx = dz @ y.float().transpose(-1, -2)
        dy = x.float().transpose(-1, -2) @ dz
        return dx.to(x.dtype), dy.to(y.dtype)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, relu: bool = False) -> Tensor:
    """x Wᵀ + b, rectified where asked, in one pass where oneDNN has one; without autograd.

    In bfloat16 without a bias there is no second pass to save, and PyTorch's own way is shorter.
    """
    if _in_float32(x.dtype):
        float32_bias = None if bias is None else bias.float()
        return product(x.float(), weight.float(), float32_bias, relu=relu).to(x.dtype)
    if _is_float32_by_onednn(x.dtype) or (bias is not None and _is_bfloat16_by_onednn(x.dtype)):
        function = "relu" if relu else "none"
        y: Tensor = _linear_pointwise()(x, weight, bias, function, [], "")
        return y
    y = F.linear(x, weight, bias)
    return y.relu_() if relu else y


def faster_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b by the kernel that is worth it for so many rows; without autograd."""
    y: Tensor = _faster_product(x, weight)(x, weight, bias)
    return y


def wide_product(x_NI: Tensor, weight_OI: Tensor) -> Tensor:
    """x Wᵀ of a matrix with very many outputs, such as a vocabulary's; differentiable.

    BLAS divides such a product among its threads by rows, of which a search has few, and reads all
    of the matrix for each. By blocks of outputs, a block stays in the processor's cache; not where
    a gradient is wanted.
    """
    outputs = len(weight_OI)
    is_float32 = x_NI.device.type == "cpu" and x_NI.dtype == weight_OI.dtype == torch.float32
    if torch.is_grad_enabled() or not is_float32:
        return linear(x_NI, weight_OI)
    if _is_float32_by_onednn(x_NI.dtype) or outputs < 2 * WIDE_BLOCK:
        return linear(x_NI, weight_OI)
    y_NO = x_NI.new_empty(len(x_NI), outputs)
    for first in range(0, outputs, WIDE_BLOCK):
        block = slice(first, first + WIDE_BLOCK)
        torch.mm(x_NI, weight_OI[block].t(), out=y_NO[:, block])
    return y_NO


def product_dtype(x: Tensor) -> torch.dtype:
    """The type in which products of x are computed: what multiplies it often is cast once."""
    return torch.float32 if x.device.type == "cpu" and _in_float32(x.dtype) else x.dtype


def add_product_(out: Tensor, x: Tensor, matrix: Tensor) -> None:
    """out ← out + x matrix, all of two dimensions; in one pass where that is not slower.

    ``out`` may be of another type than the factors.
    """
    is_cpu, is_worth_it = x.device.type == "cpu", x.numel() * matrix.shape[1] >= WORTH_A_KERNEL
    is_cast = out.dtype != x.dtype or (is_cpu and _in_float32(x.dtype))
    if is_cast or (is_cpu and is_worth_it and _is_float32_by_onednn(x.dtype)):
        out += product(x, matrix.t())
    else:
        out.addmm_(x, matrix)


def product_into(out: Tensor, x: Tensor, matrix: Tensor) -> None:
    """out ← x matrix, all of two dimensions; a copy costs less than a slower product."""
    if _in_float32(x.dtype) or _is_float32_by_onednn(x.dtype):
        out.copy_(product(x, matrix.t()))
    else:
        torch.mm(x, matrix, out=out)


def _faster_product(x: Tensor, weight: Tensor) -> Callable[..., Tensor]:
    """:func:`product`, or what PyTorch takes, for products that are not worth a kernel."""
    is_worth_it = x.numel() * weight.shape[0] >= WORTH_A_KERNEL
    return product if is_worth_it or _in_float32(x.dtype) else F.linear


@cache
def _linear_pointwise() -> Callable[..., Tensor]:
    """The operator that torch.compile emits; looking it up takes as long as a small call."""
    found: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.default
    return found


def _in_float32(dtype: torch.dtype) -> bool:
    """Whether products of a type are computed in float32."""
    return dtype == torch.bfloat16 and cpu_kernels().bfloat16_products == "float32"


def _is_float32_by_onednn(dtype: torch.dtype) -> bool:
    return dtype == torch.float32 and cpu_kernels().float32_products == "onednn"


def _is_bfloat16_by_onednn(dtype: torch.dtype) -> bool:
    return dtype == torch.bfloat16 and has_bfloat16_products()
