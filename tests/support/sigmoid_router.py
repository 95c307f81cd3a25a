"""Router with a score per expert, a preference per target language, and a loss of its own."""

import torch
from torch import Tensor, nn

from pipeline.kernels.products import linear
from pipeline.model.moe.routing import Routing, balance_loss
from pipeline.model.settings import MoEConfig
from pipeline.model.spec import ModelSpec
from pipeline.model.tokens import Tokens


class SigmoidRouter(nn.Module):
    """Route by sigmoid(W x + preference of the target language)."""

    def __init__(self, moe: MoEConfig, spec: ModelSpec) -> None:
        super().__init__()
        self.moe = moe
        self.weight = nn.Parameter(torch.empty(moe.num_experts, spec.model.width))
        self.preference = nn.Parameter(torch.empty(len(spec.languages), moe.num_experts))

    def forward(self, x_ND: Tensor, tokens: Tokens) -> Routing:
        logits_NE = linear(x_ND.float(), self.weight.float())
        logits_NE = logits_NE + self.preference.float()[tokens.target_language_N]
        score_NE = logits_NE.sigmoid()
        share_NE = score_NE / score_NE.sum(-1, keepdim=True)
        weight_NC, expert_NC = score_NE.topk(self.moe.top_k, dim=-1)
        return Routing(
            logits_NE=logits_NE,
            probability_NE=share_NE.detach(),
            expert_NC=expert_NC,
            made_weight_NC=weight_NC / weight_NC.sum(-1, keepdim=True),
            balance_loss=balance_loss(share_NE, expert_NC, tokens.shares),
        )
