"""Routers: which experts each token goes to, and with which weight (MMNMT, eq. 1).

All of it runs in float32, the matrix product included. A router has no bias and adds no noise. A
new one is a class like those below, a name in ``config.DecoderRouter`` and a case of
:func:`build_router`.

Legend: N tokens, D model width, E experts, C choices per token (top-k), G language groups.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.kernels.products import linear
from pipeline.kernels.routing import averaged_logits, choose_experts
from pipeline.model.settings import CombineWeights, MoEConfig
from pipeline.model.spec import ModelSpec
from pipeline.model.tokens import Tokens

Side = Literal["encoder", "decoder"]


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


class TokenRouter(nn.Module):
    """logits = W x."""

    def __init__(self, moe: MoEConfig, *, width: int) -> None:
        super().__init__()
        self.moe = moe
        self.weight = nn.Parameter(torch.empty(moe.num_experts, width))

    def forward(self, x_ND: Tensor, tokens: Tokens) -> Routing:  # noqa: ARG002 (one signature)
        """Route every token by its state alone."""
        logits_NE = linear(x_ND.float(), self.weight.float())
        return choose(logits_NE, top_k=self.moe.top_k, combine_weights=self.moe.combine_weights)


class LanguageGroupRouter(nn.Module):
    """logits = (W x + W_g x) / 2, g the group of the sentence's target language (MMNMT, eq. 1).

    The group routers are one stacked parameter, so that every rank gives every group a gradient.
    """

    def __init__(self, moe: MoEConfig, *, width: int, num_groups: int) -> None:
        super().__init__()
        self.moe = moe
        self.weight = nn.Parameter(torch.empty(moe.num_experts, width))
        self.group_weight = nn.Parameter(torch.empty(num_groups, moe.num_experts, width))

    def forward(self, x_ND: Tensor, tokens: Tokens) -> Routing:
        """Route every token by the shared router and by that of its language group."""
        logits_NE = averaged_logits(
            x_ND.float(), self.weight.float(), self.group_weight.float(), tokens.language_group_N
        )
        return choose(logits_NE, top_k=self.moe.top_k, combine_weights=self.moe.combine_weights)


Router = TokenRouter | LanguageGroupRouter


def build_router(spec: ModelSpec, moe: MoEConfig, *, side: Side) -> Router:
    """The router of an MoE layer; the encoder's goes by token."""
    width = spec.model.width
    match moe.decoder_router if side == "decoder" else "token":
        case "token":
            return TokenRouter(moe, width=width)
        case "language_group":
            return LanguageGroupRouter(moe, width=width, num_groups=spec.num_groups)
