"""Initial values of parameters: each depends on a seed and its own name alone."""

import math
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from pipeline.model.spec import ModelSpec
from pipeline.seeds import named_generator


@runtime_checkable
class InitializesItself(Protocol):
    """A module that knows what its own parameters start from."""

    def initial_value(self, name: str, shape: torch.Size, *, generator: torch.Generator) -> Tensor:
        """Of the parameter ``name`` (without its module's)."""


def initialize(
    name: str, shape: torch.Size, *, spec: ModelSpec, seed: int, owner: nn.Module | None = None
) -> Tensor:
    """The initial value of the named tensor (fairseq's): independent of all others and of topology.

    Embeddings N(0, 1/D) with a zero padding row; linear weights Xavier-uniform; biases 0; norms 1
    and 0; routers U(±1/sqrt(D)); scales of one-hot embeddings sqrt(D). Every expert has a name of
    its own, hence a value of its own. The module that a parameter belongs to may say otherwise.
    """
    generator = named_generator("initialize", seed, name)
    if isinstance(owner, InitializesItself):
        return owner.initial_value(name.rpartition(".")[2], shape, generator=generator)
    width = spec.model.width
    if name in ("embedding.input_scale", "embedding.output_scale"):
        return torch.full(shape, width**0.5)
    if name.startswith("embedding.") or ".positions." in name:
        value = torch.empty(shape).normal_(0, width**-0.5, generator=generator)
        if name.startswith("embedding."):
            value[spec.pad_id] = 0
        return value
    if ".router." in name:
        bound = width**-0.5
        return torch.empty(shape).uniform_(-bound, bound, generator=generator)
    if name.endswith("norm.weight"):
        return torch.ones(shape)
    if name.endswith(".bias"):
        return torch.zeros(shape)
    bound = math.sqrt(6.0 / (shape[-1] + shape[-2]))
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)
