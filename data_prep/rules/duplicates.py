"""Find training lines that repeat an earlier line of their pair.

A digest of 8 bytes stands for both sides of a line. The digests go to a temporary file and are
compared in parts, so memory grows only with the repeats: 16 bytes for each, 48 while they are
sorted, and one for every line.
"""

import hashlib
from collections.abc import Sequence
from typing import IO

import numpy as np
import numpy.typing as npt

PART, MOST_PARTS = 2**19, 64
"""Digests compared at a time, and the most parts; beyond that parts grow."""

Digests = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]


def digest_of(text: str) -> bytes:
    """Return eight bytes that stand for a text."""
    return hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest()


class Duplicates:
    """Repeats of lines that passed before them; asked line by line, in order.

    Args:
        repeats: Numbers of the lines that equal an earlier one, ascending.
        firsts: Number of the first equal line of each of them.
        lines: Lines of the pair.
    """

    def __init__(self, repeats: Numbers, firsts: Numbers, *, lines: int) -> None:
        self._repeats, self._firsts = repeats, firsts
        self._next = 0
        self._has_passed = bytearray(lines)

    def is_repeated(self, number: int) -> bool:
        """Return whether a line repeats one asked for before; numbers must ascend."""
        while self._next < len(self._repeats) and self._repeats[self._next] < number:
            self._next += 1
        is_repeat = self._next < len(self._repeats) and self._repeats[self._next] == number
        first = int(self._firsts[self._next]) if is_repeat else number
        repeated = bool(self._has_passed[first])
        self._has_passed[first] = True
        return repeated


class LineDigests:
    """Collects the digests of lines in a temporary file, 8 bytes each, and reads them in parts."""

    def __init__(self, file: IO[bytes]) -> None:
        self.lines, self._file = 0, file

    def add(self, lines: Sequence[str]) -> None:
        """Add the next lines in the form in which they are compared."""
        self._file.write(b"".join(map(digest_of, lines)))
        self.lines += len(lines)

    @property
    def parts(self) -> int:
        """Return the number of parts in which the digests fit into memory."""
        return min(max(1, round(self.lines / PART)), MOST_PARTS)

    def part(self, part: int, parts: int) -> tuple[Digests, Numbers]:
        """Return the digests that belong to a part, and the numbers of their lines."""
        digests, numbers, first = [np.empty(0, np.uint64)], [np.empty(0, np.int64)], 0
        self._file.seek(0)
        while chunk := self._file.read(8 * PART):
            digest_N = np.frombuffer(chunk, dtype=np.uint64)
            mine = np.flatnonzero(digest_N % np.uint64(parts) == part)
            digests.append(digest_N[mine])
            numbers.append(mine + first)
            first += len(digest_N)
        return np.concatenate(digests), np.concatenate(numbers)

    def duplicates(self) -> Duplicates:
        """Return the repeats among all lines added."""
        found = [repeats_among(*self.part(part, self.parts)) for part in range(self.parts)]
        repeats, firsts = (np.concatenate(one) for one in zip(*found, strict=True))
        order = np.argsort(repeats)
        return Duplicates(repeats[order], firsts[order], lines=self.lines)


def repeats_among(digest_N: Digests, number_N: Numbers) -> tuple[Numbers, Numbers]:
    """Return the numbers of lines that repeat a digest, and of the first lines with it."""
    order_N = np.argsort(digest_N, kind="stable")
    digest_N, number_N = digest_N[order_N], number_N[order_N]
    is_first_N = np.ones(len(digest_N), dtype=np.bool_)
    is_first_N[1:] = digest_N[1:] != digest_N[:-1]
    group_N = np.cumsum(is_first_N) - 1
    repeats = ~is_first_N
    return number_N[repeats], number_N[is_first_N][group_N[repeats]]
