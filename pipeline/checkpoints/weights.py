"""Tensors in safetensors files of bounded size, one part per writing rank.

Nothing is pickled, and nothing of a file is believed before it was looked at.

The bytes of a safetensors file, without a copy of its tensors.

The library writes a file only whole and by itself; here the same bytes are given out piece by
piece, to be hashed and written at once. Its format: the length of a header, the header (JSON, ended
with spaces up to a multiple of 8), and the values, the widest types first, then by name
(``serialize`` in its ``tensor.rs``).
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pipeline.artifacts.artifact import Artifact, FileRecord
from pipeline.artifacts.digests import HashedFiles
from pipeline.config.settings import one_line
from pipeline.errors import CheckpointError

PART_FOLDERS = ("weights", "optimizer")
"""Folders of an artifact in which every rank writes files of its own."""
SHARD_BYTES = 1024 * 1024 * 1024
FLOATING_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

UNREADABLE = (OSError, SafetensorError, ValueError, TypeError, AttributeError, KeyError)
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
        except UNREADABLE as error:
            artifact.verify([file])
            raise CheckpointError(
                f"{path} cannot be read as safetensors ({one_line(error)}): restore it from a copy "
                "or run its stage again."
            ) from error


class TensorFiles:
    """Tensors of an artifact, looked up by name in its safetensors files, read one at a time.

    The files' digests are checked at opening, before anything is read from them.
    """

    def __init__(self, artifact: Artifact, prefix: str) -> None:
        self.artifact = artifact
        self._file_of: dict[str, str] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._file_names = artifact.names(prefix)
        artifact.check(self._file_names)
        for header in tensor_headers(artifact, prefix):
            self._file_of[header.name] = header.file
            self._shapes[header.name] = header.shape

    @property
    def origin(self) -> Path:
        return self.artifact.directory

    def names(self) -> list[str]:
        return sorted(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

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
        except UNREADABLE as error:
            raise CheckpointError(
                f"{path}: tensor {name} cannot be read ({one_line(error)}): run its stage again."
            ) from error
        return tensor


def read_tensor(checkpoint: Artifact, name: str) -> Tensor:
    """One weight of a checkpoint, by its artifact name."""
    return TensorFiles(checkpoint, "weights/").read(name)


def write_weights(
    directory: Path, tensors: Iterable[tuple[str, Tensor]], *, part: int = 0
) -> dict[Path, FileRecord]:
    """Write tensors, in order, as safetensors files of about 1 GiB; one part per writing rank.

    At most one file's tensors are in memory at once, and no copy of them. Returns what an artifact
    says of the files, which are on disk.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with HashedFiles() as files:
        for index, held in enumerate(files_of(tensors)):
            name = f"{part_prefix(part)}{index:03d}.safetensors"
            files.write(directory / name, file_pieces(held))
    return files.records


def files_of(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """The tensors of each file of about 1 GiB, let go when the next ones are asked for."""
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
    """How the names of the files a rank writes begin."""
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
"""Types in the order of their values in a file."""
_PLACES = {dtype: place for place, dtype in enumerate(_NAMES)}
_ALIGNMENT = 8


@dataclass(frozen=True)
class TensorPlace:
    """What a header says of a tensor; its values need not be known."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def file_pieces(
    tensors: Mapping[str, Tensor], *, metadata: Mapping[str, str] | None = None
) -> list[memoryview]:
    """Header and values of a safetensors file of tensors on the CPU; these must live as long."""
    ordered = sorted(tensors.items(), key=lambda entry: (_PLACES[entry[1].dtype], entry[0]))
    places = [TensorPlace(name, value.dtype, tuple(value.shape)) for name, value in ordered]
    header = file_header(places, metadata=metadata)
    return [memoryview(header), *(tensor_bytes(value) for _, value in ordered)]


def file_header(
    places: Sequence[TensorPlace], *, metadata: Mapping[str, str] | None = None
) -> bytes:
    """How a file begins whose values follow in this order."""
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
    return len(text).to_bytes(8, "little") + text


def tensor_bytes(value: Tensor) -> memoryview:
    """The values of a tensor, without a copy where they lie side by side."""
    array: npt.NDArray[np.uint8] = value.detach().reshape(-1).view(torch.uint8).numpy()
    return array.data


class TensorFolder:
    """The tensors of all safetensors files of a folder that is being made."""

    def __init__(self, directory: Path) -> None:
        self.origin = directory
        self._file_of: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for path in sorted(directory.glob("*.safetensors")):
            with safe_open(path, framework="pt") as stream:
                for name in sorted(stream.keys()):
                    self._file_of[name] = path
                    self._shapes[name] = tuple(stream.get_slice(name).get_shape())

    def names(self) -> list[str]:
        return sorted(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(self, name: str) -> Tensor:
        """One tensor, mapped from its file."""
        with safe_open(self._file_of[name], framework="pt") as stream:
            tensor: Tensor = stream.get_tensor(name)
        return tensor
