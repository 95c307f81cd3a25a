"""The parameters of a model: their initial values, their names in artifacts, and counts.

An initial value depends only on a seed and the parameter's name.

In memory the experts of a layer are stacked, and under expert parallelism a rank holds only its
own: ``….feed_forward.experts.up.weight`` (E, F, D). In artifacts every expert has its own tensor
under its global id, ``….feed_forward.experts.7.up.weight`` (F, D), whatever the topology. Language
modules are stacked, too, and have a tensor per language under its code.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from pipeline.distributed import process
from pipeline.errors import ConfigError
from pipeline.model.building import shape_of_model
from pipeline.model.extension import AddedTensor, extensions
from pipeline.model.moe.experts import StackedModules
from pipeline.model.moe.layer import MixtureOfExperts
from pipeline.model.settings import ModelConfig
from pipeline.model.spec import ModelSpec, placeholder_spec
from pipeline.model.transformer import Trained, Transformer
from pipeline.seeds import named_generator
from pipeline.terminal import counted


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
        made = owner.initial_value(name.rpartition(".")[2], shape, generator=generator)
        if not (isinstance(made, Tensor) and made.shape == shape and made.isfinite().all()):
            raise ConfigError(
                f"initial_value of {type(owner).__name__} returned no tensor of finite numbers of "
                f"the shape {tuple(shape)} for {name}. Correct it."
            )
        return made
    width = spec.model.width
    if name.startswith("embedding.") and name.endswith("_scale"):
        return torch.full(shape, width**0.5)
    if ".router." in name:
        bound = width**-0.5
        return torch.empty(shape).uniform_(-bound, bound, generator=generator)
    if name.startswith("embedding.") or ".positions." in name:
        value = torch.empty(shape).normal_(0, width**-0.5, generator=generator)
        if name.startswith("embedding."):
            value[spec.pad_id] = 0
        return value
    if name.endswith("norm.weight"):
        return torch.ones(shape)
    if len(shape) < 2 and not name.endswith(".bias"):
        raise ConfigError(
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


@dataclass(frozen=True)
class NamedSlice:
    """One tensor of an artifact and its place in memory.

    Attributes:
        name: Name in the artifact.
        owner: The module that has the parameter.
        parameter: The parameter that contains the tensor.
        value: A view of the whole parameter, or of one expert's slice of a stacked one.
        offset: Start of the view in the flattened parameter.
        expert: Global id of the tensor's expert, or the slot of its language if languages are
            distributed over ranks.
    """

    name: str
    owner: nn.Module
    parameter: nn.Parameter
    value: Tensor
    offset: int
    expert: int | None = None


def dense_name(name: str) -> str | None:
    """Turn ``….feed_forward.experts.7.up.weight`` into ``….feed_forward.up.weight``; others: None.

    An encoder front end can have experts and a router, too, which do not count here.
    """
    before, found, after = name.partition(".feed_forward.experts.")
    return f"{before}.feed_forward.{after.partition('.')[2]}" if found else None


def is_router(name: str) -> bool:
    """Return whether a tensor belongs to a feed-forward's router."""
    return ".feed_forward.router." in name


def select_experts(router: Tensor, experts: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Return a router's tensor for these of its experts.

    A router may have any tensors, for example a bias (E,) or preferences (languages, E): the
    dimension of the experts is the one that differs from the shape of the result.

    Raises:
        ConfigError: Its size is not the number of experts, but depends on it.
    """
    for dimension, (before, after) in enumerate(zip(router.shape, shape, strict=True)):
        if before != after:
            if after != len(experts):
                raise ConfigError(
                    f"A router has a tensor {tuple(router.shape)}, of which it is not known what "
                    f"{counted(len(experts), 'expert')} keep. Let a dimension over experts have "
                    "one row for each."
                )
            router = router.index_select(dimension, torch.tensor(experts))
    return router


def added_tensor(name: str) -> AddedTensor | None:
    """Return what a tensor is that an extension adds; None for others."""
    found = (extension.added_tensor(name) for extension in extensions())
    return next((tensor for tensor in found if tensor is not None), None)


def named_slices(model: nn.Module) -> Iterator[NamedSlice]:
    """Yield every tensor that this rank contributes to an artifact, in the model's order."""
    stacked = {
        f"{module_name}.{name}" if module_name else name: (module_name, module)
        for module_name, module in model.named_modules()
        if isinstance(module, StackedModules)
        for name, _ in module.named_parameters()
    }
    for name, parameter in model.named_parameters():
        owner = model.get_submodule(name.rpartition(".")[0])
        if name not in stacked:
            yield NamedSlice(name, owner, parameter, parameter.data, 0)
            continue
        stack_name, stack = stacked[name]
        prefix, inner = f"{stack_name}." if stack_name else "", name.removeprefix(f"{stack_name}.")
        held = stack.held_slots  # behind them is padding
        for index, (slot, value) in enumerate(zip(held, parameter.data[: len(held)], strict=True)):
            yield NamedSlice(
                name=f"{prefix}{slot}.{inner}",
                owner=owner,
                parameter=parameter,
                value=value,
                offset=index * value.numel(),
                expert=stack.first_slot + index if stack.is_spread else None,
            )


def tensor_shapes(spec: ModelSpec) -> dict[str, torch.Size]:
    """Return names and shapes of all tensors of a model without allocating them."""
    return {entry.name: entry.value.shape for entry in named_slices(shape_of_model(spec))}


def shapes_of_all(model: Trained) -> dict[str, torch.Size]:
    """Return the shapes of a model's tensors, also of experts that other ranks hold."""
    if model.expert_parallel_size > 1:
        return tensor_shapes(model.spec)
    return {entry.name: entry.value.shape for entry in named_slices(model)}


def num_parameters(spec: ModelSpec) -> int:
    """Return the number of parameters of a model without allocating them."""
    return sum(parameter.numel() for parameter in shape_of_model(spec).parameters())


def initialize_weights(model: Transformer, *, seed: int) -> None:
    """Set every parameter of this rank to its initial value, a function of name and seed."""
    for entry in named_slices(model):
        process.advance()
        entry.value.copy_(initial_value(entry, model.spec, seed=seed))


def initial_value(entry: NamedSlice, spec: ModelSpec, *, seed: int) -> Tensor:
    """Return the initial value of a tensor."""
    return initialize(entry.name, entry.value.shape, owner=entry.owner, spec=spec, seed=seed)


OPERATIONS_PER_PARAMETER = 6
"""Floating-point operations per token and parameter that multiplies it: a multiplication and an
addition in the forward pass, twice as many in the backward pass (Kaplan et al. 2020, §2.1)."""

PARTS = "embeddings", "front", "encoder", "decoder", "experts", "routers"


def count_parameters(
    model: ModelConfig,
    *,
    vocabulary_size: int,
    num_groups: int,
    num_languages: int = 1,
    output_size: int | None = None,
) -> dict[str, int]:
    """Count the parameters of a model of this size: see :func:`count_parameters_of`.

    Args:
        model: settings of the model.
        vocabulary_size: number of ids.
        num_groups: number of language groups; 0 without them.
        num_languages: number of languages, which matters with language modules only.
        output_size: number of ids that translations use; None: all.
    """
    return count_parameters_of(
        placeholder_spec(
            model,
            vocabulary_size=vocabulary_size,
            num_groups=num_groups,
            num_languages=num_languages,
            output_size=output_size,
        )
    )


def count_parameters_of(spec: ModelSpec) -> dict[str, int]:
    """Count parameters by part, on the meta device.

    ``active`` counts the parameters that one token uses: ``top_k`` experts of each MoE layer, and
    one slot of each language module.
    """
    parts = dict.fromkeys(PARTS, 0)
    transformer = shape_of_model(spec)
    within = _parts_within_layers(transformer)
    for name, parameter in transformer.named_parameters():
        part = within.get(id(parameter)) or _part(name)
        parts[part] = parts.get(part, 0) + parameter.numel()
    total = sum(parts.values())
    met = _shares_met(transformer)
    idle = sum(
        parameter.numel() * (1 - met[id(parameter)])
        for parameter in transformer.parameters()
        if id(parameter) in met
    )
    return {"total": total, "active": total - round(idle), **parts}


@dataclass(frozen=True)
class PerToken:
    """Number of parameters that multiply one source token and one target token."""

    source: float
    target: float


def count_multiplied(spec: ModelSpec) -> PerToken:
    """Count the parameters in the matrix products of one forward pass, per token of each side.

    Source tokens pass the encoder, its front end, and the keys and values of cross-attention;
    target tokens pass the rest of the decoder and the output projection. Embeddings and positions
    are look-ups and do not count. A CLSR table counts once per sublayer that uses it, and a
    convolution over n-grams once per n tokens.
    """
    transformer = shape_of_model(spec)
    met = _shares_met(transformer) | _shares_of_products(transformer)
    for extension in extensions():
        met |= extension.shares_multiplied(transformer)
    sums = {"source": 0.0, "target": 0.0}
    for name, parameter in transformer.named_parameters():
        side = _side_met(name, has_own_output=transformer.embedding.output_weight is not None)
        if side is not None:
            sums[side] += parameter.numel() * met.get(id(parameter), 1.0)
    return PerToken(**sums)


def cost_without_experts(spec: ModelSpec) -> float:
    """Return the FLOP per source and target token without experts, as a share of the model's."""
    plain = spec.model.model_copy(update={"moe": None})
    dense = spec.model_copy(update={"model": plain, "language_groups": None})
    without, own = (count_multiplied(one) for one in (dense, spec))
    # Source and target tokens count alike: sentences have about as many of either.
    return (without.source + without.target) / (own.source + own.target)


def _side_met(name: str, *, has_own_output: bool) -> str | None:
    """Return the side whose tokens are multiplied by a parameter; None for look-ups."""
    if ".positions." in name:
        return None
    if name.startswith("embedding."):
        is_output = name == ("embedding.output_weight" if has_own_output else "embedding.weight")
        return "target" if is_output else None
    # The decoder's keys and values of the source are computed per source token.
    of_source = (".cross_attention.key.", ".cross_attention.value.")
    if name.startswith("decoder.") and not any(part in name for part in of_source):
        return "target"
    return "source"


def _shares_of_products(model: Transformer) -> dict[int, float]:
    """Return the multiplications per token and parameter, by id, if they differ from 1."""
    embedding = model.embedding
    if embedding.output_weight is not None or embedding.weight is None:
        return {}
    return {id(embedding.weight): embedding.output_size / len(embedding.weight)}


def _shares_met(model: Transformer) -> dict[int, float]:
    """Return the share of each parameter that is active for one token, by id, if below 1."""
    moe = model.spec.model.moe
    met: dict[int, float] = {}
    for module in model.modules():
        if isinstance(module, MixtureOfExperts) and moe is not None:
            share = moe.top_k / moe.num_experts
            met |= {id(parameter): share for parameter in module.experts.parameters()}
    for extension in extensions():
        met |= extension.shares_met(model)
    return met


def _parts_within_layers(model: Transformer) -> dict[int, str]:
    """Return the parts of parameters that the type of their module determines, by id."""
    layers = [module for module in model.modules() if isinstance(module, MixtureOfExperts)]
    experts = {id(p): "experts" for layer in layers for p in layer.experts.parameters()}
    routers = {id(p): "routers" for layer in layers for p in layer.router.parameters()}
    found = experts | routers
    for extension in extensions():
        found |= extension.parts(model)
    return found


def _part(name: str) -> str:
    """Return the part of a parameter by the first component of its name."""
    first = name.split(".")[0]
    return {"embedding": "embeddings"}.get(first, first)
