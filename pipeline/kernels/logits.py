"""Operations on rows of logits over a large vocabulary: losses, and the best tokens of a search.

- :func:`summed_cross_entropy` and :func:`summed_divergence` process a chunk of rows at a time and
  compute their gradients in the forward pass. Their operators for devices other than the CPU have
  been counted on the meta device and tested on CPU.
- :func:`best_tokens` serves a step of a search: by a compiled loop on CPU, else by PyTorch's
  operators. :func:`fused_best_tokens` serves it where fused kernels run.

Legend: L labels, V vocabulary, C rows of a chunk; R rows of a search, and there C candidates.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from pipeline.kernels.cpu import LOOP_COST, can_loop, over_rows
from pipeline.kernels.launching import is_fused, launch, power_of_two

CACHED_ROWS = 16
"""Number of rows whose float32 copies exist at a time on CPU, so that they stay in the cache."""
DEVICE_CHUNKS = 8
"""Number of chunks on other devices: few, as every operator costs a launch regardless of size."""
SEARCH_BLOCK, MOST_BEST = 512, 32
"""Columns of a part of a row in :func:`fused_best_tokens`, 16 for each thread of one warp, and most
tokens that it finds: its code grows with their number."""
LOSS_BLOCK, LOSS_WARPS = 8192, 16
"""Logits that a program reads at a time, and its warps: every thread reads 2 x 16 bytes."""


def rows_at_a_time(num_rows: int, *, is_cpu: bool) -> int:
    """Return C, the rows of logits whose float32 copies exist at a time."""
    return CACHED_ROWS if is_cpu else max(-(-num_rows // DEVICE_CHUNKS), 1)


def summed_cross_entropy(
    logits_LV: Tensor,
    labels_L: Tensor,
    *,
    smoothing: float = 0.0,
    vocabulary: int | None = None,
    overwrites: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return (smoothed, plain) cross entropy, summed over labels; smoothed is differentiable.

    Both are in float32, or in float64 if the logits are. Label smoothing interpolates the plain
    cross entropy with its mean over all V labels, as in fairseq.

    Args:
        logits_LV: logits, which may have columns of padding behind the vocabulary.
        labels_L: int64 labels.
        smoothing: weight of the mean.
        vocabulary: number of columns that are no padding; None: all.
        overwrites: whether the gradient may take the memory of the logits, which nobody else reads.
    """
    vocabulary = vocabulary or logits_LV.shape[1]
    if is_fused(logits_LV) and logits_LV.stride(1) == 1:
        smoothed, plain = _FusedCrossEntropy.apply(  # type: ignore[no-untyped-call]
            logits_LV, labels_L, smoothing, vocabulary, overwrites
        )
        return smoothed, plain
    smoothed, plain = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits_LV[:, :vocabulary],
        labels_L,
        smoothing,
        rows_at_a_time(len(labels_L), is_cpu=logits_LV.device.type == "cpu"),
        overwrites,
    )
    return smoothed, plain


class _FusedCrossEntropy(torch.autograd.Function):
    """Sum of cross entropies by one kernel, which reads a row twice and writes its gradient once.

    Liger's kernel of the same name, which also overwrites the logits, takes no padding, and asks
    the device whether the objective's gradient is 1, for which the host waits. Here, the kernel
    that multiplies by it finds out on the device, and then does nothing.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits_LV: Tensor,
        labels_L: Tensor,
        smoothing: float,
        vocabulary: int,
        overwrites: bool,
    ) -> tuple[Tensor, Tensor]:
        rows, width = logits_LV.shape
        d_logits_LV = None
        if ctx.needs_input_grad[0]:
            d_logits_LV = logits_LV.detach() if overwrites else torch.empty_like(logits_LV)
        losses_2L = logits_LV.new_empty(2, rows, dtype=torch.float32)
        strides = logits_LV.stride(0), 0 if d_logits_LV is None else d_logits_LV.stride(0)
        values = logits_LV, labels_L, d_logits_LV, losses_2L, width, *strides, float(smoothing)
        options = {"VOCABULARY": vocabulary, "BLOCK": LOSS_BLOCK, "num_warps": LOSS_WARPS}
        launch("cross_entropy", (rows,), *values, **options)
        ctx.save_for_backward(d_logits_LV)
        smoothed, plain = losses_2L[0].sum(), losses_2L[1].sum()
        ctx.mark_non_differentiable(plain)
        return smoothed, plain

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (d_logits_LV,) = ctx.saved_tensors
        rows, width = d_logits_LV.shape
        values = d_logits_LV, gradients[0], width, d_logits_LV.stride(0)
        launch("scale_rows", (rows,), *values, BLOCK=LOSS_BLOCK, num_warps=LOSS_WARPS)
        return d_logits_LV, None, None, None, None


class _CrossEntropy(torch.autograd.Function):
    """Sum of cross entropies, with the gradient computed in the forward pass.

    Rows are processed a chunk at a time, in float32 at least. The only tensors of size (L, V) are
    the logits and their gradient, both in the model's dtype, or one tensor for both.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits_LV: Tensor,
        labels_L: Tensor,
        smoothing: float,
        chunk_rows: int,
        overwrites: bool,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(logits_LV.dtype, torch.float32)
        plain = torch.zeros((), dtype=dtype, device=logits_LV.device)
        uniform = torch.zeros_like(plain)
        d_logits_LV = None
        if ctx.needs_input_grad[0]:
            d_logits_LV = logits_LV.detach() if overwrites else torch.empty_like(logits_LV)
        for start in range(0, len(labels_L), chunk_rows):
            rows = slice(start, start + chunk_rows)
            chunk_CV, labels_C1 = logits_LV[rows].to(dtype), labels_L[rows, None]
            probability_CV = F.softmax(chunk_CV, dim=-1)
            # log Σ e^x = largest logit - log of its probability: one logarithm per row, not V.
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
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (d_logits_LV,) = ctx.saved_tensors
        return d_logits_LV.mul_(gradients[0].to(d_logits_LV.dtype)), None, None, None, None


def _gradient_(probability_CV: Tensor, labels_C1: Tensor, smoothing: float) -> Tensor:
    """Return the gradient of the logits; it overwrites the probabilities."""
    of_label = probability_CV.new_full((1, 1), smoothing - 1.0).expand_as(labels_C1)
    gradient_CV = probability_CV.scatter_add_(1, labels_C1, of_label)
    return gradient_CV.sub_(smoothing / gradient_CV.shape[1]) if smoothing else gradient_CV


def summed_divergence(first_LV: Tensor, second_LV: Tensor, *, is_symmetric: bool) -> Tensor:
    """Return the Kullback–Leibler divergence of the distributions of two passes, in nats.

    It is summed over labels. It is computed from log-softmaxes, never from the logarithm of a
    probability, which may be 0.

    Args:
        first_LV: logits of p.
        second_LV: logits of q.
        is_symmetric: whether the loss is (KL(p ‖ q) + KL(q ‖ p)) / 2 with gradients to both;
            otherwise it is KL(p ‖ q) without a gradient to p.
    """
    total: Tensor = _Divergence.apply(  # type: ignore[no-untyped-call]
        first_LV,
        second_LV,
        is_symmetric,
        rows_at_a_time(len(first_LV), is_cpu=first_LV.device.type == "cpu"),
    )
    return total


class _Divergence(torch.autograd.Function):
    """Sum of divergences, by chunks in float32 at least, with gradients in the forward pass."""

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


def finds_best_at_once(logits_RV: Tensor, width: int) -> bool:
    """Return whether :func:`fused_best_tokens` serves these logits."""
    return width <= MOST_BEST and logits_RV.stride(1) == 1 and is_fused(logits_RV)


def fused_best_tokens(
    logits_RV: Tensor, width: int, *, excluded: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result of :func:`best_tokens` without a column, and log Σ e^x of every row.

    A GPU takes two kernels for both (:func:`~pipeline.kernels.launching.is_fused`): one for the
    maxima of parts of rows, one that reads the parts with the largest maxima again.
    """
    (rows, columns), stride = logits_RV.shape, logits_RV.stride(0)
    parts = -(-columns // SEARCH_BLOCK)
    of_parts = logits_RV.new_empty(3, rows, parts, dtype=torch.float32).unbind()
    best_RC = logits_RV.new_empty(rows, width, dtype=torch.float32)
    token_RC = torch.empty_like(best_RC, dtype=torch.int64)
    normalizer_R = logits_RV.new_empty(rows, dtype=torch.float32)
    numbers, block = (columns, stride, excluded), {"BLOCK": SEARCH_BLOCK}
    launch("best_of_parts", (rows, parts), logits_RV, *of_parts, *numbers, **block, num_warps=1)
    results, chosen = (best_RC, token_RC, normalizer_R), power_of_two(min(width, parts))
    sizes = {"WIDTH": width, "PARTS": power_of_two(parts), "CHOSEN": chosen, **block}
    given = logits_RV, *of_parts, *results, parts, *numbers
    launch("best_of_rows", (rows,), *given, **sizes, num_warps=max(chosen // 2, 1))
    return best_RC, token_RC, normalizer_R


def best_tokens(logits_RV: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return the ``width`` largest logits of every row and their tokens, (R, C), best first."""
    if not can_loop(logits_RV) or logits_RV.dtype != torch.float32:
        best_RC, token_RC = logits_RV.topk(width, dim=1)
        return best_RC, token_RC
    from pipeline.kernels import compiled_loops as loops

    best_RC = logits_RV.new_empty(len(logits_RV), width)
    token_RC = torch.empty(best_RC.shape, dtype=torch.int64)
    logits, best, token = logits_RV.contiguous().numpy(), best_RC.numpy(), token_RC.numpy()

    def find(first: int, last: int) -> None:
        loops.best_tokens(logits, first, last, best, token)

    over_rows(find, len(best_RC), cost_of_row=logits_RV.shape[1] * LOOP_COST)
    return best_RC, token_RC
