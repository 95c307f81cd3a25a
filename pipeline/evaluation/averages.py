"""Aggregates over runs and directions: averages, verdicts, win ratios and confusion matrices.

``moe@1`` is a run of the system ``moe``: the scores of a system are means over its runs. A mean of
BLEU is thus no BLEU of all outputs together. A system that does not translate yet still has scores:
a direction or an average is decided only if the baseline translates it.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import fmean, stdev
from typing import TypeVar

from pipeline.errors import ConfigError
from pipeline.evaluation.scores import (
    Averages,
    Column,
    Confusion,
    DirectionProfile,
    DirectionScores,
    Family,
    Group,
    Quality,
    Scores,
    SetAverage,
    SystemScores,
    Verdicts,
)
from pipeline.languages import meant_code
from pipeline.stage import named_path

Value = TypeVar("Value")


def mean_scores(scores: Sequence[Scores]) -> Scores:
    """Return arithmetic means; each score over the directions or runs that have it."""
    names = dict.fromkeys(name for score in scores for name in score)
    return {name: fmean(score[name] for score in scores if name in score) for name in names}


def by_group(
    values: Mapping[str, Value], *, profiles: Sequence[DirectionProfile]
) -> dict[Family, dict[Group, list[Value]]]:
    """Return the values of directions by family and resource group, without empty groups."""
    found: dict[Family, dict[Group, list[Value]]] = {}
    for profile in profiles:
        name = str(profile.direction)
        for group in ("all", profile.resource):
            if name in values and group is not None:
                found.setdefault(profile.family, {}).setdefault(group, []).append(values[name])
    return found


def average_scores(
    scores: Mapping[str, Scores], *, profiles: Sequence[DirectionProfile]
) -> dict[Family, dict[Group, Scores]]:
    """Return mean scores per family and resource group."""
    return {
        family: {group: mean_scores(values) for group, values in groups.items()}
        for family, groups in by_group(scores, profiles=profiles).items()
    }


def system_scores(
    name: str, directions: Mapping[str, DirectionScores], *, profiles: Sequence[DirectionProfile]
) -> SystemScores:
    """Return the scores of a system with one run, with their averages."""
    scores = {direction: one.scores for direction, one in directions.items()}
    return SystemScores(name, directions, average_scores(scores, profiles=profiles))


# Runs of a system

RUN_MARK = "@"


def group_runs(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return run names per system; ConfigError if one is named with and without a run."""
    grouped: dict[str, list[str]] = {}
    for name in names:
        grouped.setdefault(name.partition(RUN_MARK)[0] or name, []).append(name)
    for system, runs in grouped.items():
        if system in runs and len(runs) > 1:
            other = next(run for run in runs if run != system)
            raise ConfigError(
                f"System {system!r} is named without a seed, and {other!r} with one. Name the seed "
                f"of each of its runs, for example {named_path(f'{system}{RUN_MARK}1', 'DIR')}."
            )
    return {runs[0] if len(runs) == 1 else name: tuple(runs) for name, runs in grouped.items()}


def merge_runs(
    scored: Sequence[SystemScores],
    groups: Mapping[str, Sequence[str]],
    *,
    profiles: Sequence[DirectionProfile],
) -> list[SystemScores]:
    """Return the scores of systems (system → its runs) from the scores of all runs."""
    by_name = {system.name: system for system in scored}
    return [
        _merge(system, [by_name[name] for name in names], profiles)
        for system, names in groups.items()
    ]


def _merge(
    name: str, runs: Sequence[SystemScores], profiles: Sequence[DirectionProfile]
) -> SystemScores:
    if len(runs) == 1:
        return runs[0]
    ways = runs[0].directions
    directions = {way: _merge_direction([run.directions[way] for run in runs]) for way in ways}
    merged = system_scores(name, directions, profiles=profiles)
    spread: Averages = {
        family: {
            group: {
                score: stdev(run.averages[family][group][score] for run in runs) for score in means
            }
            for group, means in groups.items()
        }
        for family, groups in merged.averages.items()
    }
    return SystemScores(name, merged.directions, merged.averages, runs=tuple(runs), spread=spread)


def _merge_direction(runs: Sequence[DirectionScores]) -> DirectionScores:
    outcomes: dict[str, Counter[str]] = {}
    for column, counts in (item for run in runs for item in run.outcomes.items()):
        outcomes.setdefault(column, Counter()).update(counts)
    sums = ("lines", "empty", "truncated", "invalid", "invalid_sequences")
    return DirectionScores(
        scores=mean_scores([run.scores for run in runs]),
        signatures=runs[0].signatures,
        quality=_mean_quality([run.quality for run in runs]),
        outcomes={column: dict(sorted(counts.items())) for column, counts in outcomes.items()},
        **{name: sum(getattr(run, name) for run in runs) for name in sums},
    )


# Averages by sets of languages


def average_by_set(
    systems: Sequence[SystemScores],
    *,
    profiles: Sequence[DirectionProfile],
    pivot: str | None,
    sets: Mapping[str, Collection[str]],
) -> list[SetAverage]:
    """Return mean scores by set of languages (in any usual spelling) and family of directions.

    The language is the source if the pivot is the target, else the target, for example ``de`` of
    en-de: averages of Any → En are over source languages, all others over target languages.
    """

    def code_of(profile: DirectionProfile) -> str:
        way = profile.direction
        return way.source if way.target == pivot else way.target

    present = {code_of(profile) for profile in profiles}
    members: dict[tuple[Family, str], list[str]] = {}
    for name, spellings in sets.items():
        codes = {meant_code(one, present) for one in spellings}
        for profile in profiles:
            if code_of(profile) in codes:
                members.setdefault((profile.family, name), []).append(str(profile.direction))
    return [
        SetAverage(
            name,
            family,
            len(directions),
            {
                system.name: mean_scores([system.directions[way].scores for way in directions])
                for system in systems
            },
        )
        for (family, name), directions in sorted(members.items())
    ]


# Verdicts

LEAST_BLEU = 5.0
LEAST_DISTINCT = 50.0  # distinct outputs, in percent of the distinct sources
RULE = (
    f"A system translates where it has at least {LEAST_BLEU:g} BLEU and at least half as many "
    "distinct outputs as there are distinct sources."
)


def quality(*, bleu: float, distinct: float) -> Quality:
    """Judge a direction or an average by its BLEU and by the share of distinct outputs."""
    return Quality(bleu, distinct, bleu >= LEAST_BLEU and distinct >= LEAST_DISTINCT)


def distinct_share(outputs: Sequence[str], sources: Sequence[str]) -> float:
    """Return the distinct outputs in percent of the distinct sources; white space is ignored."""
    found, asked = (len({" ".join(text.split()) for text in side}) for side in (outputs, sources))
    return 100.0 * found / max(asked, 1)


def assess(
    systems: Sequence[SystemScores], *, baseline: str, profiles: Sequence[DirectionProfile]
) -> Verdicts:
    """Judge every system in every direction and by its means over every group of directions."""
    directions: dict[str, dict[str, Quality]] = {
        name: {system.name: system.directions[name].quality for system in systems}
        for name in (str(profile.direction) for profile in profiles)
    }
    averages: dict[Family, dict[Group, Mapping[str, Quality]]] = {
        family: {
            group: {
                name: _mean_quality([member[name] for member in members]) for name in members[0]
            }
            for group, members in groups.items()
        }
        for family, groups in by_group(directions, profiles=profiles).items()
    }
    return Verdicts(baseline, directions, averages)


def _mean_quality(members: Sequence[Quality]) -> Quality:
    bleu, distinct = (fmean(getattr(one, key) for one in members) for key in ("bleu", "distinct"))
    return quality(bleu=bleu, distinct=distinct)


# Comparison with the baseline


def win_ratios(
    systems: Sequence[SystemScores],
    *,
    columns: Sequence[Column],
    profiles: Sequence[DirectionProfile],
    verdicts: Verdicts,
) -> dict[str, Averages]:
    """Return the share of decided directions in which each system beats the baseline.

    A tie is no win (Zhang et al. 2020).
    """
    (base,) = [system for system in systems if system.name == verdicts.baseline]
    signs = {column.name: 1.0 if column.larger_is_better else -1.0 for column in columns}
    decided = [*filter(verdicts.decides, verdicts.directions)]
    shares: dict[str, Averages] = {}
    for system in systems:
        if system is base:
            continue
        won: dict[str, Scores] = {}
        for name in decided:
            ours, theirs = system.directions[name].scores, base.directions[name].scores
            won[name] = {
                column: 100.0 * (signs[column] * (ours[column] - theirs[column]) > 0)
                for column in signs
                if column in ours and column in theirs
            }
        shares[system.name] = average_scores(won, profiles=profiles)
    return shares


def confuse_languages(
    systems: Sequence[SystemScores], *, profiles: Sequence[DirectionProfile]
) -> Confusion:
    """Return the number of lines by score, system, family, target language and language found."""
    found: dict[str, dict[str, dict[Family, dict[str, dict[str, int]]]]] = {}
    for system in systems:
        for profile in profiles:
            for column, counts in system.directions[str(profile.direction)].outcomes.items():
                families = found.setdefault(column, {}).setdefault(system.name, {})
                targets, target = families.setdefault(profile.family, {}), profile.direction.target
                sums = Counter(targets.get(target, {})) + Counter(counts)
                targets[target] = dict(sorted(sums.items()))
    return found
