"""The plan of an assembly: one rule for every tensor of the result, before a byte is written.

Embeddings, encoder and decoder are taken from separately named models, or start fresh; dense
feed-forwards become experts (paper §4.2). Every tensor of the result has exactly one rule and the
shape that the rule needs, and every tensor of the parts taken is used: anything else is an error.

The shape of a recipe's model as a source: an assembly is planned before anything is trained.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from pipeline.checkpoints.assembly.vocabulary import RowPlan
from pipeline.checkpoints.names import (
    added_tensor,
    dense_name,
    is_router,
    tensor_shapes,
)
from pipeline.checkpoints.settings import UpcyclingConfig
from pipeline.checkpoints.sources import Tensors
from pipeline.errors import CheckpointError
from pipeline.model.spec import ModelSpec
from pipeline.seeds import derive_seed
from pipeline.terminal import counted

Part = Literal["embeddings", "encoder", "decoder"]
PARTS: tuple[Part, ...] = ("embeddings", "encoder", "decoder")
Rule = Literal[
    "copied",
    "expert of dense",
    "expert of expert",
    "rows of kept experts",
    "rows of more experts",
    "group router of token router",
    "rows by piece",
    "language of dense",
    "fresh",
]
EMBEDDINGS = ("embedding.weight", "embedding.output_weight")


@dataclass(frozen=True)
class Assignment:
    """One row of the receipt: where a tensor of the result comes from, and by which rule."""

    target: str
    part: Part
    source: str | None
    rule: Rule


@dataclass(frozen=True)
class Experts:
    """Which expert of a source each expert of the result comes from."""

    of_source: int
    sources: tuple[int, ...]
    """Global id → id in the source."""

    @property
    def added(self) -> bool:
        """Whether some share a source."""
        return len(set(self.sources)) < len(self.sources)

    @property
    def unchanged(self) -> bool:
        return self.sources == tuple(range(self.of_source))

    def is_copy(self, expert: int) -> bool:
        """Whether an expert is the first one of its source."""
        return self.sources.index(self.sources[expert]) == expert


def part_of(name: str) -> Part:
    """The part of the model a tensor belongs to."""
    first = name.split(".")[0]
    match first:
        case "encoder" | "decoder":
            return first
        case "front":
            return "encoder"
        case "embedding":
            return "embeddings"
    raise CheckpointError(f"Tensor {name} belongs to no part of the model.")


def experts_of(spec: ModelSpec, tensors: Tensors, config: UpcyclingConfig) -> Experts | None:
    """How the experts of a source become those of a model; None where it has none.

    Raises:
        CheckpointError: it has more than the model, and which ones stay is not said.
    """
    ids = {expert_parts(name)[1] for name in tensors.names() if dense_name(name) is not None}
    if not ids or spec.model.moe is None:
        return None
    found, wanted = max(ids) + 1, spec.model.moe.num_experts
    if ids != set(range(found)):
        raise CheckpointError(
            f"{tensors.origin} has experts up to {found - 1} but lacks "
            f"{min(set(range(found)) - ids)}: name a checkpoint that is whole."
        )
    if wanted >= found:
        return Experts(found, tuple(expert % found for expert in range(wanted)))
    kept = config.kept_experts
    if len(set(kept)) != wanted or len(kept) != wanted or max(kept, default=0) >= found:
        raise CheckpointError(
            f"{tensors.origin} has {found} experts per layer and the model {wanted}: say which "
            f"{wanted} stay (upcycling.kept_experts), or prune it by its routes first "
            "(mmnmt checkpoint prune-experts)."
        )
    return Experts(found, kept)


def plan_assembly(
    spec: ModelSpec,
    sources: Mapping[Part, Tensors | None],
    config: UpcyclingConfig,
    *,
    rows: RowPlan | None = None,
) -> list[Assignment]:
    """One rule for every tensor of the result, in the model's order.

    Args:
        rows: where the rows of the vocabulary come from, where that changes.

    Raises:
        CheckpointError: a tensor has no source, a source has one that is not used, or one of
            another shape than its target needs.
    """
    experts = {
        part: experts_of(spec, tensors, config)
        for part, tensors in sources.items()
        if tensors is not None
    }
    plan = []
    for target, shape in tensor_shapes(spec).items():
        part = part_of(target)
        tensors = sources[part]
        if tensors is None:
            plan.append(Assignment(target, part, None, "fresh"))
            continue
        names = set(tensors.names())
        entry = _assign(target, part, names, tensors, config, experts[part], rows)
        _refuse_shape(entry, tuple(shape), tensors, experts[part], rows)
        plan.append(entry)
    _refuse_unused(plan, sources, experts, config)
    return plan


def _assign(
    target: str,
    part: Part,
    names: set[str],
    tensors: Tensors,
    config: UpcyclingConfig,
    experts: Experts | None,
    rows: RowPlan | None,
) -> Assignment:
    if is_router(target):
        return _assign_router(target, part, names, tensors, config, experts)
    dense = dense_name(target)
    if dense is not None:
        layer, expert, tensor = expert_parts(target)
        if experts is not None and not experts.unchanged:
            origin = f"{layer}.experts.{experts.sources[expert]}.{tensor}"
            rule: Rule = "copied" if experts.is_copy(expert) else "expert of expert"
            if origin in names:
                return Assignment(target, part, origin, rule)
        if target in names:
            return Assignment(target, part, target, "copied")
        if dense in names:
            return Assignment(target, part, dense, "expert of dense")
    if target in EMBEDDINGS and (source := _table(target, names)) is not None:
        return Assignment(target, part, source, "copied" if rows is None else "rows by piece")
    if target in names:
        return Assignment(target, part, target, "copied")
    if target.startswith("front."):
        return Assignment(target, part, None, "fresh")
    if (module := added_tensor(target)) is not None:
        if module.dense in names:
            return Assignment(target, part, module.dense, "language of dense")
        if module.dense is None and not any(_is_of(module.stack, name) for name in names):
            return Assignment(target, part, None, "fresh")
    raise _nothing_for(target, part, tensors)


def _is_of(stack: str, name: str) -> bool:
    return name.startswith(f"{stack}.")


def _assign_router(
    target: str,
    part: Part,
    names: set[str],
    tensors: Tensors,
    config: UpcyclingConfig,
    experts: Experts | None,
) -> Assignment:
    layer = target.partition(".router.")[0]
    if f"{layer}.up.weight" in names:
        return Assignment(target, part, None, "fresh")
    shared = target.replace(".group_weight", ".weight")
    if target in names:
        if config.token_routers == "fresh":
            return Assignment(target, part, None, "fresh")
        if experts is None or experts.unchanged:
            return Assignment(target, part, target, "copied")
        rule: Rule = "rows of more experts" if experts.added else "rows of kept experts"
        return Assignment(target, part, target, rule)
    if shared in names and target != shared:
        if config.graft_group_routers == "copy" and config.token_routers == "copy":
            return Assignment(target, part, shared, "group router of token router")
        return Assignment(target, part, None, "fresh")
    raise _nothing_for(target, part, tensors)


def _table(target: str, names: set[str]) -> str | None:
    """A source's table for one of the embedding's: an untied output starts as the tied one."""
    return next((name for name in (target, "embedding.weight") if name in names), None)


def _nothing_for(target: str, part: Part, tensors: Tensors) -> CheckpointError:
    return CheckpointError(
        f"{tensors.origin} has nothing for {target}: name a checkpoint whose {part} has that "
        "layer, or change the [model] that is asked for."
    )


def _refuse_shape(
    entry: Assignment,
    shape: tuple[int, ...],
    tensors: Tensors,
    experts: Experts | None,
    rows: RowPlan | None,
) -> None:
    """Every rule needs a source of a certain shape."""
    if entry.source is None:
        return
    found = tensors.shape(entry.source)
    match entry.rule:
        case "group router of token router":
            wanted = shape[1:]
            if experts is not None:
                wanted = (experts.of_source, *wanted[1:])
        case "rows of kept experts" | "rows of more experts":
            assert experts is not None
            wanted = (*shape[:-2], experts.of_source, shape[-1])
        case "rows by piece":
            assert rows is not None
            wanted = (found[0], *shape[1:]) if found else shape
        case _:
            wanted = shape
    if found != wanted:
        raise CheckpointError(
            f"{tensors.origin}: {entry.source} has shape {found}, {entry.target} wants {wanted}: "
            "the sources must have the model's sizes."
        )


def _refuse_unused(
    plan: list[Assignment],
    sources: Mapping[Part, Tensors | None],
    experts: Mapping[Part, Experts | None],
    config: UpcyclingConfig,
) -> None:
    for part, tensors in sources.items():
        if tensors is None:
            continue
        used = {entry.source for entry in plan if entry.part == part}
        unused = [
            name
            for name in tensors.names()
            if part_of(name) == part
            and name not in used
            and not _may_go(name, experts.get(part), config)
        ]
        if unused:
            raise CheckpointError(
                f"{counted(len(unused), 'tensor')} of the {part} of {tensors.origin} would be lost "
                f"({unused[0]}, …): the [model] that is asked for must have a place for each."
            )


def _may_go(name: str, experts: Experts | None, config: UpcyclingConfig) -> bool:
    """What was said to be left behind: pruned experts, routers that start fresh."""
    if is_router(name):
        return config.token_routers == "fresh"
    if experts is None or dense_name(name) is None:
        return False
    return expert_parts(name)[1] not in experts.sources


def unused_tensors(
    plan: list[Assignment], sources: Mapping[Part, Tensors | None]
) -> dict[str, list[str]]:
    """Source → its tensors that nothing comes from: of parts not taken, or left behind as asked."""
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


_STEPS = 2**16
"""A mask compares 16 random bits with its ratio, which is so exact: four entries a drawn word."""


def diversified(dense: Tensor, target: str, config: UpcyclingConfig) -> Tensor:
    """One tensor of one expert, made of that of a dense feed-forward or of another expert.

    ``elementwise``: each entry is zeroed with probability ``mask_ratio``; ``per_neuron``: whole
    hidden neurons are, the same ones in all tensors of the expert; ``noise``: Gaussian noise of
    ``noise_std`` times the tensor's own standard deviation. Nothing is rescaled, and with a ratio
    or deviation of 0 nothing changes.

    Args:
        dense: (F, D), (D, F), (F) or (D): up and down, weight and bias.
        target: the name of the expert's tensor, ``….feed_forward.experts.7.up.weight``.
    """
    layer, expert, tensor = expert_parts(target)
    match config.method:
        case "elementwise" if config.mask_ratio > 0:
            key = derive_seed("upcycle", config.seed, f"{layer}.{tensor}", expert)
            return _masked(dense, _keep(dense.numel(), config.mask_ratio, key).view(dense.shape))
        case "per_neuron" if config.mask_ratio > 0 and tensor != "down.bias":
            width = dense.shape[-1] if tensor == "down.weight" else dense.shape[0]
            key = derive_seed("upcycle", config.seed, layer, expert)
            keep = _keep(width, config.mask_ratio, key)
            return _masked(dense, keep if tensor != "up.weight" else keep[:, None])
        case "noise" if config.noise_std > 0:
            key = derive_seed("upcycle", config.seed, f"{layer}.{tensor}", expert)
            generator = np.random.Generator(np.random.Philox(key=key))
            noise = torch.from_numpy(
                generator.standard_normal(tuple(dense.shape), dtype=np.float32)
            )
            return dense.float() + noise * config.noise_std * dense.float().std(correction=0)
    return dense


def is_diverse(config: UpcyclingConfig) -> bool:
    """Whether experts come to differ at all."""
    return (config.noise_std if config.method == "noise" else config.mask_ratio) > 0


def expert_parts(target: str) -> tuple[str, int, str]:
    """``a.feed_forward.experts.7.up.weight`` → ``a.feed_forward``, 7, ``up.weight``."""
    layer, _, rest = target.partition(".experts.")
    expert, _, tensor = rest.partition(".")
    return layer, int(expert), tensor


def _keep(count: int, ratio: float, key: int) -> Tensor:
    """``count`` truth values, each False with probability ``ratio``."""
    words = np.random.Philox(key=key).random_raw(-(-count // 4))
    drawn = words.astype("<u8", copy=False).view("<u2")[:count]
    return torch.from_numpy(drawn >= np.uint16(min(max(round(ratio * _STEPS), 1), _STEPS - 1)))


def _masked(dense: Tensor, keep: Tensor) -> Tensor:
    return torch.where(keep, dense, torch.zeros((), dtype=dense.dtype))
