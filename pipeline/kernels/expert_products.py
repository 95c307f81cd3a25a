"""Feed-forwards of many experts on contiguous slices of rows.

On CPU, each expert has its own matrix products. On other devices, all experts are computed at once:
by grouped matrix products if PyTorch has fast ones, else by batched products with padding
(:func:`has_grouped_products`). CPU tests compare both with single experts.

Legend: E experts (on this rank), R rows sorted by expert, L rows of the expert that has most, N
tokens, C choices per token, D model width, F hidden width, I and O width of what goes in and out.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from pipeline.errors import ConfigError, without_case
from pipeline.kernels.cpu import side_by_side
from pipeline.kernels.launching import is_fused, launch, power_of_two
from pipeline.kernels.placement import Placement, RowSlices, combine, gather
from pipeline.kernels.products import (
    GROUPED_MULTIPLE,
    Activation,
    activate,
    has_grouped_products,
    linear,
)


class ExpertWeights(NamedTuple):
    """Weights and biases of both projections, stacked over experts."""

    up_EFD: Tensor
    up_bias_EF: Tensor
    down_EDF: Tensor
    down_bias_ED: Tensor


def check_widths(*, width: int, hidden_width: int, device: torch.device) -> None:
    """Check that the kernels of a device support the widths of experts.

    Raises:
        ConfigError: grouped products would fail on these widths.
    """
    if device.type == "cpu" or not (width % GROUPED_MULTIPLE or hidden_width % GROUPED_MULTIPLE):
        return
    raise ConfigError(
        f"Experts of width {width} and feed_forward_width {hidden_width} cannot be computed on a "
        f"GPU: its grouped products need rows of a multiple of 16 bytes. Make "
        f"model.width and model.feed_forward_width multiples of {GROUPED_MULTIPLE}."
    )


def serve_tokens(
    x_ND: Tensor,
    weight_NC: Tensor,
    placement: Placement,
    weights: ExpertWeights,
    *,
    activation: Activation,
) -> Tensor:
    """Return the weighted sum of every token's experts, (N, D): gather, apply and combine."""
    x_RD = gather(x_ND, placement)
    if x_RD.device.type == "cpu":
        y_RD = serve_rows(x_RD, placement.rows_E.tolist(), weights, activation=activation)
    elif placement.slices is not None and has_grouped_products(x_RD):
        y_RD = grouped_products(x_RD, weights, placement.slices, activation)
    else:
        y_RD = _serve_at_once(x_RD, weights, placement.rows_E, activation)
    return combine(y_RD, weight_NC, placement)


def serve_rows(
    x_RD: Tensor,
    rows_E: Sequence[int],
    weights: ExpertWeights,
    *,
    activation: Activation,
    count_E: Tensor | None = None,
) -> Tensor:
    """Apply each expert to its slice of rows, (R, D).

    Args:
        x_RD: rows sorted by expert.
        rows_E: rows of each expert, on the host.
        weights: parameters of the experts.
        activation: activation between both projections.
        count_E: ``rows_E`` on the device of the rows, which no CPU needs. The host would wait for a
            copy of its own numbers.
    """
    if x_RD.device.type != "cpu":
        assert count_E is not None, "the device needs the rows of each expert"
        return _serve_at_once(x_RD, weights, count_E, activation, longest=max(rows_E))
    output: Tensor = _ExpertByExpert.apply(  # type: ignore[no-untyped-call]
        x_RD, *weights, tuple(rows_E), activation
    )
    return output


def _serve_at_once(
    x_RD: Tensor,
    weights: ExpertWeights,
    count_E: Tensor,
    activation: Activation,
    *,
    longest: int | None = None,
) -> Tensor:
    if has_grouped_products(x_RD):
        return grouped_feed_forward(x_RD, weights, count_E, activation)
    return padded_feed_forward(x_RD, weights, count_E, activation, longest=longest)


def padded_feed_forward(
    x_RD: Tensor,
    weights: ExpertWeights,
    count_E: Tensor,
    activation: Activation,
    *,
    longest: int | None = None,
) -> Tensor:
    """Apply experts by two batched products over E · L padded rows, on any GPU, in any dtype.

    ``longest`` is L, the rows of the largest expert, which sets the shape. None: unknown to the
    host, which copies it from the device and waits.
    """
    (num_rows, width), num_experts = x_RD.shape, len(count_E)
    longest = int(count_E.max()) if longest is None else longest
    expert_R = torch.repeat_interleave(count_E, output_size=num_rows)
    number_E = torch.arange(num_experts, device=x_RD.device)
    shift_E = number_E * longest - (count_E.cumsum(0) - count_E)
    place_R = torch.arange(num_rows, device=x_RD.device) + shift_E[expert_R]
    padded = x_RD.new_zeros(num_experts * longest, width)
    x_ELD = padded.index_copy(0, place_R, x_RD).view(num_experts, longest, width)
    up_EDF, down_EFD = weights.up_EFD.mT, weights.down_EDF.mT
    hidden_ELF = activate(torch.baddbmm(weights.up_bias_EF[:, None], x_ELD, up_EDF), activation)
    y_ELD = torch.baddbmm(weights.down_bias_ED[:, None], hidden_ELF, down_EFD)
    return y_ELD.flatten(0, 1).index_select(0, place_R)


def grouped_feed_forward(
    x_RD: Tensor, weights: ExpertWeights, count_E: Tensor, activation: Activation
) -> Tensor:
    """Apply experts by two grouped matrix products; slice sizes stay on the device."""
    slices = RowSlices.of(count_E, num_rows=len(x_RD))
    return grouped_products(x_RD, weights, slices, activation)


def grouped_products(
    x_RD: Tensor, weights: ExpertWeights, slices: RowSlices, activation: Activation
) -> Tensor:
    """Apply experts as :func:`grouped_feed_forward` does, with given slices."""
    y_RD: Tensor = _Grouped.apply(x_RD, *weights, slices, activation)  # type: ignore[no-untyped-call]
    return y_RD


class _Grouped(torch.autograd.Function):
    """Apply all experts at once, and overwrite what nothing else reads.

    It works around two defects of PyTorch's gradients: on some GPUs, experts without rows get
    nonzero gradients (:meth:`RowSlices.products`), and gradients of biases are summed in
    bfloat16, in no fixed order.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_RD: Tensor,
        up_EFD: Tensor,
        up_bias_EF: Tensor,
        down_EDF: Tensor,
        down_bias_ED: Tensor,
        slices: RowSlices,
        activation: Activation,
    ) -> Tensor:
        hidden_RF = _grouped_linear(x_RD, up_EFD, up_bias_EF, slices, relu=activation == "relu")
        active_RF = hidden_RF if activation == "relu" else F.gelu(hidden_RF)
        ctx.save_for_backward(x_RD, up_EFD, down_EDF, hidden_RF, active_RF)
        ctx.slices, ctx.activation = slices, activation
        return _grouped_linear(active_RF, down_EDF, down_bias_ED, slices)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        dy_RD, slices = gradients[0].contiguous(), ctx.slices
        x_RD, up_EFD, down_EDF, hidden_RF, active_RF = ctx.saved_tensors
        d_down_EDF = slices.products(dy_RD, active_RF)
        d_hidden_RF = F.grouped_mm(dy_RD, down_EDF, offs=slices.stop_E)
        is_relu = ctx.activation == "relu"
        if is_fused(dy_RD):
            d_down_bias_ED = _bias_gradients(dy_RD, None, slices)
            if not is_relu:
                _activation_gradient_(d_hidden_RF, hidden_RF, ctx.activation)
            d_up_bias_EF = _bias_gradients(d_hidden_RF, hidden_RF if is_relu else None, slices)
        else:
            _activation_gradient_(d_hidden_RF, hidden_RF, ctx.activation)
            d_up_bias_EF, d_down_bias_ED = slices.sums(d_hidden_RF, dy_RD)
        d_up_EFD = slices.products(d_hidden_RF, x_RD)
        dx_RD = F.grouped_mm(d_hidden_RF, up_EFD, offs=slices.stop_E)
        return dx_RD, d_up_EFD, d_up_bias_EF, d_down_EDF, d_down_bias_ED, None, None


def _grouped_linear(
    x_RI: Tensor, weight_EOI: Tensor, bias_EO: Tensor, slices: RowSlices, *, relu: bool = False
) -> Tensor:
    """Return x Wᵀ + b of every expert on its slice of rows, with ReLU if ``relu``."""
    y_RO = F.grouped_mm(x_RI, weight_EOI.mT, offs=slices.stop_E)
    if is_fused(y_RO):
        rows, columns = 16, min(256, power_of_two(y_RO.shape[1]))
        launch(
            "add_expert_biases",
            (-(-len(y_RO) // rows), -(-y_RO.shape[1] // columns)),
            *(y_RO, bias_EO, slices.expert_R, len(y_RO)),
            WIDTH=y_RO.shape[1],
            RELU=relu,
            ROWS=rows,
            BLOCK=columns,
        )
        return y_RO
    y_RO.add_(bias_EO.index_select(0, slices.expert_R))
    return y_RO.relu_() if relu else y_RO


def _bias_gradients(dy_RW: Tensor, y_RW: Tensor | None, slices: RowSlices) -> Tensor:
    """Sum the rows of each expert by a fused kernel, (E, W).

    With the results ``y_RW`` of ReLU, overwrite gradients by the gradients of its inputs before.
    """
    num_experts, width = len(slices.stop_E), dy_RW.shape[1]
    sum_EW = dy_RW.new_empty(num_experts, width)
    columns = min(64, power_of_two(width))  # narrow, for enough programs with few experts
    launch(
        "expert_bias_gradients",
        (num_experts, -(-width // columns)),
        *(dy_RW, y_RW, slices.bound_E, sum_EW),
        WIDTH=width,
        RELU=y_RW is not None,
        ROWS=64,
        BLOCK=columns,
        num_warps=8,
    )
    return sum_EW


class _ExpertByExpert(torch.autograd.Function):
    """Apply experts one by one, and write their gradients into stacked tensors.

    Plain autograd over slices of stacked weights would create and add one full-size gradient per
    expert. Experts without rows get a gradient of zeros, as DeepSpeed requires a gradient on every
    rank.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_RD: Tensor,
        up_EFD: Tensor,
        up_bias_EF: Tensor,
        down_EDF: Tensor,
        down_bias_ED: Tensor,
        rows_E: tuple[int, ...],
        activation: Activation,
    ) -> Tensor:
        y_RD, slices = torch.empty_like(x_RD), _slices(rows_E)
        hiddens = [x_RD.new_empty(0, up_EFD.shape[1])] * len(rows_E)

        def serve(e: int) -> None:
            x = _padded(x_RD[slices[e]])
            hiddens[e] = linear(x, up_EFD[e], up_bias_EF[e])
            active = hiddens[e].relu_() if activation == "relu" else F.gelu(hiddens[e])
            y_RD[slices[e]] = linear(active, down_EDF[e], down_bias_ED[e])[: rows_E[e]]

        weights = up_EFD[0].numel()
        side_by_side(serve, [rows * weights for rows in rows_E])
        ctx.slices, ctx.activation = slices, activation
        ctx.save_for_backward(x_RD, up_EFD, down_EDF, *hiddens)
        return y_RD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        dy_RD = gradients[0].contiguous()
        x_RD, up_EFD, down_EDF, *hiddens = ctx.saved_tensors
        dx_RD = torch.empty_like(x_RD)
        d_up_EFD, d_down_EDF = torch.empty_like(up_EFD), torch.empty_like(down_EDF)
        d_up_bias_EF = up_EFD.new_empty(up_EFD.shape[:2])
        d_down_bias_ED = down_EDF.new_empty(down_EDF.shape[:2])
        d_weights = d_up_EFD, d_up_bias_EF, d_down_EDF, d_down_bias_ED

        def serve(e: int) -> None:
            rows, hidden = ctx.slices[e], hiddens[e]
            if not len(hidden):
                for gradient in d_weights:
                    gradient[e].zero_()
                return
            x, dy = _padded(x_RD[rows]), _padded(dy_RD[rows])
            torch.sum(dy, 0, out=d_down_bias_ED[e])
            active = hidden if ctx.activation == "relu" else F.gelu(hidden)  # ReLU was in place
            torch.mm(dy.t(), active, out=d_down_EDF[e])
            d_hidden = linear(dy, down_EDF[e].t())
            _activation_gradient_(d_hidden, hidden, ctx.activation)
            torch.sum(d_hidden, 0, out=d_up_bias_EF[e])
            torch.mm(d_hidden.t(), x, out=d_up_EFD[e])
            dx_RD[rows] = torch.mm(d_hidden, up_EFD[e])[: rows.stop - rows.start]

        weights = up_EFD[0].numel()
        side_by_side(serve, [max(len(hidden), 1) * weights for hidden in hiddens])
        return dx_RD, *d_weights, None, None


def _padded(x_RI: Tensor) -> Tensor:
    """Add rows of zeros in bfloat16: to a multiple of 8, or of about a 48th of the rows.

    oneDNN generates code for every new number of rows, which takes as long as a small product.
    """
    rows = len(x_RI)
    step = max(8, 1 << max(rows.bit_length() - 6, 0))
    return F.pad(x_RI, (0, 0, 0, -rows % step)) if x_RI.dtype == torch.bfloat16 else x_RI


def _activation_gradient_(d_hidden_RF: Tensor, hidden_RF: Tensor, activation: Activation) -> None:
    """Overwrite the gradient of an activation's output by the gradient of its input."""
    given = d_hidden_RF, hidden_RF
    match activation:
        case "relu":
            torch.ops.aten.threshold_backward.grad_input(*given, 0, grad_input=d_hidden_RF)
        case "gelu":
            torch.ops.aten.gelu_backward.grad_input(*given, grad_input=d_hidden_RF)
        case unknown:
            raise without_case("_activation_gradient_", unknown)


def _slices(rows_E: Sequence[int]) -> list[slice]:
    """Return the slice of each expert's rows."""
    return [slice(start, stop) for start, stop in pairwise(accumulate(rows_E, initial=0))]
