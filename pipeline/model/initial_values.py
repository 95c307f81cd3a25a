"""Initial values of parameters: each depends on a seed and its own name alone."""

import math
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from pipeline.model.settings import ModelConfig
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
    """The initial value of the named tensor: independent of all others and of topology.

    Embeddings N(0, 1/D) with a zero padding row; norms 1 and 0; routers U(±1/sqrt(D)); scales of
    one-hot embeddings sqrt(D); linear layers as ``model.initialization`` says. Every expert has a
    name of its own, hence a value of its own. The module that a parameter belongs to may say
    otherwise.
    """
    generator = named_generator("initialize", seed, name)
    if isinstance(owner, InitializesItself):
        return owner.initial_value(name.rpartition(".")[2], shape, generator=generator)
    width = spec.model.width
    if name.startswith("embedding.") and name.endswith("_scale"):
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
    bound = _linear_bound(name, shape, model=spec.model)
    if bound == 0:
        return torch.zeros(shape)
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def _linear_bound(name: str, shape: torch.Size, *, model: ModelConfig) -> float:
    """What bounds the uniform values of a linear layer's weight or bias, 0 of those that are 0.

    fairseq's are those of ``reset_parameters`` in its ``multihead_attention.py``, which leaves the
    biases of query, key and value as PyTorch has them, and in ``transformer_layer.py`` PyTorch's
    linear layers as they are: U(±1/sqrt(inputs)), weights and biases.
    """
    layer, _, kind = name.rpartition(".")
    xavier = 0.0 if kind == "bias" else math.sqrt(6.0 / (shape[-1] + shape[-2]))
    match model.initialization, layer.rpartition(".")[2]:
        case "fairseq", "query" | "key" | "value":
            return 1 / math.sqrt(model.width) if kind == "bias" else xavier / math.sqrt(2)
        case "fairseq", "up":
            return 1 / math.sqrt(model.width)
        case "fairseq", "down":
            return 1 / math.sqrt(model.feed_forward_width)
        case _:
            return xavier
