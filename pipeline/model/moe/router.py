"""Routers: which experts each token goes to, and with which weight (MMNMT, eq. 1).

All of it runs in float32, the matrix product included. A router has no bias and adds no noise. A
new one is a class like those below in a module of its own, a name in ``config.DecoderRouter`` and a
``case`` of :func:`build_router`.

Legend: N tokens, D model width, E experts, C choices per token (top-k), G language groups.
"""

import torch
from torch import Tensor, nn

from pipeline.kernels.products import linear
from pipeline.kernels.routing import averaged_logits
from pipeline.model.moe.routing import Routing, choose
from pipeline.model.settings import MoEConfig
from pipeline.model.spec import ModelSpec, Side
from pipeline.model.tokens import Tokens


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


def build_router(spec: ModelSpec, moe: MoEConfig, *, side: Side) -> nn.Module:
    """Return the router of an MoE layer; the encoder always routes by token."""
    width = spec.model.width
    match moe.decoder_router if side == "decoder" else "token":
        case "token":
            return TokenRouter(moe, width=width)
        case "language_group":
            return LanguageGroupRouter(moe, width=width, num_groups=spec.num_groups)
