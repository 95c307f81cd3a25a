"""Passes of micro-batches that were assembled one by one."""

from collections.abc import Collection, Sequence
from dataclasses import fields, is_dataclass, replace
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from pipeline.batching.batch import Batch, Packing, Pass, Shares, with_each_tensor
from pipeline.kernels.noise import Noise


def join(batches: Sequence[Batch]) -> Batch:
    """The sentences of several micro-batches, one below the other."""
    rows = accumulate((len(batch.target_N) for batch in batches), initial=0)
    joined = {
        field.name: torch.cat([getattr(batch, field.name) for batch in batches])
        for field in fields(Batch)
        if isinstance(getattr(batches[0], field.name), torch.Tensor)
    }
    joined["label_rows_L"] = torch.cat(
        [batch.label_rows_L + first for batch, first in zip(batches, rows, strict=False)]
    )
    labels = np.array([batch.num_labels for batch in batches])
    return replace(
        batches[0],
        source=_joined([batch.source for batch in batches], labels),
        target=_joined([batch.target for batch in batches], labels),
        **joined,
    )


def _joined(parts: Sequence[Packing], labels: npt.NDArray[np.int64]) -> Packing:
    lengths = [length for part in parts for length in part.bound_B.diff().tolist()]
    rows = np.array([len(part.index_N) for part in parts])
    keys = [part.noise for part in parts if part.noise]
    device = parts[0].index_N.device
    return replace(
        Packing.from_lengths(lengths).to(device),
        shares=with_each_tensor(Shares.of(rows, labels), lambda part: part.to(device)),
        noise=Noise(*map(torch.cat, zip(*keys, strict=True))) if keys else None,
    )


def passes_of(
    batches: Sequence[Batch],
    *,
    seeds: Sequence[int] | None = None,
    stand_ins: Collection[int] = (),
    per_pass: int = 1,
) -> list[Pass]:
    """The passes of a rank's turns; batches at the turns of ``stand_ins`` count nothing."""
    made = []
    for start in range(0, len(batches), per_pass):
        turns = range(start, min(start + per_pass, len(batches)))
        counting = tuple(turn for turn in turns if turn not in stand_ins)
        chosen = counting or (start,)
        taken = [batches[turn].keyed(1 if seeds is None else seeds[turn]) for turn in chosen]
        batch = taken[0] if per_pass == 1 else join(taken)
        made.append(Pass(batch, counting))
    return made


def assert_same(found: object, expected: object) -> None:
    """Check that two records of tensors, such as batches, have the same values in every field."""
    assert is_dataclass(found)
    assert type(found) is type(expected)
    for field in fields(found):
        value, wanted = getattr(found, field.name), getattr(expected, field.name)
        if is_dataclass(value):
            assert_same(value, wanted)
        elif isinstance(value, torch.Tensor):
            assert value.dtype == wanted.dtype, field.name
            assert value.shape == wanted.shape, field.name
            assert torch.equal(value, wanted), field.name
        else:
            assert value == wanted, field.name
