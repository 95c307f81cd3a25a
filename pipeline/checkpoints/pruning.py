"""A checkpoint without the experts that matter least to some target languages.

Which those are is read off the routing statistics that a checkpoint carries. Weights are read one
tensor at a time, so that a model need not fit in memory.

Legend: L MoE layers, G target languages, E experts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pipeline.artifacts.artifact import Artifact, new_artifact
from pipeline.artifacts.tokenizer import tokenizer_folder
from pipeline.checkpoints.checkpoint import open_checkpoint, read_spec, write_model_files
from pipeline.checkpoints.names import tensor_shapes
from pipeline.checkpoints.weights import TensorFiles, write_weights
from pipeline.errors import ArtifactError, ConfigError
from pipeline.languages import nearest_codes
from pipeline.model.moe.routing_statistics import ROUTING_FILE, RoutingStatistics, moe_layer_names
from pipeline.model.spec import ModelSpec
from pipeline.terminal import counted, text_table, track


@dataclass(frozen=True)
class LayerPruning:
    """What of one MoE layer is kept."""

    layer: str
    """``decoder.layers.1``."""
    experts: tuple[int, ...]
    """Old ids, ascending: the new id of an expert is its place here."""
    kept_mass: float
    """Share of the layer's routes, into the target languages, that went to kept experts."""


@dataclass(frozen=True)
class PruningPlan:
    """Which experts of every MoE layer are kept."""

    num_experts: int
    layers: tuple[LayerPruning, ...]
    kept_mass: float
    """As of a layer, over all layers."""

    def lines(self) -> list[str]:
        """A table of the layers, and the share kept overall."""
        rows = [
            [entry.layer, f"{entry.kept_mass:.4f}", " ".join(map(str, entry.experts))]
            for entry in self.layers
        ]
        table = text_table(["layer", "routed mass kept", "experts, by their old ids"], rows)
        overall = f"{self.num_experts} experts per layer keep {self.kept_mass:.4f} of all routes"
        return [table, overall]


def prune_experts(
    directory: Path,
    *,
    languages: Sequence[str],
    out_dir: Path,
    experts: int | None = None,
    keep_mass: float | None = None,
    overwrite: bool = False,
) -> PruningPlan:
    """Write a checkpoint without the experts that matter least to the target languages.

    In every MoE layer the same number of experts is kept (see :func:`plan_pruning`), renumbered in
    the order of their old ids; the rows of the routers are cut accordingly. A token whose choices
    are all kept is computed as before where combine weights are renormalised.

    Raises:
        ConfigError: an option that does not fit the model.
        ArtifactError: not a checkpoint, or one without routing statistics.
    """
    checkpoint = open_checkpoint(directory)
    spec = read_spec(checkpoint)
    if spec.model.moe is None:
        raise ConfigError(f"{directory} has no experts to prune: name an MoE checkpoint.")
    plan = plan_pruning(
        read_routing(checkpoint, spec),
        languages=languages,
        top_k=spec.model.moe.top_k,
        experts=experts,
        keep_mass=keep_mass,
    )
    target = _with_experts(spec, plan.num_experts)
    asked = {"experts": experts} if keep_mass is None else {"keep_mass": keep_mass}
    with new_artifact(
        out_dir,
        kind="checkpoint",
        stage="prune_experts",
        config={"prune_experts": {"languages": list(languages), **asked}},
        inputs={"checkpoint": checkpoint.as_input},
        overwrite=overwrite,
    ) as writer:
        writer.settled |= write_weights(
            writer.directory / "weights", _pruned(checkpoint, plan, target)
        )
        write_model_files(writer, spec=target, tokenizer_dir=tokenizer_folder(checkpoint))
        writer.statistics["kept_mass"] = plan.kept_mass
        writer.statistics["layers"] = {
            entry.layer: {"experts": list(entry.experts), "kept_mass": entry.kept_mass}
            for entry in plan.layers
        }
    return plan


def read_routing(checkpoint: Artifact, spec: ModelSpec) -> RoutingStatistics:
    """The routing statistics a checkpoint carries.

    Raises:
        ArtifactError: it has none, or those of another model.
    """
    if not checkpoint.has(ROUTING_FILE):
        raise ArtifactError(
            f"{checkpoint.directory} has no {ROUTING_FILE}, so it is not known which experts serve "
            "which language: training counts that when it validates, so name a checkpoint of a "
            "training stage, or fine-tune this one."
        )
    try:
        routing = RoutingStatistics.from_json(checkpoint.read_json(ROUTING_FILE))
    except ValueError as error:
        raise ArtifactError(
            f"{checkpoint.file(ROUTING_FILE)} holds no routing statistics ({error}): run its "
            "training stage again."
        ) from error
    num_experts = spec.model.moe.num_experts if spec.model.moe else 0
    shape = (len(moe_layer_names(spec)), len(routing.languages), num_experts)
    if routing.layers != moe_layer_names(spec) or routing.routed_LGE.shape != shape:
        raise ArtifactError(
            f"{checkpoint.file(ROUTING_FILE)} was counted on another model than this checkpoint's: "
            "run its training stage again."
        )
    return routing


def plan_pruning(
    routing: RoutingStatistics,
    *,
    languages: Sequence[str],
    top_k: int,
    experts: int | None = None,
    keep_mass: float | None = None,
) -> PruningPlan:
    """Choose the experts of every layer with the most routes into the target languages.

    Exactly one of the two is given: ``experts``, how many to keep, or ``keep_mass``, a share of
    routes that every layer has to keep with as few experts as will do, ``top_k`` at least. Among
    experts of equal mass the lower id is kept. Encoder layers too are counted by target language.

    Raises:
        ConfigError: a language that was not counted, or a number or share out of range.
    """
    assert (experts is None) != (keep_mass is None)
    mass_LE = _mass(routing, languages)
    num_experts = mass_LE.shape[1]
    if experts is not None and not top_k <= experts <= num_experts:
        raise ConfigError(
            f"--experts {experts} does not fit a model of {counted(num_experts, 'expert')} that "
            f"sends every token to {top_k}: choose {top_k} to {num_experts}."
        )
    if keep_mass is not None and not 0 < keep_mass <= 1:
        raise ConfigError(f"--keep-mass {keep_mass} is no share: choose more than 0, at most 1.")
    order_LE = np.argsort(-mass_LE, axis=1, kind="stable")
    share_LE = np.take_along_axis(mass_LE, order_LE, axis=1).cumsum(1)
    share_LE /= share_LE[:, -1:].copy()
    if experts is None:
        reached_LE = share_LE >= keep_mass
        experts = max(top_k, int(reached_LE.argmax(1).max()) + 1)
    return PruningPlan(
        num_experts=experts,
        layers=tuple(
            LayerPruning(layer, tuple(sorted(order_E[:experts].tolist())), float(share))
            for layer, order_E, share in zip(
                routing.layers, order_LE, share_LE[:, experts - 1], strict=True
            )
        ),
        kept_mass=float(np.average(share_LE[:, experts - 1], weights=mass_LE.sum(1))),
    )


def _mass(routing: RoutingStatistics, languages: Sequence[str]) -> npt.NDArray[np.float64]:
    """Routes per layer and expert, (L, E), over the languages, each counted once."""
    for code in languages:
        if code not in routing.languages:
            candidates = nearest_codes(code, routing.languages) or routing.languages
            raise ConfigError(
                f"The model has no language {code!r}: choose from {', '.join(candidates)}."
            )
        if not routing.routed_LGE[:, routing.languages.index(code)].sum(-1).all():
            raise ConfigError(
                f"No routes of translations into {code!r} were counted, so its experts are not "
                "known: leave it out, or validate the model on it."
            )
    chosen = [index for index, code in enumerate(routing.languages) if code in set(languages)]
    mass_LE: npt.NDArray[np.float64] = routing.routed_LGE[:, chosen].sum(1)
    return mass_LE


def _with_experts(spec: ModelSpec, num_experts: int) -> ModelSpec:
    values = spec.model_dump(mode="json")
    values["model"]["moe"]["num_experts"] = num_experts
    return ModelSpec.model_validate(values)


def _pruned(
    checkpoint: Artifact, plan: PruningPlan, target: ModelSpec
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the pruned model, each made from one tensor of the whole one."""
    files = TensorFiles(checkpoint, "weights/")
    kept = {entry.layer: entry.experts for entry in plan.layers}
    for name in track(tensor_shapes(target), label="prune-experts"):
        layer, _, inner = name.partition(".feed_forward.")
        slot, _, rest = inner.partition(".")
        match slot:
            case "experts":
                new_id, _, parameter = rest.partition(".")
                old_id = kept[layer][int(new_id)]
                yield name, files.read(f"{layer}.feed_forward.experts.{old_id}.{parameter}")
            case "router":  # (E, D), or (G, E, D) of a router per language group
                rows = torch.tensor(kept[layer])
                yield name, files.read(name).index_select(-2, rows)
            case _:
                yield name, files.read(name)
