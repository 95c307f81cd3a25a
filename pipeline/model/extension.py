"""What an extension declares of the model: one object per extension, which the core asks.

The core never asks whether an extension is there: it asks every installed one, in a loop. All
methods have a default, which changes nothing.
"""

# ruff: noqa: ARG002 (defaults look at no argument)

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache
from typing import Protocol

from torch import Tensor, nn

from pipeline.extensions.installed import INSTALLED
from pipeline.model.moe.expert_parallel import ExpertParallel
from pipeline.model.settings import ModelConfig
from pipeline.model.spec import ModelSpec, Side
from pipeline.model.transformer import Stack, Transformer


@dataclass(frozen=True)
class AddedTensor:
    """A tensor of a checkpoint that an extension adds to the plain model's."""

    stack: str
    """The name that the tensors of all slots share."""
    dense: str | None
    """The plain model's tensor of the same shape and meaning, if there is one."""


class Extension(Protocol):
    """What an extension changes."""

    # Building a model

    def build_front(self, spec: ModelSpec) -> nn.Module | None:
        """Return the encoder front end, if the model has one of this extension's."""
        return None

    def build_feed_forward(
        self,
        spec: ModelSpec,
        *,
        side: Side,
        layer: int,
        expert_parallel: ExpertParallel | None,
    ) -> nn.Module | None:
        """Return the feed-forward of a layer, if this extension replaces it."""
        return None

    def change_side(self, spec: ModelSpec, stack: Stack, *, side: Side) -> None:
        """Change the finished layers of a side: replace linear layers, add to sublayers."""
        return

    # Counting and estimating; parameters are told by id

    def parts(self, model: Transformer) -> dict[int, str]:
        """Return the part of the model that parameters are counted for."""
        return {}

    def shares_met(self, model: Transformer) -> dict[int, float]:
        """Return the share of each parameter that one token meets, where that is not all of it."""
        return {}

    def shares_multiplied(self, model: Transformer) -> dict[int, float]:
        """Return how often a token is multiplied by a parameter, where :meth:`shares_met` errs."""
        return {}

    def operator_parts(self) -> tuple[tuple[type, str], ...]:
        """Return modules, and the part that their operators are counted for."""
        return ()

    def exchanges_rows(self, model: ModelConfig, layer: int) -> bool:
        """Return whether a layer sends each row to the rank of a module, and back."""
        return False

    # Checkpoints

    def added_tensor(self, name: str) -> AddedTensor | None:
        """Return what a tensor of a checkpoint is, if this extension adds it."""
        return None

    def folded(
        self,
        name: str,
        names: Collection[str],
        read: Callable[[str], Tensor],
    ) -> Tensor | None:
        """Return a plain tensor with what the shared route adds to it; None: nothing.

        Args:
            name: the plain model's tensor.
            names: the tensors of the checkpoint.
            read: reads one of them.
        """
        return None


@cache
def extensions() -> tuple[Extension, ...]:
    """Return the extensions that change the model, loaded on the first call."""
    loaded = (one.load_model() for one in INSTALLED)
    return tuple(one for one in loaded if one is not None)
