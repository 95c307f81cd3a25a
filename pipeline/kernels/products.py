"""Linear layers by the fastest matrix product that PyTorch has.

On CPU ``F.linear`` takes float32 to MKL, which on processors that are not Intel's is up to half as
fast as oneDNN with AVX-512. The operator is the one that torch.compile emits. bfloat16 is oneDNN's
in any case, and on CUDA nothing is different from ``nn.Linear``.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

WORTH_A_KERNEL = 2**22
"""Multiply-adds from which oneDNN is the faster: it generates code for every shape."""


class Linear(nn.Linear):
    """x Wᵀ + b, with the parameters of ``nn.Linear``."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b over the last dimension, differentiable.

    Which kernel is faster depends on the number of rows, which differs between ranks and
    micro-batches. That choice is made inside one autograd node, so that a layer's gradients come in
    the same order on all of them (:mod:`pipeline.training.gradient_order`).
    """
    if x.dtype != torch.float32 or x.device.type != "cpu" or not _by_onednn(x.dtype):
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


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, relu: bool = False) -> Tensor:
    """x Wᵀ + b, rectified where asked, in one pass where oneDNN has one; without autograd.

    In bfloat16 without a bias there is no second pass to save, and PyTorch's own way is shorter.
    """
    if _by_onednn(x.dtype) and (x.dtype == torch.float32 or bias is not None):
        function = "relu" if relu else "none"
        y: Tensor = _linear_pointwise()(x, weight, bias, function, [], "")
        return y
    y = F.linear(x, weight, bias)
    return y.relu_() if relu else y


def product_into(out: Tensor, x: Tensor, matrix: Tensor) -> None:
    """out ← x matrix, all of two dimensions; a copy costs less than MKL's float32 product."""
    if x.dtype == torch.float32 and _by_onednn(x.dtype):
        out.copy_(product(x, matrix.t()))
    else:
        torch.mm(x, matrix, out=out)


def _faster_product(x: Tensor, weight: Tensor) -> Callable[..., Tensor]:
    """:func:`product`, or what PyTorch takes, for products that are not worth a kernel."""
    is_worth_it = x.numel() * weight.shape[0] >= WORTH_A_KERNEL
    return product if is_worth_it else F.linear


@cache
def _linear_pointwise() -> Callable[..., Tensor]:
    """The operator that torch.compile emits; looking it up takes as long as a small call."""
    found: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.default
    return found


@cache
def _by_onednn(dtype: torch.dtype) -> bool:
    """Whether this build and processor have oneDNN's matrix product for a type."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32
