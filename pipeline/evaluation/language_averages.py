"""Averages by what the languages are: family and script of the one that is not the pivot.

Into the pivot that is the source, else the target: so the families of Any → En are those of the
languages that are translated, and those of En → Any and zero-shot of the languages written.
"""

from collections.abc import Mapping, Sequence

from pipeline.evaluation.averages import mean_scores
from pipeline.evaluation.directions import DirectionProfile, Family
from pipeline.evaluation.scores import LanguageAverage, Scores, SystemScores
from pipeline.languages import Language, language


def average_by_language(
    systems: Sequence[SystemScores], *, profiles: Sequence[DirectionProfile], pivot: str | None
) -> list[LanguageAverage]:
    """One per kind of directions and language family, then per kind and script."""
    found = []
    for trait in ("family", "script"):
        members: dict[tuple[Family, str], list[str]] = {}
        for profile in profiles:
            named = _language(profile, pivot)
            value = named.family if trait == "family" else named.script
            members.setdefault((profile.family, value), []).append(str(profile.direction))
        found += [
            LanguageAverage(
                trait=trait,
                value=value,
                family=family,
                directions=len(names),
                systems={one.name: mean_scores(_of(one, names)) for one in systems},
            )
            for (family, value), names in sorted(members.items())
        ]
    return found


def _language(profile: DirectionProfile, pivot: str | None) -> Language:
    direction = profile.direction
    return language(direction.source if direction.target == pivot else direction.target)


def _of(system: SystemScores, names: Sequence[str]) -> list[Mapping[str, float]]:
    scores: list[Scores] = [system.directions[name].scores for name in names]
    return scores
