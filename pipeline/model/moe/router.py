"""Routers: choose the experts of each token and their weights (MMNMT, eq. 1).

Routers compute in float32, the matrix product included. They have no bias and add no noise. To add
one, write a class like those below, a name in :data:`pipeline.model.settings.DecoderRouter` and a
``case`` of :func:`build_router`.

Legend: N tokens, D model width, E experts, C choices per token (top-k), G language groups.
"""

import torch
from torch import Tensor, nn

from pipeline.errors import ConfigError
from pipeline.kernels.products import linear
from pipeline.kernels.routing import averaged_logits
from pipeline.model.moe.routing import Routing, choose
from pipeline.model.settings import MoEConfig
from pipeline.model.spec import ModelSpec, Side
from pipeline.model.tokens import Tokens


class TokenRouter(nn.Module):
    """Route each token by its state: logits = W x."""

    reads_float32 = True

    def __init__(self, moe: MoEConfig, *, width: int) -> None:
        super().__init__()
        self.moe = moe
        self.weight = nn.Parameter(torch.empty(moe.num_experts, width))

    def forward(self, x_ND: Tensor, tokens: Tokens) -> Routing:
        """Return the routing of every token by its state."""
        # Rounded to 16 bits, close logits would choose other experts (Switch Transformer, §2.4).
        logits_NE = linear(x_ND.float(), tokens.float32(self.weight))
        return _choose(logits_NE, self.moe, tokens)


class LanguageGroupRouter(nn.Module):
    """Route by state and language group: logits = (W x + W_g x) / 2 (MMNMT, eq. 1).

    g is the group of the sentence's target language. The group routers are one stacked parameter,
    so that every rank has a gradient for every group, even for those not in its micro-batch.
    """

    reads_float32 = True

    def __init__(self, moe: MoEConfig, *, width: int, num_groups: int) -> None:
        super().__init__()
        self.moe = moe
        self.weight = nn.Parameter(torch.empty(moe.num_experts, width))
        self.group_weight = nn.Parameter(torch.empty(num_groups, moe.num_experts, width))
        refuse_without_groups(self, moe.decoder_router)

    def forward(self, x_ND: Tensor, tokens: Tokens) -> Routing:
        """Return the routing of every token by the mean of shared and group logits."""
        weight_ED, group_weight_GED = map(tokens.float32, (self.weight, self.group_weight))
        logits_NE = averaged_logits(
            x_ND.float(), weight_ED, group_weight_GED, tokens.language_group_N
        )
        return _choose(logits_NE, self.moe, tokens)


def _choose(logits_NE: Tensor, moe: MoEConfig, tokens: Tokens) -> Routing:
    return choose(
        logits_NE,
        top_k=moe.top_k,
        combine_weights=moe.combine_weights,
        shares=tokens.shares,
    )


def refuse_without_groups(router: nn.Module, name: str) -> None:
    """Raise ConfigError if a router has a parameter of language groups, of which there are none."""
    if any(0 in parameter.shape for parameter in router.parameters()):
        raise ConfigError(
            f"The router {name!r} reads language groups, of which it has none. Add it to "
            "GROUP_ROUTERS in pipeline/model/settings.py."
        )


def build_router(spec: ModelSpec, moe: MoEConfig, *, side: Side) -> nn.Module:
    """Return the router of an MoE layer; the encoder always routes by token."""
    width = spec.model.width
    match moe.decoder_router if side == "decoder" else "token":
        case "token":
            return TokenRouter(moe, width=width)
        case "language_group":
            return LanguageGroupRouter(moe, width=width, num_groups=spec.num_groups)
