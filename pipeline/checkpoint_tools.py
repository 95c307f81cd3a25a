"""What can be asked of finished artifacts, and what can be made of checkpoints without training.

``inspect``, ``verify`` and ``diff`` only read. ``average`` and ``prune-experts`` make a new
checkpoint artifact with the files it came from among its inputs. Weights are read one tensor at a
time, so that a model need not fit in memory.

Legend: E experts, G target languages.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pipeline.artifacts import (
    Artifact,
    InputRecord,
    new_artifact,
    open_artifact,
    read_manifest,
    verify_file,
)
from pipeline.checkpoint import (
    MODEL_FILE,
    PieceReader,
    TensorFiles,
    read_spec,
    read_tokenizer,
    write_model_files,
    write_weights,
)
from pipeline.errors import ArtifactError, CheckpointError, ConfigError
from pipeline.languages import nearest_codes
from pipeline.model.describe import count_parameters
from pipeline.model.spec import ModelSpec
from pipeline.plan import text_table
from pipeline.progress import track
from pipeline.routing_statistics import ROUTING_FILE, RoutingStatistics, moe_layer_names
from pipeline.run_directory import describe_change
from pipeline.weights import tensor_shapes

ReadTensor = Callable[[str, torch.Size], Tensor]
"""Name and shape of a tensor → its values, in that shape."""


def open_any(directory: Path) -> Artifact:
    """Open a finished artifact of whatever kind.

    Raises:
        ArtifactError: missing, unfinished, or of another format version.
    """
    if not directory.is_dir():
        raise ArtifactError(f"{directory} does not exist: name the folder of an artifact.")
    manifest = read_manifest(directory)
    if manifest is None:
        raise ArtifactError(
            f"{directory} has no manifest, so it is not a finished artifact: name one, or run its "
            "stage again."
        )
    return open_artifact(directory, kind=manifest.kind)


def open_checkpoint(directory: Path) -> Artifact:
    """Open a checkpoint whose small files are intact; weights are checked as they are read.

    Raises:
        ArtifactError: not a finished checkpoint, or damaged.
    """
    checkpoint = open_artifact(directory, kind="checkpoint")
    checkpoint.verify([name for name in checkpoint.names() if not name.startswith("weights/")])
    return checkpoint


# ---------------------------------------------------------------- inspect


@dataclass(frozen=True)
class TensorHeader:
    """What the header of a safetensors file says of one tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """As safetensors writes it: F32, BF16."""
    file: str


def tensor_headers(artifact: Artifact, prefix: str) -> Iterator[TensorHeader]:
    """Headers of the tensors in the files that start with ``prefix``; no values are read.

    Raises:
        CheckpointError: a file is missing or has no readable header.
    """
    for file in artifact.names(prefix):
        try:
            with safe_open(artifact.file(file), framework="pt") as stream:
                for name in sorted(stream.keys()):
                    entry = stream.get_slice(name)
                    yield TensorHeader(name, tuple(entry.get_shape()), entry.get_dtype(), file)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{artifact.directory / file} cannot be read ({error}): restore it from a copy or "
                "run its stage again."
            ) from error


def inspect(directory: Path, *, tensors: bool = False) -> dict[str, Any]:
    """All that an artifact says of itself, as JSON; weights are not read, only their headers.

    A checkpoint also has ``model``, ``parameters`` and ``dtypes`` (number of tensors of each), a
    training state ``progress`` and ``pieces``; with ``tensors`` their tensors are listed.

    Raises:
        ArtifactError: missing, unfinished, of another format version, or unreadable.
    """
    artifact = open_any(directory)
    manifest = artifact.manifest
    found: dict[str, Any] = {
        "directory": str(directory),
        "kind": manifest.kind,
        "stage": manifest.stage,
        "started": manifest.run.started,
        "wall_seconds": manifest.run.wall_seconds,
        "digest": artifact.digest,
        "statistics": artifact.statistics,
        "files": {name: manifest.files[name].size for name in artifact.names()},
    }
    headers: list[TensorHeader] = []
    match manifest.kind:
        case "checkpoint":
            artifact.verify([MODEL_FILE])
            headers = list(tensor_headers(artifact, "weights/"))
            found |= _inspect_model(read_spec(artifact), headers)
        case "training_state":
            artifact.verify(["progress.json"])
            headers = list(tensor_headers(artifact, "optimizer/"))
            found |= {
                "progress": artifact.read_json("progress.json"),
                "pieces": _inspect_pieces(headers),
            }
    if tensors:
        found["tensors"] = [vars(header) for header in headers]
    return found


def _inspect_model(spec: ModelSpec, headers: Iterable[TensorHeader]) -> dict[str, Any]:
    dtypes: dict[str, int] = {}
    for header in headers:
        dtypes[header.dtype] = dtypes.get(header.dtype, 0) + 1
    return {
        "model": spec.model_dump(mode="json"),
        "parameters": count_parameters(
            spec.model, vocabulary_size=spec.vocabulary_size, num_groups=spec.num_groups
        ),
        "dtypes": dtypes,
    }


def _inspect_pieces(headers: Iterable[TensorHeader]) -> dict[str, dict[str, int]]:
    """Per kind of value: pieces, tensors, values covered, and values missing between pieces."""
    ranges: dict[str, dict[str, list[tuple[int, int]]]] = {}
    for header in headers:
        what, tensor, start = header.name.rsplit(":", 2)
        stop = int(start) + int(np.prod(header.shape))
        ranges.setdefault(what, {}).setdefault(tensor, []).append((int(start), stop))
    described = {}
    for what, by_tensor in sorted(ranges.items()):
        covered = sum(_covered(found) for found in by_tensor.values())
        described[what] = {
            "pieces": sum(map(len, by_tensor.values())),
            "tensors": len(by_tensor),
            "values": covered,
            "missing": sum(max(stop for _, stop in found) for found in by_tensor.values())
            - covered,
        }
    return described


def _covered(ranges: list[tuple[int, int]]) -> int:
    """How many values lie in at least one of the ranges [start, stop)."""
    covered, reached = 0, 0
    for start, stop in sorted(ranges):
        covered += max(stop - max(start, reached), 0)
        reached = max(reached, stop)
    return covered


def inspection_text(found: Mapping[str, Any]) -> str:
    """What :func:`inspect` found, to be read on a terminal."""
    parts = [
        f"{found['directory']}: {found['kind']} made by {found['stage']}, "
        f"{found['started']}, in {found['wall_seconds']} s",
        _settings_text(found["statistics"] | found.get("progress", {})),
    ]
    if "model" in found:
        parts.append("Model\n" + _settings_text(flat_settings(found["model"])))
        rows = [[part, f"{count:,}"] for part, count in found["parameters"].items()]
        parts.append(text_table(["part", "parameters"], rows))
        stored = (f"{count:,} of {dtype}" for dtype, count in found["dtypes"].items())
        parts.append(f"Tensors: {', '.join(stored)}")
    if "pieces" in found:
        columns = ["pieces", "tensors", "values", "missing"]
        rows = [
            [what, *(f"{counts[column]:,}" for column in columns)]
            for what, counts in found["pieces"].items()
        ]
        parts.append(text_table(["what", *columns], rows))
    if "tensors" in found:
        rows = [
            [entry["name"], "×".join(map(str, entry["shape"])), entry["dtype"], entry["file"]]
            for entry in found["tensors"]
        ]
        parts.append(text_table(["tensor", "shape", "dtype", "file"], rows))
    files = {**found["files"], "in all": sum(found["files"].values())}
    parts.append(text_table(["file", "bytes"], [[name, f"{n:,}"] for name, n in files.items()]))
    return "\n\n".join(part for part in parts if part)


def flat_settings(values: Mapping[str, Any], *, prefix: str = "") -> dict[str, Any]:
    """Nested tables as one, ``model.moe.top_k`` → value."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= flat_settings(value, prefix=f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _settings_text(settings: Mapping[str, Any]) -> str:
    """A line per setting; tables within are left to the JSON form."""
    return "\n".join(
        f"{name} = {' '.join(map(str, value)) if isinstance(value, list) else value}"
        for name, value in settings.items()
        if not isinstance(value, Mapping)
    )


# ---------------------------------------------------------------- verify


def verify(directory: Path) -> str:
    """Compare every file of an artifact with its digest; returns a sentence that says so.

    Raises:
        ArtifactError: names the first file that is missing or differs, and where.
    """
    artifact = open_any(directory)
    files = artifact.manifest.files
    for name in track(sorted(files), label="verify"):
        verify_file(artifact.file(name), files[name])
    size = sum(record.size for record in files.values())
    return (
        f"{directory}: all {len(files)} files ({size:,} bytes) of this {artifact.manifest.kind} "
        "are as its manifest says."
    )


# ---------------------------------------------------------------- diff


@dataclass(frozen=True)
class TensorDifference:
    """How far apart two tensors of one shape are."""

    name: str
    max_absolute: float
    """max |a - b|."""
    relative_norm: float
    """‖a - b‖ / ‖a‖; infinite where a is zero."""


@dataclass(frozen=True)
class CheckpointDifference:
    """All in which two checkpoints differ."""

    settings: tuple[str, ...]
    """``model.width: 16 → 32``."""
    other_tokenizer: bool
    only_in_first: tuple[str, ...]
    only_in_second: tuple[str, ...]
    shapes: tuple[str, ...]
    """Tensors of another shape or type."""
    values: tuple[TensorDifference, ...]
    compared: int
    """Tensors of equal shape, whose values were compared."""

    @property
    def identical(self) -> bool:
        others = (self.settings, self.only_in_first, self.only_in_second, self.shapes, self.values)
        return not self.other_tokenizer and not any(others)

    def lines(self) -> list[str]:
        """A line per difference (values as a table) and a summary."""
        if self.identical:
            return [f"identical: {self.compared} tensors, settings and tokenizer"]
        lines = [*self.settings]
        lines += ["tokenizer: another one"] * self.other_tokenizer
        lines += [f"{name}: only in the first" for name in self.only_in_first]
        lines += [f"{name}: only in the second" for name in self.only_in_second]
        lines += self.shapes
        if self.values:
            rows = [
                [entry.name, f"{entry.max_absolute:.3g}", f"{entry.relative_norm:.3g}"]
                for entry in self.values
            ]
            lines.append(text_table(["tensor", "max |a - b|", "‖a - b‖ / ‖a‖"], rows))
        lines.append(
            f"different: {len(self.settings)} settings, "
            f"{len(self.only_in_first) + len(self.only_in_second)} tensors in only one, "
            f"{len(self.shapes)} of another shape or type, "
            f"{len(self.values)} of {self.compared} with other values"
        )
        return lines


def diff(first_dir: Path, second_dir: Path) -> CheckpointDifference:
    """Compare two checkpoints: model.json, tokenizer, and tensors one at a time.

    Raises:
        ArtifactError: one of them cannot be read.
    """
    first, second = open_checkpoint(first_dir), open_checkpoint(second_dir)
    first_files, second_files = TensorFiles(first, "weights/"), TensorFiles(second, "weights/")
    first_names, second_names = set(first_files.names()), set(second_files.names())
    shapes: list[str] = []
    values: list[TensorDifference] = []
    compared = 0
    for name in track(sorted(first_names & second_names), label="diff"):
        a, b = first_files.read(name), second_files.read(name)
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            shapes.append(f"{name}: {_form(a)} → {_form(b)}")
        if a.shape != b.shape:
            continue
        compared += 1
        if not torch.equal(a.double(), b.double()):
            values.append(_tensor_difference(name, a.double(), b.double()))
    return CheckpointDifference(
        settings=tuple(_setting_changes(read_spec(first), read_spec(second))),
        other_tokenizer=read_tokenizer(first).fingerprint != read_tokenizer(second).fingerprint,
        only_in_first=tuple(sorted(first_names - second_names)),
        only_in_second=tuple(sorted(second_names - first_names)),
        shapes=tuple(shapes),
        values=tuple(values),
        compared=compared,
    )


def _setting_changes(first: ModelSpec, second: ModelSpec) -> list[str]:
    old = flat_settings(first.model_dump(mode="json"))
    new = flat_settings(second.model_dump(mode="json"))
    return [
        f"{key}: {old.get(key, 'none')} → {new.get(key, 'none')}"
        for key in dict.fromkeys([*old, *new])
        if old.get(key) != new.get(key)
    ]


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _tensor_difference(name: str, a: Tensor, b: Tensor) -> TensorDifference:
    apart = a - b
    norm = a.norm().item()
    return TensorDifference(
        name=name,
        max_absolute=apart.abs().max().item(),
        relative_norm=apart.norm().item() / norm if norm else float("inf"),
    )


# ---------------------------------------------------------------- average


def average_checkpoints(
    directories: Sequence[Path], *, out_dir: Path, overwrite: bool = False
) -> None:
    """Write the mean of the weights of checkpoints of one model.

    Raises:
        CheckpointError: the models differ; names the first difference.
    """
    checkpoints = [open_checkpoint(path) for path in directories]
    for checkpoint in checkpoints[1:]:
        _refuse_other_model(checkpoints[0], checkpoint)
    shapes = tensor_shapes(read_spec(checkpoints[0]))
    _write_mean(
        [_weights_reader(checkpoint, shapes) for checkpoint in checkpoints],
        model_of=checkpoints[0],
        config={"average": {"of": "weights"}},
        inputs={f"checkpoints/{index}": entry for index, entry in enumerate(checkpoints)},
        out_dir=out_dir,
        overwrite=overwrite,
    )


def average_states(run_dir: Path, *, last: int, out_dir: Path, overwrite: bool = False) -> None:
    """Write the mean of the master weights of the ``last`` training states of ``OUT.run``.

    The model's shape and tokenizer are those of ``OUT.run/best``.

    Raises:
        ArtifactError: the folder holds no run, or fewer states.
        CheckpointError: a state does not cover all weights.
    """
    state_dirs = sorted(
        path for path in run_dir.glob("states/update-*") if read_manifest(path) is not None
    )
    if len(state_dirs) < last:
        raise ArtifactError(
            f"{run_dir} holds {len(state_dirs)} training states where {last} are wanted: name the "
            "run folder OUT.run of a training stage, ask for fewer, or raise training.keep_last."
        )
    states = [open_artifact(path, kind="training_state") for path in state_dirs[-last:]]
    best = open_checkpoint(run_dir / "best")
    _write_mean(
        [_master_reader(state) for state in states],
        model_of=best,
        config={"average": {"of": "master weights"}},
        inputs={"model": best} | {f"states/{state.directory.name}": state for state in states},
        out_dir=out_dir,
        overwrite=overwrite,
    )


def _refuse_other_model(first: Artifact, other: Artifact) -> None:
    change = describe_change(
        read_spec(first).model_dump(mode="json"), read_spec(other).model_dump(mode="json")
    )
    if change is None and read_tokenizer(first).fingerprint != read_tokenizer(other).fingerprint:
        change = "another tokenizer"
    if change is not None:
        raise CheckpointError(
            f"{other.directory} is not of the same model as {first.directory} ({change}): average "
            "checkpoints of one model."
        )


def _weights_reader(checkpoint: Artifact, shapes: Mapping[str, torch.Size]) -> ReadTensor:
    files = TensorFiles(checkpoint, "weights/")
    unknown = sorted(set(files.names()) - set(shapes))
    if unknown:
        raise CheckpointError(
            f"{checkpoint.directory} has a tensor {unknown[0]!r} that its model.json does not "
            "account for: run its stage again."
        )

    def read(name: str, shape: torch.Size) -> Tensor:
        value = files.read(name)
        if value.shape != shape:
            raise CheckpointError(
                f"{checkpoint.directory}: tensor {name} has shape {tuple(value.shape)}, its "
                f"model.json says {tuple(shape)}: run its stage again."
            )
        return value

    return read


def _master_reader(state: Artifact) -> ReadTensor:
    pieces = PieceReader(state)

    def read(name: str, shape: torch.Size) -> Tensor:
        values = pieces.read(what="master", tensor=name, start=0, length=shape.numel())
        return values.view(shape)

    return read


def _write_mean(
    readers: Sequence[ReadTensor],
    *,
    model_of: Artifact,
    config: Mapping[str, Any],
    inputs: Mapping[str, Artifact],
    out_dir: Path,
    overwrite: bool,
) -> None:
    """Write the checkpoint of the means, in the shape and with the tokenizer of ``model_of``."""
    spec = read_spec(model_of)
    averaged = [entry for name, entry in inputs.items() if name != "model"]
    with new_artifact(
        out_dir,
        kind="checkpoint",
        stage="average",
        config=config,
        inputs=_records(inputs),
        overwrite=overwrite,
    ) as writer:
        means = (
            (name, _mean((read(name, shape) for read in readers), shape))
            for name, shape in track(tensor_shapes(spec).items(), label="average")
        )
        write_weights(writer.directory / "weights", means)
        write_model_files(writer, spec=spec, tokenizer_dir=model_of.directory / "tokenizer")
        writer.statistics["averaged"] = len(averaged)
        writer.statistics["averaged_updates"] = [
            entry.statistics.get("update") for entry in averaged
        ]


def _mean(values: Iterable[Tensor], shape: torch.Size) -> Tensor:
    """Arithmetic mean in float64, rounded to float32 once."""
    total, count = torch.zeros(shape, dtype=torch.float64), 0
    for value in values:
        total += value
        count += 1
    return (total / count).float()


def _records(inputs: Mapping[str, Artifact]) -> dict[str, InputRecord]:
    return {
        name: InputRecord(
            kind=artifact.manifest.kind,
            path=str(artifact.directory.absolute()),
            digest=artifact.digest,
        )
        for name, artifact in inputs.items()
    }


# ---------------------------------------------------------------- prune-experts


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
        inputs=_records({"checkpoint": checkpoint}),
        overwrite=overwrite,
    ) as writer:
        write_weights(writer.directory / "weights", _pruned(checkpoint, plan, target))
        write_model_files(writer, spec=target, tokenizer_dir=directory / "tokenizer")
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
            "which language: run its training stage again, or fine-tune it, with this version of "
            "mmnmt, which counts that when it validates."
        )
    routing = RoutingStatistics.from_json(checkpoint.read_json(ROUTING_FILE))
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
            f"--experts {experts} does not fit a model of {num_experts} experts that sends every "
            f"token to {top_k}: choose {top_k} to {num_experts}."
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
