"""The mixture-of-experts feed-forward: router, dispatch, experts, combine (MMNMT, §4.1).

Padding never arrives here: hidden states are packed.

Legend: N real tokens, D model width, E experts, R kept routes.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from pipeline.errors import ConfigError
from pipeline.kernels.noise import dropout_in, uniform
from pipeline.kernels.placement import beside_float32, combine, gather
from pipeline.kernels.pointwise import dropped
from pipeline.model.moe.capacity import Dispatch, dispatch_routes, expert_capacity
from pipeline.model.moe.expert_parallel import ExpertParallel
from pipeline.model.moe.experts import Experts
from pipeline.model.moe.router import build_router, refuse_without_groups
from pipeline.model.moe.routing import Routing, RoutingRecord
from pipeline.model.settings import ModelConfig, MoEConfig
from pipeline.model.spec import ModelSpec, Side
from pipeline.model.sublayer import Regularization, built, not_again
from pipeline.model.tokens import Tokens


class MixtureOfExperts(nn.Module):
    """A feed-forward that applies ``top_k`` of E experts to every token."""

    def __init__(
        self,
        config: MoEConfig,
        *,
        router: nn.Module,
        experts: Experts,
        expert_parallel: ExpertParallel | None,
        regularization: Regularization | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.regularization = regularization or Regularization()
        self.site = 0
        self.router = router
        self.experts = experts
        self.expert_parallel = expert_parallel

    def forward(self, x_ND: Tensor, tokens: Tokens) -> tuple[Tensor, RoutingRecord]:
        """Return the weighted sum of every token's experts, and the routing record."""
        x_ND, routed_ND = beside_float32(x_ND)
        routing: Routing = self.router(self._jittered(routed_ND, tokens), tokens)
        self._check(routing, num_tokens=len(x_ND))
        dispatch = self._dispatch(routing, tokens)
        y_ND = self._serve(x_ND, self._masked(dispatch, tokens))
        record = RoutingRecord(
            balance_loss=routing.balance_loss,
            logits_NE=routing.logits_NE,
            probability_NE=routing.probability_NE,
            expert_NC=routing.expert_NC,
            placement=dispatch,
            shares=tokens.shares,
        )
        return y_ND, record

    def _check(self, routing: Routing, *, num_tokens: int) -> None:
        """Refuse shapes and types of a router that would fail later, far from its code."""
        of_experts = num_tokens, self.config.num_experts
        of_choices = num_tokens, self.config.top_k
        for name, wanted in (
            ("logits_NE", of_experts),
            ("probability_NE", of_experts),
            ("expert_NC", of_choices),
            ("made_weight_NC", of_choices),
            ("chosen_logits_NC", of_choices),
            ("balance_loss", ()),
        ):
            value = getattr(routing, name, 0)
            other = {"made_weight_NC": "chosen_logits_NC", "chosen_logits_NC": "made_weight_NC"}
            if value is None and getattr(routing, other.get(name, ""), None) is not None:
                continue  # weights are given, or follow from the logits
            # Experts are indices; an index in floating point would fail in a kernel.
            is_other_kind = isinstance(value, Tensor) and (
                value.is_floating_point() == (name == "expert_NC") or value.dtype == torch.bool
            )
            shape = getattr(value, "shape", None)
            if shape != wanted or is_other_kind:
                found, needed = "no tensor", f"{wanted}"
                if isinstance(value, Tensor) and shape != wanted:
                    found = f"{tuple(value.shape)}"
                elif isinstance(value, Tensor):
                    kind = "whole" if name == "expert_NC" else "floating-point"
                    found, needed = f"of {value.dtype}", f"{wanted} of {kind} numbers"
                raise ConfigError(
                    f"The router {type(self.router).__name__} returned a {type(routing).__name__} "
                    f"with {name} {found}; a Routing of {num_tokens} tokens has {needed}. Correct "
                    "its forward."
                )

    def _jittered(self, x_ND: Tensor, tokens: Tokens) -> Tensor:
        """Return the router's input, multiplied by U(1 - jitter, 1 + jitter) in training."""
        jitter = self.regularization.router_jitter
        if not self.training or jitter == 0:
            return x_ND
        assert tokens.noise is not None, "training with noise needs keys of random numbers"
        drawn_ND = uniform(tokens.noise, self.site, columns=x_ND.shape[1])
        return x_ND.float() * (1 - jitter + 2 * jitter * drawn_ND)

    def _masked(self, dispatch: Dispatch, tokens: Tokens) -> Dispatch:
        """Zero combine weights at random in training, scale the rest (expert output masking)."""
        rate = self.regularization.expert_output_masking
        # The site after the jitter's, for other numbers.
        dropout = dropout_in(self, tokens.noise, site=self.site + 1, rate=rate)
        return replace(dispatch, weight_NC=dropped(dispatch.weight_NC, dropout))

    def _dispatch(self, routing: Routing, tokens: Tokens) -> Dispatch:
        config = self.config
        shape = {"num_experts": config.num_experts, "top_k": config.top_k}
        factor = config.capacity_factor if self.training else config.evaluation_capacity_factor
        capacity_M = None
        if config.dispatch == "capacity" and factor is not None:
            rows_M = (len(routing.expert_NC),) if tokens.shares is None else tokens.shares.rows
            capacity_M = tuple(expert_capacity(rows, **shape, factor=factor) for rows in rows_M)
        return dispatch_routes(
            routing,
            tokens.route_numbers(**shape, capacity_M=capacity_M),
            prioritized=config.batch_prioritized,
            renormalize=config.combine_weights == "renormalized",
            # A dropped route that is sent to another rank would cost traffic for nothing.
            keeps_dropped=self.expert_parallel is None,
        )

    def _serve(self, x_ND: Tensor, dispatch: Dispatch) -> Tensor:
        """Return the weighted sum of every token's experts, (N, D)."""
        parallel = self.expert_parallel
        if parallel is None:
            return self.experts.serve(x_ND, dispatch)
        # A layer that is recomputed has the counts: the host need not wait for them again.
        counts = not_again(lambda: parallel.exchange_counts(dispatch.rows_E))
        dispatch = dispatch.first_rows(counts.num_sent)
        x_RD = gather(x_ND, dispatch)
        y_RD = parallel.run(self.experts, x_RD, counts)
        return combine(y_RD, dispatch.weight_NC, dispatch)


def has_experts(model: ModelConfig, layer: int) -> bool:
    """Return whether layer ``layer`` (from 0) of encoder and decoder is an MoE layer."""
    return model.moe is not None and (layer + 1) % model.moe.every == 0


def build_mixture_of_experts(
    spec: ModelSpec,
    moe: MoEConfig,
    *,
    side: Side,
    regularization: Regularization,
    expert_parallel: ExpertParallel | None,
) -> MixtureOfExperts:
    """Return an MoE layer with this rank's share of the experts.

    Raises:
        ConfigError: the ranks do not divide the experts, or the router has no ``case``.
    """
    size, rank = (1, 0) if expert_parallel is None else (expert_parallel.size, expert_parallel.rank)
    if moe.num_experts % size:
        raise ConfigError(
            f"{moe.num_experts} experts cannot be spread over {size} ranks. Choose a "
            "training.expert_parallel_size that divides model.moe.num_experts."
        )
    local_experts = moe.num_experts // size
    router = built(build_router(spec, moe, side=side), "build_router", moe.decoder_router)
    refuse_without_groups(router, moe.decoder_router)
    return MixtureOfExperts(
        moe,
        router=router,
        experts=Experts(
            num_experts=local_experts,
            first_expert=rank * local_experts,
            width=spec.model.width,
            hidden_width=spec.model.feed_forward_width,
            activation=spec.model.activation,
        ),
        expert_parallel=expert_parallel,
        regularization=regularization,
    )
