"""F1 of named entities as seqeval and conlleval count them.

An entity is a kind and the tokens it covers; it is right if both are. A ``B-`` begins one, as does
an ``I-`` behind ``O`` or behind another kind. Precision, recall and F1 are over all entities of a
language ("micro"), in percent; where nothing is found, or nothing is there, they are 0.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

OUTSIDE = "O"


class Entity(NamedTuple):
    """Tokens [start, stop) of a sentence."""

    kind: str
    start: int
    stop: int


def entities(tags: Sequence[str]) -> Iterator[Entity]:
    """The entities of a sentence's tags, from left to right."""
    number, previous = 0, OUTSIDE
    numbered: list[tuple[int, str]] = []
    for tag in tags:
        begins = tag.startswith("B-") or tag[2:] != previous[2:]
        number += begins
        numbered.append((number, tag[2:]))
        previous = tag
    start = 0
    for (_, kind), group in groupby(numbered):
        stop = start + len(list(group))
        if kind:
            yield Entity(kind, start, stop)
        start = stop


@dataclass(frozen=True)
class EntityCounts:
    """Of a language: entities that are right, found, and there."""

    right: int
    found: int
    there: int

    def scores(self) -> dict[str, float]:
        """``f1``, ``precision`` and ``recall`` in percent."""
        precision = self.right / self.found if self.found else 0.0
        recall = self.right / self.there if self.there else 0.0
        both = precision + recall
        f1 = 2 * precision * recall / both if both else 0.0
        return {"f1": 100 * f1, "precision": 100 * precision, "recall": 100 * recall}


def count_entities(
    references: Sequence[Sequence[str]], predictions: Sequence[Sequence[str]]
) -> EntityCounts:
    """Of sentences' tags; both have the same sentences of the same lengths."""
    right = found = there = 0
    for reference, prediction in zip(references, predictions, strict=True):
        assert len(reference) == len(prediction)
        wanted, given = set(entities(reference)), set(entities(prediction))
        right += len(wanted & given)
        found += len(given)
        there += len(wanted)
    return EntityCounts(right, found, there)
