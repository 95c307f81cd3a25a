"""Compute training losses.

A loss is a function of (model, batch), so that it may run the model twice. All sums are over one
micro-batch; the caller divides by the global count of real target tokens. To add a loss, write a
function in a file of its own, a name in ``LossConfig.objective`` and a case of
:func:`training_loss`.
"""

from pipeline.batching.batch import AnyBatch
from pipeline.kernels.logits import summed_divergence
from pipeline.model.transformer import Trained
from pipeline.training.loss_terms import LossTerms, loss_terms
from pipeline.training.settings import LossConfig


def training_loss(
    model: Trained, batch: AnyBatch, config: LossConfig, *, progress: float = 0.0
) -> LossTerms:
    """Return the configured loss of a micro-batch; ``progress``: share of training done."""
    match config.objective:
        case "fuse_distillation":
            return fuse_distillation_loss(model, batch, config, progress=progress)
        case "cross_entropy":
            return translation_loss(model, batch, config, progress=progress)


def translation_loss(
    model: Trained, batch: AnyBatch, config: LossConfig, *, progress: float = 0.0
) -> LossTerms:
    """Return cross entropy over real target tokens + number of labels · router losses."""
    return loss_terms(model(batch, progress=progress), batch, config, overwrites=True)


def fuse_distillation_loss(
    model: Trained, batch: AnyBatch, config: LossConfig, *, progress: float
) -> LossTerms:
    """Return (CE + CE_shared) / 2 + divergence (Xu et al., 2023, §3.1 and §4).

    It passes the batch twice, through the languages' modules and through the shared one. The
    routing statistics come from the first pass.
    """
    specific = model(batch, route="specific", progress=progress)
    shared = model(batch, route="shared", progress=progress)
    of_specific, of_shared = (loss_terms(one, batch, config) for one in (specific, shared))
    apart = summed_divergence(
        specific.logits_LV, shared.logits_LV, is_symmetric=config.distillation == "symmetric"
    )
    both = (of_specific.objective + of_shared.objective) / 2
    return LossTerms(
        objective=both + apart,
        cross_entropy=of_specific.cross_entropy,
        balance=(of_specific.balance + of_shared.balance) / 2,
        routing=of_specific.routing,
        shared_cross_entropy=of_shared.cross_entropy,
    )
