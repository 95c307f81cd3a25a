"""Linear layers with a bias and an activation, and what their backward pass adds to the products.

The fused form (:func:`~pipeline.kernels.launching.is_fused`) computes ReLU in the product. Its
backward pass computes the activation's gradient and its sums over rows, which are the gradient of
the bias, by one kernel.

Legend: N rows, I inputs, O outputs, P programs that share the rows.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from pipeline.kernels.attention import sliced
from pipeline.kernels.launching import is_fused, launch, power_of_two
from pipeline.kernels.products import Activation, activate, linear
from pipeline.kernels.residuals import PROGRAMS, total_of

SUMMING_ROWS = 8
"""Rows of ones that sum the columns of a matrix by a product; the fewest with aligned memory.

If the matrix has no multiple of 8 rows, cuBLAS takes a kernel for unaligned memory, which is slower
than a kernel that only sums."""
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


class JointParameters:
    """Parameters that are read in another form in training, all copied at once per pass.

    Matrices and biases of linear layers that read the same states lie below each other, so one
    product serves several layers, forward and backward. Others are read in float32. The copies are
    little work next to the products, and one by one they would be as many launches.
    """

    def __init__(
        self, groups: Sequence[Sequence[nn.Linear]], float32: Sequence[nn.Parameter] = ()
    ) -> None:
        """Copy the parameters.

        Args:
            groups: layers that read the same states and have the same number of outputs.
            float32: parameters to read in float32.
        """
        names = "weight", "bias"
        parameters = [getattr(one, name) for group in groups for name in names for one in group]
        copies: tuple[Tensor, ...] = _CopyParameters.apply(  # type: ignore[no-untyped-call]
            [len(group) for group in groups], *parameters, *float32
        )
        joined, widened = copies[: 2 * len(groups)], copies[2 * len(groups) :]
        pairs = zip(joined[::2], joined[1::2], strict=True)
        self._pairs = {id(group[0]): pair for group, pair in zip(groups, pairs, strict=True)}
        self._float32 = dict(zip(map(id, float32), widened, strict=True))

    def apply(self, x_NI: Tensor, layers: Sequence[nn.Module]) -> tuple[Tensor, ...] | None:
        """Return the results of the layers of a group; None if the layers are no group."""
        pair = self._pairs.get(id(layers[0]))
        return None if pair is None else sliced(activated_linear(x_NI, *pair), len(layers))

    def float32(self, parameter: Tensor) -> Tensor | None:
        """Return a parameter in float32; None if it has not been copied."""
        return self._float32.get(id(parameter))


def joins_parameters(x: Tensor) -> bool:
    """Return whether training on states like ``x`` uses :class:`JointParameters`."""
    return is_fused(x) and torch.is_grad_enabled()


class _CopyParameters(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sizes: Sequence[int], *parameters: Tensor) -> tuple[Tensor, ...]:
        left = list(parameters)
        copies: list[Tensor] = []
        views: list[Tensor] = []
        for size in (size for size in sizes for _ in ("weight", "bias")):
            parts, left = left[:size], left[size:]
            whole = parts[0].new_empty(sum(len(part) for part in parts), *parts[0].shape[1:])
            copies.append(whole)
            views += whole.chunk(size)
        if views:
            torch._foreach_copy_(views, list(parameters[: len(views)]))
        widened = [torch.empty_like(part, dtype=torch.float32) for part in left]
        if widened:
            torch._foreach_copy_(widened, left)
        ctx.sizes, ctx.dtypes = sizes, [part.dtype for part in left]
        ctx.set_materialize_grads(False)
        return (*copies, *widened)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        parts: list[Tensor | None] = []
        sizes = [size for size in ctx.sizes for _ in ("weight", "bias")]
        for size, whole in zip(sizes, gradients[: len(sizes)], strict=True):
            parts += [None] * size if whole is None else whole.chunk(size)
        wide = gradients[len(sizes) :]
        narrow = [
            None if d is None else torch.empty_like(d, dtype=dtype)
            for d, dtype in zip(wide, ctx.dtypes, strict=True)
        ]
        if written := [d for d in narrow if d is not None]:
            torch._foreach_copy_(written, [d for d in wide if d is not None])
        return None, *parts, *narrow


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
        if ctx.activation is None and len(x_NI) % SUMMING_ROWS == 0:
            dy_NO = gradients[0].contiguous()
            # One product for all sums: rows of ones, as many as the kernels of GPUs compute anyway.
            d_bias_O = (ones_for_sums(len(dy_NO), dy_NO.dtype, dy_NO.device) @ dy_NO)[0]
        else:
            dy_NO, d_bias_O = activation_gradients(gradients[0], value_NO, ctx.activation)
        wants_dx, wants_d_weight = ctx.needs_input_grad[:2]
        dx_NI = dy_NO @ weight_OI if wants_dx else None
        d_weight_OI = dy_NO.t() @ x_NI if wants_d_weight else None
        return dx_NI, d_weight_OI, d_bias_O, None


@lru_cache(maxsize=4)
def ones_for_sums(rows: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return ones for the sums of so many rows; cached, as both sides of a pass have few sizes."""
    return torch.ones(SUMMING_ROWS, rows, dtype=dtype, device=device)


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
