"""Directions of an evaluation, with their training family and amount of training data.

The family of a direction states how it was trained: into the pivot, out of the pivot, without it,
or not at all. It follows from the corpus that the systems were trained on, which may differ from
the corpus with the scored test lines.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.corpus import (
    Direction,
    Resource,
    directions,
    directions_of,
    emptied_pairs,
    imported_lines,
    is_synthetic,
    joined_lines,
    language_of,
    line_counts,
    resource_of,
)

Family = Literal[
    "into_pivot", "out_of_pivot", "other", "pivot_joined", "zero_shot", "emptied", "unknown"
]
"""Trained into the pivot, out of it, or without it, on lines of its own or on lines joined over a
pivot; not trained (zero-shot, or emptied: cleaning left no line of the pair); unknown if no given
corpus has training lines."""
Group = Literal["all", Resource]

FAMILIES: tuple[Family, ...] = get_args(Family)  # order of families in every table, panel and list
GROUPS: tuple[Group, ...] = get_args(Group)


@dataclass(frozen=True)
class DirectionProfile:
    """Training and test data of a direction."""

    direction: Direction
    family: Family
    resource: Resource | None
    """Resource group by the imported training lines of the pair; None if none are left."""
    training_lines: int  # natural lines of the pair
    test_lines: int
    synthetic_lines: int = 0  # lines with a side that a machine wrote, which train this direction


def find_pivot(training_pairs: Iterable[str]) -> str | None:
    """Return the language that is in every training pair, or None.

    A single pair has two such languages; the pivot is English if the pair has it, else None.
    """
    pairs = set(training_pairs)
    membership = Counter(code for pair in pairs for code in pair.split("-"))
    candidates = [code for code, count in membership.items() if count == len(pairs)]
    if len(candidates) == 1:
        return candidates[0]
    return "en" if "en" in candidates else None


def pivot_of(training: Artifact) -> str | None:
    """Return the pivot of a corpus, apart from pairs that were joined over one or synthetic."""
    pairs = set(line_counts(training, "train")) - set(joined_lines(training))
    return find_pivot(pair for pair in pairs if not is_synthetic(pair))


def describe_directions(
    corpus: Artifact, *, thresholds: tuple[int, ...], training: Artifact | None = None
) -> list[DirectionProfile]:
    """Return the directions with test lines, sorted; ``training`` is the corpus of the systems."""
    training = training or corpus
    lines, test = line_counts(training, "train"), line_counts(corpus, "test")
    pivot, emptied = pivot_of(training), emptied_pairs(training)
    joined = joined_lines(training)
    imported = imported_lines(training)
    made = Counter[Direction]()
    for pair in filter(is_synthetic, lines):
        for one in directions_of(pair):
            if one.suits_marks:
                made[Direction(language_of(one.source), language_of(one.target))] += lines[pair]

    def family(direction: Direction) -> Family:
        if not lines:
            return "unknown"
        if direction.pair not in lines and direction not in made:
            return "emptied" if direction.pair in emptied else "zero_shot"
        if direction.pair in joined:
            return "pivot_joined"
        if pivot not in (direction.source, direction.target):
            return "other"
        return "into_pivot" if direction.target == pivot else "out_of_pivot"

    return [
        DirectionProfile(
            direction=direction,
            family=family(direction),
            resource=(
                resource_of(imported[direction.pair], thresholds=thresholds)
                if direction.pair in lines
                else None
            ),
            training_lines=lines.get(direction.pair, 0),
            test_lines=test[direction.pair],
            synthetic_lines=made[direction],
        )
        for direction in directions(corpus, "test")
    ]


def title_of_family(family: Family, *, pivot: str | None) -> str:
    """Return the title of a family of directions around a pivot."""
    pivot = (pivot or "pivot").capitalize()
    titles: dict[Family, str] = {
        "into_pivot": f"Any → {pivot}",
        "out_of_pivot": f"{pivot} → Any",
        "other": "Other trained",
        "pivot_joined": "Joined over a pivot",
        "zero_shot": "Zero-shot",
        "emptied": "No training data left",
        "unknown": "Training data unknown",
    }
    return titles[family]
