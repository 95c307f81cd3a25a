"""Kullback–Leibler divergences between the distributions of two passes, with many labels each.

Everything is computed from log-softmaxes; the logarithm of a probability is never taken.

Legend: L labels, V vocabulary, C rows of a chunk.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from pipeline.kernels.cross_entropy import rows_at_a_time


def summed_divergence(first_LV: Tensor, second_LV: Tensor, *, is_symmetric: bool) -> Tensor:
    """Of the distributions p and q of two passes' logits, summed over labels, in nats.

    ``is_symmetric``: (KL(p ‖ q) + KL(q ‖ p)) / 2, and both learn; else KL(p ‖ q), and p does not.
    """
    total: Tensor = _Divergence.apply(  # type: ignore[no-untyped-call]
        first_LV,
        second_LV,
        is_symmetric,
        rows_at_a_time(len(first_LV), is_cpu=first_LV.device.type == "cpu"),
    )
    return total


class _Divergence(torch.autograd.Function):
    """Makes its gradients on the way, a chunk of rows at a time, in float32 at least."""

    @staticmethod
    def forward(
        ctx: Any, first_LV: Tensor, second_LV: Tensor, is_symmetric: bool, chunk_rows: int
    ) -> Tensor:
        dtype = torch.promote_types(first_LV.dtype, torch.float32)
        total = torch.zeros((), dtype=dtype, device=first_LV.device)
        wants_gradient = any(ctx.needs_input_grad[:2])
        d_first_LV = torch.empty_like(first_LV) if wants_gradient and is_symmetric else None
        d_second_LV = torch.empty_like(second_LV) if wants_gradient else None
        for start in range(0, len(first_LV), chunk_rows):
            rows = slice(start, start + chunk_rows)
            log_p_CV = F.log_softmax(first_LV[rows].to(dtype), dim=-1)
            log_q_CV = F.log_softmax(second_LV[rows].to(dtype), dim=-1)
            p_CV, q_CV = log_p_CV.exp(), log_q_CV.exp()
            apart_CV = log_p_CV - log_q_CV
            p_to_q_C1 = (p_CV * apart_CV).sum(-1, keepdim=True)
            q_to_p_C1 = -(q_CV * apart_CV).sum(-1, keepdim=True)
            total += (p_to_q_C1 + q_to_p_C1).sum() / 2 if is_symmetric else p_to_q_C1.sum()
            if d_second_LV is None:
                continue
            nearer_CV = q_CV - p_CV
            if d_first_LV is None:
                d_second_LV[rows] = nearer_CV
                continue
            d_first_LV[rows] = (p_CV * (apart_CV - p_to_q_C1) - nearer_CV) / 2
            d_second_LV[rows] = (nearer_CV - q_CV * (apart_CV + q_to_p_C1)) / 2
        ctx.save_for_backward(d_first_LV, d_second_LV)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        found = [
            None if saved is None else saved * gradients[0].to(saved.dtype)
            for saved in ctx.saved_tensors
        ]
        return (*found, None, None)
