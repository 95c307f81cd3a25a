"""Join the lines of two pairs over their equal pivot lines: de-en and en-fr become de-fr.

Pivot lines are equal if all their characters are. Of lines that occur several times, the k-th of
one pair joins the k-th of the other, and a joined pair is never larger than the smaller of the two.
Joined lines keep the order of the pair with the first language.

Memory: 16 bytes per joined line, 1 byte per line of the second pair, and the digests of one part of
the lines.

Legend: N lines, U shared digests, L joined lines.
"""

from array import array
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from tempfile import TemporaryFile
from typing import BinaryIO, NamedTuple

import numpy as np

from data_prep.pair_rules import Digests, LineDigests, Numbers
from pipeline.artifacts.corpus import aligned_lines, iterate_lines

BLOCK_LINES = 2048


class PivotedText(NamedTuple):
    """Files with the lines of a language and of the pivot."""

    text: Path
    pivot: Path


def write_joined(first: PivotedText, second: PivotedText, outputs: tuple[Path, Path]) -> None:
    """Write the lines of two languages that have equal pivot lines."""
    with ExitStack() as stack:
        streams = [stack.enter_context(path.open("rb")) for path in second]
        stored = StoredLines(streams[0], streams[1])
        one, other = (
            stack.enter_context(path.open("w", encoding="utf-8", newline="\n")) for path in outputs
        )
        matched = iter(_matches(first, second, folder=outputs[0].parent))
        following = next(matched, None)
        for number, (text, pivot) in enumerate(aligned_lines(*first)):
            if following is None:
                return
            if number < following[0]:
                continue
            translation, its_pivot = (stored.read(side, following[1]) for side in (0, 1))
            if its_pivot == pivot:  # else two pivot lines have one digest
                one.write(text + "\n")
                other.write(translation + "\n")
            following = next(matched, None)


def _matches(first: PivotedText, second: PivotedText, *, folder: Path) -> Iterable[tuple[int, int]]:
    """Return the numbers of lines with pivot lines of one digest, ascending in the first pair."""
    with TemporaryFile(dir=folder) as one_file, TemporaryFile(dir=folder) as other_file:
        one, other = LineDigests(one_file), LineDigests(other_file)
        for pivoted, digests in ((first, one), (second, other)):
            lines = iterate_lines(pivoted.pivot)
            while block := list(islice(lines, BLOCK_LINES)):
                digests.add(block)
        parts = max(one.parts, other.parts)
        found = [
            equal_lines(one.part(part, parts), other.part(part, parts)) for part in range(parts)
        ]
    number_L, other_L = (np.concatenate(numbers) for numbers in zip(*found, strict=True))
    order_L = np.argsort(number_L)
    return zip(number_L[order_L].tolist(), other_L[order_L].tolist(), strict=True)


def equal_lines(
    first: tuple[Digests, Numbers], second: tuple[Digests, Numbers]
) -> tuple[Numbers, Numbers]:
    """Return the numbers of lines with equal digests: the k-th of one with the k-th of the other.

    Args:
        first: Digests, and the number of each line, ascending.
        second: The same of other lines.
    """
    one, other = _by_digest(*first), _by_digest(*second)
    _, place_U, other_U = np.intersect1d(
        one.digests, other.digests, assume_unique=True, return_indices=True
    )
    shared_U = np.minimum(one.counts[place_U], other.counts[other_U])
    # k counts the lines of each shared digest from 0.
    k_L = np.arange(shared_U.sum()) - np.repeat(np.cumsum(shared_U) - shared_U, shared_U)
    return (
        one.numbers[np.repeat(one.starts[place_U], shared_U) + k_L],
        other.numbers[np.repeat(other.starts[other_U], shared_U) + k_L],
    )


class _ByDigest(NamedTuple):
    """Numbers of lines, sorted by digest, with the start and count of each digest's lines."""

    numbers: Numbers
    digests: Digests
    starts: Numbers
    counts: Numbers


def _by_digest(digest_N: Digests, number_N: Numbers) -> _ByDigest:
    order_N = np.argsort(digest_N, kind="stable")
    found = np.unique(digest_N[order_N], return_index=True, return_counts=True)
    return _ByDigest(number_N[order_N], *found)


STEP = 16
"""Lines from one known place in a file to the next."""


class StoredLines:
    """Lines of two files by number, with a byte in memory per line."""

    def __init__(self, first: BinaryIO, second: BinaryIO) -> None:
        self._streams = first, second
        self._starts = [array("q", islice(_starts(one), 0, None, STEP)) for one in self._streams]

    def read(self, side: int, number: int) -> str:
        """Return one side of a line."""
        stream = self._streams[side]
        stream.seek(self._starts[side][number // STEP])
        for _ in range(number % STEP):
            stream.readline()
        return stream.readline().decode("utf-8").removesuffix("\n")


def _starts(stream: BinaryIO) -> Iterator[int]:
    """Yield the offset of each line of a file."""
    start = 0
    for line in stream:
        yield start
        start += len(line)
