"""Implementation of the model's extension points by language modules.

To add a kind, write a module, a settings class in ``__init__.py`` and a ``case`` of
:meth:`LanguageModules.change_side` or :meth:`LanguageModules.build_feed_forward`. The core names,
counts, prunes and trains the parameters of any
:class:`~pipeline.extensions.language_modules.stack.LanguageStack`.
"""

import re
from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn

from pipeline.config.settings import SHARED
from pipeline.extensions.language_modules import (
    ClsrConfig,
    LanguageExpertsConfig,
    LowRankConfig,
)
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
from pipeline.extensions.language_modules.stack import LanguageStack
from pipeline.model.attention import Attention
from pipeline.model.extension import AddedTensor, Extension
from pipeline.model.moe.expert_parallel import ExpertParallel
from pipeline.model.moe.layer import has_experts
from pipeline.model.settings import ModelConfig
from pipeline.model.spec import ModelSpec, Side
from pipeline.model.sublayer import FeedForward
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
    """Extension that adds language-specific weights to a model."""

    def build_feed_forward(
        self, spec: ModelSpec, *, side: Side, layer: int, expert_parallel: ExpertParallel | None
    ) -> nn.Module | None:
        """Return the language experts of a layer, if it has any."""
        match spec.model.language_modules:
            case LanguageExpertsConfig() as config if has_language_experts(spec.model, layer):
                return build_language_experts(
                    spec, config, side=side, expert_parallel=expert_parallel
                )
        return None

    def change_side(self, spec: ModelSpec, stack: Stack, *, side: Side) -> None:
        """Add low-rank modules to linear layers, or gated projections after sublayers."""
        match spec.model.language_modules:
            case LowRankConfig() as config:
                add_low_rank(spec, config, stack, side=side)
            case ClsrConfig() as config:
                add_gates(spec, config, stack)

    def parts(self, model: Transformer) -> dict[int, str]:
        """Return the part "language modules" for all parameters of language modules."""
        return {id(one): "language modules" for each in _stacks(model) for one in each.parameters()}

    def shares_met(self, model: Transformer) -> dict[int, float]:
        """Return 1 / slots for stacks; 0 for the shared feed-forward, the alternative to a slot."""
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
        """Return uses / slots for a CLSR table that the sublayers of a side share."""
        found: dict[int, float] = {}
        for side in (model.encoder, model.decoder):
            uses = sum(isinstance(module, ConditionalRouting) for module in side.modules())
            for child in side.children():
                if isinstance(child, Projections):
                    found[id(child.weight)] = uses / len(child.slots)
        return found

    def added_tensor(self, name: str) -> AddedTensor | None:
        """Return the description of a tensor, if it belongs to a language module."""
        found = _OF_LANGUAGES.fullmatch(name)
        if found is None:
            return None
        layer = found["feed_forward"]
        if layer is not None:
            return AddedTensor(f"{layer}.of_language", f"{layer}.{found['inner']}")
        if found["shared"] is not None:
            # W_shared replaces the output projection of attention; feed-forwards have none.
            output = f"{found['sublayer']}.output.{found['kind']}"
            is_attention = found["sublayer"].endswith("attention")
            return AddedTensor(found["shared"], output if is_attention else None)
        stack = found["low_rank"] or found["projections"] or found["gate"]
        return AddedTensor(stack, None)

    def folded(
        self, name: str, names: Collection[str], read: Callable[[str], Tensor]
    ) -> Tensor | None:
        """Return W + V F of the shared slot, computed in float64.

        A shared feed-forward needs no folding: its tensors have the names of a plain one.
        """
        shared = f"{name.removesuffix('.weight')}.low_rank.{SHARED}"
        if not name.endswith(".weight") or f"{shared}.flat" not in names:
            return None
        low_rank = read(f"{shared}.vertical").double() @ read(f"{shared}.flat").double()
        return (read(name).double() + low_rank).to(torch.float32)


def _stacks(model: Transformer) -> list[LanguageStack]:
    return [module for module in model.modules() if isinstance(module, LanguageStack)]


def has_language_experts(model: ModelConfig, layer: int) -> bool:
    """Return whether layer ``layer`` (from 0) of encoder and decoder has language experts."""
    modules = model.language_modules
    return isinstance(modules, LanguageExpertsConfig) and not has_experts(model, layer)


def add_low_rank(spec: ModelSpec, config: LowRankConfig, stack: Stack, *, side: Side) -> None:
    """Add low-rank modules to the configured linear layers of a side."""
    shape = LowRankShape(
        languages=spec.languages,
        kept=config.languages,
        rank=config.rank,
        synthesis=synthesis_of(config, side=side),
        has_shared=config.shared,
    )
    for layer in stack.layers:
        _wrap(layer, config, shape)


def _wrap(layer: nn.Module, config: LowRankConfig, shape: LowRankShape) -> None:
    for name, module in layer.named_children():
        if name not in config.within:
            continue
        if isinstance(module, Attention):
            wrap_linear_layers(module, ATTENTION_PROJECTIONS, shape)
        if isinstance(module, FeedForward):  # not experts
            wrap_linear_layers(module, FEED_FORWARD_LAYERS, shape)


def synthesis_of(config: LowRankConfig, *, side: Side) -> Synthesis:
    """Return the languages that select V and F on a side."""
    if config.synthesis == "pair_wise":
        return "pair_wise"
    return "source" if side == "encoder" else config.decoder_language


def add_gates(spec: ModelSpec, config: ClsrConfig, stack: Stack) -> None:
    """Add a gate and projections after every sublayer of a side.

    If the sublayers share a table, the side owns it.
    """
    table = _projections(spec, config) if config.tables == "per_side" else None
    for layer in stack.layers:
        assert isinstance(layer, EncoderLayer | DecoderLayer)
        for name, sublayer in layer.sublayers.items():
            if name == "cross_attention" and not config.cross_attention:
                continue
            routing = ConditionalRouting(
                Gate(width=spec.model.width, gate_width=config.gate_width),
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
    """Return W_shared of a sublayer; in attention, remove the output projection it replaces."""
    if config.shared_projection == "none":
        return None
    if isinstance(sublayer, Attention):
        sublayer.output = nn.Identity()
    return XavierLinear(spec.model.width, spec.model.width)
