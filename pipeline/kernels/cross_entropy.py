"""Cross entropy of many rows over a large vocabulary.

The operators for other devices than the CPU have been counted on the meta device and tested on CPU;
not yet run on a GPU.

Legend: L labels, V vocabulary, C rows of a chunk.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CACHED_ROWS = 16
"""Rows of logits whose float32 copies exist at a time on CPU: they stay in the cache."""
DEVICE_CHUNKS = 8
"""Chunks on other devices, where every operator costs a launch, whatever its size."""


def rows_at_a_time(num_rows: int, *, is_cpu: bool) -> int:
    """Rows of logits whose float32 copies exist at a time: C."""
    return CACHED_ROWS if is_cpu else max(-(-num_rows // DEVICE_CHUNKS), 1)


def summed_cross_entropy(
    logits_LV: Tensor, labels_L: Tensor, *, smoothing: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(smoothed, plain), summed over labels; only the smoothed one is differentiable.

    In float32, or in float64 where the logits are.

    Smoothing mixes the plain one with its mean over all V labels, as fairseq does.
    """
    smoothed, plain = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits_LV,
        labels_L,
        smoothing,
        rows_at_a_time(len(labels_L), is_cpu=logits_LV.device.type == "cpu"),
    )
    return smoothed, plain


class _CrossEntropy(torch.autograd.Function):
    """Summed cross entropy that makes its gradient on the way.

    Rows are taken a chunk at a time, in float32 at least; of size (L, V) there are only the logits
    and their gradient, both in the model's dtype.
    """

    @staticmethod
    def forward(
        ctx: Any, logits_LV: Tensor, labels_L: Tensor, smoothing: float, chunk_rows: int
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(logits_LV.dtype, torch.float32)
        plain = torch.zeros((), dtype=dtype, device=logits_LV.device)
        uniform = torch.zeros_like(plain)
        wants_gradient = ctx.needs_input_grad[0]
        d_logits_LV = torch.empty_like(logits_LV) if wants_gradient else None
        for start in range(0, len(labels_L), chunk_rows):
            rows = slice(start, start + chunk_rows)
            chunk_CV, labels_C1 = logits_LV[rows].to(dtype), labels_L[rows, None]
            probability_CV = F.softmax(chunk_CV, dim=-1)
            # of largest logit and largest probability the normaliser, with one logarithm per row
            normalizer_C1 = chunk_CV.amax(-1, keepdim=True)
            normalizer_C1 -= probability_CV.amax(-1, keepdim=True).log_()
            plain += (normalizer_C1 - chunk_CV.gather(1, labels_C1)).sum()
            if smoothing:
                uniform += (normalizer_C1 - chunk_CV.mean(-1, keepdim=True)).sum()
            if d_logits_LV is not None:
                d_logits_LV[rows] = _gradient_(probability_CV, labels_C1, smoothing)
        ctx.save_for_backward(d_logits_LV)
        ctx.mark_non_differentiable(plain)
        smoothed = (1 - smoothing) * plain + smoothing * uniform if smoothing else plain.clone()
        return smoothed, plain

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (d_logits_LV,) = ctx.saved_tensors
        return d_logits_LV.mul_(gradients[0].to(d_logits_LV.dtype)), None, None, None


def _gradient_(probability_CV: Tensor, labels_C1: Tensor, smoothing: float) -> Tensor:
    """Of the logits, in the place of their probabilities."""
    of_label = probability_CV.new_full((1, 1), smoothing - 1.0).expand_as(labels_C1)
    gradient_CV = probability_CV.scatter_add_(1, labels_C1, of_label)
    return gradient_CV.sub_(smoothing / gradient_CV.shape[1]) if smoothing else gradient_CV
