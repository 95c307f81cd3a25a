"""Fuse distillation: what languages' modules know goes into the shared one (paper, §3.1 and §4).

Two passes of one batch, through the languages' modules and through the shared one, and one
backward pass of (CE + CE_shared) / 2 + weight · divergence. All sums are over real target tokens.
"""

from pipeline.batching.labelled import AnyBatch
from pipeline.config import LossConfig
from pipeline.kernels.divergence import summed_divergence
from pipeline.model.labeller import Trained
from pipeline.training.losses import LossTerms, loss_terms


def fuse_distillation_loss(
    model: Trained, batch: AnyBatch, config: LossConfig, *, progress: float
) -> LossTerms:
    """The loss of both routes, and how far they are apart.

    Balance and routing are the means of both passes, and those of the first.
    """
    specific = model(batch, route="specific", progress=progress)
    shared = model(batch, route="shared", progress=progress)
    of_specific, of_shared = (loss_terms(one, batch, config) for one in (specific, shared))
    apart = summed_divergence(
        specific.logits_LV,
        shared.logits_LV,
        is_symmetric=config.distillation == "symmetric",
    )
    both = (of_specific.objective + of_shared.objective) / 2
    return LossTerms(
        objective=both + config.distillation_weight * apart,
        cross_entropy=of_specific.cross_entropy,
        balance=(of_specific.balance + of_shared.balance) / 2,
        routing=of_specific.routing,
        shared_cross_entropy=of_shared.cross_entropy,
    )
