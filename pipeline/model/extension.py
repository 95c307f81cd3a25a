"""Extension points of the model: one object per extension implements them.

The core never tests for a particular extension: it loops over all installed. Every method has
a default that changes nothing.
"""

# ruff: noqa: ARG002 (defaults look at no argument)

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache
from typing import Protocol

from torch import Tensor, nn

from pipeline.extensions.installed import INSTALLED
from pipeline.model.moe.expert_parallel import ExpertParallel
from pipeline.model.spec import ModelSpec, Side
from pipeline.model.transformer import Stack, Transformer


@dataclass(frozen=True)
class AddedTensor:
    """A tensor of a checkpoint that an extension adds to the plain model's."""

    stack: str
    """Name that the tensors of all slots share."""
    dense: str | None
    """The plain model's tensor of the same shape and meaning, if there is one."""


class Extension(Protocol):
    """Hooks by which an extension builds, counts and exports its parts of a model."""

    # Building a model

    def build_front(self, spec: ModelSpec) -> nn.Module | None:
        """Return the encoder front end, if this extension implements the configured one."""
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

    # Counting and estimating; dictionaries are keyed by the id() of a parameter

    def parts(self, model: Transformer) -> dict[int, str]:
        """Return the part of the model under which each parameter is counted."""
        return {}

    def shares_met(self, model: Transformer) -> dict[int, float]:
        """Return the share of each parameter that is active for one token, if it is below 1."""
        return {}

    def shares_multiplied(self, model: Transformer) -> dict[int, float]:
        """Return multiplications per token and parameter, where they are not :meth:`shares_met`."""
        return {}

    # Checkpoints

    def added_tensor(self, name: str) -> AddedTensor | None:
        """Return the description of a checkpoint's tensor, if this extension adds it."""
        return None

    def folded(
        self,
        name: str,
        names: Collection[str],
        read: Callable[[str], Tensor],
    ) -> Tensor | None:
        """Return a plain tensor merged with the shared route; None if that adds nothing.

        Args:
            name: the plain model's tensor.
            names: the tensors of the checkpoint.
            read: reads a tensor.
        """
        return None


@cache
def extensions() -> tuple[Extension, ...]:
    """Return the extensions that change the model, loaded on the first call."""
    loaded = (one.load_model() for one in INSTALLED)
    return tuple(one for one in loaded if one is not None)
