"""Averages by what the languages are: family, script and named sets of the one that is not the
pivot.

Into the pivot that is the source, else the target: so the families of Any → En are those of the
languages that are translated, and those of En → Any and zero-shot of the languages written.
"""

from collections.abc import Collection, Mapping, Sequence

from pipeline.evaluation.averages import mean_scores
from pipeline.evaluation.directions import DirectionProfile, Family
from pipeline.evaluation.scores import LanguageAverage, Scores, SystemScores
from pipeline.languages import language, without_region


def average_by_language(
    systems: Sequence[SystemScores],
    *,
    profiles: Sequence[DirectionProfile],
    pivot: str | None,
    sets: Mapping[str, Collection[str]] | None = None,
) -> list[LanguageAverage]:
    """One per kind of directions and language family, then per kind and script, then per kind and
    set: name → codes, in any usual spelling.
    """
    present = {language(_code(profile, pivot)).code for profile in profiles}
    by_set = {
        name: {_code_among(present, code) for code in codes} for name, codes in (sets or {}).items()
    }
    found = []
    for trait in ("family", "script", "set"):
        members: dict[tuple[Family, str], list[str]] = {}
        for profile in profiles:
            for value in _values(trait, _code(profile, pivot), by_set):
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


def _values(trait: str, code: str, sets: Mapping[str, Collection[str]]) -> list[str]:
    """What a language has of a trait: one family, one script, any number of sets."""
    match trait:
        case "family":
            return [language(code).family]
        case "script":
            return [language(code).script]
        case _:
            return [name for name, codes in sets.items() if language(code).code in codes]


def _code_among(present: Collection[str], spelling: str) -> str:
    """The code of a spelling, without its region where that is not told apart."""
    code = language(spelling).code
    return code if code in present else without_region(code)


def _code(profile: DirectionProfile, pivot: str | None) -> str:
    direction = profile.direction
    return direction.source if direction.target == pivot else direction.target


def _of(system: SystemScores, names: Sequence[str]) -> list[Mapping[str, float]]:
    scores: list[Scores] = [system.directions[name].scores for name in names]
    return scores
