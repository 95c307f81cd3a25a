"""Parameter counts of a model: total, active per token, and per part."""

from dataclasses import dataclass

from pipeline.model.building import shape_of_model
from pipeline.model.extension import extensions
from pipeline.model.moe.layer import MixtureOfExperts
from pipeline.model.settings import ModelConfig
from pipeline.model.spec import ModelSpec, placeholder_spec
from pipeline.model.transformer import Transformer

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
