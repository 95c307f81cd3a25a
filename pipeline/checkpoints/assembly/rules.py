"""Plan an assembly and compute its values: one rule for every tensor of the result.

Embeddings, encoder and decoder come from separately named models, or start fresh; dense
feed-forwards become experts (MMNMT, §4.2). :func:`plan_assembly` gives every tensor of the result
exactly one rule, checks the shape that the rule needs, and refuses a plan that would leave a tensor
of a used part behind. :class:`Blueprint` computes the value of a tensor by its rule.

Random values come from a counter-based generator (Philox; Salmon et al. 2011, "Parallel random
numbers: as easy as 1, 2, 3"), keyed by the seed, the name of the dense tensor and the GLOBAL id of
the expert. They do not depend on topology, order, or the number of processes.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from pipeline.checkpoints.assembly.vocabulary import RowPlan
from pipeline.checkpoints.names import (
    NamedSlice,
    added_tensor,
    dense_name,
    initial_value,
    is_router,
    named_slices,
    tensor_shapes,
)
from pipeline.checkpoints.settings import UpcyclingConfig
from pipeline.checkpoints.sources import Tensors
from pipeline.errors import CheckpointError
from pipeline.kernels.cpu import numbers
from pipeline.model.building import shape_of_model
from pipeline.model.spec import ModelSpec
from pipeline.seeds import derive_seed
from pipeline.terminal import counted

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
COPY_RULES = ("copied", "group router of token router")
EXPERT_RULES = ("expert of dense", "expert of expert")
EMBEDDINGS = ("embedding.weight", "embedding.output_weight")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_STEPS = 2**16
"""Number of steps of a mask's ratio: each entry is compared with 16 random bits of its own."""
WORTH_COMPILING = 2**28
"""Masked entries of an assembly from which a compiled loop makes them: on fewer it saves less time
than loading it takes."""


@dataclass(frozen=True)
class Assignment:
    """The source of one tensor of the result, and the rule that makes it."""

    target: str
    part: Part
    source: str | None
    rule: Rule


@dataclass(frozen=True)
class Experts:
    """Mapping from each expert of the result to the expert of the source that it is made from."""

    of_source: int
    """Number of experts in the source."""
    sources: tuple[int, ...]
    """Global id in the result → id in the source."""

    @property
    def added(self) -> bool:
        """Return whether some experts share a source."""
        return len(set(self.sources)) < len(self.sources)

    @property
    def unchanged(self) -> bool:
        """Return whether the result has the experts of the source under the same ids."""
        return self.sources == tuple(range(self.of_source))

    def is_copy(self, expert: int) -> bool:
        """Return whether an expert is copied: the first one made from its source."""
        return self.sources.index(self.sources[expert]) == expert


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


def experts_of(spec: ModelSpec, tensors: Tensors) -> Experts | None:
    """Return how experts of a source become experts of a model; None if it has none.

    Raises:
        CheckpointError: The source lacks an expert, or it has more experts than the model.
    """
    ids = {expert_parts(name)[1] for name in tensors.names() if dense_name(name) is not None}
    if not ids or spec.model.moe is None:
        return None
    found, wanted = max(ids) + 1, spec.model.moe.num_experts
    if ids != set(range(found)):
        raise CheckpointError(
            f"{tensors.origin} has experts up to {found - 1} but lacks "
            f"{min(set(range(found)) - ids)}. Name a complete checkpoint."
        )
    if wanted < found:
        raise CheckpointError(
            f"{tensors.origin} has {found} experts per layer and the model {wanted}. Prune it by "
            "its routes first (mmnmt checkpoint prune)."
        )
    return Experts(found, tuple(expert % found for expert in range(wanted)))


def plan_assembly(
    spec: ModelSpec,
    sources: Mapping[Part, Tensors | None],
    config: UpcyclingConfig,
    *,
    rows: RowPlan | None = None,
) -> list[Assignment]:
    """Return one rule for every tensor of the result, in the model's order.

    Args:
        spec: The model to assemble.
        sources: The weights of each part; None: the part starts fresh.
        config: The settings of upcycling.
        rows: The sources of the embedding rows, if the vocabulary changes.

    Raises:
        CheckpointError: A tensor has no source or one of another shape, or a tensor of a source
            would not be used.
    """
    parts = {
        part: _Source(part, tensors, spec, config, rows)
        for part, tensors in sources.items()
        if tensors is not None
    }
    plan = []
    for target, shape in tensor_shapes(spec).items():
        source = parts.get(part_of(target))
        if source is None:
            plan.append(Assignment(target, part_of(target), None, "fresh"))
        else:
            plan.append(source.assigned(target, tuple(shape)))
    for source in parts.values():
        source.refuse_unused({entry.source for entry in plan if entry.part == source.part})
    return plan


class _Source:
    """The source of one part, with what decides the rules of its tensors."""

    def __init__(
        self,
        part: Part,
        tensors: Tensors,
        spec: ModelSpec,
        config: UpcyclingConfig,
        rows: RowPlan | None,
    ) -> None:
        self.part, self._tensors, self._rows = part, tensors, rows
        self._grafts = config.graft_group_routers == "copy"
        self._names = set(tensors.names())
        self._experts = experts_of(spec, tensors)

    def assigned(self, target: str, shape: tuple[int, ...]) -> Assignment:
        """Return the rule of a tensor; CheckpointError without a source of the shape it needs."""
        made = self._of_router(target) if is_router(target) else self._of_other(target)
        if made is None:
            raise CheckpointError(
                f"{self._tensors.origin} has nothing for {target}. Name a checkpoint whose "
                f"{self.part} has that layer, or change [model]."
            )
        source, rule = made
        if source is not None:
            found = self._tensors.shape(source)
            wanted = self._wanted(rule, shape, found)
            if found != wanted:
                raise CheckpointError(
                    f"{self._tensors.origin}: {source} has shape {found}, but {target} needs "
                    f"{wanted}. Name sources of the model's sizes."
                )
        return Assignment(target, self.part, source, rule)

    def _of_other(self, target: str) -> tuple[str | None, Rule] | None:
        names, experts = self._names, self._experts
        dense = dense_name(target)
        if dense is not None:
            layer, expert, tensor = expert_parts(target)
            if experts is not None and not experts.unchanged:
                origin = f"{layer}.experts.{experts.sources[expert]}.{tensor}"
                if origin in names:
                    return origin, "copied" if experts.is_copy(expert) else "expert of expert"
            if target not in names and dense in names:
                return dense, "expert of dense"
        if target in EMBEDDINGS:  # an untied output embedding can start as the tied one
            table = next((name for name in (target, "embedding.weight") if name in names), None)
            if table is not None:
                return table, "copied" if self._rows is None else "rows by piece"
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
        self, rule: Rule, shape: tuple[int, ...], found: tuple[int, ...]
    ) -> tuple[int, ...]:
        """Return the shape that a rule needs for a target of a shape."""
        experts = self._experts
        match rule:
            case "group router of token router":
                return shape[1:] if experts is None else (experts.of_source, *shape[2:])
            case "rows of more experts":
                assert experts is not None
                return (*shape[:-2], experts.of_source, shape[-1])
            case "rows by piece":
                return (found[0], *shape[1:]) if found else shape
        return shape

    def refuse_unused(self, used: Container[str | None]) -> None:
        """Raise CheckpointError if a tensor of the part would be lost."""
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


def unused_tensors(
    plan: list[Assignment], sources: Mapping[Part, Tensors | None]
) -> dict[str, list[str]]:
    """Return source → its unused tensors: all of unused parts, and tensors that may be lost."""
    used: dict[str, set[str | None]] = {}
    present = {str(tensors.origin): tensors for tensors in sources.values() if tensors is not None}
    for entry in plan:
        tensors = sources[entry.part]
        if tensors is not None:
            used.setdefault(str(tensors.origin), set()).add(entry.source)
    return {
        origin: [name for name in tensors.names() if name not in used.get(origin, ())]
        for origin, tensors in present.items()
    }


@dataclass
class Blueprint:
    """An assembly to write: the shape of the result, the sources of its parts, and the settings.

    The plan is computed on first use.
    """

    spec: ModelSpec
    sources: Mapping[Part, Tensors | None]
    config: UpcyclingConfig
    rows: RowPlan | None = None
    precision: str = "float32"
    _last: tuple[tuple[str, str, bool], Tensor] | None = field(
        default=None, repr=False, compare=False
    )

    @property
    def dtype(self) -> torch.dtype:
        """Return the type of the written tensors."""
        return DTYPES[self.precision]

    @cached_property
    def plan(self) -> list[Assignment]:
        """Return one rule for every tensor (:func:`plan_assembly`)."""
        return plan_assembly(self.spec, self.sources, self.config, rows=self.rows)

    @cached_property
    def targets(self) -> dict[str, NamedSlice]:
        """Return the tensors of the result by name, without values."""
        return {target.name: target for target in named_slices(shape_of_model(self.spec))}

    @cached_property
    def experts(self) -> dict[Part, Experts | None]:
        """Return, per part, how the experts of its source become experts of the model."""
        return {
            part: experts_of(self.spec, tensors)
            for part, tensors in self.sources.items()
            if tensors is not None
        }

    def shape(self, entry: Assignment) -> tuple[int, ...]:
        """Return the shape of one tensor of the result."""
        return tuple(self.targets[entry.target].value.shape)

    def value(self, entry: Assignment) -> Tensor:
        """Return one tensor of the result, contiguous, in the written type."""
        found = self._made(entry).to(self.dtype)
        return found.expand(self.shape(entry)).contiguous()

    def value_and_norm(self, entry: Assignment) -> tuple[Tensor, float]:
        """Return one tensor of the result, and the norm of its difference from its source.

        A copy differs by 0. Without a source of the same shape, it is the norm of the tensor.
        """
        is_expert = entry.rule in EXPERT_RULES
        if is_expert and self._is_worth_compiling:
            return masked_with_norm(self._read(entry), entry.target, self.config)
        value = self.value(entry)
        if entry.rule in COPY_RULES:
            return value, 0.0
        return value, _norm(value - self._read(entry) if is_expert else value)

    @cached_property
    def _is_worth_compiling(self) -> bool:
        """Return whether experts are masked, and enough of their entries for a compiled loop."""
        is_masked = self.config.method == "elementwise" and self.config.mask_ratio > 0
        sizes = (
            self.targets[entry.target].value.numel()
            for entry in self.plan
            if entry.rule in EXPERT_RULES
        )
        return is_masked and sum(sizes) >= WORTH_COMPILING

    def _made(self, entry: Assignment) -> Tensor:
        match entry.rule:
            case "fresh":
                return self._fresh(entry)
            case "copied" | "language of dense":
                return self._read(entry)
            case "expert of dense" | "expert of expert":
                # Noise is added before rounding; masks give the same values after it.
                exact = self.config.method == "noise"
                return diversified(self._read(entry, exact=exact), entry.target, self.config)
            case "rows of more experts" | "group router of token router":
                return self._rows_of_experts(entry)
            case "rows by piece":
                assert self.rows is not None
                return self.rows.applied(self._read(entry, exact=True), self._fresh(entry))

    def _rows_of_experts(self, entry: Assignment) -> Tensor:
        """Return a router's rows, (E, D) or (G, E, D), for the experts of the result."""
        value = self._read(entry)
        experts = self.experts[entry.part]
        if experts is None or experts.unchanged:
            return value
        return value.index_select(-2, torch.tensor(experts.sources))

    def _fresh(self, entry: Assignment) -> Tensor:
        return initial_value(self.targets[entry.target], self.spec, seed=self.config.seed)

    def _read(self, entry: Assignment, *, exact: bool = False) -> Tensor:
        """Return the source tensor, in the written type or, if ``exact``, as it is stored.

        The last one is cached, because all experts of a layer share it.
        """
        tensors = self.sources[entry.part]
        assert tensors is not None
        assert entry.source is not None
        key = (entry.part, entry.source, exact)
        if self._last is None or self._last[0] != key:
            value = tensors.read(entry.source)
            self._last = (key, value if exact else value.to(self.dtype))
        return self._last[1]


def diversified(dense: Tensor, target: str, config: UpcyclingConfig) -> Tensor:
    """Return a tensor of an expert, made from a tensor of a dense feed-forward or another expert.

    ``elementwise`` zeroes each entry with probability ``mask_ratio``; ``per_neuron`` zeroes whole
    hidden neurons, the same ones in all tensors of the expert; ``noise`` adds Gaussian noise of
    ``noise_std`` times the tensor's own standard deviation. Nothing is rescaled. A ratio or
    deviation of 0 changes nothing.

    Args:
        dense: (F, D), (D, F), (F) or (D): up and down, weight and bias.
        target: Name of the expert's tensor, ``….feed_forward.experts.7.up.weight``.
        config: The settings of upcycling.
    """
    layer, expert, tensor = expert_parts(target)
    match config.method:
        case "elementwise" if config.mask_ratio > 0:
            key = _key_of_entries(target, config)
            return _masked(dense, _keep(dense.numel(), config.mask_ratio, key).view(dense.shape))
        case "per_neuron" if config.mask_ratio > 0 and tensor != "down.bias":
            width = dense.shape[-1] if tensor == "down.weight" else dense.shape[0]
            key = derive_seed("upcycle", config.seed, layer, expert)
            keep = _keep(width, config.mask_ratio, key)
            return _masked(dense, keep if tensor != "up.weight" else keep[:, None])
        case "noise" if config.noise_std > 0:
            key = _key_of_entries(target, config)
            generator = np.random.Generator(np.random.Philox(key=key))
            noise = torch.from_numpy(
                generator.standard_normal(tuple(dense.shape), dtype=np.float32)
            )
            return dense.float() + noise * config.noise_std * dense.float().std(correction=0)
    return dense


def masked_with_norm(dense: Tensor, target: str, config: UpcyclingConfig) -> tuple[Tensor, float]:
    """Return the ``elementwise`` expert of :func:`diversified`, and the norm of the loss.

    One compiled pass makes both, with the same masks.
    """
    from pipeline.kernels.expert_masks import BLOCK, mask_entries  # loads numba

    masked, sums = torch.empty_like(dense), np.zeros(BLOCK, np.float32)
    mask_entries(
        numbers(dense.reshape(-1)),
        _key_of_entries(target, config),
        _lowest_kept(config.mask_ratio),
        numbers(masked.view(-1)),
        sums,
    )
    return masked, float(np.sqrt(sums.sum(dtype=np.float64)))


def _key_of_entries(target: str, config: UpcyclingConfig) -> int:
    """Return the key of the generator that draws for every entry of an expert's tensor."""
    layer, expert, tensor = expert_parts(target)
    return derive_seed("upcycle", config.seed, f"{layer}.{tensor}", expert)


def is_diverse(config: UpcyclingConfig) -> bool:
    """Return whether the settings make experts differ."""
    return (config.noise_std if config.method == "noise" else config.mask_ratio) > 0


def expert_parts(target: str) -> tuple[str, int, str]:
    """Split ``a.feed_forward.experts.7.up.weight`` into ``a.feed_forward``, 7, ``up.weight``."""
    layer, _, rest = target.partition(".experts.")
    expert, _, tensor = rest.partition(".")
    return layer, int(expert), tensor


def _keep(count: int, ratio: float, key: int) -> Tensor:
    """Return ``count`` truth values, each False with probability ``ratio``."""
    generator = np.random.Generator(np.random.Philox(key=key))
    # The raw words of the generator: unlike `random_raw`, this releases the interpreter.
    words = generator.integers(2**64 - 1, size=-(-count // 4), dtype=np.uint64, endpoint=True)
    drawn = words.astype("<u8", copy=False).view("<u2")[:count]
    return torch.from_numpy(drawn >= np.uint16(_lowest_kept(ratio)))


def _lowest_kept(ratio: float) -> int:
    """Return the least 16 random bits with which an entry is kept."""
    return min(max(round(ratio * _STEPS), 1), _STEPS - 1)


def _norm(difference: Tensor) -> float:
    return float(torch.linalg.vector_norm(difference, dtype=torch.float32))


_INTEGERS = {2: torch.int16, 4: torch.int32}
"""Bytes of a value → integers of its size."""


def _masked(dense: Tensor, keep: Tensor) -> Tensor:
    # Integer products run five times as fast as `torch.where` of bfloat16 (torch 2.13 on AVX-512).
    return (dense.view(_INTEGERS[dense.itemsize]) * keep).view(dense.dtype)
