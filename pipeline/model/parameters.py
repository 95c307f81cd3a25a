"""How many parameters a model has: in all, active per token, and per part."""

from dataclasses import dataclass

from pipeline.model.building import shape_of_model
from pipeline.model.extension import extensions
from pipeline.model.moe.layer import MixtureOfExperts
from pipeline.model.settings import ModelConfig
from pipeline.model.spec import ModelSpec, placeholder_spec
from pipeline.model.transformer import Transformer

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
    modules of languages those of one slot or the shared one.
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
    """Parameters by which one source token and one target token are multiplied."""

    source: float
    target: float


def count_multiplied(spec: ModelSpec) -> PerToken:
    """Count the parameters that enter the matrix products of one pass, by the tokens they meet.

    Source tokens meet the encoder, its front, and the keys and values of the decoder's attention to
    the source; target tokens meet the rest of the decoder and the output projection. Embeddings and
    positions are looked up. A CLSR table counts as often as sublayers use it, and a convolution of
    n-grams once for n tokens.
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


def _side_met(name: str, *, has_own_output: bool) -> str | None:
    """Return the side whose tokens are multiplied by a parameter; None for look-ups."""
    if ".positions." in name:
        return None
    if name.startswith("embedding."):
        is_output = name == ("embedding.output_weight" if has_own_output else "embedding.weight")
        return "target" if is_output else None
    of_source = (".cross_attention.key.", ".cross_attention.value.")
    if name.startswith("decoder.") and not any(part in name for part in of_source):
        return "target"
    return "source"


def _shares_of_products(model: Transformer) -> dict[int, float]:
    """Return how often one token is multiplied by a parameter, by id, where it is not once."""
    embedding = model.embedding
    if embedding.output_weight is not None or embedding.weight is None:
        return {}
    return {id(embedding.weight): embedding.output_size / len(embedding.weight)}


def _shares_met(model: Transformer) -> dict[int, float]:
    """Return the share of each parameter that one token meets, by id, where it is not the whole."""
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
    """Return the parts of parameters that their module's type tells, by id."""
    layers = [module for module in model.modules() if isinstance(module, MixtureOfExperts)]
    experts = {id(p): "experts" for layer in layers for p in layer.experts.parameters()}
    routers = {id(p): "routers" for layer in layers for p in layer.router.parameters()}
    found = experts | routers
    for extension in extensions():
        found |= extension.parts(model)
    return found


def _part(name: str) -> str:
    """Of a parameter of the whole model, by the first word of its name."""
    first = name.split(".")[0]
    return {"embedding": "embeddings"}.get(first, first)
