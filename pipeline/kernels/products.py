"""Linear layers and other matrix products by PyTorch's fastest kernel.

On CPU, ``F.linear`` uses MKL for float32. On processors that are not Intel's, MKL is up to half as
fast as oneDNN with AVX-512, and a little faster without. oneDNN is called by the operator that
torch.compile emits. bfloat16 uses oneDNN if the processor has instructions for it; otherwise
PyTorch's product is a plain loop, and a float32 product takes a tenth of its time.
:mod:`pipeline.kernels.cpu` chooses. On CUDA, nothing differs from ``nn.Linear``.

Some layers have one matrix per language, so that matrices differ between the sentences of a batch
(:func:`row_products`, :func:`add_low_rank`). The rows of a sentence are contiguous. On CPU,
adjacent sentences with the same matrices form one run and one product, so that a batch of one
direction is a single product. All runs are one autograd node, so that gradients arrive in the same
order for every batch. If the device has grouped products, sentences are their groups and nothing is
copied to the host; this path has been counted on the meta device and has not yet run on a GPU.

Legend: N rows, B sentences, S slots (matrices), R rank, I inputs, O outputs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from pipeline.kernels.cpu import cpu_kernels, has_bfloat16_products

WORTH_A_KERNEL = 2**22
"""Number of multiply-adds from which oneDNN is faster; below, generating code for a shape costs
more than it saves."""

WIDE_BLOCK = 2000
"""Number of outputs of a very wide matrix that BLAS computes at a time."""

GROUPED_CAPABILITY = (9, 0)
"""Lowest CUDA capability with a fast grouped product; on older GPUs it is a loop on the host."""

GROUPED_MULTIPLE = 8
"""Row widths for ``torch.nn.functional.grouped_mm``: multiples of 16 bytes, 8 bfloat16 values."""


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
    """Return x Wᵀ + b over the last dimension, differentiable.

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
    """Return the matrix products of two equally large batches of matrices, differentiable."""
    if x.device.type != "cpu" or not _in_float32(x.dtype):
        return x @ y
    z: Tensor = _BatchedProduct.apply(x, y)  # type: ignore[no-untyped-call]
    return z


class _BatchedProduct(torch.autograd.Function):
    """Product of bfloat16 matrices in float32, without keeping the float32 copies."""

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
    """Return x Wᵀ + b, with ReLU if ``relu``, in one pass where oneDNN has one; without autograd.

    In bfloat16 without a bias, there is no second pass to save, and PyTorch's own product costs
    fewer calls.
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


def wide_product(x_NI: Tensor, weight_OI: Tensor) -> Tensor:
    """Return x Wᵀ for a matrix with very many outputs, such as a vocabulary; differentiable.

    BLAS splits such a product among its threads by rows, of which a search has few, and reads the
    whole matrix for each. Computing a block of outputs at a time keeps that block of the matrix in
    the processor's cache. Products that need a gradient are not split.
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
    """Return the dtype in which products of x are computed, to cast once before many of them."""
    return torch.float32 if x.device.type == "cpu" and _in_float32(x.dtype) else x.dtype


def add_product_(out: Tensor, x: Tensor, matrix: Tensor) -> None:
    """Add x · matrix to ``out``, all two-dimensional; in one pass unless that is slower.

    ``out`` may have another dtype than the factors.
    """
    is_cpu, is_worth_it = x.device.type == "cpu", x.numel() * matrix.shape[1] >= WORTH_A_KERNEL
    is_cast = out.dtype != x.dtype or (is_cpu and _in_float32(x.dtype))
    if is_cast or (is_cpu and is_worth_it and _is_float32_by_onednn(x.dtype)):
        out += product(x, matrix.t())
    else:
        out.addmm_(x, matrix)


def product_into(out: Tensor, x: Tensor, matrix: Tensor) -> None:
    """Write x · matrix into ``out``, all two-dimensional; a copy costs less than a slow product."""
    if _in_float32(x.dtype) or _is_float32_by_onednn(x.dtype):
        out.copy_(product(x, matrix.t()))
    else:
        torch.mm(x, matrix, out=out)


def _faster_product(x: Tensor, weight: Tensor) -> Callable[..., Tensor]:
    """Return :func:`product`, or PyTorch's own function for products too small for oneDNN."""
    is_worth_it = x.numel() * weight.shape[0] >= WORTH_A_KERNEL
    return product if is_worth_it or _in_float32(x.dtype) else F.linear


@cache
def _linear_pointwise() -> Callable[..., Tensor]:
    """Return the operator that torch.compile emits; cached, as the look-up is slow."""
    found: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.default
    return found


def _in_float32(dtype: torch.dtype) -> bool:
    """Return whether products of a dtype are computed in float32."""
    return dtype == torch.bfloat16 and cpu_kernels().bfloat16_products == "float32"


def _is_float32_by_onednn(dtype: torch.dtype) -> bool:
    return dtype == torch.float32 and cpu_kernels().float32_products == "onednn"


def _is_bfloat16_by_onednn(dtype: torch.dtype) -> bool:
    return dtype == torch.bfloat16 and has_bfloat16_products()


Activation = Literal["relu", "gelu"]


def activate(x: Tensor, activation: Activation) -> Tensor:
    """Apply ReLU, or the exact (erf) GELU."""
    match activation:
        case "relu":
            return F.relu(x)
        case "gelu":
            return F.gelu(x)


def has_grouped_products(x: Tensor, *, capability: tuple[int, int] | None = None) -> bool:
    """Return whether PyTorch has a fast grouped product: for bfloat16, on Hopper and later GPUs.

    PyTorch's own check of shapes refuses float32. ``capability`` is by default that of the device;
    the meta device, on which operators are counted, has Hopper's.
    """
    if capability is None:
        is_cuda = x.device.type == "cuda"
        capability = torch.cuda.get_device_capability(x.device) if is_cuda else GROUPED_CAPABILITY
    return x.dtype == torch.bfloat16 and capability >= GROUPED_CAPABILITY


class Run(NamedTuple):
    """A run of rows, [start, stop), and the two slots that it uses."""

    start: int
    stop: int
    first: int
    second: int

    @property
    def rows(self) -> slice:
        """Return the rows as a slice."""
        return slice(self.start, self.stop)


@dataclass(frozen=True)
class SentenceSlots:
    """Slots in two stacked tensors for each sentence of a batch.

    Attributes:
        sentence_N: sentence of each row, ascending.
        first_B: slot of each sentence in the first tensor.
        second_B: slot of each sentence in the second tensor.
    """

    sentence_N: Tensor
    first_B: Tensor
    second_B: Tensor

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """Return the fewest possible runs; one on the meta device, which has no values."""
        if self.sentence_N.device.type == "meta":
            return (Run(0, len(self.sentence_N), 0, 0),)
        pair_B2 = torch.stack([self.first_B, self.second_B], dim=1)
        pair_N2, count = torch.unique_consecutive(
            pair_B2[self.sentence_N], dim=0, return_counts=True
        )
        stops = count.cumsum(0).tolist()
        starts = [0, *stops[:-1]]
        return tuple(
            Run(start, stop, first, second)
            for start, stop, (first, second) in zip(starts, stops, pair_N2.tolist(), strict=True)
        )

    @cached_property
    def lengths(self) -> list[int]:
        """Return the number of rows of each run."""
        return [run.stop - run.start for run in self.runs]

    @cached_property
    def first_N(self) -> Tensor:
        """Return the first slot of each row."""
        return self.first_B[self.sentence_N]

    @cached_property
    def order_N(self) -> Tensor:
        """Return rows sorted by their first slots; those of one slot stay in order."""
        return self.first_N.argsort(stable=True)

    @cached_property
    def stop_B(self) -> Tensor:
        """Return the row after the last one of each sentence, int32."""
        following_B = torch.arange(1, len(self.first_B) + 1, device=self.sentence_N.device)
        return torch.searchsorted(self.sentence_N, following_B, out_int32=True)


def add_low_rank(
    y_NO: Tensor, x_NI: Tensor, vertical_SOR: Tensor, flat_SRI: Tensor, slots: SentenceSlots
) -> Tensor:
    """Return y + V_first (F_second x), row by row; may overwrite ``y_NO`` to save memory."""
    if _is_grouped(x_NI, vertical_SOR):
        flat_BRI = flat_SRI.index_select(0, slots.second_B)
        vertical_BOR = vertical_SOR.index_select(0, slots.first_B)
        low_NR = F.grouped_mm(x_NI, flat_BRI.mT, offs=slots.stop_B)
        return y_NO + F.grouped_mm(low_NR, vertical_BOR.mT, offs=slots.stop_B)
    if not torch.is_grad_enabled():
        return _add_low_rank_(y_NO, x_NI, vertical_SOR, flat_SRI, slots)[0]
    added: Tensor = _AddLowRank.apply(  # type: ignore[no-untyped-call]
        y_NO, x_NI, vertical_SOR, flat_SRI, slots
    )
    return added


def _is_grouped(x_NI: Tensor, vertical_SOR: Tensor) -> bool:
    sizes = (x_NI.shape[1], *vertical_SOR.shape[1:])
    fits = not any(size % GROUPED_MULTIPLE for size in sizes)
    return x_NI.device.type != "cpu" and fits and has_grouped_products(x_NI)


def _add_low_rank_(
    y_NO: Tensor, x_NI: Tensor, vertical_SOR: Tensor, flat_SRI: Tensor, slots: SentenceSlots
) -> tuple[Tensor, list[Tensor]]:
    """Add to y run by run; return y, and F x of every run in the dtype of products."""
    dtype, lengths = product_dtype(x_NI), slots.lengths
    sum_NO, x_NI = y_NO.to(dtype), x_NI.to(dtype)
    vertical_SRO, lows = vertical_SOR.mT, []
    for run, y, x in zip(slots.runs, sum_NO.split(lengths), x_NI.split(lengths), strict=True):
        low = times(x, flat_SRI[run.second].to(dtype))
        add_product_(y, low, vertical_SRO[run.first].to(dtype))
        lows.append(low)
    if sum_NO is not y_NO:
        y_NO.copy_(sum_NO)
    return y_NO, lows


class _AddLowRank(torch.autograd.Function):
    """Low-rank addition run by run; gradients of slots without rows are zeros."""

    @staticmethod
    def forward(
        ctx: Any,
        y_NO: Tensor,
        x_NI: Tensor,
        vertical_SOR: Tensor,
        flat_SRI: Tensor,
        slots: SentenceSlots,
    ) -> Tensor:
        y_NO, lows = _add_low_rank_(y_NO, x_NI, vertical_SOR, flat_SRI, slots)
        ctx.mark_dirty(y_NO)
        ctx.slots = slots
        ctx.save_for_backward(x_NI, vertical_SOR, flat_SRI, *lows)
        return y_NO

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        dy_NO = gradients[0]
        x_NI, vertical_SOR, flat_SRI, *lows = ctx.saved_tensors
        dtype, lengths = product_dtype(x_NI), ctx.slots.lengths
        wants_dx = ctx.needs_input_grad[1]
        dx_NI = torch.empty_like(x_NI) if wants_dx else None
        d_vertical_SOR, d_flat_SRI = torch.zeros_like(vertical_SOR), torch.zeros_like(flat_SRI)
        parts = dy_NO.to(dtype).split(lengths), x_NI.to(dtype).split(lengths)
        for run, dy, x, low in zip(ctx.slots.runs, *parts, lows, strict=True):
            d_low = times(dy, vertical_SOR[run.first].to(dtype).t())
            add_product_(d_vertical_SOR[run.first], dy.t(), low)
            add_product_(d_flat_SRI[run.second], d_low.t(), x)
            if dx_NI is not None:
                dx_NI[run.rows] = times(d_low, flat_SRI[run.second].to(dtype).t())
        return dy_NO, dx_NI, d_vertical_SOR, d_flat_SRI, None


def times(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x Wᵀ + b by the fastest kernel for the number of rows, without autograd."""
    multiply = _faster_product(x, weight) if x.device.type == "cpu" else F.linear
    return multiply(x, weight, bias)


def row_products(
    x_NI: Tensor, weight_SOI: Tensor, slots: SentenceSlots, bias_SO: Tensor | None = None
) -> Tensor:
    """Return x Wᵀ + b with the matrix of each row's first slot, run by run."""
    y_NO: Tensor = _RowProducts.apply(  # type: ignore[no-untyped-call]
        x_NI, weight_SOI, bias_SO, slots
    )
    return y_NO


class _RowProducts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_NI: Tensor, weight_SOI: Tensor, bias_SO: Tensor | None, slots: SentenceSlots
    ) -> Tensor:
        y_NO = x_NI.new_empty(len(x_NI), weight_SOI.shape[1])
        for run in slots.runs:
            bias_O = None if bias_SO is None else bias_SO[run.first]
            y_NO[run.rows] = times(x_NI[run.rows], weight_SOI[run.first], bias_O)
        ctx.runs, ctx.has_bias = slots.runs, bias_SO is not None
        ctx.save_for_backward(x_NI, weight_SOI)
        return y_NO

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        dy_NO = gradients[0]
        x_NI, weight_SOI = ctx.saved_tensors
        dx_NI, d_weight_SOI = torch.empty_like(x_NI), torch.zeros_like(weight_SOI)
        d_bias_SO = weight_SOI.new_zeros(weight_SOI.shape[:2]) if ctx.has_bias else None
        for run in ctx.runs:
            dy = dy_NO[run.rows]
            dx_NI[run.rows] = times(dy, weight_SOI[run.first].t())
            add_product_(d_weight_SOI[run.first], dy.t(), x_NI[run.rows])
            if d_bias_SO is not None:
                d_bias_SO[run.first] += dy.sum(0)
        return dx_NI, d_weight_SOI, d_bias_SO, None
