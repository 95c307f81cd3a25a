"""Metadata of the tokens that a layer processes, and linear layers that depend on it.

Legend: B sentences, N tokens, L languages.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.batching.batch import Packing, Shares
from pipeline.config.settings import Route
from pipeline.kernels.launching import is_fused
from pipeline.kernels.noise import Noise
from pipeline.kernels.placement import Limits, RouteNumbers
from pipeline.kernels.pointwise import JointParameters, activated_linear, joins_parameters
from pipeline.kernels.products import Activation, Linear, activate
from pipeline.kernels.slot_products import SentenceSlots, copied_to


@dataclass(frozen=True)
class Tokens:
    """Metadata of packed tokens.

    One record keeps the signatures of layers short. It also caches values that several layers
    compute from it.

    Attributes:
        sentence_N: index of each token's sentence.
        position_N: position of each token in its sentence, from 0.
        source_language_B: index of each sentence's source language in ``spec.languages``.
        target_language_B: index of its target language.
        group_of_language_L: group of each language.
        route: the language-specific or the shared route, in a model that has both.
        progress: share of training done before this update, 0 to 1; read in training only.
        shares: the micro-batches that share the pass; None for a single one.
        noise: keys of the tokens' random numbers; None outside training.
        joint: copies of parameters for training on a GPU; None: they are read as they are.
    """

    sentence_N: Tensor
    position_N: Tensor
    source_language_B: Tensor
    target_language_B: Tensor
    group_of_language_L: Tensor
    route: Route = "specific"
    progress: float = 0.0
    shares: Shares | None = None
    noise: Noise | None = None
    joint: JointParameters | None = None

    def float32(self, parameter: Tensor) -> Tensor:
        """Return a parameter in float32."""
        copied = self.joint.float32(parameter) if self.joint else None
        return parameter.float() if copied is None else copied

    @cached_property
    def source_language_N(self) -> Tensor:
        """Return the source language of each token."""
        return self.source_language_B[self.sentence_N]

    @cached_property
    def target_language_N(self) -> Tensor:
        """Return the target language of each token."""
        return self.target_language_B[self.sentence_N]

    @cached_property
    def language_group_N(self) -> Tensor:
        """Return the group of each token's target language."""
        return self.group_of_language_L[self.target_language_N]

    def route_numbers(
        self, *, num_experts: int, top_k: int, capacity_M: tuple[int, ...] | None
    ) -> RouteNumbers:
        """Return the index tensors of MoE layers of this shape, cached for all such layers.

        ``capacity_M``: the most routes that an expert keeps of each micro-batch; None: all.
        """
        key = num_experts, top_k, capacity_M
        if key not in self._route_numbers:
            device, limits = self.sentence_N.device, None
            if capacity_M is not None:
                limits = Limits(copied_to(device, torch.tensor(capacity_M)), self.shares)
            self._route_numbers[key] = RouteNumbers(
                len(self.sentence_N), top_k, num_experts, device, limits
            )
        return self._route_numbers[key]

    def over(self, packing: Packing) -> "Tokens":
        """Return the metadata of other tokens of the same sentences, for example their sources."""
        if id(packing) not in self._over:
            other = replace(
                self,
                sentence_N=packing.sentence_N,
                position_N=packing.position_N,
                shares=packing.shares,
                noise=packing.noise,
            )
            # The packing is kept as well: its id could be reused if it were freed.
            self._over[id(packing)] = packing, other
        return self._over[id(packing)][1]

    @cached_property
    def _over(self) -> dict[int, tuple[Packing, "Tokens"]]:
        return {}

    @cached_property
    def kept_slots(self) -> dict[tuple[object, ...], SentenceSlots]:
        """Return the cache of language modules: kind → the slots that serve these sentences."""
        return {}

    @cached_property
    def _route_numbers(self) -> dict[tuple[object, ...], RouteNumbers]:
        return {}


class TokenLinear(nn.Module, ABC):
    """A replacement for a linear layer whose result also depends on token metadata.

    It is called with the states, (…, inputs), and the metadata of their rows.
    """

    in_features: int
    out_features: int

    @property
    @abstractmethod
    def kept_values(self) -> int:
        """Return the values per token kept for gradients, in addition to a linear layer's."""


@runtime_checkable
class ReadsFloat32(Protocol):
    """A module that reads its parameters by :meth:`Tokens.float32`."""

    reads_float32: bool

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters."""


def project(
    layer: nn.Module, x: Tensor, tokens: Tokens, activation: Activation | None = None
) -> Tensor:
    """Apply a linear layer or its replacement, and an activation."""
    if type(layer) is Linear and is_fused(x):
        return activated_linear(x, layer.weight, layer.bias, activation)
    y: Tensor = layer(x, tokens) if isinstance(layer, TokenLinear) else layer(x)
    return y if activation is None else activate(y, activation)


def project_jointly(
    layers: Sequence[nn.Module], x_ND: Tensor, tokens: Tokens
) -> tuple[Tensor, ...]:
    """Apply linear layers of the same shape, or their replacements, to the same states."""
    found = tokens.joint.apply(x_ND, layers) if tokens.joint else None
    return found or tuple(project(layer, x_ND, tokens) for layer in layers)


class Unbiased(NamedTuple):
    """Result of a sublayer's last linear layer, whose bias is added with the residual."""

    y_ND: Tensor
    bias_D: Tensor

    @property
    def total(self) -> Tensor:
        """Return the result with its bias."""
        return self.y_ND + self.bias_D


def project_last(layer: nn.Module, x_ND: Tensor, tokens: Tokens) -> Tensor | Unbiased:
    """Apply the last linear layer of a sublayer, or its replacement."""
    if type(layer) is Linear and joins_parameters(x_ND):
        return Unbiased(F.linear(x_ND, layer.weight), layer.bias)
    return project(layer, x_ND, tokens)
