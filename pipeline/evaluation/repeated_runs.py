"""Systems with several runs, which differ in their seed: ``moe@1`` is a run of ``moe``.

Every run is scored by itself. The scores of the system are means over its runs; a mean of BLEU is
thus no BLEU of all outputs together. Averages also have their standard deviation over runs.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, stdev

from pipeline.errors import ConfigError
from pipeline.evaluation.averages import average_scores, mean_scores, quality
from pipeline.evaluation.directions import DirectionProfile, Family, Group
from pipeline.evaluation.scores import (
    DirectionScores,
    Scores,
    SystemScores,
)

RUN_MARK = "@"
"""Separates a system from its run: ``lms@1`` is run 1 of ``lms``."""


def group_runs(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return the names of the runs of every system; of a single run, the system has the name.

    Raises:
        ConfigError: a system is named with and without a run.
    """
    grouped: dict[str, list[str]] = {}
    for name in names:
        grouped.setdefault(name.partition(RUN_MARK)[0] or name, []).append(name)
    for system, runs in grouped.items():
        if system in runs and len(runs) > 1:
            other = next(run for run in runs if run != system)
            raise ConfigError(
                f"System {system!r} is named without a seed, and {other!r} with one. Name the seed "
                f"of each of its runs, for example {system}{RUN_MARK}1=DIR."
            )
    return {runs[0] if len(runs) == 1 else name: tuple(runs) for name, runs in grouped.items()}


def seed_of(run: str) -> str:
    """Return the seed in the name of a run; empty if it has none."""
    return run.partition(RUN_MARK)[2]


def merge_runs(
    scored: Sequence[SystemScores],
    groups: Mapping[str, Sequence[str]],
    *,
    profiles: Sequence[DirectionProfile],
) -> list[SystemScores]:
    """Return the scores of systems from those of their runs.

    Args:
        scored: of all runs.
        groups: system → its runs.
        profiles: directions.
    """
    by_name = {one.name: one for one in scored}
    return [
        by_name[names[0]]
        if len(names) == 1
        else _merge(system, [by_name[name] for name in names], profiles)
        for system, names in groups.items()
    ]


def _merge(
    system: str, runs: Sequence[SystemScores], profiles: Sequence[DirectionProfile]
) -> SystemScores:
    directions = {
        name: _merge_direction([run.directions[name] for run in runs])
        for name in runs[0].directions
    }
    return SystemScores(
        name=system,
        directions=directions,
        averages=average_scores(
            {name: one.scores for name, one in directions.items()}, profiles=profiles
        ),
        runs=tuple(runs),
        spread=_spread(runs),
    )


def _merge_direction(runs: Sequence[DirectionScores]) -> DirectionScores:
    outcomes: dict[str, Counter[str]] = {}
    for run in runs:
        for column, counts in run.outcomes.items():
            outcomes.setdefault(column, Counter()).update(counts)
    return DirectionScores(
        scores=mean_scores([run.scores for run in runs]),
        lines=sum(run.lines for run in runs),
        empty=sum(run.empty for run in runs),
        truncated=sum(run.truncated for run in runs),
        signatures=runs[0].signatures,
        quality=quality(
            bleu=fmean(run.quality.bleu for run in runs),
            distinct=fmean(run.quality.distinct for run in runs),
        ),
        outcomes=outcomes,
        invalid=sum(run.invalid for run in runs),
        invalid_sequences=sum(run.invalid_sequences for run in runs),
    )


def _spread(runs: Sequence[SystemScores]) -> dict[Family, dict[Group, Scores]]:
    """Return the standard deviations of all averages over runs."""
    return {
        family: {
            group: {
                column: stdev(run.averages[family][group][column] for run in runs)
                for column in scores
            }
            for group, scores in groups.items()
        }
        for family, groups in runs[0].averages.items()
    }
