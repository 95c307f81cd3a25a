"""Cross entropy of many rows over a large vocabulary.

Legend: L labels, V vocabulary, C rows of a chunk.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LOSS_ROWS = 16
"""Rows of logits whose float32 copies exist at a time."""


def summed_cross_entropy(logits_LV: Tensor, labels_L: Tensor) -> Tensor:
    """Summed over labels, in float32."""
    total: Tensor = _CrossEntropy.apply(logits_LV, labels_L)  # type: ignore[no-untyped-call]
    return total


class _CrossEntropy(torch.autograd.Function):
    """Summed cross entropy that makes its gradient on the way.

    Rows are taken a few at a time, in float32, while they are in the cache; of size (L, V) there
    are only the logits and their gradient, both in the model's dtype.
    """

    @staticmethod
    def forward(ctx: Any, logits_LV: Tensor, labels_L: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=logits_LV.device)
        wants_gradient = ctx.needs_input_grad[0]
        d_logits_LV = torch.empty_like(logits_LV) if wants_gradient else None
        for start in range(0, len(labels_L), LOSS_ROWS):
            rows = slice(start, start + LOSS_ROWS)
            chunk_CV, labels_C1 = logits_LV[rows].float(), labels_L[rows, None]
            probability_CV = F.softmax(chunk_CV, dim=-1)
            # of largest logit and largest probability the normaliser, with one logarithm per row
            normalizer_C1 = chunk_CV.amax(-1, keepdim=True)
            normalizer_C1 -= probability_CV.amax(-1, keepdim=True).log_()
            total += (normalizer_C1 - chunk_CV.gather(1, labels_C1)).sum()
            if d_logits_LV is not None:
                minus_one = probability_CV.new_full((1, 1), -1.0).expand_as(labels_C1)
                d_logits_LV[rows] = probability_CV.scatter_add_(1, labels_C1, minus_one)
        ctx.save_for_backward(d_logits_LV)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (d_logits_LV,) = ctx.saved_tensors
        return d_logits_LV.mul_(gradients[0].to(d_logits_LV.dtype)), None
