"""Routers: which experts each token goes to, and with which weight (mmnmt.md §2, paper eq. 1).

All of it runs in float32, the matrix product included. A router has no bias and adds no noise.

Legend: N tokens, D model width, E experts, C choices per token (top-k), G language groups.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.model.linear import linear

CombineWeights = Literal["renormalized", "probability"]


@dataclass(frozen=True)
class Routing:
    """Where every token goes.

    Attributes:
        probability_NE: softmax over all experts.
        expert_NC: chosen experts, best first.
        weight_NC: how their outputs are weighted.
        z_loss: mean over tokens of the squared log-normaliser of the logits (ST-MoE, eq. 5).
    """

    probability_NE: Tensor
    expert_NC: Tensor
    weight_NC: Tensor
    z_loss: Tensor


def choose(
    logits_NE: Tensor, *, top_k: int, combine_weights: CombineWeights = "renormalized"
) -> Routing:
    """Softmax and the ``top_k`` best, their probabilities renormalised to sum 1 or as they are."""
    probability_NE = F.softmax(logits_NE, dim=-1, dtype=torch.float32)
    weight_NC, expert_NC = probability_NE.topk(top_k, dim=-1)
    normalizer_N1 = logits_NE.gather(1, expert_NC[:, :1]) - weight_NC[:, :1].log()
    if combine_weights == "renormalized":
        weight_NC = weight_NC / weight_NC.sum(-1, keepdim=True)
    z_loss = normalizer_N1.square().sum() / max(len(logits_NE), 1)
    return Routing(probability_NE, expert_NC, weight_NC, z_loss)


class TokenRouter(nn.Module):
    """logits = W x."""

    def __init__(
        self,
        *,
        width: int,
        num_experts: int,
        top_k: int,
        combine_weights: CombineWeights = "renormalized",
    ) -> None:
        super().__init__()
        self.top_k, self.combine_weights = top_k, combine_weights
        self.weight = nn.Parameter(torch.empty(num_experts, width))

    def forward(self, x_ND: Tensor, group_N: Tensor) -> Routing:  # noqa: ARG002 (one signature)
        """Route every token; the language group is not looked at."""
        logits_NE = linear(x_ND.float(), self.weight.float())
        return choose(logits_NE, top_k=self.top_k, combine_weights=self.combine_weights)


class LanguageGroupRouter(nn.Module):
    """logits = (W x + W_g x) / 2, g the group of the sentence's target language (paper eq. 1).

    The group routers are one stacked parameter, so that every rank gives every group a gradient.
    """

    def __init__(
        self,
        *,
        width: int,
        num_experts: int,
        num_groups: int,
        top_k: int,
        combine_weights: CombineWeights = "renormalized",
    ) -> None:
        super().__init__()
        self.top_k, self.combine_weights = top_k, combine_weights
        self.weight = nn.Parameter(torch.empty(num_experts, width))
        self.group_weight = nn.Parameter(torch.empty(num_groups, num_experts, width))

    def forward(self, x_ND: Tensor, group_N: Tensor) -> Routing:
        """Route every token by the shared router and by that of its group."""
        x_ND = x_ND.float()
        num_groups, num_experts, _ = self.group_weight.shape
        all_logits = linear(x_ND, self.group_weight.float().flatten(0, 1))
        all_logits_NGE = all_logits.view(-1, num_groups, num_experts)
        index_N1E = group_N[:, None, None].expand(-1, 1, num_experts)
        group_logits_NE = all_logits_NGE.gather(1, index_N1E).squeeze(1)
        shared_logits_NE = linear(x_ND, self.weight.float())
        logits_NE = (shared_logits_NE + group_logits_NE) / 2
        return choose(logits_NE, top_k=self.top_k, combine_weights=self.combine_weights)


Router = TokenRouter | LanguageGroupRouter
