"""Modules of equal shape with stacked parameters: experts and language modules.

In memory, the first dimension of every parameter is over slots. In checkpoints, each slot has its
own tensors under its name: ``….experts.7.up.weight``.
"""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import nn


class StackedModules(nn.Module, ABC):
    """A module whose parameters, and those below it, have a first dimension over slots."""

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
