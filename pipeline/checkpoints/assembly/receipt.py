"""What an assembly did: one entry per tensor, and a table that a person reads."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.checkpoints.assembly.diversity import expert_parts, is_diverse
from pipeline.checkpoints.assembly.plan import PARTS, Assignment, Part, part_of
from pipeline.checkpoints.assembly.values import Blueprint
from pipeline.checkpoints.names import dense_name, is_router
from pipeline.summary import counted
from pipeline.terminal import text_table

RECEIPT_FILE = "receipt.json"
RANDOM_RULES = ("expert of dense", "expert of expert", "rows by piece", "fresh")
"""Rules that draw from the seed."""


@dataclass(frozen=True)
class ReceiptEntry:
    """What became of one tensor.

    Attributes:
        seed: of what is random in it, None where nothing is.
        norm: Euclidean norm of the difference between target and source, 0 of copies; of the target
            itself where it is not made entry by entry: fresh values, chosen rows.
        digest: SHA-256 of the target's values as stored.
    """

    target: str
    part: Part
    source: str | None
    rule: str
    seed: int | None
    norm: float
    digest: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def seed_of(entry: Assignment, blueprint: Blueprint) -> int | None:
    """The seed of what is random in a tensor."""
    if entry.rule not in RANDOM_RULES:
        return None
    if entry.rule.startswith("expert of") and not is_diverse(blueprint.config):
        return None
    return blueprint.config.seed


def receipt_lines(plan: Sequence[Assignment], directories: Mapping[Part, str]) -> list[str]:
    """The plan as text: target ← source, rule; the experts of a layer share a line."""
    lines: dict[str, str] = {}
    for entry in plan:
        target, source = entry.target, entry.source
        if dense_name(target) is not None:
            target = _any_expert(target)
            source = _any_expert(source) if source and dense_name(source) else source
        origin = f"{directories[entry.part]}: {source}" if source else "–"
        lines[target] = f"{target} ← {origin} ({entry.rule})"
    return list(lines.values())


def summary_table(blueprint: Blueprint, names: Mapping[Part, str]) -> str:
    """The plan part by part: modules, where they come from, tensors, parameters, the rule."""
    counts: dict[tuple[Part, str, str], list[int]] = defaultdict(lambda: [0, 0])
    for entry in blueprint.plan:
        count = counts[entry.part, _module(entry.target), _worded(entry, blueprint)]
        count[0] += 1
        count[1] += blueprint.targets[entry.target].value.numel()
    rows = [
        [part, module, names[part], f"{tensors:,}", f"{parameters:,}", rule]
        for part in PARTS
        for (of, module, rule), (tensors, parameters) in counts.items()
        if of == part
    ]
    total = sum(parameters for _, parameters in counts.values())
    rows.append(["all", "", "", f"{len(blueprint.plan):,}", f"{total:,}", ""])
    return text_table(["part", "modules", "from", "tensors", "parameters", "rule"], rows)


def headline(blueprint: Blueprint, names: Mapping[Part, str]) -> str:
    """The assembly as the paper writes it: Enc(dense)-Dec(moe_lgr), and its experts."""
    model = blueprint.spec.model
    text = (
        f"Enc({names['encoder']})-Dec({names['decoder']}), embeddings of {names['embeddings']}: "
        f"{model.encoder_layers}+{model.decoder_layers} layers of width {model.width}"
    )
    if model.moe is None:
        return f"{text}, no experts"
    layers = range(model.moe.every, max(model.encoder_layers, model.decoder_layers) + 1)
    numbers = ", ".join(map(str, layers[:: model.moe.every]))
    text += f"; {model.moe.num_experts} experts, top-{model.moe.top_k}, in layers {numbers}"
    groups = blueprint.spec.num_groups
    return f"{text}; decoder routed by {groups} language groups" if groups else text


def unused_lines(unused: Mapping[str, Sequence[str]]) -> list[str]:
    """How much of every source stays behind."""
    lines = []
    for source, names in unused.items():
        counts = Counter(part_of(name) for name in names)
        if counts:
            listed = ", ".join(f"{count:,} of the {part}" for part, count in counts.items())
            lines.append(
                f"not used of {source}: {counted(sum(counts.values()), 'tensor')} ({listed})"
            )
    return lines


def _module(target: str) -> str:
    """What of a model a tensor belongs to, in words."""
    if target.startswith("front."):
        return "front"
    if dense_name(target) is not None:
        return "experts"
    if ".group_weight" in target:
        return "language-group routers"
    if is_router(target):
        return "routers"
    if ".feed_forward." in target:
        return "dense feed-forwards"
    if "attention." in target:
        return "attention"
    if "norm." in target:
        return "norms"
    return target.split(".")[1] if "." in target else target


def _worded(entry: Assignment, blueprint: Blueprint) -> str:
    """A rule with its numbers."""
    config = blueprint.config
    if not entry.rule.startswith("expert of"):
        return entry.rule
    kind = f"{entry.rule}, " + (
        f"plus noise of {config.noise_std:g} of its deviation (seed {config.seed})"
        if config.method == "noise"
        else f"{config.mask_ratio:.0%} of its "
        f"{'entries' if config.method == 'elementwise' else 'neurons'} zero (seed {config.seed})"
    )
    return kind if is_diverse(config) else f"{entry.rule}, a copy"


def _any_expert(name: str) -> str:
    layer, _, tensor = expert_parts(name)
    return f"{layer}.experts.*.{tensor}"
