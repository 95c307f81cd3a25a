"""How many parameters a model has: in all, active per token, and per part."""

from pipeline.config import ModelConfig
from pipeline.model.language_modules.stack import LanguageStack
from pipeline.model.moe.layer import MixtureOfExperts
from pipeline.model.spec import ModelSpec, placeholder_spec
from pipeline.model.transformer import Transformer, shape_of_model

PARTS = "embeddings", "front", "encoder", "decoder", "experts", "routers"


def count_parameters(
    model: ModelConfig,
    *,
    vocabulary_size: int,
    num_groups: int,
    num_languages: int = 1,
    output_size: int | None = None,
) -> dict[str, int]:
    """Parameters by part, built on the meta device: see :func:`count_parameters_of`.

    ``num_languages`` matters to models with modules of languages; ``output_size`` is the number of
    ids that translations consist of, where that is not all.
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
    """Parameters by part, built on the meta device.

    ``active`` are those one token meets: of the experts of a layer only ``top_k`` count, and of the
    modules of languages those of one slot.
    """
    model = spec.model
    parts = dict.fromkeys(PARTS, 0)
    if model.language_modules is not None:
        parts["language modules"] = 0
    transformer = shape_of_model(spec)
    within = _parts_within_layers(transformer)
    for name, parameter in transformer.named_parameters():
        parts[within.get(id(parameter)) or _part(name)] += parameter.numel()
    total = sum(parts.values())
    idle = 0
    if model.moe is not None:
        idle = parts["experts"] * (model.moe.num_experts - model.moe.top_k)
        idle //= model.moe.num_experts
    for stack in _stacks(transformer):
        values = sum(parameter.numel() for parameter in stack.parameters())
        idle += values - values // len(stack.slots)
    return {"total": total, "active": total - idle, **parts}


def _stacks(model: Transformer) -> list[LanguageStack]:
    return [module for module in model.modules() if isinstance(module, LanguageStack)]


def _parts_within_layers(model: Transformer) -> dict[int, str]:
    """Parameters of experts, routers and languages, told from those of other layers by type."""
    layers = [module for module in model.modules() if isinstance(module, MixtureOfExperts)]
    experts = {id(p): "experts" for layer in layers for p in layer.experts.parameters()}
    routers = {id(p): "routers" for layer in layers for p in layer.router.parameters()}
    languages = {id(p): "language modules" for one in _stacks(model) for p in one.parameters()}
    return experts | routers | languages


def _part(name: str) -> str:
    """Of a parameter of the whole model, by the first word of its name."""
    first = name.split(".")[0]
    return {"embedding": "embeddings"}.get(first, first)
