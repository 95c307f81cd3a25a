"""Sets of parallel test lines: the lines of different pairs that are the same sentence.

Test sets such as FLORES-200, NTREX-128 and Bible verses have the same sentences in every language.
The scores of their directions vary together over sentences, so ``statistics`` draws their lines
together. Equal text on a side that two pairs share tells which lines are the same sentence:

- A line has a key on each side: its text, how often the side has that text, and which of these
  occurrences it is. A repeated short line thus agrees only with a side that repeats it as often.
- Two pairs are parallel if at least half of the lines of the shorter pair have a key of the other,
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
LEAST_SHARED = 0.5  # of the lines of the shorter of two parallel test sets


class Sentences(NamedTuple):
    """The sentence of every line of a pair, (lines,), and the number of sentences of its set."""

    of_lines: Places
    total: int


@dataclass(frozen=True)
class LineSet:
    """Pairs with test lines that are drawn together."""

    pairs: tuple[str, ...]
    sentences: int  # number of different sentences in the lines of all pairs
    of_lines: Mapping[str, Places]  # pair → sentence of every line, (lines,)


class Key(NamedTuple):
    """Text of a line on one side, with its place among the equal lines of that side."""

    occurrences: int
    occurrence: int
    text: str


_Keys = Mapping[str, Mapping[str, Sequence[Key]]]  # pair → language → keys of its lines


def find_line_sets(corpus: Artifact, pairs: Sequence[str]) -> list[LineSet]:
    """Return the sets of parallel test sets among some pairs of a corpus."""
    if len(pairs) < 2:
        return []
    sides = {
        pair: {c: read_lines(corpus, "test", pair, c) for c in pair.split("-")} for pair in pairs
    }
    return group_lines(sides)


def group_lines(sides: Mapping[str, Mapping[str, Sequence[str]]]) -> list[LineSet]:
    """Return the sets of at least two parallel pairs, in the order of their first pairs.

    ``sides`` is pair → language → lines.
    """
    keys = {
        pair: {code: _line_keys(lines) for code, lines in texts.items()}
        for pair, texts in sides.items()
    }
    groups = {pair: [pair] for pair in keys}
    for code in dict.fromkeys(code for found in keys.values() for code in found):
        texts = {pair: set(found[code]) for pair, found in keys.items() if code in found}
        for one, other in combinations(texts, 2):
            least = LEAST_SHARED * min(len(texts[one]), len(texts[other]))
            is_apart = groups[one] is not groups[other]
            if is_apart and len(texts[one] & texts[other]) >= least:
                groups[one] += groups[other]
                groups.update(dict.fromkeys(groups[other], groups[one]))
    members = {id(group): group for group in groups.values()}.values()
    return [_line_set(group, keys) for group in members if len(group) > 1]


def _line_keys(lines: Sequence[str]) -> list[Key]:
    occurrences, seen = Counter(lines), Counter[str]()
    found = []
    for text in lines:
        found.append(Key(occurrences[text], seen[text], text))
        seen[text] += 1
    return found


def _line_set(pairs: Sequence[str], keys: _Keys) -> LineSet:
    """Return which lines of parallel pairs are one sentence."""
    sizes = [len(next(iter(keys[pair].values()))) for pair in pairs]
    starts = np.cumsum([0, *sizes]).tolist()
    holders: dict[tuple[str, Key], list[int]] = {}
    for pair, start in zip(pairs, starts, strict=False):
        for code, of_side in keys[pair].items():
            for number, key in enumerate(of_side, start=start):
                holders.setdefault((code, key), []).append(number)
    parents = list(range(sum(sizes)))  # of a union-find forest
    # A bit per pair: sentences are joined only if they have none in common.
    members = [1 << place for place, count in enumerate(sizes) for _ in range(count)]

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
