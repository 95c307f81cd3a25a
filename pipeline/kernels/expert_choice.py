"""From a router's logits to every token's experts: by a compiled loop on CPU, else by operators.

Legend: N tokens, E experts, C choices per token (top-k).
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from pipeline.kernels import routing_loops as loops


class ExpertChoice(NamedTuple):
    """See :class:`~pipeline.model.moe.router.Routing`."""

    probability_NE: Tensor
    expert_NC: Tensor
    weight_NC: Tensor
    balance_loss: Tensor


def choose_experts(logits_NE: Tensor, *, top_k: int, is_renormalized: bool) -> ExpertChoice:
    """Softmax, the ``top_k`` best experts of every token, their weights, and the balance loss."""
    if logits_NE.device.type == "cpu":
        return choose_by_loop(logits_NE, top_k=top_k, is_renormalized=is_renormalized)
    return choose_by_operators(logits_NE, top_k=top_k, is_renormalized=is_renormalized)


def choose_by_loop(logits_NE: Tensor, *, top_k: int, is_renormalized: bool) -> ExpertChoice:
    """:func:`choose_experts` on CPU."""
    found = _ChooseByLoop.apply(  # type: ignore[no-untyped-call]
        logits_NE, top_k, is_renormalized
    )
    return ExpertChoice(*found)


def choose_by_operators(logits_NE: Tensor, *, top_k: int, is_renormalized: bool) -> ExpertChoice:
    """:func:`choose_experts` on any device."""
    num_tokens, num_experts = logits_NE.shape
    probability_NE = F.softmax(logits_NE, dim=-1)
    # of equal logits the first, as in the loops: topk may take any
    order_NE = logits_NE.sort(dim=-1, descending=True, stable=True).indices
    expert_NC = order_NE[:, :top_k]
    if is_renormalized:  # a softmax over the chosen
        weight_NC = F.softmax(logits_NE.gather(1, expert_NC), dim=-1)
    else:
        weight_NC = probability_NE.gather(1, expert_NC)
    first_N, one = expert_NC[:, 0], logits_NE.new_ones(1)
    first_E = logits_NE.new_zeros(num_experts).index_add_(0, first_N, one.expand(num_tokens))
    scale = num_experts / max(num_tokens, 1) ** 2
    return ExpertChoice(
        probability_NE=probability_NE.detach(),
        expert_NC=expert_NC,
        weight_NC=weight_NC,
        balance_loss=probability_NE.sum(0) @ (first_E * scale),
    )


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
