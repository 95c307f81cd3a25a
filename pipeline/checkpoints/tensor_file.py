"""The bytes of a safetensors file, without a copy of its tensors.

The library writes a file only whole and by itself; here the same bytes are given out piece by
piece, to be hashed and written at once. Its format: the length of a header, the header (JSON, ended
with spaces up to a multiple of 8), and the values, the widest types first, then by name
(``serialize`` in its ``tensor.rs``).
"""

import json
from collections.abc import Mapping

import torch
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


def file_pieces(tensors: Mapping[str, Tensor]) -> list[memoryview]:
    """Header and values of a safetensors file of tensors on the CPU; these must live as long."""
    ordered = sorted(tensors.items(), key=lambda entry: (_PLACES[entry[1].dtype], entry[0]))
    return [memoryview(_header(ordered)), *(_values(tensor) for _, tensor in ordered)]


def _header(tensors: list[tuple[str, Tensor]]) -> bytes:
    described: dict[str, dict[str, object]] = {}
    start = 0
    for name, tensor in tensors:
        end = start + tensor.nbytes
        described[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(described, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _values(tensor: Tensor) -> memoryview:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data
