"""What modules of languages change: linear layers, feed-forwards, sublayers and checkpoints.

A new kind is a module of its own, a config type in ``settings.py``, and a ``case`` of
:meth:`LanguageModules.change_side` or :meth:`LanguageModules.build_feed_forward`. Parameters of a
:class:`~pipeline.extensions.language_modules.stack.LanguageStack` are named, counted, pruned and
trained without more.
"""

import re
from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn

from pipeline.config.variants import SHARED
from pipeline.extensions.language_modules.clsr import (
    ConditionalRouting,
    Gate,
    Projections,
    XavierLinear,
)
from pipeline.extensions.language_modules.language_experts import (
    LanguageExperts,
    build_language_experts,
)
from pipeline.extensions.language_modules.low_rank import (
    LowRankShape,
    Synthesis,
    wrap_linear_layers,
)
from pipeline.extensions.language_modules.settings import (
    ClsrConfig,
    LanguageExpertsConfig,
    LowRankConfig,
)
from pipeline.extensions.language_modules.stack import LanguageStack
from pipeline.model.attention import Attention
from pipeline.model.extension import AddedTensor, Extension
from pipeline.model.feed_forward import FeedForward
from pipeline.model.moe.expert_parallel import ExpertParallel
from pipeline.model.moe.layer import has_experts
from pipeline.model.settings import ModelConfig
from pipeline.model.spec import ModelSpec, Side
from pipeline.model.transformer import DecoderLayer, EncoderLayer, Stack, Transformer

ATTENTION_PROJECTIONS = ("query", "key", "value", "output")
FEED_FORWARD_LAYERS = ("up", "down")
_OF_LANGUAGES = re.compile(
    r"(?P<low_rank>.*\.low_rank)\.[^.]+\.(vertical|flat)"
    r"|(?P<feed_forward>.*\.feed_forward)\.of_language\.[^.]+\.(?P<inner>(up|down)\.(weight|bias))"
    r"|(?P<projections>.*\.?projections)\.[^.]+\.weight"
    r"|(?P<gate>.*_routing\.gate)\.(up|down)\.(weight|bias)"
    r"|(?P<shared>(?P<sublayer>.*)_routing\.shared)\.(?P<kind>weight|bias)"
)


class LanguageModules(Extension):
    """Weights of single languages, beside those of all."""

    def build_feed_forward(
        self, spec: ModelSpec, *, side: Side, layer: int, expert_parallel: ExpertParallel | None
    ) -> nn.Module | None:
        """Return a layer's feed-forwards of languages, if it has them."""
        match spec.model.language_modules:
            case LanguageExpertsConfig() as config if has_language_experts(spec.model, layer):
                return build_language_experts(
                    spec, config, side=side, expert_parallel=expert_parallel
                )
        return None

    def change_side(self, spec: ModelSpec, stack: Stack, *, side: Side) -> None:
        """Put low-rank modules beside linear layers, or gated projections behind sublayers."""
        match spec.model.language_modules:
            case LowRankConfig() as config:
                add_low_rank(spec, config, stack, side=side)
            case ClsrConfig() as config:
                add_gates(spec, config, stack)

    def exchanges_rows(self, model: ModelConfig, layer: int) -> bool:
        """Return whether a layer has a feed-forward per language."""
        return has_language_experts(model, layer)

    def parts(self, model: Transformer) -> dict[int, str]:
        """Count the modules of languages as a part of their own."""
        return {id(one): "language modules" for each in _stacks(model) for one in each.parameters()}

    def shares_met(self, model: Transformer) -> dict[int, float]:
        """Return 1 / slots for stacks; 0 for the shared module in whose place they stand."""
        met = {
            id(parameter): 1 / len(stack.slots)
            for stack in _stacks(model)
            for parameter in stack.parameters()
        }
        for module in model.modules():
            if isinstance(module, LanguageExperts) and module.has_shared:
                shared = (*module.up.parameters(), *module.down.parameters())
                met |= {id(parameter): 0.0 for parameter in shared}
        return met

    def shares_multiplied(self, model: Transformer) -> dict[int, float]:
        """Return the share of a side's table that one token meets, times the table's uses."""
        found: dict[int, float] = {}
        for side in (model.encoder, model.decoder):
            uses = sum(isinstance(module, ConditionalRouting) for module in side.modules())
            for child in side.children():
                if isinstance(child, Projections):
                    found[id(child.weight)] = uses / len(child.slots)
        return found

    def added_tensor(self, name: str) -> AddedTensor | None:
        """Return what a tensor of language modules is."""
        found = _OF_LANGUAGES.fullmatch(name)
        if found is None:
            return None
        layer = found["feed_forward"]
        if layer is not None:
            return AddedTensor(f"{layer}.of_language", f"{layer}.{found['inner']}")
        if found["shared"] is not None:
            # It takes the place of the output projection of attention; a feed-forward has none.
            output = f"{found['sublayer']}.output.{found['kind']}"
            is_attention = found["sublayer"].endswith("attention")
            return AddedTensor(found["shared"], output if is_attention else None)
        stack = found["low_rank"] or found["projections"] or found["gate"]
        return AddedTensor(stack, None)

    def folded(
        self, name: str, names: Collection[str], read: Callable[[str], Tensor]
    ) -> Tensor | None:
        """Return W + V F of the shared slot, summed in float64.

        A shared feed-forward has the names of a plain one, so that it needs no folding.
        """
        shared = f"{name.removesuffix('.weight')}.low_rank.{SHARED}"
        if not name.endswith(".weight") or f"{shared}.flat" not in names:
            return None
        low_rank = read(f"{shared}.vertical").double() @ read(f"{shared}.flat").double()
        return (read(name).double() + low_rank).to(torch.float32)


def _stacks(model: Transformer) -> list[LanguageStack]:
    return [module for module in model.modules() if isinstance(module, LanguageStack)]


def has_language_experts(model: ModelConfig, layer: int) -> bool:
    """Return whether layer ``layer`` (from 0) of both sides has a feed-forward per language."""
    modules = model.language_modules
    if has_experts(model, layer) or not isinstance(modules, LanguageExpertsConfig):
        return False
    return (layer + 1) % modules.every == 0


def add_low_rank(spec: ModelSpec, config: LowRankConfig, stack: Stack, *, side: Side) -> None:
    """Give the linear layers of a side low-rank modules."""
    chosen = config.encoder_layers if side == "encoder" else config.decoder_layers
    shape = LowRankShape(
        languages=spec.languages,
        kept=config.languages,
        rank=config.rank,
        synthesis=synthesis_of(config, side=side),
        has_shared=config.shared,
    )
    for index, layer in enumerate(stack.layers):
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


def add_gates(spec: ModelSpec, config: ClsrConfig, stack: Stack) -> None:
    """Let gated projections follow every sublayer of a side.

    The table that sublayers share belongs to the side.
    """
    table = _projections(spec, config) if config.tables == "per_side" else None
    for layer in stack.layers:
        assert isinstance(layer, EncoderLayer | DecoderLayer)
        for name, sublayer in layer.sublayers.items():
            if name == "cross_attention" and not config.cross_attention:
                continue
            routing = ConditionalRouting(
                Gate(width=spec.model.width, gate_width=config.gate_width, noise=config.noise),
                table or _projections(spec, config),
                owns_projections=table is None,
                shared=_shared_projection(spec, config, getattr(layer, name)),
            )
            layer.add_module(f"{name}_routing", routing)
            sublayer.after = routing
    if table is not None:
        stack.add_module("projections", table)


def _projections(spec: ModelSpec, config: ClsrConfig) -> Projections:
    return Projections(
        spec.languages,
        width=spec.model.width,
        kept=config.languages,
        starts_as_identity=config.shared_projection == "none",
    )


def _shared_projection(
    spec: ModelSpec, config: ClsrConfig, sublayer: nn.Module
) -> nn.Module | None:
    """Return W_shared of a sublayer, which replaces the output projection of attention."""
    if config.shared_projection == "none":
        return None
    if isinstance(sublayer, Attention):
        sublayer.output = nn.Identity()
    return XavierLinear(spec.model.width, spec.model.width)
