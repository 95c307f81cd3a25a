"""Compute what surrounds matrix products: biases, activations, dropout, residual sums and norms.

Every function has a plain form in PyTorch's operators and a fused form
(:func:`~pipeline.kernels.launching.is_fused`). Fused residual connections take one kernel per
direction, store no masks and do not round between the operators. Both forms drop the same values
(:mod:`pipeline.kernels.noise`). Fused linear layers compute ReLU in the product. Their backward
pass computes the activation's gradient and its sums over rows, which are the gradient of the bias,
by one kernel.

Legend: N tokens or rows, D model width, I inputs, O outputs, P programs that share the rows.
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
from pipeline.kernels.noise import Dropout, signed_threshold
from pipeline.kernels.noise import dropout as plain_dropout
from pipeline.kernels.products import Activation, activate, linear

PROGRAMS = 528
"""Most programs that add up gradients over rows: 4 for each of the 132 multiprocessors of an H100.

A constant, so that sums do not depend on the GPU."""
VALUES_PER_WARP = 256
"""Values of a row per warp: every thread reads 16 bytes of bfloat16."""
SUM_ROWS, SUM_COLUMNS = 256, 16
"""Rows and columns of a block when the sums of programs are added up."""
SUMMING_COLUMNS = 8
"""Equal columns of the value 1, of which a product sums the rows of a matrix: the fewest with
aligned memory.

They lie in memory as the inputs of a layer do, from which a product makes the gradient of the
weight. Neither factor is read along the rows, which is aligned only for a multiple of 8."""
LEAST_ONES = 4096
"""Least rows of such columns, which the passes of a model share: 64 KiB."""
MAX_BLOCK = 1024
"""Most columns of a block: 4 warps of which every thread reads 16 bytes of bfloat16."""


def dropped(x_ND: Tensor, dropout: Dropout | None) -> Tensor:
    """Return x after dropout; None: as it is."""
    if dropout is None:
        return x_ND
    if _can_fuse(x_ND):
        total_ND: Tensor = _fused(None, x_ND, None, None, dropout)[0]
        return total_ND
    return plain_dropout(x_ND, dropout)


def add_dropped(
    x_ND: Tensor,
    y_ND: Tensor,
    *,
    y_bias_D: Tensor | None = None,
    dropout: Dropout | None = None,
) -> Tensor:
    """Return x + dropout(y + bias); the arguments are as in :func:`add_and_norm`."""
    if _can_fuse(x_ND, y_ND):
        total_ND: Tensor = _fused(x_ND, y_ND, y_bias_D, None, dropout)[0]
        return total_ND
    return x_ND + dropped(_with_bias(y_ND, y_bias_D), dropout)


def add_and_norm(
    x_ND: Tensor,
    y_ND: Tensor,
    norm: nn.LayerNorm,
    *,
    y_bias_D: Tensor | None = None,
    dropout: Dropout | None = None,
) -> tuple[Tensor, Tensor]:
    """Return x + dropout(y + bias), and its norm.

    Args:
        x_ND: the residual stream.
        y_ND: the result of a sublayer.
        norm: the norm of the next sublayer.
        y_bias_D: bias of the last product of the sublayer, where ``y_ND`` lacks it.
        dropout: dropout of the result; None: nothing is dropped.
    """
    if _can_fuse(x_ND, y_ND):
        return _fused(x_ND, y_ND, y_bias_D, norm, dropout)
    total_ND = add_dropped(x_ND, y_ND, y_bias_D=y_bias_D, dropout=dropout)
    return total_ND, layer_norm(total_ND, norm)


def norm_of_sum(
    x_ND: Tensor,
    y_ND: Tensor,
    norm: nn.LayerNorm,
    *,
    y_bias_D: Tensor | None = None,
    dropout: Dropout | None = None,
) -> Tensor:
    """Return norm(x + dropout(y + bias)); the arguments are as in :func:`add_and_norm`."""
    return add_and_norm(x_ND, y_ND, norm, y_bias_D=y_bias_D, dropout=dropout)[1]


def layer_norm(x_ND: Tensor, norm: nn.LayerNorm) -> Tensor:
    """Return norm(x)."""
    if _can_fuse(x_ND):
        return _fused(None, x_ND, None, norm, None)[1]
    return F.layer_norm(x_ND, norm.normalized_shape, norm.weight, norm.bias, norm.eps)


def _with_bias(y_ND: Tensor, bias_D: Tensor | None) -> Tensor:
    return y_ND if bias_D is None else y_ND + bias_D


def _can_fuse(*states_ND: Tensor) -> bool:
    first = states_ND[0]
    return is_fused(first) and all(x.dim() == 2 and x.dtype == first.dtype for x in states_ND)


def _fused(
    x_ND: Tensor | None,
    y_ND: Tensor,
    y_bias_D: Tensor | None,
    norm: nn.LayerNorm | None,
    dropout: Dropout | None,
) -> tuple[Tensor, Tensor]:
    """Return the sum and the norm; a norm without a sum, or a sum without a norm, has only one."""
    keys = (None, None) if dropout is None else dropout.noise
    site, rate = (0, 0.0) if dropout is None else dropout[1:]
    values: tuple[Any, ...] = (None, None, 0.0)
    if norm is not None:
        values = norm.weight, norm.bias, norm.eps
    both: tuple[Tensor, Tensor] = _Residual.apply(  # type: ignore[no-untyped-call]
        x_ND, y_ND, y_bias_D, *keys, *values, site, rate
    )
    return both


class _Residual(torch.autograd.Function):
    """x + dropout(y + bias), and its norm if there is a weight; without x, norm(y) only."""

    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor | None,
        y_ND: Tensor,
        y_bias_D: Tensor | None,
        seed_N: Tensor | None,
        row_N: Tensor | None,
        weight_D: Tensor | None,
        shift_D: Tensor | None,
        epsilon: float,
        site: int,
        rate: float,
    ) -> tuple[Tensor | None, Tensor | None]:
        rows, width = y_ND.shape
        y_ND = y_ND.contiguous()
        x_ND = None if x_ND is None else x_ND.contiguous()
        is_sum = x_ND is not None or weight_D is None
        total_ND = torch.empty_like(y_ND) if is_sum else None
        normed_ND = mean_N = deviation_N = None
        if weight_D is not None:
            normed_ND = torch.empty_like(y_ND)
            mean_N, deviation_N = y_ND.new_empty(2, rows, dtype=torch.float32)
        ctx.numbers = site, signed_threshold(rate), 1 / (1 - rate)
        given = y_ND, x_ND, y_bias_D, weight_D, shift_D, seed_N, row_N
        results = total_ND, normed_ND, mean_N, deviation_N
        options = block_of(width)
        launch("residual_forward", (rows,), *given, *results, *ctx.numbers, epsilon, **options)
        summed_ND = total_ND if is_sum else y_ND
        saved = None if weight_D is None else summed_ND
        ctx.save_for_backward(saved, weight_D, mean_N, deviation_N, seed_N, row_N)
        ctx.types = [None if p is None else p.dtype for p in (weight_D, shift_D, y_bias_D)]
        ctx.set_materialize_grads(False)
        return total_ND, normed_ND

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        d_total_ND, d_normed_ND = (None if d is None else d.contiguous() for d in gradients)
        total_ND, weight_D, mean_N, deviation_N, seed_N, row_N = ctx.saved_tensors
        some_ND = d_normed_ND if d_total_ND is None else d_total_ND
        if some_ND is None:
            return (None,) * 10
        rows, width = some_ND.shape
        has_norm, sums_bias = d_normed_ND is not None, ctx.needs_input_grad[2]
        dx_ND = torch.empty_like(some_ND) if has_norm else d_total_ND
        dy_ND = dx_ND if seed_N is None else torch.empty_like(some_ND)
        programs = min(rows, PROGRAMS)
        sums_3PD = some_ND.new_empty(3, programs, width, dtype=torch.float32)
        if has_norm or sums_bias or seed_N is not None:
            given = d_total_ND, d_normed_ND, total_ND, weight_D, mean_N, deviation_N, seed_N, row_N
            written = dx_ND if has_norm else None, None if seed_N is None else dy_ND
            options = block_of(width) | {"SUMS_BIAS": sums_bias}
            numbers = rows, *ctx.numbers
            launch(
                "residual_backward", (programs,), sums_3PD, *given, *written, *numbers, **options
            )
        parameters: list[Tensor | None] = [None, None, None]
        first, last = 0 if has_norm else 2, 3 if sums_bias else 2
        if first < last:
            dtypes = ctx.types[first:last]
            found = total_of(sums_3PD[first:last], dtypes[0]).unbind()
            parameters[first:last] = [d.to(t) for d, t in zip(found, dtypes, strict=True)]
        d_weight_D, d_shift_D, d_bias_D = parameters
        dx_ND = dx_ND if ctx.needs_input_grad[0] else None
        return dx_ND, dy_ND, d_bias_D, None, None, d_weight_D, d_shift_D, None, None, None


def block_of(width: int) -> dict[str, int]:
    """Return the options of a kernel that holds whole rows of a width."""
    block = power_of_two(width)
    warps = min(max(block // VALUES_PER_WARP, 1), 16)
    return {"WIDTH": width, "BLOCK": block, "num_warps": warps}


def total_of(sums_GPD: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sums over all programs, (G, D)."""
    groups, programs, width = sums_GPD.shape
    result_GD = sums_GPD.new_empty(groups, width, dtype=dtype)
    blocks = -(-width // SUM_COLUMNS)
    options = {"WIDTH": width, "PART": SUM_ROWS, "BLOCK": SUM_COLUMNS}
    launch("add_sums", (groups, blocks), sums_GPD, result_GD, programs, **options)
    return result_GD


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
        if ctx.activation is None:
            dy_NO = gradients[0].contiguous()
            # One product for all sums, with as many columns as the kernels of GPUs compute anyway.
            d_bias_O = (ones_for_sums(dy_NO).t() @ dy_NO)[0]
        else:
            dy_NO, d_bias_O = activation_gradients(gradients[0], value_NO, ctx.activation)
        wants_dx, wants_d_weight = ctx.needs_input_grad[:2]
        dx_NI = dy_NO @ weight_OI if wants_dx else None
        d_weight_OI = dy_NO.t() @ x_NI if wants_d_weight else None
        return dx_NI, d_weight_OI, d_bias_O, None


def ones_for_sums(x_NI: Tensor) -> Tensor:
    """Return the value 1 in (N, 8) places, which sums the rows of a matrix by a product."""
    rows = max(power_of_two(len(x_NI)), LEAST_ONES)
    return shared_ones(rows, x_NI.dtype, x_NI.device)[: len(x_NI)]


@lru_cache(maxsize=4)
def shared_ones(rows: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a matrix of the value 1 that passes share, nearly all of which have another N."""
    return torch.ones(rows, SUMMING_COLUMNS, dtype=dtype, device=device)


def activation_gradients(
    dy_NO: Tensor, value_NO: Tensor, activation: Activation
) -> tuple[Tensor, Tensor]:
    """Return the gradient of an activation's input, and its sums over rows, by one kernel.

    The gradient does not overwrite ``dy_NO``, which autograd may also have given to others. That
    takes memory for a moment, but reads and writes as many bytes.

    Args:
        dy_NO: gradient of the activation's output.
        value_NO: output of a ReLU, or input of a GELU.
        activation: which of them.
    """
    dy_NO = dy_NO.contiguous()
    rows, width = dy_NO.shape
    dx_NO = torch.empty_like(dy_NO)
    block = min(power_of_two(width), MAX_BLOCK)
    programs, blocks = min(rows, PROGRAMS), -(-width // block)
    sums_PO = dy_NO.new_empty(programs, width, dtype=torch.float32)
    values = dy_NO, value_NO, dx_NO, sums_PO, rows
    options = {"WIDTH": width, "BLOCK": block, "ACTIVATION": activation}
    launch("activation_backward", (programs, blocks), *values, **options)
    return dx_NO, total_of(sums_PO[None], dy_NO.dtype)[0]
