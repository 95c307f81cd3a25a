"""Experts: feed-forwards of equal shape with stacked weights.

Legend: E experts (on this rank), R rows sorted by expert, N tokens, D model width.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from pipeline.kernels.expert_products import ExpertWeights, serve_rows, serve_tokens
from pipeline.kernels.gradient_sums import summed
from pipeline.kernels.products import Activation
from pipeline.model.moe.capacity import Dispatch


class StackedModules(nn.Module, ABC):
    """Experts or language modules of equal shape, with stacked parameters.

    In memory, the first dimension of every parameter is over slots. In checkpoints, each slot has
    its own tensors under its name: ``….experts.7.up.weight``.
    """

    can_spread: ClassVar[bool] = False
    """Whether expert parallelism spreads the slots over ranks."""
    first_slot: int
    """Number of the first slot that this rank holds."""

    @property
    @abstractmethod
    def held_slots(self) -> tuple[str, ...]:
        """Return the names of the slots that this rank holds, in order."""

    @property
    @abstractmethod
    def is_spread(self) -> bool:
        """Return whether ranks may hold different slots."""

    @torch.no_grad()
    def clear_padding(self) -> None:
        """Set the parameters after the last slot to zero."""
        for parameter in self.parameters():
            parameter[len(self.held_slots) :] = 0


class StackedLinear(nn.Module):
    """One linear layer of every expert: weights (E, out, in) and biases (E, out)."""

    def __init__(self, *, num_experts: int, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, out_features, in_features))
        self.bias = nn.Parameter(torch.empty(num_experts, out_features))


class Experts(StackedModules):
    """The E experts of this rank; ``first_expert`` is the global id of the first one."""

    can_spread = True

    def __init__(
        self,
        *,
        num_experts: int,
        first_expert: int,
        width: int,
        hidden_width: int,
        activation: Activation,
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.first_slot = self.first_expert = first_expert
        self.activation: Activation = activation
        self.up = StackedLinear(
            num_experts=num_experts, in_features=width, out_features=hidden_width
        )
        self.down = StackedLinear(
            num_experts=num_experts, in_features=hidden_width, out_features=width
        )

    @property
    def is_spread(self) -> bool:
        """Return True: each expert belongs to one rank, even if there is only one rank."""
        return True

    @property
    def held_slots(self) -> tuple[str, ...]:
        """Return the global ids of this rank's experts."""
        return tuple(str(self.first_expert + index) for index in range(self.num_experts))

    def forward(self, x_RD: Tensor, rows_E: Sequence[int], count_E: Tensor | None = None) -> Tensor:
        """Apply each expert to its slice of ``rows_E`` rows, in order, (R, D)."""
        return serve_rows(
            x_RD, rows_E, self._weights(), activation=self.activation, count_E=count_E
        )

    def serve(self, x_ND: Tensor, dispatch: Dispatch) -> Tensor:
        """Return the weighted sum of every token's experts, (N, D)."""
        return serve_tokens(
            x_ND, dispatch.weight_NC, dispatch, self._weights(), activation=self.activation
        )

    def _weights(self) -> ExpertWeights:
        # Every pass reads them by ``summed``: where gradients are added to sums at once, one that
        # bypassed it would be missing in the update.
        parameters = self.up.weight, self.up.bias, self.down.weight, self.down.bias
        return ExpertWeights(*map(summed, parameters))


def expert_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of all experts of this rank, all of which are read by ``summed``."""
    layers = [module for module in model.modules() if isinstance(module, Experts)]
    return [parameter for layer in layers for parameter in layer.parameters()]
