"""Map tensors in memory to tensors in artifacts, by name.

In memory the experts of a layer are stacked, and under expert parallelism a rank holds only its
own: ``….feed_forward.experts.up.weight`` (E, F, D). In artifacts every expert has its own tensor
under its global id, ``….feed_forward.experts.7.up.weight`` (F, D), whatever the topology. Language
modules are stacked, too, and have a tensor per language under its code.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipeline.distributed import progress
from pipeline.model.building import shape_of_model
from pipeline.model.extension import AddedTensor, extensions
from pipeline.model.initial_values import initialize
from pipeline.model.spec import ModelSpec
from pipeline.model.stacked import StackedModules
from pipeline.model.transformer import Transformer


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

    A router may have any tensors, such as a bias (E,) or preferences (languages, E): the dimension
    of the experts is the one that differs from the shape of the result.
    """
    for dimension, (before, after) in enumerate(zip(router.shape, shape, strict=True)):
        if before != after:
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


def num_parameters(spec: ModelSpec) -> int:
    """Return the number of parameters of a model without allocating them."""
    return sum(parameter.numel() for parameter in shape_of_model(spec).parameters())


def initialize_weights(model: Transformer, *, seed: int) -> None:
    """Set every parameter of this rank to its initial value, a function of name and seed."""
    for entry in named_slices(model):
        progress.advance()
        entry.value.copy_(initial_value(entry, model.spec, seed=seed))


def initial_value(entry: NamedSlice, spec: ModelSpec, *, seed: int) -> Tensor:
    """Return the initial value of a tensor."""
    return initialize(entry.name, entry.value.shape, owner=entry.owner, spec=spec, seed=seed)
