"""Results of routers and MoE layers: experts and weights per token, and routing losses.

Separate from :mod:`~pipeline.model.moe.layer` and :mod:`~pipeline.model.moe.router`, which both
import it.

Legend: N tokens, E experts, C choices per token (top-k).
"""

from dataclasses import dataclass
from functools import cached_property

import torch.nn.functional as F
from torch import Tensor

from pipeline.kernels.placement import Placement
from pipeline.kernels.routing import choose_experts
from pipeline.model.settings import CombineWeights


@dataclass(frozen=True)
class Routing:
    """Result of a router.

    Attributes:
        logits_NE: the router's logits; differentiable.
        probability_NE: softmax over all experts.
        expert_NC: chosen experts, best first.
        made_weight_NC: combine weights, if the choice computed them.
        balance_loss: l_aux = E · Σ_e m_e c_e, of the mean probabilities m and the shares c of
            tokens that choose an expert first (Switch Transformer, §2.2): 1 when balanced, 0
            without tokens; differentiable.
        chosen_logits_NC: logits whose softmax is the combine weights, if the choice did not.
    """

    logits_NE: Tensor
    probability_NE: Tensor
    expert_NC: Tensor
    made_weight_NC: Tensor | None
    balance_loss: Tensor
    chosen_logits_NC: Tensor | None = None

    @cached_property
    def weight_NC(self) -> Tensor:
        """Return the combine weights of the chosen experts; differentiable."""
        if self.made_weight_NC is not None:
            return self.made_weight_NC
        assert self.chosen_logits_NC is not None, "weights are made with the choice or of these"
        return F.softmax(self.chosen_logits_NC, dim=-1)


def choose(
    logits_NE: Tensor, *, top_k: int, combine_weights: CombineWeights = "renormalized"
) -> Routing:
    """Choose the ``top_k`` most probable experts of each token, and their combine weights."""
    choice = choose_experts(
        logits_NE, top_k=top_k, is_renormalized=combine_weights == "renormalized"
    )
    return Routing(logits_NE, *choice)


def z_loss(logits_NE: Tensor) -> Tensor:
    """Return the mean over tokens of the router's squared log-sum-exp (ST-MoE, eq. 5)."""
    return logits_NE.logsumexp(-1).square().sum() / max(len(logits_NE), 1)


@dataclass(frozen=True)
class RoutingRecord:
    """Routing of one micro-batch by one MoE layer; the layer returns it and keeps no state.

    Attributes:
        balance_loss: E · Σ_e m_e c_e, differentiable; 1 when balanced (0 without tokens).
        logits_NE: the router's logits, differentiable.
        probability_NE: router probabilities, detached.
        expert_NC: chosen experts, best first.
        placement: the row of every route.
    """

    balance_loss: Tensor
    logits_NE: Tensor
    probability_NE: Tensor
    expert_NC: Tensor
    placement: Placement

    @property
    def routed_E(self) -> Tensor:
        """Return the routes per expert before the capacity limit."""
        return self.placement.routed_E

    @property
    def kept_E(self) -> Tensor:
        """Return the routes per expert after the capacity limit."""
        return self.placement.count_E
