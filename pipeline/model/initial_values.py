"""Initial values of parameters; each depends only on a seed and the parameter's name."""

import math
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from pipeline.model.settings import ModelConfig
from pipeline.model.spec import ModelSpec
from pipeline.seeds import named_generator


@runtime_checkable
class InitializesItself(Protocol):
    """A module that defines the initial values of its own parameters."""

    def initial_value(self, name: str, shape: torch.Size, *, generator: torch.Generator) -> Tensor:
        """Return the initial value of parameter ``name``, without the module's prefix."""


def initialize(
    name: str, shape: torch.Size, *, spec: ModelSpec, seed: int, owner: nn.Module | None = None
) -> Tensor:
    """Return the initial value of the named tensor, independent of all others and of topology.

    Embeddings are N(0, 1/D) with a zero padding row; norms 1 and 0; routers U(±1/sqrt(D)); scales
    of one-hot embeddings sqrt(D); linear layers follow ``model.initialization``. Every expert has
    its own name and therefore its own value.

    Args:
        name: full name of the tensor in checkpoints.
        shape: its shape.
        spec: the model's spec.
        seed: seed of the training run.
        owner: the module of the parameter; it overrides these rules if it is an
            :class:`InitializesItself`.
    """
    # By name: a rank draws its own experts' values without those of the other ranks.
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
    if len(shape) < 2 and not name.endswith(".bias"):
        raise ValueError(
            f"{name} {tuple(shape)} is no weight or bias of a linear layer. Give its module a "
            "method initial_value (InitializesItself)."
        )
    bound = _linear_bound(name, shape, model=spec.model)
    if bound == 0:
        return torch.zeros(shape)
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def _linear_bound(name: str, shape: torch.Size, *, model: ModelConfig) -> float:
    """Return the bound b of the values U(±b) of a linear layer's weight or bias; 0 for zeros.

    The ``fairseq`` values follow ``reset_parameters`` in its ``multihead_attention.py``, which
    keeps PyTorch's biases of query, key and value, and its ``transformer_layer.py``, which keeps
    PyTorch's linear layers: U(±1/sqrt(inputs)) for weights and biases.
    """
    layer, _, kind = name.rpartition(".")
    xavier = 0.0 if kind == "bias" else math.sqrt(6.0 / (shape[-1] + shape[-2]))
    match model.initialization, layer.rpartition(".")[2]:
        case "fairseq", "query" | "key" | "value":
            # fairseq scales by 1 / sqrt(2) where the three have the same inputs.
            return 1 / math.sqrt(model.width) if kind == "bias" else xavier / math.sqrt(2)
        case "fairseq", "up":
            return 1 / math.sqrt(model.width)
        case "fairseq", "down":
            return 1 / math.sqrt(model.feed_forward_width)
        case _:
            return xavier
