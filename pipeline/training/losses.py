"""Compute training losses.

A loss is a function of (model, batch), so that it may run the model twice. All sums are over one
micro-batch; the caller divides by the global count of real target tokens. To add a loss, write a
function here, a name in ``LossConfig.objective`` and a case of :func:`training_loss`.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeline.batching.batch import AnyBatch
from pipeline.errors import ConfigError, without_case
from pipeline.kernels.logits import summed_cross_entropy, summed_divergence
from pipeline.model.moe.routing import RoutingRecord, z_loss
from pipeline.model.moe.routing_statistics import moe_layer_names
from pipeline.model.transformer import Output, Trained
from pipeline.terminal import counted
from pipeline.training.settings import LossConfig

GATE_BUDGET = 0.3
"""Target of the mean gate of gated projections (CLSR; Zhang et al., 2021)."""


@dataclass(frozen=True)
class LossTerms:
    """Terms of one micro-batch, or summed over those that share a pass.

    Attributes:
        objective: the minimized value, summed over the micro-batch's labels; differentiable.
        cross_entropy: summed over labels, in nats, without smoothing; detached.
        balance: load-balance loss, summed over MoE layers (1 per layer when balanced); detached.
        routing: one record per MoE layer.
        shared_cross_entropy: of the shared route, where both are trained; the other is then that
            of the languages' route.
    """

    objective: Tensor
    cross_entropy: Tensor
    balance: Tensor
    routing: tuple[RoutingRecord, ...]
    shared_cross_entropy: Tensor | None = None


def loss_terms(
    output: Output, batch: AnyBatch, config: LossConfig, *, overwrites: bool = False
) -> LossTerms:
    """Return the loss terms of one pass through a model.

    The router losses are means over tokens; weighting them by the micro-batch's labels makes them,
    after division by the global count, weighted means over micro-batches. If micro-batches share
    the pass, these losses are already means over them, weighted in the same way. With
    ``overwrites``, nothing else reads the logits, and their gradient may take their memory.
    """
    smoothed, cross_entropy = summed_cross_entropy(
        output.logits_LV,
        batch.labels_L,
        smoothing=config.label_smoothing,
        overwrites=overwrites,
    )
    balance = router_z = smoothed.new_zeros(())
    if output.routing:
        balance = torch.stack([record.balance_loss for record in output.routing]).sum()
        if config.router_z_weight:
            losses = [z_loss(one.logits_NE, one.shares) for one in output.routing]
            router_z = torch.stack(losses).sum()
    per_token = config.balance_weight * balance + config.router_z_weight * router_z
    if output.gates:
        per_token = per_token + _gate_loss(output)
    return LossTerms(
        objective=smoothed + batch.num_labels * per_token,
        cross_entropy=cross_entropy,
        balance=balance.detach(),
        routing=output.routing,
    )


def _gate_loss(output: Output) -> Tensor:
    """Return how far the mean gate of a micro-batch is from the budget."""
    shares = [one for one in output.gate_shares if one is not None]
    if not shares:
        return (torch.cat(output.gates).mean() - GATE_BUDGET).abs()
    parts = [gate_N.split(one.rows) for gate_N, one in zip(output.gates, shares, strict=True)]
    mean_M = torch.stack([torch.cat(gates).mean() for gates in zip(*parts, strict=True)])
    return shares[0].weight_M @ (mean_M - GATE_BUDGET).abs()


def training_loss(
    model: Trained, batch: AnyBatch, config: LossConfig, *, progress: float = 0.0
) -> LossTerms:
    """Return the configured loss of a micro-batch; ``progress``: share of training done."""
    terms = _configured_loss(model, batch, config, progress=progress)
    return checked(terms, config.objective, layers=len(moe_layer_names(model.spec)))


def _configured_loss(
    model: Trained, batch: AnyBatch, config: LossConfig, *, progress: float
) -> LossTerms:
    match config.objective:
        case "fuse_distillation":
            return fuse_distillation_loss(model, batch, config, progress=progress)
        case "cross_entropy":
            return translation_loss(model, batch, config, progress=progress)
        case unknown:
            raise without_case("training_loss", unknown)


def checked(terms: LossTerms, objective: str, *, layers: int) -> LossTerms:
    """Return the terms of a loss; ConfigError if they would fail later, far from its code.

    ``layers`` is the number of the model's MoE layers.
    """
    for name in ("objective", "cross_entropy", "balance"):
        value: Any = getattr(terms, name, None)
        may_lack_gradient = name != "objective" or not torch.is_grad_enabled()
        is_scalar = isinstance(value, Tensor) and not value.shape
        if not is_scalar or not (may_lack_gradient or value.requires_grad):
            raise ConfigError(
                f"The loss {objective!r} returned a {type(terms).__name__} in which {name} is no "
                f"{'differentiable ' if name == 'objective' else ''}tensor without dimensions. "
                "Return LossTerms, for example of loss_terms."
            )
    routing: Any = terms.routing
    records = routing if isinstance(routing, tuple | list) else ()
    found = sum(isinstance(one, RoutingRecord) for one in records)
    if not found == len(records) == layers:
        raise ConfigError(
            f"The loss {objective!r} returned routing of {counted(found, 'layer')}, "
            f"where the model has {counted(layers, 'MoE layer')}. Return output.routing."
        )
    return terms


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
