"""Linear layers and other matrix products by PyTorch's fastest kernel.

On CPU, ``F.linear`` uses MKL for float32, except in products of few rows by a large matrix, as in a
search, for which oneDNN may be faster. On CUDA, nothing differs from ``nn.Linear``.

Legend: N rows, I inputs, O outputs.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

FEW_ROWS, LARGE = range(3, 65), 2**18
"""Numbers of rows, and of weights, with which a product by MKL reads the weights more slowly."""

NO_AVX512 = ("DEFAULT", "AVX2")
"""PyTorch's names of x86 capabilities with which MKL's products of few rows beat oneDNN's."""

GROUPED_CAPABILITY = (9, 0)
"""Lowest CUDA capability with a fast grouped product."""

GROUPED_MAJORS = (9, 10)
"""Major numbers of capabilities with it: Hopper, and Blackwell of data centers. On other GPUs, for
example an RTX 5090 (12.0), PyTorch loops on the host, which waits for the sizes of the groups."""

GROUPED_MULTIPLE = 8
"""Row widths for ``torch.nn.functional.grouped_mm``: multiples of 16 bytes, 8 bfloat16 values."""


OUTPUT_MULTIPLE = 64
"""Multiple to which outputs of a wide matrix are padded in 16-bit training off the CPU.

The fast kernels of GPUs read and write rows that start at multiples of 16 bytes. A vocabulary of
64,000 pieces and 101 languages has an odd number of logits. 64 is a whole tile (not measured)."""


class Linear(nn.Linear):
    """Linear layer x Wᵀ + b with the parameters of ``nn.Linear`` and the fastest kernel."""

    def reset_parameters(self) -> None:
        """Initialize as PyTorch does, except on the meta device, which has no values."""
        if not self.weight.is_meta:
            super().reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to the last dimension."""
        return linear(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x Wᵀ + b over the last dimension, differentiable."""
    if x.device.type == "cpu" and _few_rows_by_onednn(x, weight):
        y: Tensor = _linear_pointwise()(x, weight, bias, "none", [], "")
        return y
    return F.linear(x, weight, bias)


def wide_product(x_NI: Tensor, weight_OI: Tensor) -> Tensor:
    """Return x Wᵀ for a matrix with very many outputs, for example a vocabulary; differentiable.

    On devices other than the CPU, it is :func:`padded_product` in 16 bits.
    """
    if is_on_cpu(x_NI) or not pads_outputs(len(weight_OI), x_NI.dtype):
        return linear(x_NI, weight_OI)
    multiply = padded_product if torch.is_grad_enabled() else _product_in_padded_rows
    return multiply(x_NI, weight_OI)


def pads_outputs(outputs: int, dtype: torch.dtype) -> bool:
    """Return whether training off the CPU pads so many outputs of a wide matrix."""
    return dtype.itemsize == 2 and outputs % OUTPUT_MULTIPLE != 0


def padded_product(x_NI: Tensor, weight_OI: Tensor) -> Tensor:
    """Return x Wᵀ as a view of a product with rows of zeros below W; differentiable.

    Both products of the backward pass have the padded shape, too.
    """
    product: Tensor = _PaddedProduct.apply(x_NI, weight_OI)  # type: ignore[no-untyped-call]
    return product


def _product_in_padded_rows(x_NI: Tensor, weight_OI: Tensor) -> Tensor:
    """Return x Wᵀ as a view of padded rows, without a copy of W: its last rows on their own."""
    outputs = len(weight_OI)
    y_NO = x_NI.new_empty(len(x_NI), -(-outputs // OUTPUT_MULTIPLE) * OUTPUT_MULTIPLE)[:, :outputs]
    whole = outputs // OUTPUT_MULTIPLE * OUTPUT_MULTIPLE
    for part in (slice(0, whole), slice(whole, outputs)):
        torch.mm(x_NI, weight_OI[part].t(), out=y_NO[:, part])
    return y_NO


class _PaddedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight_OI: Tensor) -> Tensor:
        padded_PI = F.pad(weight_OI, (0, 0, 0, -len(weight_OI) % OUTPUT_MULTIPLE))
        ctx.save_for_backward(x_NI, padded_PI)
        return F.linear(x_NI, padded_PI)[:, : len(weight_OI)]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, padded_PI = ctx.saved_tensors
        dy_NO, width = gradients[0], len(padded_PI)
        outputs = dy_NO.shape[1]
        # The fused loss writes its gradient over the logits, a view of padded rows. There, the
        # padding holds finite numbers, which the rows of zeros multiply.
        has_padding = dy_NO.untyped_storage().nbytes() == len(dy_NO) * width * dy_NO.itemsize
        if dy_NO.stride() == (width, 1) and dy_NO.storage_offset() == 0 and has_padding:
            dy_NP = dy_NO.as_strided((len(dy_NO), width), (width, 1))
        else:
            dy_NP = F.pad(dy_NO, (0, width - outputs))
        wants_dx, wants_d_weight = ctx.needs_input_grad
        d_weight_PI = dy_NP.t() @ x_NI if wants_d_weight else None
        return (
            dy_NP @ padded_PI if wants_dx else None,
            None if d_weight_PI is None else d_weight_PI[:outputs],
        )


def _few_rows_by_onednn(x: Tensor, weight: Tensor) -> bool:
    """Return whether a product of a search takes oneDNN for its few rows.

    In training, batches have new numbers of rows, for each of which oneDNN would generate code.
    """
    if x.dtype != torch.float32 or weight.numel() < LARGE or not torch.is_inference_mode_enabled():
        return False
    return x.numel() // x.shape[-1] in FEW_ROWS and _has_fast_onednn()


@cache
def _has_fast_onednn() -> bool:
    """Return whether oneDNN's products of few rows are faster than MKL's on this processor."""
    has_avx512 = torch.backends.cpu.get_cpu_capability() not in NO_AVX512
    return has_avx512 and torch.backends.mkldnn.is_available()


@cache
def _linear_pointwise() -> Callable[..., Tensor]:
    """Return the operator that torch.compile emits; cached, as the look-up is slow."""
    found: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.default
    return found


Activation = Literal["relu", "gelu"]


def activate(x: Tensor, activation: Activation) -> Tensor:
    """Apply ReLU, or the exact (erf) GELU."""
    match activation:
        case "relu":
            return F.relu(x)
        case "gelu":
            return F.gelu(x)


def has_grouped_products(x: Tensor, *, capability: tuple[int, int] | None = None) -> bool:
    """Return whether PyTorch has a fast grouped product: for bfloat16, on :data:`GROUPED_MAJORS`.

    PyTorch's own check of shapes refuses float32. ``capability``: by default the device's.
    """
    if capability is None:
        is_cuda = x.device.type == "cuda"
        capability = torch.cuda.get_device_capability(x.device) if is_cuda else _meta.get()
    is_fast = capability is not None and capability[0] in GROUPED_MAJORS
    return x.dtype == torch.bfloat16 and is_fast


_meta: ContextVar[tuple[int, int] | None] = ContextVar("meta", default=GROUPED_CAPABILITY)


def meta_capability() -> tuple[int, int] | None:
    """Return the CUDA capability that the meta device stands for; None: a CPU."""
    return _meta.get()


def may_leave_idle_gradients(x: Tensor, *, capability: tuple[int, int] | None = None) -> bool:
    """Return whether a grouped product may return nonzero gradients for experts without rows.

    It does on Blackwell, but not on Hopper (pytorch#172439). ``capability`` is as in
    :func:`has_grouped_products`.
    """
    if capability is None:
        if x.device.type == "cuda":
            capability = torch.cuda.get_device_capability(x.device)
        else:
            capability = GROUPED_CAPABILITY if x.device.type == "meta" else None
    return capability is None or capability[0] != GROUPED_CAPABILITY[0]


@contextmanager
def meta_stands_for(capability: tuple[int, int] | None) -> Iterator[None]:
    """Let the meta device, on which operators are counted, take the branches of a device.

    This is a GPU of a CUDA capability, by default Hopper's, or None: a CPU.
    """
    token = _meta.set(capability)
    try:
        yield
    finally:
        _meta.reset(token)


def is_on_cpu(x: Tensor) -> bool:
    """Return whether a tensor is on a CPU, or on the meta device while that stands for one."""
    return x.device.type == "cpu" or (x.is_meta and _meta.get() is None)
