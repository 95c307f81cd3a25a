"""The training objective: cross entropy plus the load-balance term.

A loss is a function of (model, batch), so that a later objective may run the model twice. All sums
are over one micro-batch; the caller divides by the global count of real target tokens.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from pipeline.batches import Batch
from pipeline.config import LossConfig
from pipeline.model.moe import RoutingRecord
from pipeline.model.transformer import Transformer


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
        router_z = router_z + record.z_loss
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
    logits_LV = logits_LV.float()
    plain = F.cross_entropy(logits_LV, labels_L, reduction="sum")
    if smoothing == 0:
        return plain, plain
    uniform = -F.log_softmax(logits_LV, dim=-1).mean(-1).sum()
    return (1 - smoothing) * plain + smoothing * uniform, plain
