"""All tensors of a batch lie in one buffer, and one copy moves them."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.passes import assert_same, join
from support.tiny_models import random_batch, tiny_spec
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.batching.batch import (
    ALIGNMENT,
    Batch,
    Labelled,
    LabelledBatch,
    collate_tags,
    in_one_buffer,
    moved,
    with_each_tensor,
)


def batches() -> Iterator[Batch | LabelledBatch]:
    """With tensors of every type, some with an odd number of bytes."""
    plain = [random_batch(tiny_spec(), sentences=n, seed=n) for n in (1, 3)]
    yield plain[0]
    yield replace(plain[1], source_begins_N=plain[1].source_N > 5)
    yield join(plain)
    ids = np.arange(7)
    yield collate_tags([Labelled(ids, ids[1:4], ids[:3])] * 2, languages=[0, 1])


def tensors(batch: Batch | LabelledBatch) -> list[Tensor]:
    found: list[Tensor] = []
    with_each_tensor(batch, lambda part: found.append(part) or part)  # type: ignore[func-returns-value]
    return found


class Copies(TorchDispatchMode):
    """Counts operators that copy."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in {"_to_copy", "copy_", "clone", "_pin_memory"}:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("batch", list(batches()))
def test_a_batch_in_one_buffer_has_the_same_values_at_aligned_places(
    batch: Batch | LabelledBatch,
) -> None:
    found = in_one_buffer(batch, pinned=False)
    assert_same(found, batch)
    parts = tensors(found)
    assert len({part.untyped_storage().data_ptr() for part in parts}) == 1
    ends = [part.storage_offset() * part.element_size() + part.nbytes for part in parts]
    starts = [part.storage_offset() * part.element_size() for part in parts]
    assert all(start % ALIGNMENT == 0 for start in starts)
    assert all(end <= start for end, start in zip(ends[:-1], starts[1:], strict=True))


@pytest.mark.parametrize("batch", list(batches()))
@pytest.mark.parametrize("is_read", [False, True])
def test_one_copy_moves_a_batch(batch: Batch | LabelledBatch, is_read: bool) -> None:
    if is_read:  # by the thread of the feed
        batch = in_one_buffer(batch, pinned=False)
    with Copies() as copies:
        there = moved(batch, torch.device("meta"))
    assert copies.names == ["_to_copy"]
    for part, before in zip(tensors(there), tensors(batch), strict=True):
        assert part.device.type == "meta"
        assert (part.dtype, part.shape) == (before.dtype, before.shape)
    assert_same(moved(batch, torch.device("cpu")), batch)
