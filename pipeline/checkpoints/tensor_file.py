"""The bytes of a safetensors file, without a copy of its tensors.

The library writes a file only whole and by itself; here the same bytes are given out piece by
piece, to be hashed and written at once. Its format: the length of a header, the header (JSON, ended
with spaces up to a multiple of 8), and the values, the widest types first, then by name
(``serialize`` in its ``tensor.rs``).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open
from torch import Tensor

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
