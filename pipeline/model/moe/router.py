"""Routers: which experts each token goes to, and with which weight (mmnmt.md §2, paper eq. 1).

All of it runs in float32, the matrix product included. A router has no bias and adds no noise.

Legend: N tokens, D model width, E experts, C choices per token (top-k), G language groups.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from pipeline.kernels import routing_loops as loops
from pipeline.kernels.products import linear

CombineWeights = Literal["renormalized", "probability"]


@dataclass(frozen=True)
class Routing:
    """Where every token goes.

    Attributes:
        logits_NE: what the router says; differentiable.
        probability_NE: softmax over all experts.
        expert_NC: chosen experts, best first.
        weight_NC: how their outputs are weighted; differentiable.
        balance_loss: l_aux = E · Σ_e m_e c_e, of the mean probabilities m and the shares c of
            tokens that choose an expert first (mmnmt.md §2): 1 when balanced, 0 without tokens;
            differentiable.
    """

    logits_NE: Tensor
    probability_NE: Tensor
    expert_NC: Tensor
    weight_NC: Tensor
    balance_loss: Tensor


def choose(
    logits_NE: Tensor, *, top_k: int, combine_weights: CombineWeights = "renormalized"
) -> Routing:
    """Softmax and the ``top_k`` best, their probabilities renormalised to sum 1 or as they are."""
    is_renormalized = combine_weights == "renormalized"
    if logits_NE.device.type == "cpu":
        found = _ChooseByLoop.apply(  # type: ignore[no-untyped-call]
            logits_NE, top_k, is_renormalized
        )
        return Routing(logits_NE, *found)
    return choose_by_operators(logits_NE, top_k=top_k, is_renormalized=is_renormalized)


def choose_by_operators(logits_NE: Tensor, *, top_k: int, is_renormalized: bool) -> Routing:
    """:func:`choose` on any device."""
    num_tokens, num_experts = logits_NE.shape
    probability_NE = F.softmax(logits_NE, dim=-1)
    # of equal logits the first, as in the loops: topk may take any
    order_NE = logits_NE.sort(dim=-1, descending=True, stable=True).indices
    expert_NC = order_NE[:, :top_k]
    weight_NC = probability_NE.gather(1, expert_NC)
    if is_renormalized:
        weight_NC = weight_NC / weight_NC.sum(-1, keepdim=True)
    first_N = expert_NC[:, 0]
    first_E = logits_NE.new_zeros(num_experts)
    first_E.index_add_(0, first_N, torch.ones_like(first_N, dtype=first_E.dtype))
    pairs = max(num_tokens, 1) ** 2
    return Routing(
        logits_NE=logits_NE,
        probability_NE=probability_NE.detach(),
        expert_NC=expert_NC,
        weight_NC=weight_NC,
        balance_loss=num_experts * (probability_NE.sum(0) * first_E).sum() / pairs,
    )


def z_loss(logits_NE: Tensor) -> Tensor:
    """Mean over tokens of the squared log-normaliser of the router's logits (ST-MoE, eq. 5)."""
    return logits_NE.logsumexp(-1).square().sum() / max(len(logits_NE), 1)


class _ChooseByLoop(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_NE: Tensor, top_k: int, is_renormalized: bool
    ) -> tuple[Tensor, ...]:
        num_tokens, num_experts = logits_NE.shape
        probability_NE = torch.empty_like(logits_NE, memory_format=torch.contiguous_format)
        expert_NC = logits_NE.new_empty(num_tokens, top_k, dtype=torch.int64)
        weight_NC = logits_NE.new_empty(num_tokens, top_k)
        first_E, balance_loss = logits_NE.new_empty(num_experts), logits_NE.new_empty(1)
        outputs = probability_NE, expert_NC, weight_NC, first_E, balance_loss
        loops.choose_experts(
            logits_NE.contiguous().numpy(),
            is_renormalized,
            *(output.numpy() for output in outputs),
        )
        ctx.save_for_backward(probability_NE, expert_NC, weight_NC, first_E)
        ctx.mark_non_differentiable(probability_NE, expert_NC)
        ctx.is_renormalized = is_renormalized
        return probability_NE, expert_NC, weight_NC, balance_loss.view(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        _, _, d_weight_NC, d_balance_loss = gradients
        probability_NE, expert_NC, weight_NC, first_E = ctx.saved_tensors
        d_logits_NE = torch.empty_like(probability_NE)
        loops.choose_experts_backward(
            probability_NE.numpy(),
            expert_NC.numpy(),
            weight_NC.numpy(),
            first_E.numpy(),
            ctx.is_renormalized,
            d_weight_NC.contiguous().numpy(),
            d_balance_loss.item(),
            d_logits_NE.numpy(),
        )
        return d_logits_NE, None, None


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
