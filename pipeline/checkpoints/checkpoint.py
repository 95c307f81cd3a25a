"""Checkpoints (weights) and training states: written by all ranks, readable on any topology.

A *checkpoint* artifact has the model's shape (``model.json``), its tokenizer (``tokenizer/``) and
its weights: safetensors files of bounded size, tensors named per global expert, in float32.

A *training state* artifact additionally has the optimizer's master weights and moments. ZeRO cuts
them into flat ranges; each rank writes its own ranges as ``{what}:{tensor}:{start}``, and a reader,
on any number of ranks, picks the pieces that overlap what it needs. Nothing is pickled and nothing
is gathered on one rank.
"""

import math
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from pipeline.artifacts.artifact import Artifact, ArtifactWriter, open_artifact
from pipeline.artifacts.tokenizer import Tokenizer, copy_tokenizer, load_tokenizer, tokenizer_folder
from pipeline.checkpoints.names import named_slices, num_parameters
from pipeline.errors import CheckpointError
from pipeline.model.moe.expert_parallel import ExpertParallel
from pipeline.model.regularization import Regularization
from pipeline.model.spec import ModelSpec
from pipeline.model.transformer import Transformer, build_model
from pipeline.settings import describe_validation, one_line, shown

PART_FOLDERS = ("weights", "optimizer")
"""Folders of an artifact in which every rank writes files of its own."""
SHARD_BYTES = 1024 * 1024 * 1024
MODEL_FILE = "model.json"
PROGRESS_FILE = "progress.json"
MAX_LACKING = 2
"""A model of more than this many times the values that its files hold is not theirs."""
MAX_DIGITS = 19
"""Of a place within a tensor."""


FLOATING_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

_UNREADABLE = (OSError, SafetensorError, ValueError, TypeError, AttributeError, KeyError)
"""What safetensors 0.8 raises for a damaged file or for a type of values that torch lacks."""


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
        path = artifact.unchecked_file(file)
        try:
            with safe_open(path, framework="pt") as stream:
                for name in sorted(stream.keys()):
                    entry = stream.get_slice(name)
                    yield TensorHeader(name, tuple(entry.get_shape()), entry.get_dtype(), file)
        except _UNREADABLE as error:
            artifact.verify([file])
            raise CheckpointError(
                f"{path} cannot be read as safetensors ({one_line(error)}): restore it from a copy "
                "or run its stage again."
            ) from error


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
        for header in tensor_headers(artifact, prefix):
            self._file_of[header.name] = header.file

    def names(self) -> list[str]:
        return sorted(self._file_of)

    def read(self, name: str) -> Tensor:
        """One tensor of finite numbers.

        Raises:
            CheckpointError: there is no tensor of that name, or it has values that are no numbers.
        """
        tensor = self.read_as_stored(name)
        if tensor.dtype not in FLOATING_TYPES:
            raise CheckpointError(
                f"{self.artifact.directory}: tensor {name} has the type {tensor.dtype}, where "
                "floating-point numbers are wanted: run its stage again."
            )
        # The sum is one pass without a copy; only where it overflows is every value looked at.
        if not tensor.sum().isfinite() and not tensor.isfinite().all():
            raise CheckpointError(
                f"{self.artifact.directory}: tensor {name} has values that are not finite numbers: "
                "name another checkpoint, or train this one again with a lower learning rate."
            )
        return tensor

    def read_as_stored(self, name: str) -> Tensor:
        """One tensor, whatever its values; its file's digest is checked when it is first used.

        Raises:
            CheckpointError: there is no tensor of that name, or it cannot be read.
        """
        if name not in self._file_of:
            raise CheckpointError(
                f"{self.artifact.directory} has no tensor {name!r}: it was made by another model; "
                "name a checkpoint of this one."
            )
        path = self.artifact.file(self._file_of[name])
        try:
            with safe_open(path, framework="pt") as stream:
                tensor: Tensor = stream.get_tensor(name)
        except _UNREADABLE as error:
            raise CheckpointError(
                f"{path}: tensor {name} cannot be read ({one_line(error)}): run its stage again."
            ) from error
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


def stated_spec(checkpoint: Artifact) -> ModelSpec:
    """The model's shape as stated when it was first made, whatever the files of weights hold.

    Raises:
        CheckpointError: model.json holds something else.
    """
    path = checkpoint.file(MODEL_FILE)
    try:
        return ModelSpec.model_validate(checkpoint.read_json(MODEL_FILE))
    except ValidationError as error:
        raise CheckpointError(
            f"{path} does not describe a model: {describe_validation(error, ModelSpec)}"
        ) from error


def read_spec(checkpoint: Artifact) -> ModelSpec:
    """The shape of a model that is about to be built.

    Nothing of that size is allocated before the files are known to be of about that size; which
    tensor is missing of one that lacks a few is said when it is read.

    Raises:
        CheckpointError: model.json holds something else, or asks for far more than the files hold.
    """
    spec = stated_spec(checkpoint)
    wanted = num_parameters(spec)
    held = sum(math.prod(header.shape) for header in tensor_headers(checkpoint, "weights/"))
    if wanted > MAX_LACKING * held:
        raise CheckpointError(
            f"{checkpoint.directory / MODEL_FILE} asks for {wanted:,} parameters, and the files "
            f"under weights hold {held:,} values: name a checkpoint whose files belong together."
        )
    return spec


def refuse_other_tokenizer(checkpoint: Artifact, tokenizer: Tokenizer) -> None:
    """Raises CheckpointError where a checkpoint's model was not made for a tokenizer."""
    spec = read_spec(checkpoint)
    for what, of_model, of_tokenizer in (
        ("ids", spec.vocabulary_size, tokenizer.size),
        ("padding", spec.pad_id, tokenizer.pad_id),
        ("languages", spec.languages, tokenizer.languages),
    ):
        if of_model != of_tokenizer:
            raise CheckpointError(
                f"The model and the tokenizer of {checkpoint.directory} do not belong together "
                f"({what}: {shown(of_model)} and {shown(of_tokenizer)}): run its stage again."
            )


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
            what, tensor, start = split_key(key, state)
            self._pieces.setdefault((what, tensor), []).append((start, key))
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
            self._cached = (key, self._files.read(key).flatten())
        return self._cached[1]


def split_key(key: str, state: Artifact) -> tuple[str, str, int]:
    """What a piece is of, its tensor, and where it starts (:attr:`Piece.key`)."""
    what, _, place = key.partition(":")
    tensor, _, start = place.rpartition(":")
    if not (what and tensor and start.isascii() and start.isdecimal() and len(start) < MAX_DIGITS):
        raise CheckpointError(
            f"{state.directory} has a piece named {shown(key)!r}, which is none of a training "
            "state: resume from an earlier one."
        )
    return what, tensor, int(start)


Whole = Annotated[int, Field(ge=0, lt=2**63)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Sum = Annotated[float, Field(allow_inf_nan=False)]


@dataclass(frozen=True)
class Progress:
    """Where a training run stands: all that resuming needs beside tensors."""

    update: Whole = 0
    cursor: tuple[Whole, Whole] = (0, 0)
    """Where the batch plan goes on: (window, step within the window)."""
    validated: Whole = 0
    """Last update that was validated."""
    best_perplexity: Sum | None = None
    best_update: Whole | None = None
    seconds: Seconds = 0.0
    interval: Annotated[tuple[Sum, ...], Field(min_length=4, max_length=4)] = (0.0, 0.0, 0.0, 0.0)
    """Sums over all ranks since the last line of metrics: see ``training/loop.py``."""

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))

    @classmethod
    def from_json(cls, values: Any) -> "Progress":
        """Raises ValidationError where the values are none of a run."""
        return TypeAdapter(cls).validate_python(values)


def read_progress(state: Artifact) -> Progress:
    """Where the run of a training state stands; CheckpointError where its file says otherwise."""
    path = state.file(PROGRESS_FILE)
    try:
        return Progress.from_json(state.read_json(PROGRESS_FILE))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(shown(str(part)) for part in first["loc"]) or "the file"
        raise CheckpointError(
            f"{path} does not say where a run stands ({where}: {first['msg']}): resume from an "
            "earlier state."
        ) from error


def write_pieces(directory: Path, pieces: Iterator[Piece], *, part: int) -> list[str]:
    """Write one rank's optimizer pieces."""
    return write_weights(directory, ((piece.key, piece.values) for piece in pieces), part=part)
