"""Averages of scores: arithmetic means over directions, per family and resource group."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

from pipeline.evaluation.directions import DirectionProfile, Family, Group
from pipeline.evaluation.scores import Scores

Value = TypeVar("Value")


def mean_scores(scores: Sequence[Scores]) -> Scores:
    """Arithmetic means over directions, of each score over those that have it."""
    names = dict.fromkeys(name for one in scores for name in one)
    return {name: _mean([one[name] for one in scores if name in one]) for name in names}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def by_group(
    values: Mapping[str, Value], *, profiles: Sequence[DirectionProfile]
) -> dict[Family, dict[Group, list[Value]]]:
    """Values of directions by family and resource group; groups without a value are left out."""
    found: dict[Family, dict[Group, list[Value]]] = {}
    for profile in profiles:
        name = str(profile.direction)
        if name not in values:
            continue
        groups = found.setdefault(profile.family, {})
        groups.setdefault("all", []).append(values[name])
        if profile.resource is not None:
            groups.setdefault(profile.resource, []).append(values[name])
    return found


def average_scores(
    scores: Mapping[str, Scores], *, profiles: Sequence[DirectionProfile]
) -> dict[Family, dict[Group, Scores]]:
    """Mean scores per family and resource group."""
    return {
        family: {group: mean_scores(values) for group, values in groups.items()}
        for family, groups in by_group(scores, profiles=profiles).items()
    }
