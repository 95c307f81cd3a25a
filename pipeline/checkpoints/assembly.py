"""Assembling a model from modules of trained ones; dense feed-forwards become experts (paper §4.2).

Embeddings, encoder and decoder are taken from separately named checkpoints, or start fresh. Every
tensor of the result has exactly one rule, and every tensor of the parts taken is used: anything
else is an error. Expert masks are seeded by (seed, layer, GLOBAL expert id), so that they depend
neither on topology nor on order.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pipeline.checkpoints.names import (
    dense_name,
    initial_value,
    named_slices,
    tensor_shapes,
)
from pipeline.checkpoints.weights import TensorFiles
from pipeline.config import UpcyclingConfig
from pipeline.errors import CheckpointError
from pipeline.model.spec import ModelSpec
from pipeline.model.transformer import shape_of_model
from pipeline.seeds import named_generator

Part = Literal["embeddings", "encoder", "decoder"]
Rule = Literal["copied", "expert of dense", "group router of token router", "fresh"]


@dataclass(frozen=True)
class Assignment:
    """One row of the receipt: where a tensor of the result comes from, and by which rule."""

    target: str
    part: Part
    source: str | None
    rule: Rule


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


def plan_assembly(
    spec: ModelSpec, sources: Mapping[Part, TensorFiles | None], config: UpcyclingConfig
) -> list[Assignment]:
    """One rule for every tensor of the result, in the model's order.

    Raises:
        CheckpointError: a tensor has no source, or a source has a tensor that is not used.
    """
    plan = []
    for target in tensor_shapes(spec):
        part = part_of(target)
        files = sources[part]
        if files is None:
            plan.append(Assignment(target, part, None, "fresh"))
            continue
        plan.append(_assign(target, part, set(files.names()), files, config))
    _refuse_unused(plan, sources)
    return plan


def _assign(
    target: str, part: Part, names: set[str], files: TensorFiles, config: UpcyclingConfig
) -> Assignment:
    if target in names:
        return Assignment(target, part, target, "copied")
    dense = dense_name(target)
    if dense is not None and dense in names:
        return Assignment(target, part, dense, "expert of dense")
    if target.endswith(".router.group_weight"):
        shared = target.replace(".group_weight", ".weight")
        if shared in names and config.graft_group_routers == "copy":
            return Assignment(target, part, shared, "group router of token router")
        return Assignment(target, part, None, "fresh")
    if target.startswith("front."):
        return Assignment(target, part, None, "fresh")
    layer, is_router, _ = target.partition(".router.")
    if is_router and f"{layer}.up.weight" in names:
        return Assignment(target, part, None, "fresh")
    if target == "embedding.output_weight" and "embedding.weight" in names:
        return Assignment(target, part, "embedding.weight", "copied")
    raise CheckpointError(
        f"{files.artifact.directory} has nothing for {target}: name a checkpoint whose {part} has "
        "that layer, or change the recipe's [model]."
    )


def _refuse_unused(plan: list[Assignment], sources: Mapping[Part, TensorFiles | None]) -> None:
    for part, files in sources.items():
        if files is None:
            continue
        used = {entry.source for entry in plan if entry.part == part}
        unused = [n for n in files.names() if part_of(n) == part and n not in used]
        if unused:
            raise CheckpointError(
                f"{len(unused)} tensors of the {part} of {files.artifact.directory} would be lost "
                f"({unused[0]}, …): the recipe's [model] must have a place for each."
            )


def assemble(
    plan: list[Assignment],
    spec: ModelSpec,
    sources: Mapping[Part, TensorFiles | None],
    config: UpcyclingConfig,
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the result, one at a time.

    Raises:
        CheckpointError: a source tensor has another shape than its target.
    """
    targets = {target.name: target for target in named_slices(shape_of_model(spec))}
    for entry in plan:
        files = sources[entry.part]
        target = targets[entry.target]
        shape = target.value.shape
        if entry.source is None or files is None:
            yield entry.target, initial_value(target, spec, seed=config.seed)
            continue
        value = files.read(entry.source).float()
        match entry.rule:
            case "expert of dense":
                value = expert_from_dense(value, entry.target, config)
            case "group router of token router":
                value = value.expand(shape) if value.shape == shape[1:] else value
        if value.shape != shape:
            raise CheckpointError(
                f"{files.artifact.directory}: {entry.source} has shape {tuple(value.shape)}, "
                f"{entry.target} wants {tuple(shape)}: the sources must have the recipe's sizes."
            )
        yield entry.target, value.contiguous()


def expert_from_dense(dense: Tensor, target: str, config: UpcyclingConfig) -> Tensor:
    """One tensor of one expert from the dense feed-forward's (MMNMT, §4.2).

    ``elementwise``: each entry is zeroed with probability ``mask_ratio``; ``per_neuron``: whole
    hidden neurons are, the same ones in all tensors of the expert; ``noise``: Gaussian noise of
    ``noise_std`` times the tensor's own standard deviation. Nothing is rescaled.
    """
    match config.method:
        case "elementwise":
            generator = named_generator("upcycle", config.seed, target)
            keep = torch.rand(dense.shape, generator=generator) >= config.mask_ratio
            return dense * keep
        case "per_neuron":
            layer, expert, tensor = _expert_parts(target)
            if tensor == "down.bias":
                return dense
            width = dense.shape[-1] if tensor == "down.weight" else dense.shape[0]
            generator = named_generator("upcycle", config.seed, layer, expert)
            keep = torch.rand(width, generator=generator) >= config.mask_ratio
            return dense * (keep if tensor != "up.weight" else keep[:, None])
        case "noise":
            generator = named_generator("upcycle", config.seed, target)
            noise = torch.randn(dense.shape, generator=generator)
            return dense + noise * config.noise_std * dense.std(correction=0)


def _expert_parts(target: str) -> tuple[str, str, str]:
    layer, _, rest = target.partition(".experts.")
    expert, _, tensor = rest.partition(".")
    return layer, expert, tensor


def receipt_lines(plan: list[Assignment], directories: Mapping[Part, str]) -> list[str]:
    """The receipt as text: target ← source, rule; the experts of a layer share a line."""
    lines: dict[str, str] = {}
    for entry in plan:
        target = entry.target
        source = entry.source
        if dense_name(target) is not None:
            layer, expert, tensor = _expert_parts(target)
            target = f"{layer}.experts.*.{tensor}"
            source = source.replace(f".experts.{expert}.", ".experts.*.") if source else None
        origin = f"{directories[entry.part]}: {source}" if source else "–"
        lines[target] = f"{target} ← {origin} ({entry.rule})"
    return list(lines.values())
