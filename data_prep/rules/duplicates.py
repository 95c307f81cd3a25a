"""S"""

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from data_prep.rules.normalization import digest_of, fold

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


NGRAM = 5
"""Characters."""
BANDS, MINIMA = 8, 4
"""Bands of a sketch, and minima that are hashed into one."""
CANDIDATES = 8
"""Earlier lines, the latest ones, that a line is compared with per band."""
SEED = 1
"""Of the hash functions."""

_DIGIT = re.compile(r"\d")
_MASK = 2**64 - 1

Sketches = npt.NDArray[np.uint64]
"""(lines, bands)"""
Hashes = npt.NDArray[np.uint64]


def key_of(first: str, second: str) -> str:
    """The text of a line whose n-grams count."""
    return _DIGIT.sub("0", f"{fold(first)}\n{fold(second)}").ljust(NGRAM, "\0")


def ngrams(key: str) -> frozenset[str]:
    """The n-grams of a text."""
    return frozenset(key[place : place + NGRAM] for place in range(len(key) - NGRAM + 1))


def similarity(one: frozenset[str], other: frozenset[str]) -> float:
    """Jaccard similarity of two sets that are not both empty."""
    shared = len(one & other)
    return shared / (len(one) + len(other) - shared)


def sketches(lines: Sequence[tuple[str, str]]) -> Sketches:
    """The bands of each line of a block, (lines, bands)."""
    keys = [key_of(first, second) for first, second in lines]
    if not keys:
        return np.empty((0, BANDS), dtype=np.uint64)
    hashes, starts = _ngram_hashes(keys)
    found = np.zeros((len(keys), BANDS), dtype=np.uint64)
    constants = _hash_constants()
    for band in range(BANDS):
        for _ in range(MINIMA):
            factor, offset = next(constants), next(constants)
            minima = np.minimum.reduceat(hashes * (factor | np.uint64(1)) + offset, starts)
            found[:, band] = _mixed(found[:, band] * np.uint64(31) + minima)
    return found


def _ngram_hashes(keys: Sequence[str]) -> tuple[Hashes, npt.NDArray[np.int64]]:
    """A hash of every n-gram of every key, and where those of each key begin."""
    codes = np.frombuffer("".join(keys).encode("utf-32-le"), dtype=np.uint32).astype(np.uint64)
    lengths = np.fromiter(map(len, keys), dtype=np.int64, count=len(keys))
    hashes = np.zeros(len(codes) - NGRAM + 1, dtype=np.uint64)
    for place in range(NGRAM):
        hashes = hashes * np.uint64(0x100000001B3) + codes[place : place + len(hashes)]
    ends = np.cumsum(lengths)
    within = np.ones(len(hashes), dtype=np.bool_)
    for place in range(1, NGRAM):
        within[ends[:-1] - place] = False  # n-grams that reach into the next key
    counts = lengths - NGRAM + 1
    return _mixed(hashes[within]), np.cumsum(counts) - counts


def _mixed(values: Hashes) -> Hashes:
    """The finaliser of splitmix64, which spreads every bit over all."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _hash_constants() -> Iterator[np.uint64]:
    """The numbers of splitmix64 from the seed on."""
    for step in count(1):
        state = np.array([(SEED + step * 0x9E3779B97F4A7C15) & _MASK], dtype=np.uint64)
        yield _mixed(state)[0]


class NearDuplicates:
    """Which lines nearly repeat a line that was kept before them; asked line by line, in order.

    Args:
        blocks: sketches of all lines of the pair, in their order.
        threshold: Jaccard similarity from which on a line repeats another.
        line_at: the two sides of an earlier line, by its number.
    """

    def __init__(
        self,
        blocks: Sequence[Sketches],
        *,
        threshold: float,
        line_at: Callable[[int], tuple[str, str]],
    ) -> None:
        self._threshold = threshold
        self._line_at = line_at
        self._before = _line_before(np.concatenate(blocks))
        self._is_kept = bytearray(len(self._before))

    def is_repeated(self, number: int, first: str, second: str) -> bool:
        """Whether a line nearly repeats one that was kept; all before it are settled."""
        candidates = self._candidates(number)
        if not candidates:
            return False
        own = ngrams(key_of(first, second))
        return any(
            similarity(own, ngrams(key_of(*self._line_at(candidate)))) >= self._threshold
            for candidate in candidates
        )

    def settle(self, number: int, *, kept: bool) -> None:
        """Say of the next line whether it stays: others may repeat it then."""
        self._is_kept[number] = kept
        before = self._before[number]
        for band, earlier in enumerate(before.tolist()):
            if earlier >= 0 and not self._is_kept[earlier]:
                before[band] = self._before[earlier, band]  # where that one's kept one is

    def _candidates(self, number: int) -> list[int]:
        """Kept lines that share a band, the latest first; at most so many per band."""
        found: set[int] = set()
        for band in range(BANDS):
            found.update(islice(self._kept_before(number, band), CANDIDATES))
        return sorted(found, reverse=True)

    def _kept_before(self, number: int, band: int) -> Iterator[int]:
        earlier = int(self._before[number, band])
        while earlier >= 0:
            if self._is_kept[earlier]:
                yield earlier
            earlier = int(self._before[earlier, band])


def _line_before(found: Sketches) -> npt.NDArray[np.int32]:
    """(lines, bands): the last line before with the same band; -1 where there is none."""
    before = np.full(found.shape, -1, dtype=np.int32)
    for band in range(found.shape[1]):
        order = np.argsort(found[:, band], kind="stable")
        same = found[order[1:], band] == found[order[:-1], band]
        before[order[1:][same], band] = order[:-1][same]
    return before
