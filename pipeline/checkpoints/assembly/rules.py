"""Plan an assembly and compute its values: one rule for every tensor of the result.

Embeddings, encoder and decoder come from separately named models, or start fresh; dense
feed-forwards become experts (MMNMT, §4.2). :class:`AssemblyPlan` gives every tensor of the result
exactly one rule, checks the shape that the rule needs, and refuses to leave a tensor of a used part
behind. It computes the value of a tensor by its rule.

Experts differ from their source and from each other by random values of a counter-based generator
(Philox; Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), keyed by the seed, the
name of the dense tensor and the GLOBAL id of the expert. They do not depend on topology, order, or
the number of processes.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from pipeline.artifacts.manifest import InputRecord
from pipeline.artifacts.tokenizer import TokenizerFiles
from pipeline.checkpoints.assembly.vocabulary import RowPlan
from pipeline.checkpoints.checkpoint import ModelSource
from pipeline.checkpoints.settings import UpcyclingConfig
from pipeline.checkpoints.weights import Tensors
from pipeline.errors import CheckpointError, ConfigError, without_case
from pipeline.model.building import shape_of_model
from pipeline.model.parameters import (
    NamedSlice,
    added_tensor,
    dense_name,
    initial_value,
    is_router,
    named_slices,
    select_experts,
)
from pipeline.model.spec import ModelSpec, placeholder_spec
from pipeline.seeds import derive_seed
from pipeline.terminal import counted

_STEPS = 2**16
"""Number of steps of a mask's ratio: each entry is compared with 16 random bits of its own."""
_INTEGERS = {2: torch.int16, 4: torch.int32}
"""Bytes of a value → integers of its size."""


def diversified(dense: Tensor, target: str, config: UpcyclingConfig) -> Tensor:
    """Return a tensor of an expert, made from a tensor of a dense feed-forward or another expert.

    ``elementwise`` zeroes each entry with probability ``mask_ratio``; ``per_neuron`` zeroes whole
    hidden neurons, equal in all tensors of the expert; ``noise`` adds Gaussian noise of
    ``noise_std`` times the tensor's own standard deviation. Nothing is rescaled. A ratio or
    deviation of 0 changes nothing.

    Args:
        dense: (F, D), (D, F), (F) or (D): up and down, weight and bias.
        target: Name of the expert's tensor, ``….feed_forward.experts.7.up.weight``.
        config: The settings of upcycling.
    """
    if not is_diverse(config):
        return dense
    layer, expert, tensor = expert_parts(target)
    key = derive_seed("upcycle", config.seed, f"{layer}.{tensor}", expert)
    match config.method:
        case "elementwise":
            return _masked(dense, _keep(dense.numel(), config, key).view(dense.shape))
        case "per_neuron":
            if tensor == "down.bias":
                return dense
            width = dense.shape[-1] if tensor == "down.weight" else dense.shape[0]
            keep = _keep(width, config, derive_seed("upcycle", config.seed, layer, expert))
            return _masked(dense, keep[:, None] if tensor == "up.weight" else keep)
        case "noise":
            drawn = np.random.Generator(np.random.Philox(key=key)).standard_normal
            noise = torch.from_numpy(drawn(tuple(dense.shape), dtype=np.float32))
            return dense.float() + noise * config.noise_std * dense.float().std(correction=0)
        case unknown:
            raise without_case("diversified", unknown)


def is_diverse(config: UpcyclingConfig) -> bool:
    """Return whether the settings make experts differ."""
    return (config.noise_std if config.method == "noise" else config.mask_ratio) > 0


def expert_parts(target: str) -> tuple[str, int, str]:
    """Split ``a.feed_forward.experts.7.up.weight`` into ``a.feed_forward``, 7, ``up.weight``."""
    layer, _, rest = target.partition(".experts.")
    expert, _, tensor = rest.partition(".")
    return layer, int(expert), tensor


def _keep(count: int, config: UpcyclingConfig, key: int) -> Tensor:
    """Return ``count`` truth values, each False with probability ``mask_ratio``."""
    generator = np.random.Generator(np.random.Philox(key=key))
    # The raw words of the generator: unlike `random_raw`, this releases the interpreter.
    words = generator.integers(2**64 - 1, size=-(-count // 4), dtype=np.uint64, endpoint=True)
    drawn = words.astype("<u8", copy=False).view("<u2")[:count]
    return torch.from_numpy(drawn >= np.uint16(_lowest_kept(config)))


def _lowest_kept(config: UpcyclingConfig) -> int:
    """Return the least 16 random bits with which an entry is kept."""
    return min(max(round(config.mask_ratio * _STEPS), 1), _STEPS - 1)


def _masked(dense: Tensor, keep: Tensor) -> Tensor:
    # Integer products run five times as fast as `torch.where` of bfloat16 (torch 2.13 on AVX-512).
    return (dense.view(_INTEGERS[dense.itemsize]) * keep).view(dense.dtype)


Part = Literal["embeddings", "encoder", "decoder"]
PARTS: tuple[Part, ...] = ("embeddings", "encoder", "decoder")
Rule = Literal[
    "copied",
    "expert of dense",
    "expert of expert",
    "rows of more experts",
    "group router of token router",
    "rows by piece",
    "language of dense",
    "fresh",
]
EXPERT_RULES = ("expert of dense", "expert of expert")
EMBEDDINGS = ("embedding.weight", "embedding.output_weight")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Assignment:
    """The source of one tensor of the result, and the rule that makes it."""

    target: str
    part: Part
    source: str | None
    rule: Rule


@dataclass(frozen=True)
class ExpertSources:
    """The expert of the source that each expert of the result is made from, in turns."""

    num_in_source: int
    num_in_result: int

    @property
    def unchanged(self) -> bool:
        """Return whether the result has the experts of the source under the same ids."""
        return self.num_in_result == self.num_in_source

    @property
    def ids(self) -> list[int]:
        """Return the id in the source of each global id in the result."""
        return [expert % self.num_in_source for expert in range(self.num_in_result)]


def part_of(name: str) -> Part:
    """Return the part of the model that a tensor belongs to."""
    first = name.split(".")[0]
    match first:
        case "encoder" | "decoder":
            return first
        case "front":
            return "encoder"
        case "embedding":
            return "embeddings"
    raise CheckpointError(f"Tensor {name} belongs to no part of the model.")


def expert_sources(spec: ModelSpec, tensors: Tensors) -> ExpertSources | None:
    """Return how experts of a source become experts of a model; None if it has none.

    Raises:
        CheckpointError: The source lacks an expert, or it has more experts than the model.
    """
    ids = {expert_parts(name)[1] for name in tensors.names() if dense_name(name) is not None}
    if not ids or spec.model.moe is None:
        return None
    available, wanted = max(ids) + 1, spec.model.moe.num_experts
    if ids != set(range(available)):
        raise CheckpointError(
            f"{tensors.origin} has experts up to {available - 1} but lacks "
            f"{min(set(range(available)) - ids)}. Name a complete checkpoint."
        )
    if wanted < available:
        raise CheckpointError(
            f"{tensors.origin} has {available} experts per layer and the model {wanted}. Prune it "
            "first (mmnmt checkpoint prune); if it has no record of its routes (routing.json), "
            "fine-tune it here before."
        )
    return ExpertSources(available, wanted)


class _PartSource:
    """The source of one part, with the settings that decide the rules of its tensors."""

    def __init__(
        self, part: Part, tensors: Tensors, plan: "AssemblyPlan", experts: ExpertSources | None
    ) -> None:
        self.part, self._tensors, self._experts = part, tensors, experts
        self._has_rows = plan.rows is not None
        self._grafts = plan.config.graft_group_routers == "copy"
        self._names = set(tensors.names())

    def assigned(self, target: str, shape: tuple[int, ...]) -> Assignment:
        """Return the rule of a tensor; CheckpointError without a source of the shape it needs."""
        assigned = self._of_router(target) if is_router(target) else self._of_other(target)
        if assigned is None:
            raise CheckpointError(
                f"{self._tensors.origin} has nothing for {target}. {self._fix(target)}"
            )
        source, rule = assigned
        if source is not None:
            stored = self._tensors.shape(source)
            wanted = self._wanted(rule, shape, stored)
            if stored != wanted:
                raise CheckpointError(
                    f"{self._tensors.origin}: {source} has shape {stored}, but {target} needs "
                    f"{wanted}. Name sources of the model's sizes."
                )
        return Assignment(target, self.part, source, rule)

    def _fix(self, target: str) -> str:
        """Return what to do about a tensor without a rule, which may be of a variant."""
        layer, router, _ = target.rpartition(".router.")
        held = [name for name in self._names if router and name.startswith(f"{layer}.")]
        if any(name.startswith(layer + router) for name in held):
            return "It has another router there: keep its decoder_router, or name a dense source."
        if held:
            return (
                'Experts are made only of feed-forwards of kind "dense", and it has another there: '
                f"name another source, or let the {self.part} start fresh."
            )
        return f"Name a checkpoint with that layer in its {self.part}, or change [model]."

    def _of_other(self, target: str) -> tuple[str | None, Rule] | None:
        names, experts = self._names, self._experts
        dense = dense_name(target)
        if dense is not None:
            layer, expert, tensor = expert_parts(target)
            if experts is not None and not experts.unchanged:
                origin = f"{layer}.experts.{expert % experts.num_in_source}.{tensor}"
                if origin in names:
                    return origin, "copied" if origin == target else "expert of expert"
            if target not in names and dense in names:
                return dense, "expert of dense"
        if target in EMBEDDINGS:  # an untied output embedding can start as the tied one
            table = next((name for name in (target, "embedding.weight") if name in names), None)
            if table is not None:
                return table, "rows by piece" if self._has_rows else "copied"
        if target in names:
            return target, "copied"
        if target.startswith("front."):
            return None, "fresh"
        if (module := added_tensor(target)) is not None:
            if module.dense in names:
                return module.dense, "language of dense"
            if module.dense is None and not any(n.startswith(f"{module.stack}.") for n in names):
                return None, "fresh"
        return None

    def _of_router(self, target: str) -> tuple[str | None, Rule] | None:
        names, experts = self._names, self._experts
        shared = target.replace(".group_weight", ".weight")
        if f"{target.partition('.router.')[0]}.up.weight" in names:
            return None, "fresh"
        if target in names:
            is_copy = experts is None or experts.unchanged
            return target, "copied" if is_copy else "rows of more experts"
        if shared in names:
            return (shared, "group router of token router") if self._grafts else (None, "fresh")
        return None

    def _wanted(
        self, rule: Rule, shape: tuple[int, ...], stored: tuple[int, ...]
    ) -> tuple[int, ...]:
        """Return the shape that a rule needs for a target of a shape."""
        experts = self._experts
        match rule:
            case "group router of token router":
                return shape[1:] if experts is None else (experts.num_in_source, *shape[2:])
            case "rows of more experts":
                assert experts is not None
                growth = experts.num_in_source, experts.num_in_result
                if len(stored) == len(shape):
                    pairs = zip(stored, shape, strict=True)
                    return tuple(pair[0] if pair == growth else pair[1] for pair in pairs)
            case "rows by piece":
                return (stored[0], *shape[1:]) if stored else shape
        return shape

    def refuse_unused(self, assignments: Iterable[Assignment]) -> None:
        """Raise CheckpointError if a tensor of the part would be lost."""
        used = {entry.source for entry in assignments if entry.part == self.part}
        unused = [
            name
            for name in self._tensors.names()
            if part_of(name) == self.part and name not in used
        ]
        if unused:
            raise CheckpointError(
                f"{counted(len(unused), 'tensor')} of the {self.part} of {self._tensors.origin} "
                f"would be lost ({unused[0]}, …). Change [model] so that it has each of them."
            )


@dataclass
class AssemblyPlan:
    """An assembly to write: the model, the source of each part, and the settings."""

    spec: ModelSpec
    sources: Mapping[Part, ModelSource]
    """The source of each part; other parts start fresh."""
    config: UpcyclingConfig
    tokenizer: TokenizerFiles
    rows: RowPlan | None = None
    """The sources of the embedding rows, if the vocabulary changes."""
    precision: str = "float32"
    inputs: dict[str, InputRecord] = field(default_factory=dict)
    """Records of all inputs, for a manifest."""

    @property
    def dtype(self) -> torch.dtype:
        """Return the type of the written tensors."""
        return DTYPES[self.precision]

    @cached_property
    def targets(self) -> dict[str, NamedSlice]:
        """Return the tensors of the result by name, without values."""
        return {target.name: target for target in named_slices(shape_of_model(self.spec))}

    @cached_property
    def experts(self) -> dict[Part, ExpertSources | None]:
        """Return, per part, how the experts of its source become experts of the model."""
        return {
            part: None if part == "embeddings" else expert_sources(self.spec, source.tensors)
            for part, source in self.sources.items()
        }

    @cached_property
    def assignments(self) -> list[Assignment]:
        """Return one rule for every tensor of the result, in the model's order.

        Raises:
            CheckpointError: A tensor has no source, or its source has another shape, or a tensor of
                a source would not be used.
            ConfigError: A setting of upcycling changes nothing here.
        """
        parts = {
            part: _PartSource(part, source.tensors, self, self.experts[part])
            for part, source in self.sources.items()
        }
        assignments = [
            Assignment(target, part_of(target), None, "fresh")
            if part_of(target) not in parts
            else parts[part_of(target)].assigned(target, self.shape(target))
            for target in self.targets
        ]
        for source in parts.values():
            source.refuse_unused(assignments)
        self._refuse_idle_settings(assignments)
        self._refuse_rows_of_other_languages(assignments)
        return assignments

    def _refuse_rows_of_other_languages(self, assignments: Sequence[Assignment]) -> None:
        """Refuse tensors of routers that would keep a row per language, for other languages."""
        languages = self.spec.languages
        others = [part for part, one in self.sources.items() if one.spec.languages != languages]
        kept = [
            entry
            for entry in assignments
            if entry.part in others and entry.source == entry.target and is_router(entry.target)
        ]
        if not kept:
            return
        wider = placeholder_spec(
            self.spec.model,
            vocabulary_size=self.spec.vocabulary_size,
            num_groups=self.spec.num_groups,
            num_languages=len(languages) + 1,
        )
        shapes = {one.name: tuple(one.value.shape) for one in named_slices(shape_of_model(wider))}
        for entry in kept:
            if shapes.get(entry.target) != self.shape(entry.target):
                raise CheckpointError(
                    f"{self.sources[entry.part].origin}: {entry.target} has a row per language, "
                    "and the languages of the model are others. Name a source with the same ones, "
                    f"or let the {entry.part} start fresh."
                )

    def _refuse_idle_settings(self, assignments: Sequence[Assignment]) -> None:
        experts = any(entry.rule in EXPERT_RULES for entry in assignments)
        token_routers = {
            (part, name.replace(".router.weight", ".router.group_weight"))
            for part, source in self.sources.items()
            for name in source.tensors.names()
        }
        grafts = any(
            (entry.part, entry.target) in token_routers
            for entry in assignments
            if entry.rule == "fresh"
        )
        used = {"graft_group_routers": grafts}
        used |= dict.fromkeys(("method", "mask_ratio", "noise_std"), experts)
        for name, is_used in used.items():
            if not is_used and self.config.differs(name):
                raise ConfigError(
                    f"upcycling.{name} is {getattr(self.config, name)!r}, and no tensor of this "
                    f"model is made with it. Leave it out (its default is "
                    f"{getattr(UpcyclingConfig(), name)!r}), or ask for experts or language groups "
                    "that the sources lack."
                )

    def unused(self) -> dict[str, list[str]]:
        """Return source → its unused tensors: all of unused parts, and tensors that may be lost."""
        used: dict[str, set[str | None]] = {}
        for entry in self.assignments:
            if entry.part in self.sources:
                used.setdefault(str(self.sources[entry.part].origin), set()).add(entry.source)
        return {
            str(source.origin): [
                name for name in source.tensors.names() if name not in used[str(source.origin)]
            ]
            for source in self.sources.values()
        }

    def shape(self, target: str) -> tuple[int, ...]:
        """Return the shape of one tensor of the result."""
        return tuple(self.targets[target].value.shape)

    def values(self, assignments: Iterable[Assignment]) -> Iterator[Tensor]:
        """Yield tensors of the result, contiguous, in the written type.

        A source tensor is read once for assignments that follow each other, because all experts of
        a layer share it.
        """
        source_name: tuple[Part, str] | None = None
        source = torch.empty(0)
        for entry in assignments:
            # Noise and means are computed before rounding; masks give the same values after it.
            is_exact = entry.rule == "rows by piece" or self.config.method == "noise"
            if entry.source is not None and source_name != (entry.part, entry.source):
                source_name = (entry.part, entry.source)
                stored = self.sources[entry.part].tensors.read(entry.source)
                source = stored if is_exact else stored.to(self.dtype)
            value = self._value(entry, source).to(self.dtype)
            yield value.expand(self.shape(entry.target)).contiguous()

    def _value(self, entry: Assignment, source: Tensor) -> Tensor:
        match entry.rule:
            case "copied" | "language of dense":
                return source
            case "expert of dense" | "expert of expert":
                return diversified(source, entry.target, self.config)
            case "rows of more experts" | "group router of token router":
                experts = self.experts[entry.part]
                if experts is None or experts.unchanged:
                    return source
                wanted = self.shape(entry.target)[-source.dim() :]  # a group router has one more
                return select_experts(source, experts.ids, wanted)
        fresh = initial_value(self.targets[entry.target], self.spec, seed=self.config.seed)
        if entry.rule == "fresh":
            return fresh
        assert self.rows is not None  # rows by piece
        return self.rows.applied(source, fresh)
