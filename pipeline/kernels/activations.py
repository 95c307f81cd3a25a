"""Linear layers with a bias and an activation, and what their backward pass adds to the products.

The fused form (:func:`~pipeline.kernels.launching.is_fused`) computes ReLU in the product. Its
backward pass computes the activation's gradient and its sums over rows, which are the gradient of
the bias, by one kernel.

Legend: N rows, I inputs, O outputs, P programs that share the rows.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from pipeline.kernels.launching import is_fused, launch, power_of_two
from pipeline.kernels.packed_attention import sliced
from pipeline.kernels.products import Activation, activate, linear
from pipeline.kernels.residuals import PROGRAMS, total_of

MAX_BLOCK = 1024
"""Most columns of a block: 4 warps of which every thread reads 16 bytes of bfloat16."""


def activated_linear(
    x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor, activation: Activation | None = None
) -> Tensor:
    """Return activation(x Wᵀ + b), differentiable; without an activation, x Wᵀ + b."""
    if x_NI.dim() == 2 and x_NI.dtype == weight_OI.dtype == bias_O.dtype and is_fused(x_NI):
        y_NO: Tensor = _ActivatedLinear.apply(  # type: ignore[no-untyped-call]
            x_NI, weight_OI, bias_O, activation
        )
        return y_NO
    y_NO = linear(x_NI, weight_OI, bias_O)
    return y_NO if activation is None else activate(y_NO, activation)


def joint_linear(x_NI: Tensor, layers: Sequence[nn.Linear]) -> tuple[Tensor, ...]:
    """Return the results of several linear layers of the same shape, in training by one product.

    Their matrices are copied below each other first, which is little work beside the product.
    """
    if not (is_fused(x_NI) and torch.is_grad_enabled()):
        return tuple(linear(x_NI, layer.weight, layer.bias) for layer in layers)
    weight_OI = torch.cat([layer.weight for layer in layers])
    bias_O = torch.cat([layer.bias for layer in layers])
    return sliced(activated_linear(x_NI, weight_OI, bias_O), len(layers))


def open_linear(x_NI: Tensor, layer: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """Return x Wᵀ, and the bias for the residual kernel to add; None if it has been added."""
    if is_fused(x_NI) and torch.is_grad_enabled():
        return F.linear(x_NI, layer.weight), layer.bias
    return linear(x_NI, layer.weight, layer.bias), None


class _ActivatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor, activation: Activation | None
    ) -> Tensor:
        if activation == "relu":
            y_NO = torch._addmm_activation(bias_O, x_NI, weight_OI.t())
        else:
            y_NO = torch.addmm(bias_O, x_NI, weight_OI.t())
        # GELU's gradient needs its input; ReLU's gradient is known from its output.
        ctx.save_for_backward(x_NI, weight_OI, None if activation is None else y_NO)
        ctx.activation = activation
        return F.gelu(y_NO) if activation == "gelu" else y_NO

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, weight_OI, value_NO = ctx.saved_tensors
        dy_NO, d_bias_O = activation_gradients(gradients[0], value_NO, ctx.activation)
        wants_dx, wants_d_weight = ctx.needs_input_grad[:2]
        dx_NI = dy_NO @ weight_OI if wants_dx else None
        d_weight_OI = dy_NO.t() @ x_NI if wants_d_weight else None
        return dx_NI, d_weight_OI, d_bias_O, None


def activation_gradients(
    dy_NO: Tensor, value_NO: Tensor | None, activation: Activation | None
) -> tuple[Tensor, Tensor]:
    """Return the gradient of an activation's input, and its sums over rows, by one kernel.

    The gradient does not overwrite ``dy_NO``, which autograd may also have given to others. That
    takes memory for a moment, but reads and writes as many bytes.

    Args:
        dy_NO: gradient of the activation's output.
        value_NO: output of a ReLU, or input of a GELU.
        activation: None: the gradient is ``dy_NO``.
    """
    dy_NO = dy_NO.contiguous()
    rows, width = dy_NO.shape
    dx_NO = dy_NO if activation is None else torch.empty_like(dy_NO)
    block = min(power_of_two(width), MAX_BLOCK)
    programs, blocks = min(rows, PROGRAMS), -(-width // block)
    sums_PO = dy_NO.new_empty(programs, width, dtype=torch.float32)
    values = dy_NO, value_NO, dx_NO, sums_PO, rows
    options = {"WIDTH": width, "BLOCK": block, "ACTIVATION": activation}
    launch("activation_backward", (programs, blocks), *values, **options)
    return dx_NO, total_of(sums_PO[None], dy_NO.dtype)[0]
