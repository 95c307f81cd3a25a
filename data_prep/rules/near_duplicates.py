"""Training lines that nearly repeat an earlier one of their pair: MinHash over character n-grams.

Both sides of a line, folded (``folding.fold``) and with every digit as 0, make one text, and the
n-grams of its characters a set. Lines whose sets have a Jaccard similarity of at least a threshold
repeat each other. Candidates are found by locality-sensitive hashing (Broder, 1997; Leskovec,
Rajaraman and Ullman, Mining of Massive Datasets, §3.4): 8 bands of 4 minima each, so that a line of
similarity 0.8 to an earlier one is found with a probability of 98 %, one of 0.9 always but for one
in 5,000. What is found is compared exactly: nothing is dropped that is not as similar as that.

Memory: about 180 bytes per training line of the pair at the most, and a block of lines.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice

import numpy as np
import numpy.typing as npt

from data_prep.folding import fold

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
