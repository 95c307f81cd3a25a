"""A layer of experts in the form of torchtitan's: sort, gather, grouped products, scatter.

The weights are those of one of our layers: two matrices with bias per expert and ReLU between them.

Legend: N tokens, D width, F hidden width, E experts, K experts per token, R = N · K rows.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.model.moe.layer import MixtureOfExperts


class TorchtitanLayer(nn.Module):
    """``torch._grouped_mm`` over rows sorted by expert; (N, D) → (N, D) and the balance loss."""

    def __init__(self, ours: MixtureOfExperts, *, top_k: int) -> None:
        super().__init__()
        up: Any = ours.experts.up
        down: Any = ours.experts.down
        router: Any = ours.router
        weights = router.weight, up.weight, up.bias, down.weight, down.bias
        copies = [nn.Parameter(weight.detach().clone()) for weight in weights]
        self.gate_ED, self.up_EFD, self.up_EF, self.down_EDF, self.down_ED = copies
        self.top_k = top_k

    def forward(self, x_ND: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weighted sum of each token's experts, and the balance loss."""
        experts = len(self.gate_ED)
        probability_NE = F.linear(x_ND.float(), self.gate_ED.float()).softmax(-1)
        weight_NK, expert_NK = probability_NE.topk(self.top_k)
        weight_NK = weight_NK / weight_NK.sum(-1, keepdim=True)
        expert_R, order_R = expert_NK.flatten().sort(stable=True)
        token_R = order_R // self.top_k
        rows_E = torch.bincount(expert_R, minlength=experts)
        stop_E = rows_E.cumsum(0).to(torch.int32)
        x_RD = x_ND.index_select(0, token_R)
        hidden_RF = torch._grouped_mm(x_RD, self.up_EFD.mT, offs=stop_E)
        hidden_RF = F.relu(hidden_RF + self.up_EF.index_select(0, expert_R))
        y_RD = torch._grouped_mm(hidden_RF, self.down_EDF.mT, offs=stop_E)
        y_RD = y_RD + self.down_ED.index_select(0, expert_R)
        y_RD = y_RD * weight_NK.flatten()[order_R, None].to(y_RD.dtype)
        first_E = F.one_hot(expert_NK[:, 0], experts).float().mean(0)
        balance = experts * (first_E * probability_NE.mean(0)).sum()
        return torch.zeros_like(x_ND).index_add(0, token_R, y_RD), balance
