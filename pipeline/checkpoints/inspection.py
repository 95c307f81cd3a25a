"""Inspect and verify finished artifacts, and compare two checkpoints.

Nothing is written. Weights are read one tensor at a time: a model need not fit in memory.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.artifacts.artifact import Artifact, finished_manifest, open_artifact
from pipeline.artifacts.run_folders import read_position
from pipeline.checkpoints.checkpoint import open_checkpoint, read_spec, read_tokenizer
from pipeline.checkpoints.resharding import split_key
from pipeline.checkpoints.weights import TensorFiles, TensorHeader, tensor_headers
from pipeline.config.recipe import leaf_settings, setting_changes
from pipeline.distributed.process import track
from pipeline.model.parameters import count_parameters_of
from pipeline.model.spec import ModelSpec
from pipeline.terminal import counted, text_table


def open_any(directory: Path) -> Artifact:
    """Open a finished artifact of any kind.

    Raises:
        ArtifactError: It is missing, unfinished, or of another format version.
    """
    return open_artifact(directory, kind=finished_manifest(directory).kind)


# ---------------------------------------------------------------- inspect


def inspect(directory: Path, *, tensors: bool = False) -> dict[str, Any]:
    """Return a description of an artifact as JSON, from its manifest and the headers of weights.

    A checkpoint also has ``model``, ``parameters`` and ``dtypes`` (number of tensors of each), a
    training state ``progress`` and ``pieces``.

    Raises:
        ArtifactError: It is missing, unfinished, of another format version, or unreadable.
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
            headers = list(tensor_headers(artifact, "weights/"))
            found |= _inspect_model(read_spec(artifact, may_hold_more=True), headers)
        case "training_state":
            headers = list(tensor_headers(artifact, "optimizer/"))
            found |= {
                "progress": read_position(artifact).to_json(),
                "pieces": _inspect_pieces(headers, artifact),
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
        "parameters": count_parameters_of(spec),
        "dtypes": dtypes,
    }


def _inspect_pieces(headers: Iterable[TensorHeader], state: Artifact) -> dict[str, dict[str, int]]:
    """Return per kind of value: pieces, tensors, values, and values missing between pieces."""
    ranges: dict[str, dict[str, list[tuple[int, int]]]] = {}
    for header in headers:
        what, tensor, start = split_key(header.name, state)
        stop = start + math.prod(header.shape)
        ranges.setdefault(what, {}).setdefault(tensor, []).append((start, stop))
    described = {}
    for what, by_tensor in sorted(ranges.items()):
        counts = {"pieces": 0, "tensors": len(by_tensor), "values": 0, "missing": 0}
        for pieces in by_tensor.values():
            reached = 0
            for start, stop in sorted(pieces):
                counts["missing"] += max(start - reached, 0)
                counts["values"] += max(stop - max(start, reached), 0)
                reached = max(reached, stop)
            counts["pieces"] += len(pieces)
        described[what] = counts
    return described


def inspection_text(found: Mapping[str, Any]) -> str:
    """Return the result of :func:`inspect` as text for a terminal."""
    parts = [
        f"{found['directory']}: {found['kind']} made by {found['stage']}, "
        f"{found['started']}, in {found['wall_seconds']} s",
        _settings_text(found["statistics"] | found.get("progress", {})),
    ]
    if "model" in found:
        parts.append("Model\n" + _settings_text(dict(leaf_settings(found["model"]))))
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


def _settings_text(settings: Mapping[str, Any]) -> str:
    """Return a line per setting, without nested tables."""
    return "\n".join(
        f"{name} = {' '.join(map(str, value)) if isinstance(value, list) else value}"
        for name, value in settings.items()
        if not isinstance(value, Mapping)
    )


# ---------------------------------------------------------------- verify


def verify(directory: Path) -> str:
    """Compare every file of an artifact with its digest; return a sentence to print.

    Raises:
        ArtifactError: A file is missing or differs; names the first, and where.
    """
    artifact = open_any(directory)
    files = artifact.manifest.files
    for name in track(sorted(files), label="verify"):
        artifact.check([name])
    size = sum(record.size for record in files.values())
    return (
        f"{directory}: this {artifact.manifest.kind} artifact with {counted(len(files), 'file')} "
        f"({counted(size, 'byte')}) is as its manifest says."
    )


# ---------------------------------------------------------------- diff


@dataclass(frozen=True)
class TensorDifference:
    """The difference of two tensors of one shape."""

    name: str
    max_absolute: float
    """Largest absolute difference, max |a - b|."""
    relative_norm: float
    """Norm of the difference, ‖a - b‖ / ‖a‖; infinite if a is zero."""


@dataclass(frozen=True)
class CheckpointDifference:
    """The differences of two checkpoints."""

    settings: tuple[str, ...]
    """Changed settings, for example ``model.width: 16 → 32``."""
    other_tokenizer: bool
    only_in_one: tuple[str, ...]
    """Tensors of one checkpoint, for example ``decoder.final_norm.bias: only in the first``."""
    shapes: tuple[str, ...]
    """Tensors of another shape or type."""
    values: tuple[TensorDifference, ...]
    compared: int
    """Number of tensors of equal shape, which were compared by value."""

    @property
    def identical(self) -> bool:
        """Return whether there is no difference."""
        others = (self.settings, self.only_in_one, self.shapes, self.values)
        return not self.other_tokenizer and not any(others)

    def lines(self) -> list[str]:
        """Return a line per difference (values as a table) and a summary."""
        if self.identical:
            return [f"identical: {counted(self.compared, 'tensor')}, settings and tokenizer"]
        tokenizer = ["tokenizer: another one"] * self.other_tokenizer
        lines = [*self.settings, *tokenizer, *self.only_in_one, *self.shapes]
        if self.values:
            rows = [
                [entry.name, f"{entry.max_absolute:.3g}", f"{entry.relative_norm:.3g}"]
                for entry in self.values
            ]
            lines.append(text_table(["tensor", "max |a - b|", "‖a - b‖ / ‖a‖"], rows))
        lines.append(
            f"different: {counted(len(self.settings), 'setting')}, "
            f"{counted(len(self.only_in_one), 'tensor')} in only one, "
            f"{len(self.shapes)} of another shape or type, "
            f"{len(self.values)} of {self.compared} with other values"
        )
        return lines


def diff(first_dir: Path, second_dir: Path) -> CheckpointDifference:
    """Compare two checkpoints: model.json, tokenizer, and tensors one at a time.

    Raises:
        ArtifactError: One of them cannot be read.
    """
    first, second = open_checkpoint(first_dir), open_checkpoint(second_dir)
    first_files, second_files = TensorFiles(first, "weights/"), TensorFiles(second, "weights/")
    first_names, second_names = set(first_files.names()), set(second_files.names())
    shapes: list[str] = []
    values: list[TensorDifference] = []
    compared = 0
    for name in track(sorted(first_names & second_names), label="diff"):
        a, b = first_files.read_as_stored(name), second_files.read_as_stored(name)
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            shapes.append(f"{name}: {_form(a)} → {_form(b)}")
        if a.shape != b.shape:
            continue
        compared += 1
        a, b = a.double(), b.double()
        if not torch.allclose(a, b, rtol=0, atol=0, equal_nan=True):
            norm = a.norm().item()
            relative = (a - b).norm().item() / norm if norm else math.inf
            values.append(TensorDifference(name, (a - b).abs().max().item(), relative))
    specs = [read_spec(one, may_hold_more=True).model_dump(mode="json") for one in (first, second)]
    return CheckpointDifference(
        settings=tuple(setting_changes(*specs)),
        other_tokenizer=read_tokenizer(first).fingerprint != read_tokenizer(second).fingerprint,
        only_in_one=tuple(
            f"{name}: only in the {'first' if name in first_names else 'second'}"
            for name in sorted(first_names ^ second_names)
        ),
        shapes=tuple(shapes),
        values=tuple(values),
        compared=compared,
    )


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
