"""Aggregates over directions: averages, verdicts, win ratios and confusion matrices.

A system that does not translate yet still has scores, and so has one that gives the same few
outputs for every source. A direction or an average is decided only if the baseline translates it.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

from pipeline.evaluation.directions import DirectionProfile, Family, Group
from pipeline.evaluation.score_slot import Column
from pipeline.evaluation.scores import (
    Confusion,
    Quality,
    Scores,
    SetAverage,
    SystemScores,
    Verdicts,
    Wins,
)
from pipeline.languages import language, without_region

Value = TypeVar("Value")


def mean_scores(scores: Sequence[Scores]) -> Scores:
    """Return arithmetic means over directions; each score over the directions that have it."""
    names = dict.fromkeys(name for one in scores for name in one)
    found = {name: [one[name] for one in scores if name in one] for name in names}
    return {name: sum(values) / len(values) for name, values in found.items()}


def by_group(
    values: Mapping[str, Value], *, profiles: Sequence[DirectionProfile]
) -> dict[Family, dict[Group, list[Value]]]:
    """Return the values of directions by family and resource group, without empty groups."""
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
    """Return mean scores per family and resource group."""
    return {
        family: {group: mean_scores(values) for group, values in groups.items()}
        for family, groups in by_group(scores, profiles=profiles).items()
    }


# Averages by sets of languages


def average_by_set(
    systems: Sequence[SystemScores],
    *,
    profiles: Sequence[DirectionProfile],
    pivot: str | None,
    sets: Mapping[str, Collection[str]],
) -> list[SetAverage]:
    """Return mean scores by set of languages and family of directions.

    The language is the source if the pivot is the target, else the target: averages of Any → En are
    over source languages, averages of En → Any and of zero-shot directions over target languages.

    Args:
        systems: with their scores.
        profiles: directions.
        pivot: language that all trained directions share, if there is one.
        sets: name of a set → language codes, in any usual spelling.
    """
    present = {language(_code(profile, pivot)).code for profile in profiles}
    members: dict[tuple[Family, str], list[str]] = {}
    for name, spellings in sets.items():
        codes = {language(one).code for one in spellings}
        # A code with a region also names the language without it, unless the directions have both.
        codes = {code if code in present else without_region(code) for code in codes}
        for profile in profiles:
            if language(_code(profile, pivot)).code in codes:
                members.setdefault((profile.family, name), []).append(str(profile.direction))
    return [
        SetAverage(
            name=name,
            family=family,
            directions=len(names),
            systems={
                one.name: mean_scores([one.directions[name].scores for name in names])
                for one in systems
            },
        )
        for (family, name), names in sorted(members.items())
    ]


def _code(profile: DirectionProfile, pivot: str | None) -> str:
    direction = profile.direction
    return direction.source if direction.target == pivot else direction.target


# Verdicts

LEAST_BLEU = 5.0
LEAST_DISTINCT = 50.0
"""Distinct outputs, in percent of the distinct sources."""
RULE = (
    f"A system translates where it has at least {LEAST_BLEU:g} BLEU and at least half as many "
    "distinct outputs as there are distinct sources."
)


def quality(*, bleu: float, distinct: float) -> Quality:
    """Judge a direction or an average by its BLEU and by the share of distinct outputs."""
    translates = bleu >= LEAST_BLEU and distinct >= LEAST_DISTINCT
    return Quality(bleu=bleu, distinct=distinct, translates=translates)


def distinct_share(outputs: Sequence[str], sources: Sequence[str]) -> float:
    """Return the distinct outputs in percent of the distinct sources; white space is ignored."""
    return 100.0 * _distinct(outputs) / max(_distinct(sources), 1)


def _distinct(texts: Sequence[str]) -> int:
    return len({" ".join(text.split()) for text in texts})


def judge(
    systems: Sequence[SystemScores], *, baseline: str, profiles: Sequence[DirectionProfile]
) -> Verdicts:
    """Judge every system in every direction and on average over every group of directions."""
    directions: dict[str, dict[str, Quality]] = {
        str(profile.direction): {
            one.name: one.directions[str(profile.direction)].quality for one in systems
        }
        for profile in profiles
    }
    averages: dict[Family, dict[Group, Mapping[str, Quality]]] = {
        family: {group: _mean_quality(members) for group, members in groups.items()}
        for family, groups in by_group(directions, profiles=profiles).items()
    }
    return Verdicts(baseline=baseline, directions=directions, averages=averages)


def _mean_quality(members: Sequence[Mapping[str, Quality]]) -> dict[str, Quality]:
    """Judge systems by the arithmetic means of their directions."""
    return {
        name: quality(
            bleu=sum(one[name].bleu for one in members) / len(members),
            distinct=sum(one[name].distinct for one in members) / len(members),
        )
        for name in members[0]
    }


# Comparison with the baseline


def win_ratios(
    systems: Sequence[SystemScores],
    *,
    baseline: str,
    columns: Sequence[Column],
    profiles: Sequence[DirectionProfile],
    verdicts: Verdicts,
) -> Wins | None:
    """Return the share of directions in which each system beats the baseline (Zhang et al. 2020).

    A tie is no win. None is returned if there is no other system.

    Args:
        systems: with their scores.
        baseline: name of the baseline.
        columns: scores; those without a better end are left out.
        profiles: directions.
        verdicts: directions that are not decided are left out.
    """
    (base,) = [one for one in systems if one.name == baseline]
    ranked = {
        one.name: 1.0 if one.larger_is_better else -1.0
        for one in columns
        if one.larger_is_better is not None
    }
    decided = [str(one.direction) for one in profiles if verdicts.decides(str(one.direction))]
    shares = {}
    for system in systems:
        won: dict[str, Scores] = {}
        for name in decided:
            ours, theirs = system.directions[name].scores, base.directions[name].scores
            won[name] = {
                column: 100.0 * (sign * ours[column] > sign * theirs[column])
                for column, sign in ranked.items()
                if column in ours and column in theirs
            }
        if system is not base:
            shares[system.name] = average_scores(won, profiles=profiles)
    return Wins(baseline, shares) if shares else None


# Output languages


def confuse_languages(
    systems: Sequence[SystemScores], *, profiles: Sequence[DirectionProfile]
) -> Confusion:
    """Return the number of lines by target language and language found, for every family.

    There is one confusion matrix per score that identifies languages, system and family. Directions
    that a score does not cover have no lines in it.
    """
    found: dict[str, dict[str, dict[Family, dict[str, dict[str, int]]]]] = {}
    for system in systems:
        for profile in profiles:
            outcomes = system.directions[str(profile.direction)].outcomes
            for column, counts in outcomes.items():
                families = found.setdefault(column, {}).setdefault(system.name, {})
                targets = families.setdefault(profile.family, {})
                target = profile.direction.target
                sums = Counter(targets.get(target, {})) + Counter(counts)
                targets[target] = dict(sorted(sums.items()))
    return found
