"""Compute residual connections: bias, keyed dropout, sum and norm, in one kernel per direction.

Every function has a plain form in PyTorch's operators and a fused form
(:func:`~pipeline.kernels.launching.is_fused`), which stores no masks and does not round between the
operators. Both drop the same values (:mod:`pipeline.kernels.noise`).

Legend: N tokens, D model width.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from pipeline.kernels.launching import is_fused, launch, power_of_two
from pipeline.kernels.noise import Dropout, threshold
from pipeline.kernels.noise import dropout as plain_dropout

PROGRAMS = 528
"""Most programs that add up gradients over rows: 4 for each of the 132 multiprocessors of an H100.

A constant, so that sums do not depend on the GPU."""
VALUES_PER_WARP = 256
"""Values of a row per warp: every thread reads 16 bytes of bfloat16."""
SUM_ROWS, SUM_COLUMNS = 256, 16
"""Rows and columns of a block when the sums of programs are added up."""


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


def signed_threshold(rate: float) -> int:
    """Return the threshold of a rate as the int32 with the same bits, as kernels get it."""
    bits = threshold(rate)
    return bits - 2**32 if bits >= 2**31 else bits


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
