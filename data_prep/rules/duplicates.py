"""Find training lines that repeat, or nearly repeat, an earlier line of their pair.

Repeats: a digest of 8 bytes stands for both sides of a line. The digests go to a temporary file and
are compared in parts, so that memory grows only with the repeats: 16 bytes for each, 48 while they
are sorted, and one for every line.

Near repeats: both sides, folded (``normalization.fold``) and with every digit as 0, make one text
and its character n-grams a set. Lines whose sets have at least a certain Jaccard similarity repeat
each other. MinHash with locality-sensitive hashing (Broder, 1997; Leskovec, Rajaraman and Ullman,
Mining of Massive Datasets, §3.4) finds candidates: 8 bands of 4 minima find a line of similarity
0.8 with a probability of 98 %, one of 0.9 in all but 1 of 5,000 cases. Candidates are compared
exactly, so no line below the threshold is dropped. Memory: about 180 bytes per training line of the
pair, and a block of lines.
"""

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
"""Digests compared at a time, and the most parts; beyond that parts grow."""

Digests = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]


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
    """Collects the digests of a pair's lines, and finds those that repeat another.

    Args:
        path: Temporary file with 8 bytes per line, removed at the end of the block.
    """

    def __init__(self, path: Path) -> None:
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
        """Add the next lines in the form in which they are compared."""
        self._file.write(b"".join([digest_of(f"{one}\n{other}") for one, other in lines]))
        self._lines += len(lines)

    def duplicates(self) -> Duplicates:
        """Return the repeats among all lines added."""
        self._file.flush()
        parts = min(max(1, round(self._lines / PART)), MOST_PARTS)
        found = [self._within(part, parts) for part in range(parts)]
        repeats, firsts = (np.concatenate(one) for one in zip(*found, strict=True))
        order = np.argsort(repeats)
        return Duplicates(repeats[order], firsts[order], lines=self._lines)

    def _within(self, part: int, parts: int) -> tuple[Numbers, Numbers]:
        """Return the repeats among the digests of one part, and their first lines."""
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
    """Return the numbers of lines that repeat a digest, and those of its first lines."""
    order_N = np.argsort(digest_N, kind="stable")
    digest_N, number_N = digest_N[order_N], number_N[order_N]
    is_first_N = np.ones(len(digest_N), dtype=np.bool_)
    is_first_N[1:] = digest_N[1:] != digest_N[:-1]
    group_N = np.cumsum(is_first_N) - 1
    repeats = ~is_first_N
    return number_N[repeats], number_N[is_first_N][group_N[repeats]]


NGRAM = 5
"""Characters of an n-gram."""
BANDS, MINIMA = 8, 4
"""Bands of a sketch, and minima hashed into each band."""
CANDIDATES = 8
"""Latest earlier lines that a line is compared with per band."""
SEED = 1
"""Seed of the hash functions."""

_DIGIT = re.compile(r"\d")
_MASK = 2**64 - 1

Sketches = npt.NDArray[np.uint64]
"""Bands of lines, (lines, bands)."""
Hashes = npt.NDArray[np.uint64]


def key_of(first: str, second: str) -> str:
    """Return the text of a line whose n-grams count."""
    return _DIGIT.sub("0", f"{fold(first)}\n{fold(second)}").ljust(NGRAM, "\0")


def ngrams(key: str) -> frozenset[str]:
    """Return the n-grams of a text."""
    return frozenset(key[place : place + NGRAM] for place in range(len(key) - NGRAM + 1))


def similarity(one: frozenset[str], other: frozenset[str]) -> float:
    """Return the Jaccard similarity of two sets that are not both empty."""
    shared = len(one & other)
    return shared / (len(one) + len(other) - shared)


def sketches(lines: Sequence[tuple[str, str]]) -> Sketches:
    """Return the bands of each line of a block, (lines, bands)."""
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
    """Return a hash of every n-gram of every key, and the start of each key's hashes."""
    codes = np.frombuffer("".join(keys).encode("utf-32-le"), dtype=np.uint32).astype(np.uint64)
    lengths = np.fromiter(map(len, keys), dtype=np.int64, count=len(keys))
    hashes = np.zeros(len(codes) - NGRAM + 1, dtype=np.uint64)
    for place in range(NGRAM):
        hashes = hashes * np.uint64(0x100000001B3) + codes[place : place + len(hashes)]
    ends = np.cumsum(lengths)
    within = np.ones(len(hashes), dtype=np.bool_)
    for place in range(1, NGRAM):
        within[ends[:-1] - place] = False  # this n-gram reaches into the next key
    counts = lengths - NGRAM + 1
    return _mixed(hashes[within]), np.cumsum(counts) - counts


def _mixed(values: Hashes) -> Hashes:
    """Apply the finalizer of splitmix64, which spreads every bit over all."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _hash_constants() -> Iterator[np.uint64]:
    """Yield the numbers of splitmix64 from the seed on."""
    for step in count(1):
        state = np.array([(SEED + step * 0x9E3779B97F4A7C15) & _MASK], dtype=np.uint64)
        yield _mixed(state)[0]


class NearDuplicates:
    """Near repeats of lines that were kept before them; asked line by line, in order.

    Args:
        blocks: Sketches of all lines of the pair, in their order.
        threshold: Least Jaccard similarity of a repeat.
        line_at: Function from the number of an earlier line to its two sides.
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
        """Return whether a line nearly repeats a kept one; all before it must be settled."""
        candidates = self._candidates(number)
        if not candidates:
            return False
        own = ngrams(key_of(first, second))
        return any(
            similarity(own, ngrams(key_of(*self._line_at(candidate)))) >= self._threshold
            for candidate in candidates
        )

    def settle(self, number: int, *, kept: bool) -> None:
        """Record whether the next line is kept, so that later lines can repeat it."""
        self._is_kept[number] = kept
        before = self._before[number]
        for band, earlier in enumerate(before.tolist()):
            if earlier >= 0 and not self._is_kept[earlier]:
                before[band] = self._before[earlier, band]  # skip a line that was not kept

    def _candidates(self, number: int) -> list[int]:
        """Return kept lines that share a band, the latest first, limited per band."""
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
    """Return the last earlier line with the same band, (lines, bands); -1 if there is none."""
    before = np.full(found.shape, -1, dtype=np.int32)
    for band in range(found.shape[1]):
        order = np.argsort(found[:, band], kind="stable")
        same = found[order[1:], band] == found[order[:-1], band]
        before[order[1:][same], band] = order[:-1][same]
    return before
