"""Read and write tensors in safetensors files of bounded size, one part per writing rank.

Nothing is pickled, and files are checked before they are used. The safetensors library can only
write a whole file by itself. :func:`file_pieces` yields the same bytes piece by piece, without a
copy of the tensors; they are hashed as they are written. The format: the length of a
header, the header (JSON, padded with spaces to a multiple of 8), and the values, the widest types
first, then by name (``serialize`` in its ``tensor.rs``).
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pipeline.artifacts.artifact import Artifact, FileRecord
from pipeline.artifacts.manifest import write_hashed
from pipeline.config.documents import refuse_pipe, refuse_pointer
from pipeline.config.settings import one_line
from pipeline.distributed import process
from pipeline.errors import CheckpointError

PART_FOLDERS = ("weights", "optimizer")
"""Folders of an artifact in which every rank writes its own files."""
SHARD_BYTES = 1024 * 1024 * 1024
FLOATING_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

_FIX = "Restore it from a copy or run its stage again."
_UNREADABLE = (OSError, SafetensorError, ValueError, TypeError, AttributeError, KeyError)
"""Exceptions of safetensors 0.8 for a damaged file or a type of values that torch lacks."""


@dataclass(frozen=True)
class TensorHeader:
    """A tensor in the header of a safetensors file."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Type in the spelling of safetensors: F32, BF16."""
    file: str


def tensor_headers(artifact: Artifact, prefix: str) -> Iterator[TensorHeader]:
    """Yield the headers of the tensors in the files with names that start with ``prefix``.

    Raises:
        CheckpointError: A file is missing or has no readable header.
    """
    for file in artifact.names(prefix):
        path = artifact.unchecked_file(file)
        try:
            yield from _headers(path, file)
        except _UNREADABLE as error:
            artifact.check([file])
            raise _unreadable(path, error, fix=_FIX) from error


def _headers(path: Path, file: str) -> Iterator[TensorHeader]:
    with safe_open(path, framework="pt") as stream:
        for name in sorted(stream.keys()):
            entry = stream.get_slice(name)
            yield TensorHeader(name, tuple(entry.get_shape()), entry.get_dtype(), file)


def _unreadable(path: Path, error: Exception, *, fix: str) -> CheckpointError:
    return CheckpointError(f"{path} cannot be read as safetensors ({one_line(error)}). {fix}")


class Tensors(Protocol):
    """Weights by our names, read one tensor at a time."""

    @property
    def origin(self) -> Path:
        """Return the folder or file that holds them, for messages."""

    def names(self) -> list[str]:
        """Return all names, sorted."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor without reading its values."""

    def read(self, name: str) -> Tensor:
        """Return one tensor of finite floating-point numbers, as stored.

        Raises:
            CheckpointError: There is no such tensor, or it cannot be used.
        """


class TensorFolder:
    """Tensors by name, mapped from safetensors files outside of an artifact.

    Raises:
        CheckpointError: A file cannot be read; ``fix`` says what to do.
    """

    def __init__(self, origin: Path, paths: Iterable[Path], *, fix: str) -> None:
        self.origin = origin
        self._fix = fix
        self._file_of: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for path in paths:
            refuse_pipe(path, error=CheckpointError)
            try:
                for header in _headers(path, path.name):
                    self._file_of[header.name] = path
                    self._shapes[header.name] = header.shape
            except _UNREADABLE as error:
                refuse_pointer(path, error=CheckpointError)
                raise _unreadable(path, error, fix=fix) from error

    @classmethod
    def of_written(cls, directory: Path) -> "TensorFolder":
        """Return the tensors of all safetensors files of a folder that is being written."""
        return cls(directory, sorted(directory.glob("*.safetensors")), fix=_FIX)

    def names(self) -> list[str]:
        """Return the names of all tensors, sorted."""
        return sorted(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor without reading its values."""
        return self._shapes[name]

    def read(self, name: str) -> Tensor:
        """Return one tensor with any values."""
        path = self._file_of[name]
        try:
            with safe_open(path, framework="pt") as stream:
                tensor: Tensor = stream.get_tensor(name)
        except _UNREADABLE as error:
            raise CheckpointError(
                f"{path}: Tensor {name} cannot be read ({one_line(error)}). {self._fix}"
            ) from error
        return tensor


class TensorFiles(TensorFolder):
    """Tensors of an artifact by name, read one at a time from its safetensors files.

    The files' digests are checked at opening, before anything is read from them.
    """

    def __init__(self, artifact: Artifact, prefix: str) -> None:
        self.artifact = artifact
        names = artifact.names(prefix)
        artifact.check(names)
        super().__init__(artifact.directory, map(artifact.unchecked_file, names), fix=_FIX)

    def read(self, name: str) -> Tensor:
        """Return one tensor, and check that its values are finite.

        Raises:
            CheckpointError: There is no such tensor, or its values are not finite floating-point
                numbers.
        """
        return refuse_not_finite(self.read_as_stored(name), name, self.origin)

    def read_as_stored(self, name: str) -> Tensor:
        """Return one tensor with any values.

        Raises:
            CheckpointError: There is no such tensor, or it cannot be read.
        """
        if name not in self._file_of:
            raise CheckpointError(
                f"{self.origin} has no tensor {name!r}, so it is of another model. Name a "
                "checkpoint of this model."
            )
        process.advance()
        self.artifact.check([self._file_of[name].relative_to(self.origin).as_posix()])
        return super().read(name)


def refuse_not_finite(
    tensor: Tensor,
    name: str,
    origin: Path,
    *,
    fix: str = "train this one again with a lower learning rate",
) -> Tensor:
    """Return a tensor; raise CheckpointError unless it has finite floating-point numbers."""
    if tensor.dtype not in FLOATING_TYPES:
        raise CheckpointError(
            f"{origin}: Tensor {name} has the type {tensor.dtype}, not a floating-point type. Name "
            "a checkpoint that is not quantized."
        )
    # The sum is one pass without a copy. Every value is looked at only if it overflows.
    if not (tensor.sum().isfinite() or tensor.isfinite().all()):
        raise CheckpointError(
            f"{origin}: Tensor {name} has values that are not finite numbers. Name another "
            f"checkpoint, or {fix}."
        )
    return tensor


def read_tensor(checkpoint: Artifact, name: str) -> Tensor:
    """Return one weight of a checkpoint by its name in the artifact."""
    return TensorFiles(checkpoint, "weights/").read(name)


def write_weights(
    directory: Path, tensors: Iterable[tuple[str, Tensor]], *, part: int = 0
) -> dict[Path, FileRecord]:
    """Write tensors, in order, as safetensors files of about 1 GiB; one part per writing rank.

    At most one file's tensors are in memory at once, and no copy of them.

    Returns:
        The record of each file for a manifest.
    """
    directory.mkdir(parents=True, exist_ok=True)
    records: dict[Path, FileRecord] = {}
    for index, held in enumerate(files_of(tensors)):
        path = directory / f"{part_prefix(part)}{index:03d}.safetensors"
        records[path] = write_hashed(path, file_pieces(held))
    return records


def files_of(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors of each file of about 1 GiB, which are freed at the next request."""
    held: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if held and size + tensor.nbytes > SHARD_BYTES:
            yield held
            held.clear()
            size = 0
        held[name] = tensor
        size += tensor.nbytes
    if held:
        yield held


def part_prefix(part: int) -> str:
    """Return the beginning of the names of a rank's files."""
    return f"part-{part:05d}-"


_NAMES = {
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of types, in the order in which their values stand in a file."""
_PLACES = {dtype: place for place, dtype in enumerate(_NAMES)}
_ALIGNMENT = _LENGTH_BYTES = 8


@dataclass(frozen=True)
class TensorPlace:
    """A tensor to write. The header needs no values."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Return the size of the values in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def file_pieces(
    tensors: Mapping[str, Tensor], *, metadata: Mapping[str, str] | None = None
) -> list[memoryview]:
    """Return header and values of a safetensors file as views of tensors on the CPU."""
    ordered = sorted(tensors.items(), key=lambda entry: (_PLACES[entry[1].dtype], entry[0]))
    places = [TensorPlace(name, value.dtype, tuple(value.shape)) for name, value in ordered]
    header = file_header(places, metadata=metadata)
    return [memoryview(header), *(tensor_bytes(value) for _, value in ordered)]


def file_header(
    places: Sequence[TensorPlace], *, metadata: Mapping[str, str] | None = None
) -> bytes:
    """Return the header of a file; the values follow in the order of ``places``."""
    described: dict[str, Mapping[str, object]] = {"__metadata__": metadata} if metadata else {}
    start = 0
    for place in places:
        end = start + place.nbytes
        described[place.name] = {
            "dtype": _NAMES[place.dtype],
            "shape": list(place.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(described, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def tensor_bytes(value: Tensor) -> memoryview:
    """Return the values of a tensor as bytes, without a copy if they are contiguous."""
    array: npt.NDArray[np.uint8] = value.detach().reshape(-1).view(torch.uint8).numpy()
    return array.data
