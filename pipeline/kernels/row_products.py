"""Products of rows with matrices that differ between sentences; see :mod:`.low_rank_products`.

Legend: N rows, S slots, I inputs, O outputs.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pipeline.kernels.low_rank_products import SentenceSlots, times
from pipeline.kernels.products import add_product_


def row_products(
    x_NI: Tensor, weight_SOI: Tensor, slots: SentenceSlots, bias_SO: Tensor | None = None
) -> Tensor:
    """x Wᵀ + b with the matrix of each row's first slot, run by run, as one autograd node."""
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
