"""Map tensors in memory to tensors in artifacts, by name.

In memory the experts of a layer are stacked, and under expert parallelism a rank holds only its
own: ``….feed_forward.experts.up.weight`` (E, F, D). In artifacts every expert has its own tensor
under its global id, ``….feed_forward.experts.7.up.weight`` (F, D), whatever the topology. Language
modules are stacked, too, and have a tensor per language under its code.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipeline.model.initial_values import initialize
from pipeline.model.language_modules.stack import LanguageStack
from pipeline.model.moe.experts import Experts
from pipeline.model.spec import ModelSpec
from pipeline.model.transformer import Transformer, shape_of_model


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


def expert_name(stacked_name: str, expert: int) -> str:
    """Return the name of a tensor of an expert: ``a.experts.7.up.weight``."""
    before, _, after = stacked_name.rpartition(".experts.")
    return f"{before}.experts.{expert}.{after}"


def dense_name(name: str) -> str | None:
    """Turn ``….feed_forward.experts.7.up.weight`` into ``….feed_forward.up.weight``; others: None.

    An encoder front end can have experts and a router, too, which do not count here.
    """
    before, found, after = name.partition(".feed_forward.experts.")
    return f"{before}.feed_forward.{after.partition('.')[2]}" if found else None


def is_router(name: str) -> bool:
    """Return whether a tensor belongs to a feed-forward's router."""
    return ".feed_forward.router." in name


@dataclass(frozen=True)
class LanguageTensor:
    """A tensor of a language module, its gate, or the shared module beside it.

    Attributes:
        stack: The name that the modules of all languages share.
        dense: The plain model's tensor of the same shape and meaning; None if there is none.
    """

    stack: str
    dense: str | None


_OF_LANGUAGES = re.compile(
    r"(?P<low_rank>.*\.low_rank)\.[^.]+\.(vertical|flat)"
    r"|(?P<feed_forward>.*\.feed_forward)\.of_language\.[^.]+\.(?P<inner>(up|down)\.(weight|bias))"
    r"|(?P<projections>.*\.?projections)\.[^.]+\.weight"
    r"|(?P<gate>.*_routing\.gate)\.(up|down)\.(weight|bias)"
    r"|(?P<shared>(?P<sublayer>.*)_routing\.shared)\.(?P<kind>weight|bias)"
)


def language_tensor(name: str) -> LanguageTensor | None:
    """Return the description of a tensor of language modules; None for other tensors."""
    found = _OF_LANGUAGES.fullmatch(name)
    if found is None:
        return None
    layer = found["feed_forward"]
    if layer is not None:
        return LanguageTensor(f"{layer}.of_language", f"{layer}.{found['inner']}")
    if found["shared"] is not None:
        # It takes the place of the output projection of attention; a feed-forward has none.
        output = f"{found['sublayer']}.output.{found['kind']}"
        is_attention = found["sublayer"].endswith("attention")
        return LanguageTensor(found["shared"], output if is_attention else None)
    stack = found["low_rank"] or found["projections"] or found["gate"]
    return LanguageTensor(stack, None)


def named_slices(model: nn.Module) -> Iterator[NamedSlice]:
    """Yield every tensor that this rank contributes to an artifact, in the model's order."""
    stacked: dict[str, tuple[str, Experts | LanguageStack]] = {
        f"{module_name}.{name}" if module_name else name: (module_name, module)
        for module_name, module in model.named_modules()
        if isinstance(module, Experts | LanguageStack)
        for name, _ in module.named_parameters()
    }
    for name, parameter in model.named_parameters():
        owner = model.get_submodule(name.rpartition(".")[0])
        stack_name, stack = stacked.get(name, ("", None))
        match stack:
            case None:
                yield NamedSlice(name, owner, parameter, parameter.data, 0)
            case Experts():
                yield from _slices_of_experts(name, stack, owner, parameter)
            case LanguageStack():
                inner = name.removeprefix(f"{stack_name}.")
                yield from _slices_of_languages(stack_name, inner, stack, owner, parameter)


def _slices_of_experts(
    name: str, experts: Experts, owner: nn.Module, parameter: nn.Parameter
) -> Iterator[NamedSlice]:
    for index, value in enumerate(parameter.data.unbind(0)):
        yield NamedSlice(
            name=expert_name(name, experts.first_expert + index),
            owner=owner,
            parameter=parameter,
            value=value,
            offset=index * value.numel(),
            expert=experts.first_expert + index,
        )


def _slices_of_languages(
    stack_name: str, inner: str, stack: LanguageStack, owner: nn.Module, parameter: nn.Parameter
) -> Iterator[NamedSlice]:
    """``….low_rank``, ``vertical`` → ``….low_rank.de.vertical`` and so on."""
    prefix = f"{stack_name}." if stack_name else ""
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
        entry.value.copy_(initial_value(entry, model.spec, seed=seed))


def initial_value(entry: NamedSlice, spec: ModelSpec, *, seed: int) -> Tensor:
    """Return the initial value of a tensor."""
    return initialize(entry.name, entry.value.shape, owner=entry.owner, spec=spec, seed=seed)
