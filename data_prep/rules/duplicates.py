"""Training lines that repeat an earlier one of their pair, told before any of them is judged.

A digest of 8 bytes stands for both sides of a line. The digests go to a file that is removed again,
and are compared a part at a time, so that memory grows with the repeats alone: 16 bytes for each,
48 while they are sorted, and one for every line.
"""

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from data_prep.rules.held_out import digest_of

PART, MOST_PARTS = 2**19, 64
"""Digests that are compared at a time, about; more of them where there would be more parts."""

Digests = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]


class Duplicates:
    """Which lines read like one that was let pass before them; asked line by line, in order.

    Args:
        repeats: numbers of the lines that read like an earlier one, ascending.
        firsts: of each, the number of the first line that reads so.
        lines: of the pair.
    """

    def __init__(self, repeats: Numbers, firsts: Numbers, *, lines: int) -> None:
        self._repeats, self._firsts = repeats, firsts
        self._next = 0
        self._has_passed = bytearray(lines)

    def is_repeated(self, number: int) -> bool:
        """Whether a line repeats one that was asked for before it; numbers are given ascending."""
        while self._next < len(self._repeats) and self._repeats[self._next] < number:
            self._next += 1
        is_repeat = self._next < len(self._repeats) and self._repeats[self._next] == number
        first = int(self._firsts[self._next]) if is_repeat else number
        repeated = bool(self._has_passed[first])
        self._has_passed[first] = True
        return repeated


class LineDigests:
    """Collects the lines of a pair, and finds those that repeat another."""

    def __init__(self, path: Path) -> None:
        """``path``: of a file of 8 bytes per line, which is there as long as this."""
        self._path, self._lines = path, 0
        self._file = path.open("wb")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
        self._path.unlink()

    def add(self, lines: Sequence[tuple[str, str]]) -> None:
        """The next lines, as they are compared."""
        self._file.write(b"".join([digest_of(f"{one}\n{other}") for one, other in lines]))
        self._lines += len(lines)

    def duplicates(self) -> Duplicates:
        self._file.flush()
        parts = min(max(1, round(self._lines / PART)), MOST_PARTS)
        found = [self._within(part, parts) for part in range(parts)]
        repeats, firsts = (np.concatenate(one) for one in zip(*found, strict=True))
        order = np.argsort(repeats)
        return Duplicates(repeats[order], firsts[order], lines=self._lines)

    def _within(self, part: int, parts: int) -> tuple[Numbers, Numbers]:
        """The repeats among the digests that fall to one part, and their firsts."""
        digests, numbers, first = [], [], 0
        with self._path.open("rb") as stream:
            while chunk := stream.read(8 * PART):
                digest_N = np.frombuffer(chunk, dtype=np.uint64)
                mine = np.flatnonzero(digest_N % np.uint64(parts) == part)
                digests.append(digest_N[mine])
                numbers.append(mine + first)
                first += len(digest_N)
        if not digests:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        return repeats_among(np.concatenate(digests), np.concatenate(numbers))


def repeats_among(digest_N: Digests, number_N: Numbers) -> tuple[Numbers, Numbers]:
    """Numbers of the lines that are not the first with their digest, and of those that are."""
    order_N = np.argsort(digest_N, kind="stable")
    digest_N, number_N = digest_N[order_N], number_N[order_N]
    is_first_N = np.ones(len(digest_N), dtype=np.bool_)
    is_first_N[1:] = digest_N[1:] != digest_N[:-1]
    group_N = np.cumsum(is_first_N) - 1
    repeats = ~is_first_N
    return number_N[repeats], number_N[is_first_N][group_N[repeats]]
