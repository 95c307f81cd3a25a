"""Remove experts or language modules from a checkpoint.

- :func:`prune_experts` removes the experts that some target languages use least, by the routing
  statistics of the checkpoint.
- :func:`prune_languages` removes the language modules of other languages. Vocabulary and indices of
  languages stay: translations between kept languages are the same to the last bit.
- :func:`fold_checkpoint` writes the route that all languages share as a plain model. With low-rank
  modules, W + V F of the shared module replaces W; with language experts, the shared feed-forward
  already has the names of a plain one.

Weights are read one tensor at a time: a model need not fit in memory.

Legend: L MoE layers, G target languages, E experts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from torch import Tensor

from pipeline.artifacts.artifact import Artifact
from pipeline.checkpoints.checkpoint import open_checkpoint, read_spec, write_derived
from pipeline.checkpoints.weights import TensorFiles
from pipeline.config.settings import SHARED
from pipeline.distributed.process import track
from pipeline.errors import ArtifactError, ConfigError
from pipeline.languages import meant_code, unknown_language
from pipeline.model.extension import extensions
from pipeline.model.moe.routing_statistics import ROUTING_FILE, RoutingStatistics, moe_layer_names
from pipeline.model.parameters import num_parameters, select_experts, tensor_shapes
from pipeline.model.spec import ModelSpec
from pipeline.terminal import counted, text_table


@dataclass(frozen=True)
class LayerPruning:
    """The kept experts of one MoE layer."""

    layer: str
    """Name of the layer, for example ``decoder.layers.1``."""
    experts: tuple[int, ...]
    """Old ids of the kept experts, ascending; an expert's index is its new id."""
    kept_mass: float
    """Share of the layer's routes into the target languages that went to kept experts."""


@dataclass(frozen=True)
class PruningPlan:
    """The kept experts of every MoE layer."""

    num_experts: int
    layers: tuple[LayerPruning, ...]
    kept_mass: float
    """Share of the routes of all layers that went to kept experts."""

    def lines(self) -> list[str]:
        """Return a table of the layers, and the share of all routes that is kept."""
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
    """Write a checkpoint without the experts that the target languages use least.

    Every MoE layer keeps the same number of experts (see :func:`plan_pruning`), renumbered in the
    order of their old ids, and routers lose the rows of the others. With renormalized combine
    weights, a token has the same result as before if all of its experts are kept.

    Raises:
        ConfigError: An option does not fit the model.
        ArtifactError: It is no checkpoint, or has no routing statistics.
    """
    checkpoint = open_checkpoint(directory)
    spec = read_spec(checkpoint)
    if spec.model.moe is None:
        raise ConfigError(f"{directory} has no experts to prune. Name an MoE checkpoint.")
    routing = read_routing(checkpoint, spec)
    plan = plan_pruning(
        routing,
        languages=languages,
        top_k=spec.model.moe.top_k,
        experts=experts,
        keep_mass=keep_mass,
    )
    target = _with_model(
        spec, moe=spec.model.moe.model_copy(update={"num_experts": plan.num_experts})
    )
    codes = list(dict.fromkeys(known_codes(languages, routing.languages)))
    limit = {"experts": experts} if keep_mass is None else {"keep_mass": keep_mass}
    layers = {
        entry.layer: {"experts": list(entry.experts), "kept_mass": entry.kept_mass}
        for entry in plan.layers
    }
    write_derived(
        checkpoint,
        _pruned(checkpoint, plan, target),
        spec=target,
        out_dir=out_dir,
        stage="prune_experts",
        config={"prune_experts": {"languages": codes, **limit}},
        statistics={"kept_mass": plan.kept_mass, "layers": layers},
        overwrite=overwrite,
    )
    return plan


def read_routing(checkpoint: Artifact, spec: ModelSpec) -> RoutingStatistics:
    """Return the routing statistics of a checkpoint.

    Raises:
        ArtifactError: It has none, or they were counted on another model.
    """
    if not checkpoint.has(ROUTING_FILE):
        raise ArtifactError(
            f"{checkpoint.directory} has no {ROUTING_FILE}, which training writes when it "
            "validates: it is not known which experts serve which language. Name a checkpoint of a "
            "training stage, or fine-tune this one."
        )
    try:
        routing = RoutingStatistics.from_json(checkpoint.read_json(ROUTING_FILE))
    except ValueError as error:
        raise ArtifactError(
            f"{checkpoint.file(ROUTING_FILE)} holds no routing statistics ({error}). Run its "
            "training stage again."
        ) from error
    num_experts = spec.model.moe.num_experts if spec.model.moe else 0
    shape = (len(moe_layer_names(spec)), len(routing.languages), num_experts)
    if routing.layers != moe_layer_names(spec) or routing.routed_LGE.shape != shape:
        raise ArtifactError(
            f"{checkpoint.file(ROUTING_FILE)} was counted on another model than this checkpoint's. "
            "Run its training stage again."
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

    Exactly one of ``experts`` and ``keep_mass`` is given. Among experts with equally many routes
    the lower id is kept. Encoder layers are counted by target language, too.

    Args:
        routing: The routing statistics of the model.
        languages: Codes of the target languages.
        top_k: Experts per token, the least number to keep.
        experts: Number of experts to keep.
        keep_mass: Share of routes that every layer must keep, with as few experts as possible.

    Raises:
        ConfigError: A language was not counted, or a number or share is out of range.
    """
    assert (experts is None) != (keep_mass is None)
    mass_LE = _mass(routing, languages)
    num_experts = mass_LE.shape[1]
    if experts is not None and not top_k <= experts <= num_experts:
        raise ConfigError(
            f"--experts {experts} does not fit a model of {counted(num_experts, 'expert')} that "
            f"sends every token to {top_k}. Choose {top_k} to {num_experts}."
        )
    if keep_mass is not None and not 0 < keep_mass <= 1:
        raise ConfigError(f"--keep-mass {keep_mass} is no share. Choose more than 0, at most 1.")
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


def known_codes(languages: Sequence[str], known: Sequence[str]) -> list[str]:
    """Return the model's codes of languages in any spelling; unknown spellings stay."""
    return [meant_code(code, known) for code in languages]


def _mass(routing: RoutingStatistics, languages: Sequence[str]) -> npt.NDArray[np.float64]:
    """Return the routes per layer and expert, (L, E), summed over the distinct languages."""
    languages = known_codes(languages, routing.languages)
    for code in languages:
        if code not in routing.languages:
            refusal = f"The model has no language {code!r}."
            raise unknown_language(code, routing.languages, refusal)
        if not routing.routed_LGE[:, routing.languages.index(code)].sum(-1).all():
            raise ConfigError(
                f"No routes of translations into {code!r} were counted, so its experts are not "
                "known. Leave it out, or validate the model on it."
            )
    chosen = [index for index, code in enumerate(routing.languages) if code in set(languages)]
    mass_LE: npt.NDArray[np.float64] = routing.routed_LGE[:, chosen].sum(1)
    return mass_LE


def _with_model(spec: ModelSpec, **settings: object) -> ModelSpec:
    """Return the shape of a model with some of its settings replaced."""
    return spec.model_copy(update={"model": spec.model.model_copy(update=settings)})


def _pruned(
    checkpoint: Artifact, plan: PruningPlan, target: ModelSpec
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the pruned model, each made from one tensor of the whole one."""
    files = TensorFiles(checkpoint, "weights/")
    kept = {entry.layer: entry.experts for entry in plan.layers}
    shapes = tensor_shapes(target)
    for name in track(shapes, label="prune"):
        layer, _, inner = name.partition(".feed_forward.")
        slot, _, rest = inner.partition(".")
        match slot:
            case "experts":
                new_id, _, parameter = rest.partition(".")
                old_id = kept[layer][int(new_id)]
                yield name, files.read(f"{layer}.feed_forward.experts.{old_id}.{parameter}")
            case "router":
                yield name, select_experts(files.read(name), kept[layer], shapes[name])
            case _:
                yield name, files.read(name)


# ---------------------------------------------------------------- language modules


@dataclass(frozen=True)
class SmallerModel:
    """The result of removing language modules."""

    before: int
    """Number of parameters before."""
    after: int
    """Number of parameters after."""
    languages: tuple[str, ...] = ()
    """Languages with modules that were kept."""
    matrices: int = 0
    """Number of matrices that were folded."""


def prune_languages(
    directory: Path, *, languages: Sequence[str], out_dir: Path, overwrite: bool = False
) -> SmallerModel:
    """Write a checkpoint without the modules of other languages.

    Raises:
        ConfigError: The model has no language modules, or a language has none.
        ArtifactError: It is no checkpoint.
    """
    checkpoint = open_checkpoint(directory)
    spec = read_spec(checkpoint)
    modules = spec.model.language_modules
    if modules is None:
        experts = (
            ", or pass --experts or --keep-mass to prune its experts" if spec.model.moe else ""
        )
        raise ConfigError(
            f"{directory} has no language modules to prune: name a checkpoint that has "
            f"(model.language_modules){experts}."
        )
    had = spec.languages if modules.languages is None else modules.languages
    languages = known_codes(languages, had)
    for code in languages:
        if code not in had:
            refusal = f"{directory} has no module for the language {code!r}."
            raise unknown_language(code, had, refusal)
    kept = tuple(code for code in had if code in set(languages))
    target = _with_model(spec, language_modules=modules.model_copy(update={"languages": kept}))
    files = TensorFiles(checkpoint, "weights/")
    write_derived(
        checkpoint,
        ((name, files.read(name)) for name in track(tensor_shapes(target), label="prune")),
        spec=target,
        out_dir=out_dir,
        stage="prune_languages",
        config={"prune_languages": {"languages": list(kept)}},
        overwrite=overwrite,
    )
    return SmallerModel(num_parameters(spec), num_parameters(target), languages=kept)


def fold_checkpoint(directory: Path, *, out_dir: Path, overwrite: bool = False) -> SmallerModel:
    """Write the shared route of a checkpoint as a model without language modules.

    Raises:
        ConfigError: It has no shared route.
        ArtifactError: It is no checkpoint.
    """
    checkpoint = open_checkpoint(directory)
    spec = read_spec(checkpoint)
    if not spec.model.has_shared_route:
        raise ConfigError(
            f"{directory} has no route that all languages share (model.language_modules.shared): "
            "name a checkpoint of fuse distillation."
        )
    target = _with_model(spec, language_modules=None)
    files = TensorFiles(checkpoint, "weights/")
    folded: list[str] = []
    write_derived(
        checkpoint,
        _folded(files, target, folded),
        spec=target,
        out_dir=out_dir,
        stage="fold",
        config={"fold": {"route": SHARED}},
        overwrite=overwrite,
    )
    return SmallerModel(num_parameters(spec), num_parameters(target), matrices=len(folded))


def _folded(
    files: TensorFiles, target: ModelSpec, folded: list[str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the folded model, in its order; add the names of sums to ``folded``."""
    names = set(files.names())
    for name in track(tensor_shapes(target), label="fold"):
        sums = (extension.folded(name, names, files.read) for extension in extensions())
        weight = next((tensor for tensor in sums if tensor is not None), None)
        if weight is not None:
            folded.append(name)
        yield name, files.read(name) if weight is None else weight
