"""Results of routers and MoE layers: experts and weights per token, and routing losses.

Separate from :mod:`~pipeline.model.moe.layer` and :mod:`~pipeline.model.moe.router`, which both
import it.

Legend: N tokens, E experts, C choices per token (top-k).
"""

from dataclasses import dataclass
from functools import cached_property

import torch.nn.functional as F
from torch import Tensor

from pipeline.batching.batch import Shares
from pipeline.kernels.placement import Placement
from pipeline.kernels.routing import balance_loss as balance_loss  # for routers of one's own
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
            without tokens; differentiable. If micro-batches share the pass, their losses averaged
            by their labels. A router may have another loss.
        chosen_logits_NC: logits whose softmax is the combine weights, if the choice did not.
        claim_N: see :class:`~pipeline.kernels.routing.ExpertChoice`.
    """

    logits_NE: Tensor
    probability_NE: Tensor
    expert_NC: Tensor
    made_weight_NC: Tensor | None
    balance_loss: Tensor
    chosen_logits_NC: Tensor | None = None
    claim_N: Tensor | None = None

    @cached_property
    def weight_NC(self) -> Tensor:
        """Return the combine weights of the chosen experts; differentiable."""
        if self.made_weight_NC is not None:
            return self.made_weight_NC
        assert self.chosen_logits_NC is not None, "weights are made with the choice or of these"
        return F.softmax(self.chosen_logits_NC, dim=-1)


def choose(
    logits_NE: Tensor,
    *,
    top_k: int,
    combine_weights: CombineWeights = "renormalized",
    shares: Shares | None = None,
) -> Routing:
    """Choose the ``top_k`` most probable experts of each token, and their combine weights.

    ``shares`` are the micro-batches of the pass (``tokens.shares``); None for a single one.
    """
    choice = choose_experts(
        logits_NE,
        top_k=top_k,
        is_renormalized=combine_weights == "renormalized",
        shares=shares,
    )
    return Routing(logits_NE, *choice)


def z_loss(logits_NE: Tensor, shares: Shares | None = None) -> Tensor:
    """Return the mean over tokens of the router's squared log-sum-exp (ST-MoE, eq. 5).

    With ``shares``, the losses of micro-batches are averaged by their labels.
    """
    square_N = logits_NE.logsumexp(-1).square()
    if shares is not None:
        return shares.weight_M @ (shares.mean_MN @ square_N.float())
    # A rank without tokens has a loss of 0, not one that is no number.
    return square_N.sum() / max(len(logits_NE), 1)


@dataclass(frozen=True)
class RoutingRecord:
    """Routing of a pass by one MoE layer; the layer returns it and keeps no state.

    Attributes:
        balance_loss: the router's, of all micro-batches; differentiable.
        logits_NE: the router's logits, differentiable.
        probability_NE: router probabilities, detached.
        expert_NC: chosen experts, best first.
        placement: the row of every route.
        shares: the micro-batches that share the pass; None for a single one.
    """

    balance_loss: Tensor
    logits_NE: Tensor
    probability_NE: Tensor
    expert_NC: Tensor
    placement: Placement
    shares: Shares | None = None

    @property
    def routed_E(self) -> Tensor:
        """Return the routes per expert before the capacity limit."""
        return self.placement.routed_E

    @property
    def kept_E(self) -> Tensor:
        """Return the routes per expert after the capacity limit."""
        return self.placement.count_E
