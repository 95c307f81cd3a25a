"""From a router's logits to every token's experts: by a compiled loop on CPU, else by operators.

Legend: N tokens, E experts, C choices per token (top-k).
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from pipeline.kernels.kept_weights import softmax_backward


class ExpertChoice(NamedTuple):
    """See :class:`~pipeline.model.moe.router.Routing`.

    Attributes:
        chosen_logits_NC: of which the weights are the softmax, where they have not been made.
    """

    probability_NE: Tensor
    expert_NC: Tensor
    made_weight_NC: Tensor | None
    balance_loss: Tensor
    chosen_logits_NC: Tensor | None = None


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
    """:func:`choose_experts` on any device, in few operators."""
    probability_NE, expert_NC, chosen_NC, balance_loss = _ChooseByOperators.apply(  # type: ignore[no-untyped-call]
        logits_NE, top_k, is_renormalized
    )
    if is_renormalized:
        return ExpertChoice(probability_NE, expert_NC, None, balance_loss, chosen_NC)
    return ExpertChoice(probability_NE, expert_NC, chosen_NC, balance_loss)


class _ChooseByOperators(torch.autograd.Function):
    """Probabilities, experts, their logits or probabilities, and the balance loss."""

    @staticmethod
    def forward(
        ctx: Any, logits_NE: Tensor, top_k: int, is_renormalized: bool
    ) -> tuple[Tensor, ...]:
        num_tokens, num_experts = logits_NE.shape
        probability_NE = F.softmax(logits_NE, dim=-1)
        # of equal logits the first, as in the loops: topk may take any
        sorted_NE, order_NE = logits_NE.sort(dim=-1, descending=True, stable=True)
        expert_NC, chosen_NC = order_NE[:, :top_k], sorted_NE[:, :top_k]
        if not is_renormalized:
            chosen_NC = probability_NE.gather(1, expert_NC)
        scale = num_experts / max(num_tokens, 1) ** 2
        first_E = logits_NE.new_zeros(num_experts)
        first_E.scatter_(0, order_NE[:, 0], scale, reduce="add")
        ctx.save_for_backward(probability_NE, expert_NC, first_E)
        ctx.mark_non_differentiable(probability_NE, expert_NC)
        ctx.set_materialize_grads(False)
        ctx.is_renormalized = is_renormalized
        return probability_NE, expert_NC, chosen_NC, probability_NE.sum(0) @ first_E

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        _, _, d_chosen_NC, d_balance_loss = gradients
        probability_NE, expert_NC, first_E = ctx.saved_tensors
        balances = d_balance_loss is not None
        d_probability_E = first_E * d_balance_loss if balances else torch.zeros_like(first_E)
        d_probability_NE = d_probability_E.expand_as(probability_NE)
        if d_chosen_NC is not None and not ctx.is_renormalized:
            d_probability_NE = d_probability_NE.scatter_add(1, expert_NC, d_chosen_NC)
        d_logits_NE = softmax_backward(d_probability_NE, probability_NE)
        if d_chosen_NC is not None and ctx.is_renormalized:
            d_logits_NE.scatter_add_(1, expert_NC, d_chosen_NC)
        return d_logits_NE, None, None


class _ChooseByLoop(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_NE: Tensor, top_k: int, is_renormalized: bool
    ) -> tuple[Tensor, ...]:
        from pipeline.kernels import routing_loops as loops

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
        from pipeline.kernels import routing_loops as loops

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
