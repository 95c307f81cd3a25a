"""Packing and the layout of a micro-batch."""

from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.passes import assert_same, join
from support.tiny_models import random_batch, tiny_spec
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.batching.batch import (
    ALIGNMENT,
    Batch,
    Example,
    Labelled,
    LabelledBatch,
    Packing,
    collate,
    collate_tags,
    in_one_buffer,
    moved,
    with_each_tensor,
)

lengths_of_sentences = st.lists(st.integers(1, 7), min_size=1, max_size=6)


@settings(deadline=None)
@given(lengths_of_sentences)
def test_unpacking_and_packing_gives_back_the_tokens(lengths: list[int]) -> None:
    packing = Packing.from_lengths(lengths)
    x_ND = torch.randn(sum(lengths), 3)
    x_BTD = packing.unpack(x_ND)
    assert x_BTD.shape == (len(lengths), max(lengths), 3)
    assert torch.equal(packing.pack(x_BTD), x_ND)
    for row, sentence in enumerate(x_ND.split(lengths)):
        assert torch.equal(x_BTD[row, : lengths[row]], sentence)
        assert x_BTD[row, lengths[row] :].count_nonzero() == 0


@settings(deadline=None)
@given(lengths_of_sentences)
def test_every_token_knows_its_sentence_and_position(lengths: list[int]) -> None:
    packing = Packing.from_lengths(lengths)
    places = [(row, at) for row, length in enumerate(lengths) for at in range(length)]
    sentences, positions = packing.sentence_N.tolist(), packing.position_N.tolist()
    assert list(zip(sentences, positions, strict=True)) == places
    assert packing.mask_BT.nonzero().tolist() == [list(place) for place in places]
    assert packing.is_full == (min(lengths) == max(lengths))
    assert packing.bound_B.tolist() == [0, *accumulate(lengths)]


def test_packing_passes_gradients_to_real_tokens_only() -> None:
    packing = Packing.from_lengths([1, 3])
    x_BTD = torch.randn(2, 3, 4, requires_grad=True)
    packing.pack(x_BTD).sum().backward()
    assert x_BTD.grad is not None
    assert torch.equal(x_BTD.grad, packing.mask_BT[:, :, None].expand(2, 3, 4).float())
    x_ND = torch.randn(4, 4, requires_grad=True)
    packing.unpack(x_ND).sum().backward()
    assert x_ND.grad is not None
    assert torch.equal(x_ND.grad, torch.ones(4, 4))


EOS, DE, EN = 2, 90, 91
"""Of a vocabulary of 90 pieces."""


def example_pairs(prefix: tuple[int, ...], prompt: tuple[int, ...]) -> list[Example]:
    """de → en: 3 and 2 tokens; then 1 and none."""
    return [
        Example(
            source=np.array([11, 12, 13], dtype=np.uint16),
            target=np.array([21, 22], dtype=np.uint16),
            source_prefix=prefix,
            decoder_prompt=prompt,
            source_language=0,
            target_language=1,
            pair=5,
            line=70,
        ),
        Example([14], [], prefix, prompt, source_language=0, target_language=1, pair=6, line=71),
    ]


def test_source_and_target_tags_are_laid_out_as_stated() -> None:
    batch = collate(example_pairs(prefix=(DE,), prompt=(EOS, EN)), eos_id=EOS)
    assert batch.source_N.tolist() == [DE, 11, 12, 13, EOS, DE, 14, EOS]
    assert batch.source.mask_BT.tolist() == [[True] * 5, [True] * 3 + [False] * 2]
    assert batch.target_N.tolist() == [EOS, EN, 21, 22, EOS, EN]
    assert batch.target.mask_BT.tolist() == [[True] * 4, [True] * 2 + [False] * 2]
    assert batch.label_rows_L.tolist() == [1, 2, 3, 5]
    assert batch.labels_L.tolist() == [21, 22, EOS, EOS]


def test_a_target_tag_on_the_source_is_laid_out_as_stated() -> None:
    batch = collate(example_pairs(prefix=(EN,), prompt=(EOS,)), eos_id=EOS)
    assert batch.source_N.tolist() == [EN, 11, 12, 13, EOS, EN, 14, EOS]
    assert batch.target_N.tolist() == [EOS, 21, 22, EOS]
    assert batch.label_rows_L.tolist() == [0, 1, 2, 3]
    assert batch.labels_L.tolist() == [21, 22, EOS, EOS]


def test_a_tag_that_is_a_label_is_one_more_row_per_sentence() -> None:
    batch = collate(example_pairs(prefix=(DE,), prompt=(EOS, EN)), eos_id=EOS, tag_is_label=True)
    assert batch.target_N.tolist() == [EOS, EN, 21, 22, EOS, EN]
    assert batch.label_rows_L.tolist() == [0, 1, 2, 3, 4, 5]
    assert batch.labels_L.tolist() == [EN, 21, 22, EOS, EN, EOS]


def test_large_ids_of_small_types_stay_what_they_are() -> None:
    ids = np.array([65_535], dtype=np.uint16)
    example = Example(ids, ids, (70_000,), (EOS,), source_language=0, target_language=1)
    batch = collate([example], eos_id=EOS)
    assert batch.source_N.tolist() == [70_000, 65_535, EOS]
    assert batch.source_N.dtype == batch.labels_L.dtype == torch.int64


def test_a_batch_moves_to_a_device_as_a_whole() -> None:
    plain = random_batch(tiny_spec(), sentences=3, seed=1)
    assert plain.to(torch.device("meta")).source_begins_N is None
    batch = replace(plain, source_begins_N=plain.source_N > 5)
    assert batch.to(torch.device("cpu")) is batch
    moved = batch.to(torch.device("meta"))
    for field in fields(moved):
        value = getattr(moved, field.name)
        tensor = value.index_N if isinstance(value, Packing) else value
        assert tensor.device.type == "meta", field.name


# ---------------------------------------------------------------- one buffer


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
