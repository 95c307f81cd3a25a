"""Win ratio: in how many of its directions a system beats the baseline (Zhang et al. 2020)."""

from collections.abc import Mapping, Sequence

from pipeline.evaluation.averages import average_scores
from pipeline.evaluation.directions import DirectionProfile
from pipeline.evaluation.score_slot import Column
from pipeline.evaluation.scores import Scores, SystemScores, Verdicts, Wins


def win_ratios(
    systems: Sequence[SystemScores],
    *,
    baseline: str,
    columns: Sequence[Column],
    profiles: Sequence[DirectionProfile],
    verdicts: Verdicts,
) -> Wins | None:
    """Per family and resource group; a tie is no win. None where there is no other system.

    Args:
        columns: those without a better end are left out.
        verdicts: directions that they do not decide are left out.
    """
    by_name = {one.name: one for one in systems}
    others = [name for name in by_name if name != baseline]
    if not others:
        return None
    ranked = [column for column in columns if column.larger_is_better is not None]
    decided = [str(one.direction) for one in profiles if verdicts.decides(str(one.direction))]
    return Wins(
        baseline=baseline,
        systems={
            name: average_scores(
                _wins(by_name[name], by_name[baseline], ranked, decided), profiles=profiles
            )
            for name in others
        },
    )


def _wins(
    system: SystemScores,
    baseline: SystemScores,
    columns: Sequence[Column],
    directions: Sequence[str],
) -> Mapping[str, Scores]:
    """Direction → name of a column → 100 where it was won, else 0; where both have the score."""
    return {
        direction: {
            column.name: 100.0 * _better(column, one.scores, baseline.directions[direction].scores)
            for column in columns
            if column.name in one.scores and column.name in baseline.directions[direction].scores
        }
        for direction in directions
        for one in [system.directions[direction]]
    }


def _better(column: Column, ours: Scores, theirs: Scores) -> bool:
    if column.larger_is_better:
        return ours[column.name] > theirs[column.name]
    return ours[column.name] < theirs[column.name]
