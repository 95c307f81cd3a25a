"""Averages of scores: arithmetic means over directions, per family and resource group."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

from pipeline.evaluation.directions import DirectionProfile, Family, Group
from pipeline.evaluation.language_accuracy import LanguageAccuracy
from pipeline.evaluation.scores import Scores

Value = TypeVar("Value")


def mean_scores(scores: Sequence[Scores]) -> Scores:
    """Arithmetic means over directions; language accuracy over those that have one."""
    known = [one.language_accuracy for one in scores if one.language_accuracy is not None]
    return Scores(
        bleu=_mean([one.bleu for one in scores]),
        chrf=_mean([one.chrf for one in scores]),
        language_accuracy=mean_accuracy(known) if known else None,
    )


def mean_accuracy(values: Sequence[LanguageAccuracy]) -> LanguageAccuracy:
    """Arithmetic means over directions."""
    return LanguageAccuracy(
        plain=_mean([one.plain for one in values]),
        restricted=_mean([one.restricted for one in values]),
    )


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


def average_accuracy(
    values: Mapping[str, LanguageAccuracy], *, profiles: Sequence[DirectionProfile]
) -> dict[Family, dict[Group, LanguageAccuracy]]:
    """Mean language accuracy per family and resource group."""
    return {
        family: {group: mean_accuracy(found) for group, found in groups.items()}
        for family, groups in by_group(values, profiles=profiles).items()
    }
