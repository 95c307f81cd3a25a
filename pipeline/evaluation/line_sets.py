"""Sets of parallel test lines: the lines of different pairs that are the same sentence.

Test sets such as FLORES-200, NTREX-128 and Bible verses have the same sentences in every language.
The scores of their directions vary together over sentences, so ``statistics`` draws their lines
together. Equal text on a side that two pairs share tells which lines are the same sentence:

- A line has a key on each side: its text, how often the side has that text, and which of these
  occurrences it is. A repeated short line thus agrees only with a side that repeats it as often.
- Two pairs are parallel if at least half of the lines of the shorter one have a key of the other,
  or by way of a third pair: de-fr and en-ja over de-en.
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
    lines = [len(next(iter(keys[pair].values()))) for pair in pairs]
    starts = np.cumsum([0, *lines]).tolist()
    holders: dict[tuple[str, Key], list[int]] = {}
    for pair, start in zip(pairs, starts, strict=False):
        for code, of_side in keys[pair].items():
            for number, key in enumerate(of_side, start=start):
                holders.setdefault((code, key), []).append(number)
    parents = list(range(sum(lines)))  # of a union-find forest
    # A bit per pair: sentences are joined only if they have none in common.
    members = [1 << place for place, count in enumerate(lines) for _ in range(count)]

    def root(line: int) -> int:
        while parents[line] != line:
            parents[line] = line = parents[parents[line]]
        return line

    for _, (first, *others) in sorted(holders.items(), key=lambda one: one[0][1].occurrences):
        for other in others:
            one, two = root(first), root(other)
            if one != two and not members[one] & members[two]:
                parents[two] = one
                members[one] |= members[two]
    _, sentences = np.unique([root(line) for line in range(len(parents))], return_inverse=True)
    parts = np.split(sentences.astype(np.int64), starts[1:-1])
    return LineSet(tuple(pairs), int(sentences.max()) + 1, dict(zip(pairs, parts, strict=True)))
