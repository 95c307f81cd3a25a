"""Loops compiled by numba: rounding, and compilation without a writable directory."""

import numba
import pytest
import torch

from pipeline.kernels import compiled_loops as loops
from pipeline.kernels.compiled_loops import compiled, narrowed
from pipeline.kernels.cpu import numbers


def test_numbers_are_rounded_to_bfloat16_as_pytorch_rounds_them() -> None:
    @compiled()
    def round_all(some: loops.Floats, found: loops.States) -> None:
        for i in range(len(some)):
            found[i] = narrowed(some[i], found[i])

    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(-(2**31), 2**31, (2**16,), generator=generator, dtype=torch.int64)
    halves = (torch.arange(2**16) << 16) + 2**15  # between two neighbors, all of them
    some = torch.cat([bits, halves, halves + 1, halves - 1]).to(torch.int32).view(torch.float32)
    found = torch.empty(len(some), dtype=torch.bfloat16)
    round_all(some.numpy(), numbers(found))
    expected = some.to(torch.bfloat16)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_loops_are_compiled_where_nothing_can_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    njit = numba.njit

    def cannot_keep(*, cache: bool = False, nogil: bool) -> object:
        if cache:
            raise RuntimeError("cannot cache function 'double': no locator available")
        return njit(nogil=nogil)

    monkeypatch.setattr(numba, "njit", cannot_keep)

    @compiled()
    def double(numbers: loops.Integers) -> None:
        numbers *= 2

    some = torch.arange(3)
    double(some.numpy())
    assert some.tolist() == [0, 2, 4]
