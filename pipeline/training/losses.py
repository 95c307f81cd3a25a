"""The training objective: cross entropy plus the load-balance term.

A loss is a function of (model, batch), so that a later objective may run the model twice. All sums
are over one micro-batch; the caller divides by the global count of real target tokens.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.batching.batch import Batch
from pipeline.config import LossConfig
from pipeline.model.moe.layer import RoutingRecord
from pipeline.model.moe.router import z_loss
from pipeline.model.transformer import Transformer

LOSS_ROWS = 16
"""Rows of logits whose float32 copies exist at a time."""


@dataclass(frozen=True)
class LossTerms:
    """Terms of one micro-batch.

    Attributes:
        objective: what is minimised, summed over the micro-batch's labels; differentiable.
        cross_entropy: summed over labels, in nats, without smoothing; detached.
        balance: load-balance loss, summed over MoE layers (1 per layer when balanced); detached.
        routing: one record per MoE layer.
    """

    objective: Tensor
    cross_entropy: Tensor
    balance: Tensor
    routing: tuple[RoutingRecord, ...]


def translation_loss(model: Transformer, batch: Batch, config: LossConfig) -> LossTerms:
    """Cross entropy over real target tokens + number of labels · weighted router losses.

    The router losses are means over tokens; weighting them by the micro-batch's labels makes them,
    after division by the global count, weighted means over micro-batches (mmnmt.md §2).
    """
    output = model(batch)
    smoothed, cross_entropy = label_smoothed_cross_entropy(
        output.logits_LV, batch.labels_L, smoothing=config.label_smoothing
    )
    balance = smoothed.new_zeros(())
    router_z = smoothed.new_zeros(())
    for record in output.routing:
        balance = balance + record.balance_loss
        if config.router_z_weight:
            router_z = router_z + z_loss(record.logits_NE)
    per_token = config.balance_weight * balance + config.router_z_weight * router_z
    return LossTerms(
        objective=smoothed + batch.num_labels * per_token,
        cross_entropy=cross_entropy.detach(),
        balance=balance.detach(),
        routing=output.routing,
    )


def label_smoothed_cross_entropy(
    logits_LV: Tensor, labels_L: Tensor, *, smoothing: float
) -> tuple[Tensor, Tensor]:
    """(smoothed, plain) cross entropy, summed, in float32 (fairseq's smoothing over V)."""
    if smoothing == 0:
        plain: Tensor = _CrossEntropy.apply(logits_LV, labels_L)  # type: ignore[no-untyped-call]
        return plain, plain
    logits_LV = logits_LV.float()
    plain = F.cross_entropy(logits_LV, labels_L, reduction="sum")
    uniform = -F.log_softmax(logits_LV, dim=-1).mean(-1).sum()
    return (1 - smoothing) * plain + smoothing * uniform, plain


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
