"""The experts' weights, stacked over experts, and their arithmetic on contiguous slices of rows.

On CPU a loop over experts serves each with products of its own; on CUDA one grouped matrix product
per projection serves all experts.

Legend: E experts (on this rank), R rows sorted by expert, D model width, F hidden width.
"""

import contextlib
import ctypes
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.model.feed_forward import Activation, activate

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
"""Of glibc's malloc.h."""


def keep_freed_memory() -> None:
    """Let this process keep the memory it frees, instead of returning it to the system.

    By default glibc asks the system anew for every tensor above 32 MiB and gives it back at once.
    The gradients of stacked experts are such tensors, and on CPU having them mapped, page by page,
    at every step costs a good part of the layer's time. Does nothing where there is no glibc.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


class StackedLinear(nn.Module):
    """The weights of one linear layer of every expert: (E, out, in) and (E, out)."""

    def __init__(self, *, num_experts: int, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, out_features, in_features))
        self.bias = nn.Parameter(torch.empty(num_experts, out_features))


class Experts(nn.Module):
    """E feed-forwards of one shape; ``first_expert`` is the global id of the first one here."""

    def __init__(
        self,
        *,
        num_experts: int,
        first_expert: int,
        width: int,
        hidden_width: int,
        activation: Activation,
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.first_expert = first_expert
        self.activation: Activation = activation
        self.up = StackedLinear(
            num_experts=num_experts, in_features=width, out_features=hidden_width
        )
        self.down = StackedLinear(
            num_experts=num_experts, in_features=hidden_width, out_features=width
        )

    def forward(self, x_RD: Tensor, count_E: Sequence[int] | Tensor) -> Tensor:
        """Apply each expert to its slice of rows; ``count_E`` is a tensor on CUDA only."""
        weights = (self.up.weight, self.up.bias, self.down.weight, self.down.bias)
        if isinstance(count_E, Tensor):
            return grouped_feed_forward(x_RD, *weights, count_E, self.activation)
        output: Tensor = _LoopedFeedForward.apply(  # type: ignore[no-untyped-call]
            x_RD, *weights, tuple(count_E), self.activation
        )
        return output


def grouped_feed_forward(
    x_RD: Tensor,
    up_EFD: Tensor,
    up_bias_EF: Tensor,
    down_EDF: Tensor,
    down_bias_ED: Tensor,
    count_E: Tensor,
    activation: Activation,
) -> Tensor:
    """Two grouped matrix products; slice sizes stay on the device."""
    offsets_E = count_E.cumsum(0).to(torch.int32)
    expert_R = torch.repeat_interleave(count_E, output_size=x_RD.shape[0])
    hidden_RF = F.grouped_mm(x_RD, up_EFD.transpose(-1, -2), offs=offsets_E)
    hidden_RF = activate(hidden_RF + up_bias_EF.index_select(0, expert_R), activation)
    y_RD = F.grouped_mm(hidden_RF, down_EDF.transpose(-1, -2), offs=offsets_E)
    return y_RD + down_bias_ED.index_select(0, expert_R)


class _LoopedFeedForward(torch.autograd.Function):
    """The loop over experts, writing the gradients of all experts straight into stacked tensors.

    Plain autograd over slices of stacked weights would make and add one full-size gradient per
    expert. Experts without rows get a gradient of zeros (DeepSpeed wants one from every rank).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_RD: Tensor,
        up_EFD: Tensor,
        up_bias_EF: Tensor,
        down_EDF: Tensor,
        down_bias_ED: Tensor,
        count_E: tuple[int, ...],
        activation: Activation,
    ) -> Tensor:
        is_relu = activation == "relu"
        y_RD = torch.empty_like(x_RD)
        hiddens = []
        for expert, rows, window in _slices(count_E):
            hidden = _linear(x_RD[window.rows], up_EFD[expert], up_bias_EF[expert], relu=is_relu)
            active = _activated(window.clear_others(hidden), activation)
            y = _linear(active, down_EDF[expert], down_bias_ED[expert])
            y_RD[rows] = y[window.inner]
            hiddens.append(hidden)
        ctx.save_for_backward(x_RD, up_EFD, down_EDF, *hiddens)
        ctx.count_E, ctx.activation = count_E, activation
        return y_RD

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (dy_RD,) = gradients
        x_RD, up_EFD, down_EDF, *hiddens = ctx.saved_tensors
        dy_RD = dy_RD.contiguous()
        dx_RD = torch.empty_like(x_RD)
        d_up, d_down = torch.empty_like(up_EFD), torch.empty_like(down_EDF)
        d_up_bias = up_EFD.new_zeros(up_EFD.shape[:2])
        d_down_bias = down_EDF.new_zeros(down_EDF.shape[:2])
        for expert, count in enumerate(ctx.count_E):
            if count == 0:
                d_up[expert].zero_()
                d_down[expert].zero_()
        for (expert, rows, window), hidden in zip(_slices(ctx.count_E), hiddens, strict=True):
            dy = dy_RD[window.rows]
            _weight_gradient(dy, _activated(hidden, ctx.activation), out=d_down[expert])
            torch.sum(dy_RD[rows], 0, out=d_down_bias[expert])
            d_active = _linear(dy, down_EDF[expert].t())
            d_hidden = _activation_backward(d_active, hidden, ctx.activation)
            _weight_gradient(window.clear_others(d_hidden), x_RD[window.rows], out=d_up[expert])
            torch.sum(d_hidden, 0, out=d_up_bias[expert])
            dx_RD[rows] = _linear(d_hidden, up_EFD[expert].t())[window.inner]
        return dx_RD, d_up, d_up_bias, d_down, d_down_bias, None, None


@dataclass(frozen=True)
class _Window:
    """Rows of a round number around an expert's own, and where its own lie among them.

    oneDNN generates code for every new shape, which takes as long as a small product, so that
    products over as many rows as experts happen to get would do so at every step. A window may
    reach into the rows of neighbours: what is computed for those is left out.
    """

    rows: slice
    inner: slice

    def clear_others(self, x: Tensor) -> Tensor:
        """Zero, in place, the rows that are not the expert's own."""
        x[: self.inner.start].zero_()
        x[self.inner.stop :].zero_()
        return x


def _slices(count_E: Sequence[int]) -> Iterator[tuple[int, slice, _Window]]:
    """(expert, its rows, the window around them) for every expert that has any."""
    total = sum(count_E)
    for expert, (start, stop) in enumerate(pairwise(accumulate(count_E, initial=0))):
        if stop > start:
            size = min(_rounded(stop - start), total)
            first = min(start, total - size)
            window = _Window(slice(first, first + size), slice(start - first, stop - first))
            yield expert, slice(start, stop), window


def _rounded(count: int) -> int:
    """The next multiple of 8 and of about a 32nd of the count: few shapes, little waste."""
    step = max(8, 1 << max(count.bit_length() - 6, 0))
    return math.ceil(count / step) * step


def _by_onednn(dtype: torch.dtype) -> bool:
    """Whether this build and processor have oneDNN's matrix product for a type."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, relu: bool = False) -> Tensor:
    """x Wᵀ + b, rectified where asked, in one pass.

    ``F.linear`` takes float32 to MKL, which on processors that are not Intel's is slower than
    oneDNN with AVX-512. bfloat16 is oneDNN's in any case, and without a bias there is no second
    pass to save. The operator is the one that torch.compile emits.
    """
    is_gain = x.dtype == torch.float32 or bias is not None
    if is_gain and _by_onednn(x.dtype):
        function = "relu" if relu else "none"
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, function, [], "")
        return y
    y = F.linear(x, weight, bias)
    return y.relu_() if relu else y


def _weight_gradient(dy: Tensor, x: Tensor, *, out: Tensor) -> None:
    """dyᵀ x; a copy costs less than MKL's float32 product, bfloat16 is oneDNN's in any case."""
    if x.dtype == torch.float32 and _by_onednn(x.dtype):
        out.copy_(_linear(dy.t(), x.t()))
    else:
        torch.mm(dy.t(), x, out=out)


def _activated(hidden: Tensor, activation: Activation) -> Tensor:
    """What goes into the down projection; of ReLU the up projection gives the result itself."""
    return hidden if activation == "relu" else F.gelu(hidden)


def _activation_backward(d_active: Tensor, hidden: Tensor, activation: Activation) -> Tensor:
    match activation:
        case "relu":
            gradient: Tensor = torch.ops.aten.threshold_backward(d_active, hidden, 0)
        case "gelu":
            gradient = torch.ops.aten.gelu_backward(d_active, hidden)
    return gradient
