"""Checkpoints (weights) and training states: written by all ranks, readable on any topology.

A *checkpoint* artifact has the model's shape (``model.json``), its tokenizer (``tokenizer/``) and
its weights: safetensors files of bounded size, tensors named per global expert, in float32.

A *training state* artifact additionally has the optimizer's master weights and moments. ZeRO cuts
them into flat ranges; each rank writes its own ranges as ``{what}:{tensor}:{start}``, and a reader,
on any number of ranks, picks the pieces that overlap what it needs. Nothing is pickled and nothing
is gathered on one rank.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from pipeline.artifacts import Artifact, ArtifactWriter, open_artifact
from pipeline.errors import CheckpointError
from pipeline.model.expert_parallel import ExpertParallel
from pipeline.model.regularization import Regularization
from pipeline.model.spec import ModelSpec
from pipeline.model.transformer import Transformer, build_model
from pipeline.tokenizer import Tokenizer, copy_tokenizer, load_tokenizer, tokenizer_folder
from pipeline.weights import named_slices

PART_FOLDERS = ("weights", "optimizer")
"""Folders of an artifact in which every rank writes files of its own."""
SHARD_BYTES = 1024 * 1024 * 1024
MODEL_FILE = "model.json"

_SYSTEM_ERROR = re.compile(r"(?:os error|code:) (\d+)")
"""How safetensors writes the number of an error of the operating system into its message."""


class TensorFiles:
    """Tensors of an artifact, looked up by name in its safetensors files, read one at a time.

    The files' digests are checked at opening, before anything is read from them.
    """

    def __init__(self, artifact: Artifact, prefix: str) -> None:
        self.artifact = artifact
        self._file_of: dict[str, str] = {}
        self._file_names = artifact.names(prefix)
        artifact.check(self._file_names)
        for name in self._file_names:
            self._file_of.update(dict.fromkeys(self._tensor_names(name), name))

    def _tensor_names(self, file_name: str) -> list[str]:
        """Names in one file's header."""
        path = self.artifact.file(file_name)
        try:
            with safe_open(path, framework="pt") as stream:
                names: list[str] = stream.keys()
            return names
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{path} cannot be read as safetensors ({error}): run its stage again."
            ) from error

    def names(self) -> list[str]:
        return sorted(self._file_of)

    def read(self, name: str) -> Tensor:
        """One tensor.

        Raises:
            CheckpointError: there is no tensor of that name.
        """
        if name not in self._file_of:
            raise CheckpointError(
                f"{self.artifact.directory} has no tensor {name!r}: it was made by another model; "
                "name a checkpoint of this one."
            )
        with safe_open(self.artifact.file(self._file_of[name]), framework="pt") as stream:
            tensor: Tensor = stream.get_tensor(name)
        return tensor


def read_tensor(checkpoint: Artifact, name: str) -> Tensor:
    """One weight of a checkpoint, by its artifact name."""
    return TensorFiles(checkpoint, "weights/").read(name)


def open_checkpoint(directory: Path) -> Artifact:
    """Open a checkpoint whose small files are intact; weights are checked when they are opened.

    Raises:
        ArtifactError: not a finished checkpoint, or damaged.
    """
    checkpoint = open_artifact(directory, kind="checkpoint")
    checkpoint.check(name for name in checkpoint.names() if not name.startswith("weights/"))
    return checkpoint


def read_spec(checkpoint: Artifact) -> ModelSpec:
    """The model's shape as stated when it was first made."""
    return ModelSpec.model_validate(checkpoint.read_json(MODEL_FILE))


def read_tokenizer(checkpoint: Artifact) -> Tokenizer:
    """The tokenizer a checkpoint carries."""
    return load_tokenizer(tokenizer_folder(checkpoint))


def load_model(
    checkpoint: Artifact,
    *,
    regularization: Regularization | None = None,
    expert_parallel: ExpertParallel | None = None,
    device: torch.device | None = None,
) -> Transformer:
    """Build the model of a checkpoint and fill it; every rank reads only what it holds."""
    model = build_model(
        read_spec(checkpoint),
        regularization=regularization,
        expert_parallel=expert_parallel,
        device=device,
    )
    load_weights(model, checkpoint)
    return model


def load_weights(model: Transformer, checkpoint: Artifact) -> None:
    """Copy a checkpoint's weights into a model of the same shape.

    Raises:
        CheckpointError: a tensor is missing or has another shape.
    """
    files = TensorFiles(checkpoint, "weights/")
    for entry in named_slices(model):
        value = files.read(entry.name)
        if value.shape != entry.value.shape:
            raise CheckpointError(
                f"{checkpoint.directory}: tensor {entry.name} has shape {tuple(value.shape)}, the "
                f"model wants {tuple(entry.value.shape)}: name a checkpoint of this model."
            )
        entry.value.copy_(value)


def write_model_files(writer: ArtifactWriter, *, spec: ModelSpec, tokenizer_dir: Path) -> None:
    """Shape and tokenizer of a checkpoint."""
    writer.write_json(MODEL_FILE, spec.model_dump(mode="json"))
    copy_tokenizer(tokenizer_dir, writer.path(f"tokenizer/{MODEL_FILE}").parent)


def write_weights(
    directory: Path, tensors: Iterable[tuple[str, Tensor]], *, part: int = 0
) -> list[str]:
    """Write tensors, in order, as safetensors files of about 1 GiB; one part per writing rank.

    At most one file's tensors are in memory at once. Returns the file names.
    """
    directory.mkdir(parents=True, exist_ok=True)
    names: list[str] = []
    pending: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if pending and size + tensor.nbytes > SHARD_BYTES:
            names.append(_flush(directory, pending, part=part, index=len(names)))
            pending, size = {}, 0
        pending[name] = tensor.contiguous()
        size += tensor.nbytes
    if pending:
        names.append(_flush(directory, pending, part=part, index=len(names)))
    return names


def part_prefix(part: int) -> str:
    """How the names of the files a rank writes begin."""
    return f"part-{part:05d}-"


def _flush(directory: Path, tensors: dict[str, Tensor], *, part: int, index: int) -> str:
    name = f"{part_prefix(part)}{index:03d}.safetensors"
    try:
        save_file(tensors, directory / name)
    except SafetensorError as error:
        found = _SYSTEM_ERROR.search(str(error))
        if found is None:
            raise
        number = int(found[1])
        raise OSError(number, os.strerror(number), str(directory / name)) from error
    return name


@dataclass(frozen=True)
class Piece:
    """A contiguous range of a named tensor, flattened: one rank's share of it under ZeRO."""

    what: str
    """``master``, or the optimizer's name of a moment."""
    tensor: str
    start: int
    values: Tensor

    @property
    def key(self) -> str:
        return f"{self.what}:{self.tensor}:{self.start}"


class PieceReader:
    """Ranges of tensors from the pieces of a training state, whoever wrote them."""

    def __init__(self, state: Artifact) -> None:
        self._files = TensorFiles(state, "optimizer/")
        self._pieces: dict[tuple[str, str], list[tuple[int, str]]] = {}
        for key in self._files.names():
            what, tensor, start = key.rsplit(":", 2)
            self._pieces.setdefault((what, tensor), []).append((int(start), key))
        for pieces in self._pieces.values():
            pieces.sort()
        self._cached: tuple[str, Tensor] = ("", torch.empty(0))

    def read(self, *, what: str, tensor: str, start: int, length: int) -> Tensor:
        """Values [start, start + length) of a flattened tensor.

        Raises:
            CheckpointError: the state does not cover that range.
        """
        out = torch.empty(length)
        filled = 0
        for piece_start, key in self._pieces.get((what, tensor), []):
            if piece_start >= start + length:
                break
            values = self._piece(key)
            low = max(start, piece_start)
            high = min(start + length, piece_start + len(values))
            if low < high:
                out[low - start : high - start] = values[low - piece_start : high - piece_start]
                filled += high - low
        if filled != length:
            raise CheckpointError(
                f"{self._files.artifact.directory} has {filled} of the {length} values wanted of "
                f"{what} of {tensor}: the state is incomplete; resume from an earlier one."
            )
        return out

    def _piece(self, key: str) -> Tensor:
        if self._cached[0] != key:
            self._cached = (key, self._files.read(key))
        return self._cached[1]


@dataclass(frozen=True)
class Progress:
    """Where a training run stands: all that resuming needs beside tensors."""

    update: int = 0
    cursor: tuple[int, int] = (0, 0)
    """Where the batch plan goes on: (window, step within the window)."""
    validated: int = 0
    """Last update that was validated."""
    best_perplexity: float | None = None
    best_update: int | None = None
    seconds: float = 0.0
    interval: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)
    """Sums over all ranks since the last line of metrics: see ``train_loop``."""

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Progress":
        window, step = values["cursor"]
        interval = tuple(values["interval"])
        return cls(**{**values, "cursor": (window, step), "interval": interval})


def write_pieces(directory: Path, pieces: Iterator[Piece], *, part: int) -> list[str]:
    """Write one rank's optimizer pieces."""
    return write_weights(directory, ((piece.key, piece.values) for piece in pieces), part=part)
