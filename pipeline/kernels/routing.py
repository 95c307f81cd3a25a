"""Routing of tokens to experts: router logits, choice of experts, and weights of kept routes.

On GPUs, fused kernels do the work, and elsewhere a few operators.

Legend: N tokens, M micro-batches of the pass, D model width, E experts, C choices per token
(top-k), G groups of tokens, P blocks of tokens, K = 2: probabilities and first choices.
"""

from typing import Any, NamedTuple, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from pipeline.kernels.launching import is_fused, launch, power_of_two
from pipeline.kernels.products import linear

_LARGEST_TILE = 4096
"""Values of a tile of tokens by experts: 32 registers of each thread of four warps."""


class MicroBatches(Protocol):
    """The micro-batches of a pass; see :class:`~pipeline.batching.batch.Shares`."""

    @property
    def rows(self) -> tuple[int, ...]: ...  # noqa: D102
    @property
    def rows_M(self) -> Tensor: ...  # noqa: D102
    @property
    def micro_batch_N(self) -> Tensor: ...  # noqa: D102
    @property
    def mean_MN(self) -> Tensor: ...  # noqa: D102
    @property
    def weight_M(self) -> Tensor: ...  # noqa: D102


class ExpertChoice(NamedTuple):
    """Experts and weights of every token; see :class:`~pipeline.model.moe.router.Routing`.

    Attributes:
        chosen_logits_NC: logits whose softmax is the weights, if the choice did not compute them.
        claim_N: int64 that, ascending, sort tokens by micro-batch, then by the probability of their
            best expert, highest first; made by fused kernels.
    """

    probability_NE: Tensor
    expert_NC: Tensor
    made_weight_NC: Tensor | None
    balance_loss: Tensor
    chosen_logits_NC: Tensor | None = None
    claim_N: Tensor | None = None


def choose_experts(
    logits_NE: Tensor, *, top_k: int, is_renormalized: bool, shares: MicroBatches | None = None
) -> ExpertChoice:
    """Return the ``top_k`` best experts of every token, their weights, and the balance loss.

    With ``shares``, the balance losses of the micro-batches are averaged by their labels.
    """
    options: dict[str, Any] = {
        **{"top_k": top_k, "is_renormalized": is_renormalized, "shares": shares}
    }
    if _is_fused(logits_NE):
        return choose_by_kernels(logits_NE, **options)
    return choose_by_operators(logits_NE, **options)


def _is_fused(logits: Tensor) -> bool:
    """Return whether kernels, which read float32, serve these logits: a router may have others."""
    return logits.dtype == torch.float32 and is_fused(logits)


def choose_by_operators(
    logits_NE: Tensor, *, top_k: int, is_renormalized: bool, shares: MicroBatches | None = None
) -> ExpertChoice:
    """Return the result of :func:`choose_experts` by operators, on any device."""
    probability_NE = F.softmax(logits_NE, dim=-1)
    # The first of equal logits, as in the kernels; topk may choose any of them.
    order_NE = logits_NE.detach().argsort(dim=-1, descending=True, stable=True)
    expert_NC = order_NE[:, :top_k].contiguous()
    chosen_NC = (logits_NE if is_renormalized else probability_NE).gather(1, expert_NC)
    loss = balance_loss(probability_NE, expert_NC, shares)
    found = probability_NE.detach(), expert_NC, chosen_NC, loss
    return _choice(*found, is_renormalized=is_renormalized)


def choose_by_kernels(
    logits_NE: Tensor, *, top_k: int, is_renormalized: bool, shares: MicroBatches | None = None
) -> ExpertChoice:
    """Return the result of :func:`choose_experts` by fused kernels."""
    found = _ChooseByKernels.apply(logits_NE, top_k, is_renormalized, shares)  # type: ignore[no-untyped-call]
    return _choice(*found, is_renormalized=is_renormalized)


def _choice(
    probability_NE: Tensor,
    expert_NC: Tensor,
    chosen_NC: Tensor,
    balance_loss: Tensor,
    claim_N: Tensor | None = None,
    *,
    is_renormalized: bool,
) -> ExpertChoice:
    of_values = (None, chosen_NC) if is_renormalized else (chosen_NC, None)
    weight_NC, logits_NC = of_values
    return ExpertChoice(probability_NE, expert_NC, weight_NC, balance_loss, logits_NC, claim_N)


class TokenBlocks(NamedTuple):
    """Blocks of tokens, of one micro-batch each, of which a program of a fused kernel has one."""

    grid: tuple[int, int]
    """Blocks of the longest micro-batch, and micro-batches."""
    rows_M: Tensor | None
    """Tokens of each micro-batch; None: there is only one."""
    constants: dict[str, int]

    @classmethod
    def of(cls, expert_NC: Tensor, *, num_experts: int, shares: MicroBatches | None) -> Self:
        """Return the blocks of tokens with so many choices and experts; at least one."""
        num_tokens, num_choices = expert_NC.shape
        longest, micro_batches = num_tokens, 1
        if shares is not None:
            longest, micro_batches = max(shares.rows), len(shares.rows)
        columns = power_of_two(num_experts)
        tokens = max(min(_LARGEST_TILE // columns, 64), 1)
        constants = {
            **{"MICRO_BATCHES": micro_batches, "EXPERTS": num_experts, "CHOICES": num_choices},
            **{"TOKENS": tokens, "BLOCK": columns},
        }
        grid = max(-(-longest // tokens), 1), micro_batches
        return cls(grid, None if shares is None else shares.rows_M, constants)


class _ChooseByKernels(torch.autograd.Function):
    """Choice of experts, and the order in which tokens claim rows."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_NE: Tensor,
        top_k: int,
        is_renormalized: bool,
        shares: MicroBatches | None,
    ) -> tuple[Tensor, ...]:
        logits_NE = logits_NE.contiguous()
        num_tokens, num_experts = logits_NE.shape
        expert_NC = logits_NE.new_empty(num_tokens, top_k, dtype=torch.int64)
        claim_N = logits_NE.new_empty(num_tokens, dtype=torch.int64)
        chosen_NC = logits_NE.new_empty(num_tokens, top_k)
        probability_NE = torch.empty_like(logits_NE)
        blocks = TokenBlocks.of(expert_NC, num_experts=num_experts, shares=shares)
        (num_blocks, micro_batches), rows_M, constants = blocks
        sum_MPKE = logits_NE.new_empty(micro_batches, num_blocks, 2, num_experts)
        given = logits_NE, rows_M, probability_NE, expert_NC, chosen_NC, claim_N, sum_MPKE
        options = {"RENORMALIZED": is_renormalized, **constants}
        launch("choose_experts", blocks.grid, *given, num_tokens, **options)
        balance_loss = logits_NE.new_empty(())
        d_probability_ME = logits_NE.new_empty(micro_batches, num_experts)
        launch(
            "average_balance",
            (1,),
            *(sum_MPKE, rows_M, None if shares is None else shares.weight_M),
            *(balance_loss, d_probability_ME, num_tokens, num_blocks),
            MICRO_BATCHES=micro_batches,
            EXPERTS=num_experts,
            ROWS=constants["TOKENS"],
            BLOCK=constants["BLOCK"],
        )
        ctx.save_for_backward(probability_NE, expert_NC, d_probability_ME)
        ctx.mark_non_differentiable(probability_NE, expert_NC, claim_N)
        ctx.set_materialize_grads(False)
        ctx.blocks, ctx.options = blocks, options
        return probability_NE, expert_NC, chosen_NC, balance_loss, claim_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        _, _, d_chosen_NC, d_balance_loss, _ = gradients
        probability_NE, expert_NC, d_probability_ME = ctx.saved_tensors
        d_logits_NE = torch.empty_like(probability_NE)
        d_chosen_NC = None if d_chosen_NC is None else d_chosen_NC.contiguous()
        launch(
            "choose_experts_backward",
            ctx.blocks.grid,
            *(probability_NE, expert_NC, ctx.blocks.rows_M, d_probability_ME, d_chosen_NC),
            *(d_balance_loss, d_logits_NE, len(expert_NC)),
            **ctx.options,
        )
        return d_logits_NE, None, None, None


def balance_loss(probability_NE: Tensor, expert_NC: Tensor, shares: MicroBatches | None) -> Tensor:
    """Return E · Σ_e m_e c_e, of mean probabilities m and shares c of first choices.

    The losses of micro-batches are averaged by their labels. The loss of all tokens together would
    be another one: it is a product of means.
    """
    num_tokens, num_experts = probability_NE.shape
    if shares is not None:  # means are float32, of a router in any precision
        probability_NE = probability_NE.float()
    # The shares of first choices have no gradient: the loss changes probabilities only.
    is_first_NE = torch.zeros_like(probability_NE).scatter_(1, expert_NC[:, :1], 1.0)
    if shares is None:
        means = probability_NE.sum(0) @ is_first_NE.sum(0) / max(num_tokens, 1) ** 2
    else:
        means_ME = (shares.mean_MN @ probability_NE) * (shares.mean_MN @ is_first_NE)
        means = shares.weight_M @ means_ME.sum(-1)
    return num_experts * means


def averaged_logits(x_ND: Tensor, weight_ED: Tensor, weight_GED: Tensor, group_N: Tensor) -> Tensor:
    """Return (W x + W_g x) / 2 with g the group of the token, (N, E)."""
    num_groups, num_experts, _ = weight_GED.shape
    # Weights are averaged instead of logits: one product, and few operators.
    mean_GED: Tensor = _Average.apply(weight_ED, weight_GED)  # type: ignore[no-untyped-call]
    logits_NGE = linear(x_ND, mean_GED.flatten(0, 1)).view(-1, num_groups, num_experts)
    index_N1E = group_N[:, None, None].expand(-1, 1, num_experts)
    return logits_NGE.gather(1, index_N1E).squeeze(1)


class _Average(torch.autograd.Function):
    """Average of shared and group weights, (W + W_g) / 2, (G, E, D)."""

    @staticmethod
    def forward(ctx: Any, weight_ED: Tensor, weight_GED: Tensor) -> Tensor:  # noqa: ARG004
        return torch.lerp(weight_GED, weight_ED.expand_as(weight_GED), 0.5)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG004
        half_GED = gradients[0] / 2
        return half_GED.sum(0), half_GED


def kept_weights(weight_NC: Tensor, is_dropped_NC: Tensor | None, *, renormalize: bool) -> Tensor:
    """Return weights with 0 for dropped routes; ``renormalize`` gives their share to the others.

    The sum of their sizes stays: a router's own weights may have any sum and any sign.
    """
    kept_NC = weight_NC if is_dropped_NC is None else weight_NC.masked_fill(is_dropped_NC, 0)
    if not renormalize:
        return kept_NC
    size_N1, kept_N1 = (each_NC.abs().sum(-1, keepdim=True) for each_NC in (weight_NC, kept_NC))
    # Divided first: a token without kept routes has weights of 0, not 0 · inf.
    return kept_NC / kept_N1.clamp_min(torch.finfo(torch.float32).tiny) * size_N1


def kept_softmax(logits_NC: Tensor, is_dropped_NC: Tensor) -> Tensor:
    """Return the softmax over the routes that were not dropped, and 0 elsewhere.

    It equals the renormalized :func:`kept_weights` of a softmax, but takes fewer operators on
    devices other than the CPU.
    """
    weight_NC: Tensor = _KeptSoftmax.apply(logits_NC, is_dropped_NC)  # type: ignore[no-untyped-call]
    return weight_NC


class _KeptSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NC: Tensor, is_dropped_NC: Tensor) -> Tensor:
        if _is_fused(logits_NC):
            logits_NC, num_tokens = logits_NC.contiguous(), len(logits_NC)
            weight_NC, num_choices = torch.empty_like(logits_NC), logits_NC.shape[1]
            options = {"CHOICES": num_choices, "TOKENS": 128, "BLOCK": power_of_two(num_choices)}
            given = logits_NC, is_dropped_NC, weight_NC, num_tokens
            launch("kept_softmax", (-(-num_tokens // 128),), *given, **options)
        else:
            weight_NC = F.softmax(logits_NC.masked_fill(is_dropped_NC, -torch.inf), dim=-1)
            weight_NC.masked_fill_(is_dropped_NC, 0)
        ctx.save_for_backward(weight_NC)
        return weight_NC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (weight_NC,) = ctx.saved_tensors
        return softmax_backward(gradients[0], weight_NC), None


def softmax_backward(d_softmax: Tensor, softmax: Tensor) -> Tensor:
    """Return the gradient of the input of a softmax over the last dimension, in one operator."""
    gradient: Tensor = torch.ops.aten._softmax_backward_data(d_softmax, softmax, -1, softmax.dtype)
    return gradient
