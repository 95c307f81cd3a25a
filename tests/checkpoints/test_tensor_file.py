"""Our bytes of a safetensors file are the library's."""

from collections.abc import Mapping

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

from pipeline.checkpoints.weights import file_pieces

TENSORS: dict[str, dict[str, Tensor]] = {
    "one": {"a": torch.arange(6.0).view(2, 3)},
    "order of names": {name: torch.full((3,), float(len(name))) for name in ("b", "a", "aa", "B")},
    "none": {},
    "empty and without axes": {"empty": torch.empty(0, 4), "number": torch.tensor(3.5)},
    "every type": {
        f"{name}{turn}": torch.ones(turn + 1, dtype=dtype)
        for turn in range(2)
        for name, dtype in {
            **{"f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16},
            **{"f16": torch.float16, "i64": torch.int64, "i32": torch.int32, "i16": torch.int16},
            **{"i8": torch.int8, "u8": torch.uint8, "bool": torch.bool, "u64": torch.uint64},
            **{"u32": torch.uint32, "u16": torch.uint16},
        }.items()
    },
    "names that JSON escapes": {'a"\\\n\t\x01é字😀\x7f/': torch.ones(2), "\u2028": torch.ones(1)},
    "pieces of a training state": {"master:embedding.weight:0": torch.ones(2)},
}


@pytest.mark.parametrize("case", TENSORS)
def test_the_bytes_are_those_of_the_library(case: str) -> None:
    written = b"".join(file_pieces(TENSORS[case]))
    assert written == save(TENSORS[case])


def same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in found
    )


def test_tensors_that_share_memory_or_are_turned_are_written_by_their_values() -> None:
    """The library refuses both; masters and moments are ranges of one flat tensor."""
    flat = torch.arange(12.0)
    tensors = {"low": flat[:5], "high": flat[5:], "turned": flat.view(3, 4).t()}
    assert same(load(b"".join(file_pieces(tensors))), tensors)


def test_the_values_of_a_tensor_are_not_copied() -> None:
    tensor = torch.zeros(4)
    _, values = file_pieces({"a": tensor})
    tensor[0] = 1
    assert torch.frombuffer(values, dtype=torch.float32)[0] == 1
