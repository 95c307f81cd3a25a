"""Keep the tensors of a batch in one buffer, so that one copy takes them all to a GPU."""

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor

ALIGNMENT = 16
"""Bytes to a multiple of which every tensor starts, since kernels load as many at once."""

Record = TypeVar("Record")


def with_each_tensor(record: Record, change: Callable[[Tensor], Tensor]) -> Record:
    """Return a dataclass with each of its tensors changed, also within its dataclasses."""
    changed: dict[str, Any] = {}
    for name, value in _parts(record):
        if isinstance(value, Tensor):
            changed[name] = change(value)
        elif is_dataclass(value):
            changed[name] = with_each_tensor(value, change)
    return replace(record, **changed)  # type: ignore[type-var]


def in_one_buffer(record: Record, *, pinned: bool) -> Record:
    """Return the record with its tensors, on the CPU, as views of one new buffer.

    Args:
        record: a dataclass.
        pinned: whether a GPU can copy from the buffer by itself.
    """
    sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in _tensors(record)]
    *starts, end = accumulate(sizes, initial=0)
    buffer, places = torch.empty(end, dtype=torch.uint8, pin_memory=pinned), iter(starts)

    def placed(tensor: Tensor) -> Tensor:
        view = _view(buffer, next(places), like=tensor)
        view.numpy()[...] = tensor.numpy()  # in this thread only, as torch's copy is not
        return view

    return with_each_tensor(record, placed)


def moved(record: Record, device: torch.device) -> Record:
    """Return a record of tensors on the CPU on a device, by one copy.

    From pinned memory the copy runs while the device still works on earlier operators.
    """
    tensors = list(_tensors(record))
    if len({tensor.untyped_storage().data_ptr() for tensor in tensors}) > 1:
        record = in_one_buffer(record, pinned=device.type == "cuda")
        tensors = list(_tensors(record))
    whole = torch.empty(0, dtype=torch.uint8).set_(tensors[0].untyped_storage())
    there = whole.to(device, non_blocking=True)
    return with_each_tensor(
        record,
        lambda part: _view(there, int(part.storage_offset()) * part.element_size(), like=part),
    )


def _parts(record: object) -> Iterator[tuple[str, Any]]:
    return ((field.name, getattr(record, field.name)) for field in fields(record))  # type: ignore[arg-type]


def _tensors(record: object) -> Iterator[Tensor]:
    for _, value in _parts(record):
        if isinstance(value, Tensor):
            yield value
        elif is_dataclass(value):
            yield from _tensors(value)


def _view(buffer: Tensor, start: int, *, like: Tensor) -> Tensor:
    return buffer[start : start + like.nbytes].view(like.dtype).view(like.shape)
