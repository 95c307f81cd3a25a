"""What routers and MoE layers return: experts, weights and losses per token.

A module of its own, so that a router can be one, too.

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
    """Where every token goes.

    Attributes:
        logits_NE: what the router says; differentiable.
        probability_NE: softmax over all experts.
        expert_NC: chosen experts, best first.
        made_weight_NC: the weights where they have been made with the choice.
        balance_loss: l_aux = E · Σ_e m_e c_e, of the mean probabilities m and the shares c of
            tokens that choose an expert first (Switch Transformer, §2.2): 1 when balanced, 0
            without tokens; differentiable.
        chosen_logits_NC: of which the weights are a softmax, where they have not been made.
    """

    logits_NE: Tensor
    probability_NE: Tensor
    expert_NC: Tensor
    made_weight_NC: Tensor | None
    balance_loss: Tensor
    chosen_logits_NC: Tensor | None = None

    @cached_property
    def weight_NC(self) -> Tensor:
        """How the outputs of the chosen experts are weighted; differentiable."""
        if self.made_weight_NC is not None:
            return self.made_weight_NC
        assert self.chosen_logits_NC is not None, "weights are made with the choice or of these"
        return F.softmax(self.chosen_logits_NC, dim=-1)


def choose(
    logits_NE: Tensor, *, top_k: int, combine_weights: CombineWeights = "renormalized"
) -> Routing:
    """Softmax and the ``top_k`` best, their probabilities renormalised to sum 1 or as they are."""
    choice = choose_experts(
        logits_NE, top_k=top_k, is_renormalized=combine_weights == "renormalized"
    )
    return Routing(logits_NE, *choice)


def z_loss(logits_NE: Tensor) -> Tensor:
    """Mean over tokens of the squared log-normaliser of the router's logits (ST-MoE, eq. 5)."""
    return logits_NE.logsumexp(-1).square().sum() / max(len(logits_NE), 1)


@dataclass(frozen=True)
class RoutingRecord:
    """What one MoE layer did with one micro-batch; returned, never kept.

    Attributes:
        balance_loss: E · Σ_e m_e c_e, differentiable; 1 when balanced (0 without tokens).
        logits_NE: the router's logits, differentiable.
        probability_NE: router probabilities, detached.
        expert_NC: chosen experts, best first.
        placement: where every route was served.
    """

    balance_loss: Tensor
    logits_NE: Tensor
    probability_NE: Tensor
    expert_NC: Tensor
    placement: Placement

    @property
    def routed_E(self) -> Tensor:
        """Routes per expert before capacity."""
        return self.placement.routed_E

    @property
    def kept_E(self) -> Tensor:
        """Routes per expert after capacity."""
        return self.placement.count_E
