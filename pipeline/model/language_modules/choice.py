"""Which language modules a model has, and where.

A new kind is a file of its own, a config type in ``config.LanguageModulesConfig`` and a case here.
"""

from collections.abc import Iterable, Sequence

from torch import nn

from pipeline.errors import ConfigError
from pipeline.kernels.products import Linear
from pipeline.model.attention import Attention
from pipeline.model.feed_forward import FeedForward
from pipeline.model.language_modules.clsr import ConditionalRouting, Gate, Projections
from pipeline.model.language_modules.low_rank import (
    LowRankShape,
    Synthesis,
    wrap_linear_layers,
)
from pipeline.model.layers import DecoderLayer, EncoderLayer
from pipeline.model.moe.router import Side
from pipeline.model.settings import ClsrConfig, LanguageExpertsConfig, LowRankConfig, ModelConfig
from pipeline.model.spec import ModelSpec

ATTENTION_PROJECTIONS = ("query", "key", "value", "output")
FEED_FORWARD_LAYERS = ("up", "down")


def add_low_rank(spec: ModelSpec, layers: Sequence[nn.Module], *, side: Side) -> None:
    """Give the linear layers of a side's layers low-rank modules, where the model has them."""
    config = spec.model.language_modules
    if not isinstance(config, LowRankConfig):
        return
    chosen = config.encoder_layers if side == "encoder" else config.decoder_layers
    shape = LowRankShape(
        languages=spec.languages,
        kept=config.languages,
        rank=config.rank,
        synthesis=synthesis_of(config, side=side),
        has_shared=config.shared,
    )
    for index, layer in enumerate(layers):
        if chosen is None or index in chosen:
            _wrap(layer, config, shape)


def _wrap(layer: nn.Module, config: LowRankConfig, shape: LowRankShape) -> None:
    for name, module in layer.named_children():
        if name == "cross_attention" and not config.cross_attention:
            continue
        if isinstance(module, Attention) and config.within != "feed_forward":
            wrap_linear_layers(module, ATTENTION_PROJECTIONS, shape)
        if isinstance(module, FeedForward) and config.within != "attention":
            wrap_linear_layers(module, FEED_FORWARD_LAYERS, shape)


def synthesis_of(config: LowRankConfig, *, side: Side) -> Synthesis:
    """Whose V and F a side has."""
    if config.synthesis == "pair_wise":
        return "pair_wise"
    return "source" if side == "encoder" else config.decoder_language


def add_gates(
    spec: ModelSpec, layers: Sequence[EncoderLayer] | Sequence[DecoderLayer]
) -> Projections | None:
    """Add gated projections to every sublayer of a side, if the model has them.

    Returns:
        The table that the sublayers share, which belongs to the side; None where each has its own.
    """
    config = spec.model.language_modules
    if not isinstance(config, ClsrConfig):
        return None
    table = _projections(spec, config) if config.tables == "per_side" else None
    for layer in layers:
        for name in layer.sublayers:
            if name == "cross_attention" and not config.cross_attention:
                continue
            routing = ConditionalRouting(
                Gate(width=spec.model.width, gate_width=config.gate_width, noise=config.noise),
                table or _projections(spec, config),
                owns_projections=table is None,
                shared=_shared_projection(spec, config, getattr(layer, name)),
            )
            setattr(layer, f"{name}_routing", routing)
    return table


def _projections(spec: ModelSpec, config: ClsrConfig) -> Projections:
    return Projections(
        spec.languages,
        width=spec.model.width,
        kept=config.languages,
        starts_as_identity=config.shared_projection == "none",
    )


def _shared_projection(spec: ModelSpec, config: ClsrConfig, sublayer: nn.Module) -> Linear | None:
    """Return W_shared of a sublayer, which replaces the output projection of attention."""
    if config.shared_projection == "none":
        return None
    if isinstance(sublayer, Attention):
        sublayer.output = nn.Identity()
    return Linear(spec.model.width, spec.model.width)


def has_two_routes(model: ModelConfig) -> bool:
    """Whether a model has a route of all languages beside those of its languages."""
    match model.language_modules:
        case LowRankConfig(shared=shared) | LanguageExpertsConfig(shared=shared):
            return shared
        case _:
            return False


def refuse_languages_without_modules(spec: ModelSpec, codes: Iterable[str]) -> None:
    """Raises ConfigError where a model has language modules, and none for one of some languages."""
    own = languages_with_modules(spec)
    missing = sorted(set(codes) - set(own))
    if missing:
        raise ConfigError(
            f"The model has no language module for {', '.join(missing)}: it has those of "
            f"{', '.join(own)}; name one of these"
            + (", or take the shared route." if has_two_routes(spec.model) else ".")
        )


def languages_with_modules(spec: ModelSpec) -> tuple[str, ...]:
    """The languages that a model's own route serves; all of them without language modules."""
    modules = spec.model.language_modules
    own = None if modules is None else modules.languages
    return spec.languages if own is None else own
