"""Find training lines that repeat, or nearly repeat, an earlier line of their pair.

Repeats: a digest of 8 bytes stands for both sides of a line. The digests go to a temporary file and
are compared in parts, so that memory grows only with the repeats: 16 bytes for each, 48 while they
are sorted, and one for every line.

Near repeats: both sides, folded (``normalization.fold``) and with every digit as 0, make one text
and its character n-grams a set. Lines whose sets have at least a certain Jaccard similarity repeat
each other. MinHash with locality-sensitive hashing (Broder, 1997; Leskovec, Rajaraman and Ullman,
Mining of Massive Datasets, §3.4) finds candidates: 8 bands of 4 minima find a line of similarity
0.8 with a probability of 98 %, one of 0.9 in all but 1 of 5,000 cases. Candidates are compared
exactly, so no line below the threshold is dropped.

In a large pair, lines that share a phrase make most lines candidates of many others: as many as a
line may have, though none is similar enough. A bit for each n-gram (``traits``) bounds the
similarity of two lines from above and rejects nearly all of these without reading their text, so
that the time is proportional to the lines. Sketches, links and traits are in temporary files, 232
bytes per line. Memory: a byte for each line, the part of a band that is sorted at a time, and a
block of lines.
"""

import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self

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
        return repeats_among(*part_of(self._path, part, parts))


def part_of(path: Path, part: int, parts: int) -> tuple[Digests, Numbers]:
    """Return the digests in a file that belong to a part, and the numbers of their lines."""
    digests, numbers, first = [np.empty(0, np.uint64)], [np.empty(0, np.int64)], 0
    with path.open("rb") as stream:
        while chunk := stream.read(8 * PART):
            digest_N = np.frombuffer(chunk, dtype=np.uint64)
            mine = np.flatnonzero(digest_N % np.uint64(parts) == part)
            digests.append(digest_N[mine])
            numbers.append(mine + first)
            first += len(digest_N)
    return np.concatenate(digests), np.concatenate(numbers)


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
TRAIT_BITS = 1024
"""Bits for the n-grams of a line. Lines of 240 n-grams have few bits in common, so that nearly all
of a similarity below 0.7 are told from those of 0.8."""
BAND_PART = 2**22
"""Lines of a band that are sorted at a time."""

_DIGIT = re.compile(r"\d")
_MASK = 2**64 - 1

Words = npt.NDArray[np.uint64]
Hashes = npt.NDArray[np.uint64]


class Sketches(NamedTuple):
    """Sketches of lines."""

    bands: Words
    """Hashes of the bands, (lines, bands)."""
    traits: Words
    """Number of n-grams, and bits of them, (lines, 1 + words)."""


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
    """Return the sketches of the lines of a block."""
    keys = [key_of(first, second) for first, second in lines]
    found = np.zeros((len(keys), BANDS), dtype=np.uint64)
    if not keys:
        return Sketches(found, np.zeros((0, 1 + TRAIT_BITS // 64), dtype=np.uint64))
    hashes, starts = _ngram_hashes(keys)
    constants = _hash_constants()
    for band in range(BANDS):
        for _ in range(MINIMA):
            factor, offset = next(constants), next(constants)
            minima = np.minimum.reduceat(hashes * (factor | np.uint64(1)) + offset, starts)
            found[:, band] = _mixed(found[:, band] * np.uint64(31) + minima)
    return Sketches(found, _traits(hashes, starts))


def _traits(hashes: Hashes, starts: Numbers) -> Words:
    """Return the number of n-grams of each key, and a bit for each of them."""
    counts = np.diff(starts, append=len(hashes))
    flags = np.zeros((len(starts), TRAIT_BITS), dtype=np.bool_)
    flags[np.repeat(np.arange(len(starts)), counts), hashes % np.uint64(TRAIT_BITS)] = True
    words = np.packbits(flags, axis=1).view(np.uint64)
    return np.concatenate([counts.astype(np.uint64)[:, None], words], axis=1)


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


class LineSketches:
    """Collects the sketches of a pair's lines in files of a new folder, and links equal bands.

    Args:
        folder: Temporary folder, removed at the end of the block.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._lines = folder, 0
        self._rule: NearDuplicates | None = None
        folder.mkdir()
        with ExitStack() as stack:
            self._bands = [
                stack.enter_context(self._band(band).open("wb")) for band in range(BANDS)
            ]
            self._traits = stack.enter_context((folder / "traits").open("wb"))
            self._streams = stack.pop_all()

    def _band(self, band: int) -> Path:
        return self._folder / f"band.{band}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._streams.close()
        if self._rule is not None:
            self._rule.close()
        shutil.rmtree(self._folder)

    def add(self, lines: Sequence[tuple[str, str]]) -> None:
        """Add the next lines."""
        self.add_sketches(sketches(lines))

    def add_sketches(self, found: Sketches) -> None:
        """Add the sketches of the next lines."""
        for stream, band_L in zip(self._bands, found.bands.T, strict=True):
            stream.write(band_L.tobytes())
        self._traits.write(found.traits.tobytes())
        self._lines += len(found.traits)

    def near_duplicates(
        self, *, threshold: float, line_at: Callable[[int], tuple[str, str]]
    ) -> "NearDuplicates":
        """Return the rule for all lines added, which is valid within the block.

        Args:
            threshold: Least Jaccard similarity of a repeat.
            line_at: Function from the number of an earlier line to its two sides.
        """
        self._streams.close()
        size, none = 4 * BANDS * self._lines, b"\xff" * 2**16  # -1 as int32
        with (self._folder / "before").open("wb") as stream:
            # Written, not only mapped: a full disk is then an error and not a crash.
            for start in range(0, size, len(none)):
                stream.write(none[: size - start])
        before_BN = self._map("before", np.dtype(np.int32), (BANDS, self._lines), mode="r+")
        for band, before_N in enumerate(before_BN):
            link_equal(self._band(band), before_N)
            self._band(band).unlink()
        shape = self._lines, 1 + TRAIT_BITS // 64
        traits_NW = self._map("traits", np.dtype(np.uint64), shape, mode="r")
        self._rule = NearDuplicates(before_BN, traits_NW, threshold=threshold, line_at=line_at)
        return self._rule

    def _map(
        self, name: str, kind: np.dtype[Any], shape: tuple[int, int], *, mode: Literal["r", "r+"]
    ) -> npt.NDArray[Any]:
        """Map a file into memory, which the system can take back at any time."""
        if not self._lines:
            return np.empty(shape, kind)
        return np.asarray(np.memmap(self._folder / name, dtype=kind, mode=mode, shape=shape))


def link_equal(path: Path, before_N: npt.NDArray[np.int32]) -> None:
    """Fill in the last earlier line with the same digest in a file, for lines that have one."""
    parts = max(1, -(-len(before_N) // BAND_PART))
    for part in range(parts):
        digest_N, number_N = part_of(path, part, parts)
        order_N = np.argsort(digest_N, kind="stable")
        digest_N, number_N = digest_N[order_N], number_N[order_N]
        same = digest_N[1:] == digest_N[:-1]
        before_N[number_N[1:][same]] = number_N[:-1][same]


class NearDuplicates:
    """Near repeats of lines that were kept before them; asked line by line, in order.

    Args:
        before_BN: Last earlier line with the same band, (bands, lines); -1 if there is none.
        traits_NW: Traits of the lines.
        threshold: Least Jaccard similarity of a repeat.
        line_at: Function from the number of an earlier line to its two sides.
    """

    def __init__(
        self,
        before_BN: npt.NDArray[np.int32],
        traits_NW: Words,
        *,
        threshold: float,
        line_at: Callable[[int], tuple[str, str]],
    ) -> None:
        from pipeline.kernels.line_loops import settle_line, similar_before  # loads numba

        self._similar_before, self._settle_line = similar_before, settle_line
        self._before_BN, self._traits_NW = before_BN, traits_NW
        self._threshold = threshold
        self._line_at = line_at
        self._is_kept_N = np.zeros(before_BN.shape[1], dtype=np.uint8)
        self._found = np.empty(BANDS * CANDIDATES, dtype=np.int64)

    def is_repeated(self, number: int, first: str, second: str) -> bool:
        """Return whether a line nearly repeats a kept one; all before it must be settled."""
        similar = self._similar_before(
            number,
            self._before_BN,
            self._is_kept_N,
            self._traits_NW,
            self._threshold,
            CANDIDATES,
            self._found,
        )
        if not similar:
            return False
        own = ngrams(key_of(first, second))
        return any(
            similarity(own, ngrams(key_of(*self._line_at(candidate)))) >= self._threshold
            for candidate in sorted(self._found[:similar].tolist(), reverse=True)
        )

    def settle(self, number: int, *, kept: bool) -> None:
        """Record whether the next line is kept, so that later lines can repeat it."""
        self._settle_line(number, kept, self._before_BN, self._is_kept_N)

    def close(self) -> None:
        """Let go of mapped files, which NFS would not remove from their folder."""
        self._before_BN, self._traits_NW = self._before_BN[:, :0].copy(), self._traits_NW[:0].copy()
