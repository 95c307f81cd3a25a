"""safetensors files written tensor by tensor: names, types and shapes first, values as they come.

The library's own writer wants all values of a file in memory at once.
"""

import json
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open
from torch import Tensor

from pipeline.artifacts.places import sync

_TYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}
_ALIGNMENT = 8
"""safetensors pads its header with spaces to a multiple of this many bytes."""


@dataclass(frozen=True)
class TensorPlace:
    """What a header says of a tensor, before its values are known."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def write_tensor_file(path: Path, places: Sequence[TensorPlace], values: Iterable[Tensor]) -> None:
    """Write a file whose tensors have these places, and force it to disk.

    ``values`` are taken one at a time, in the order of the places.
    """
    header: dict[str, object] = {}
    end = 0
    for place in places:
        begin, end = end, end + place.nbytes
        header[place.name] = {
            "dtype": _TYPES[place.dtype],
            "shape": list(place.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with path.open("wb", buffering=0) as stream:
        _write(stream, struct.pack("<Q", len(text)) + text)
        for place, value in zip(places, values, strict=True):
            assert (value.dtype, tuple(value.shape)) == (place.dtype, place.shape), place
            _write(stream, tensor_bytes(value))
    sync(path)


def tensor_bytes(value: Tensor) -> memoryview:
    """The values of a contiguous tensor, without a copy."""
    array: npt.NDArray[np.uint8] = value.contiguous().view(-1).view(torch.uint8).numpy()
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


def _write(stream: FileIO, content: bytes | memoryview) -> None:
    """All of it: an unbuffered file may take less at once."""
    left = memoryview(content)
    while left:
        left = left[stream.write(left) :]
