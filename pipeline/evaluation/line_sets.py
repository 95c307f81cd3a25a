"""Sets of parallel test lines: the lines of different pairs that are the same sentence.

Test sets such as FLORES-200, NTREX-128 and Bible verses have the same sentences in every language.
The scores of their directions then vary together over sentences, and an average over directions has
a wider confidence interval than one over independent lines. ``significance`` therefore draws the
lines of parallel test sets together.

Nothing in a corpus states that two lines are the same sentence; it follows from equal text on a
side that two pairs share:

- A line has a key on each side: its text, how often the side has that text, and which of these
  occurrences it is. A repeated short line thus agrees only with a side that repeats it as often.
- Two pairs are parallel if at least half of the lines of the shorter one have a key that the other
  has, too, in a language of both. Pairs that are parallel to a third one share its line set: de-fr
  and en-ja by way of de-en.
- Within a set, lines with a common key are one sentence, unless that would put two lines of a pair
  into one. Keys of texts that occur once are taken first.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.corpus import read_lines

Places = npt.NDArray[np.int64]
LEAST_SHARED = 0.5
"""Share of the lines of the shorter of two test sets that parallel ones have in common."""


@dataclass(frozen=True)
class Sentences:
    """The sentences of a line set that the lines of one pair are."""

    of_lines: Places
    """Sentence of every line, (lines,)."""
    total: int
    """Number of sentences of the whole set."""


@dataclass(frozen=True)
class LineSet:
    """Pairs whose test lines are drawn together."""

    pairs: tuple[str, ...]
    sentences: int
    """Number of different sentences in the lines of all pairs."""
    of_lines: Mapping[str, Places]
    """Pair → sentence of every line, (lines,)."""

    def of_pair(self, pair: str) -> Sentences:
        """Return the sentences of the lines of one pair."""
        return Sentences(self.of_lines[pair], self.sentences)


class Key(NamedTuple):
    """Text of a line on one side, with its place among the equal lines of that side."""

    occurrences: int
    occurrence: int
    text: str


Sides = Mapping[str, Mapping[str, Sequence[str]]]
"""Pair → language → lines."""


def find_line_sets(corpus: Artifact, pairs: Sequence[str]) -> list[LineSet]:
    """Return the sets of parallel test sets among some pairs of a corpus."""
    if len(pairs) < 2:
        return []
    return group_lines(
        {
            pair: {code: read_lines(corpus, "test", pair, code) for code in pair.split("-")}
            for pair in pairs
        }
    )


def group_lines(sides: Sides) -> list[LineSet]:
    """Return the sets of at least two parallel pairs, in the order of their first pairs."""
    keys = {
        pair: {code: line_keys(lines) for code, lines in texts.items()}
        for pair, texts in sides.items()
    }
    return [_line_set(members, keys) for members in _parallel_pairs(keys) if len(members) > 1]


def line_keys(lines: Sequence[str]) -> list[Key]:
    """Return the key of every line of a side."""
    occurrences, seen = Counter(lines), Counter[str]()
    found = []
    for text in lines:
        found.append(Key(occurrences[text], seen[text], text))
        seen[text] += 1
    return found


_Keys = Mapping[str, Mapping[str, Sequence[Key]]]
"""Pair → language → keys of its lines."""


def _parallel_pairs(keys: _Keys) -> list[list[str]]:
    """Group pairs that are parallel, directly or by way of others."""
    groups = {pair: [pair] for pair in keys}
    for code in dict.fromkeys(code for sides in keys.values() for code in sides):
        texts = {pair: set(sides[code]) for pair, sides in keys.items() if code in sides}
        for one, other in combinations(texts, 2):
            if groups[one] is groups[other]:
                continue
            common = len(texts[one] & texts[other])
            if common >= LEAST_SHARED * min(len(texts[one]), len(texts[other])):
                groups[one] += groups[other]
                groups.update(dict.fromkeys(groups[other], groups[one]))
    return list({id(members): members for members in groups.values()}.values())


def _line_set(pairs: Sequence[str], keys: _Keys) -> LineSet:
    """Return which lines of parallel pairs are one sentence."""
    lines = {pair: len(next(iter(keys[pair].values()))) for pair in pairs}
    starts = dict(zip(pairs, np.cumsum([0, *lines.values()]).tolist(), strict=False))
    holders: dict[tuple[str, Key], list[int]] = {}
    for pair in pairs:
        for code, of_side in keys[pair].items():
            for number, key in enumerate(of_side, start=starts[pair]):
                holders.setdefault((code, key), []).append(number)
    joined = _Joined(np.repeat(np.arange(len(pairs)), list(lines.values())).tolist())
    for _, (first, *others) in sorted(holders.items(), key=lambda one: one[0][1].occurrences):
        for other in others:
            joined.join(first, other)
    numbers: dict[int, int] = {}
    sentences = np.array(
        [
            numbers.setdefault(joined.root(line), len(numbers))
            for line in range(sum(lines.values()))
        ],
        dtype=np.int64,
    )
    return LineSet(
        pairs=tuple(pairs),
        sentences=len(numbers),
        of_lines={pair: sentences[starts[pair] : starts[pair] + lines[pair]] for pair in pairs},
    )


class _Joined:
    """Lines joined to sentences, none of which has two lines of a pair (union-find)."""

    def __init__(self, pairs: Sequence[int]) -> None:
        """Start with a sentence for every line, given the number of its pair."""
        self._parents = list(range(len(pairs)))
        # A bit per pair: sentences are joined only if they have none in common.
        self._pairs = [1 << pair for pair in pairs]

    def root(self, line: int) -> int:
        """Return the line that stands for the sentence of a line."""
        while self._parents[line] != line:
            self._parents[line] = line = self._parents[self._parents[line]]
        return line

    def join(self, one: int, other: int) -> None:
        """Make two lines one sentence, unless it had two lines of a pair."""
        first, second = self.root(one), self.root(other)
        if first != second and not self._pairs[first] & self._pairs[second]:
            self._parents[second] = first
            self._pairs[first] |= self._pairs[second]
