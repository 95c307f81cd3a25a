"""Whether a system differs from the baseline in a direction: two tests, corrected for their number.

- Paired bootstrap: how often the difference of a draw, less the mean of them all, is as large as
  the one that was measured (Koehn 2004, as Moses and sacreBLEU count it).
- Approximate randomisation: how often it is as large once every line's two translations are
  swapped by the toss of a coin (Riezler and Maxwell 2005).
- Of as many tests as there are directions and systems, one in twenty would find a difference by
  chance. Holm's correction (1979) bounds the chance that any of them does.

Both count a trial as large as the measured difference where sacreBLEU wants it larger: scores that
count lines repeat their values, and two systems that are one have no difference beyond chance.

A p-value of n trials is at least 1 / (n + 1), so of m tests Holm's correction can find a difference
only with m / ``LEVEL`` trials. Most tests need far fewer, so the trials come in two rounds:

- The first round has the recipe's number of resamples. A test in which ``SETTLED`` of them or more
  were as large as the measured difference keeps its p-value.
- The others are drawn again, m / ``LEVEL`` times, and have the p-value of those trials.

Such a p-value is as honest as one of a fixed number of trials: under the null hypothesis it is at
most a with probability a at most. Let p1 and p2 be those of n1 < n2 trials and c the smallest p1
that ends the first round, (SETTLED + 1) / (n1 + 1). For a >= c, the result is at most a only where
p1 is: it is p1, or p1 < c. For a < c, it is at most a only where p2 is. Both have a probability of
at most a. (Besag and Clifford 1991 end by the same rule after every trial.)
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np

from pipeline.evaluation.score_slot import Floats, Score
from pipeline.evaluation.scores import BaselineTests, PairedTest
from pipeline.evaluation.significance import (
    RESAMPLES,
    BootstrapTask,
    read_statistics,
    resampled_scores,
)

LEVEL = 0.05
SETTLED = 10
"""Trials as far apart as the systems are: with so many a p-value is large, and known to a third."""
MOST_RESAMPLES = 50_000
"""Of the second round: 15 minutes of one core for 188 directions of 2,000 lines, four systems."""
BLOCK_ELEMENTS = 4_000_000
TOLERANCE = 1e-9
"""Differences of scores that are equal but for rounding."""


@dataclass(frozen=True)
class RandomisationTask:
    """One direction of all systems."""

    paths: Sequence[Path]
    """Line statistics, one file per system."""
    baseline: int
    """Place of the one that the others are held against."""
    scores: Sequence[Score]
    seed: int
    trials: int = RESAMPLES

    def again(self, columns: Collection[str], *, trials: int) -> Self:
        """Return the task with more trials, of some columns."""
        return replace(self, scores=_named(self.scores, columns), trials=trials)


def randomisation_p_values(task: RandomisationTask) -> dict[str, list[float]]:
    """Name of a column → p-value of every system, 1 of the baseline, of scores that all have."""
    statistics = [read_statistics(path, task.scores) for path in task.paths]
    measured = [one for one in task.scores if all(one.column.name in found for found in statistics)]
    if not measured:
        return {}
    lines = len(next(iter(statistics[0].values())))
    tossed = np.random.default_rng(task.seed).integers(2, size=(task.trials, lines), dtype=bool)
    base = _joined(statistics[task.baseline], measured)
    splits = np.cumsum([statistics[0][one.column.name].shape[1] for one in measured])[:-1]
    found: dict[str, list[float]] = {one.column.name: [] for one in measured}
    for place, one_system in enumerate(statistics):
        rows = _joined(one_system, measured)
        total, of_rows = base.sum(axis=0) + rows.sum(axis=0), rows.sum(axis=0)
        swapped = of_rows + _products(tossed, base - rows)
        both = [np.vstack([of_rows, swapped]), np.vstack([total - of_rows, total - swapped])]
        parts = zip(*(np.split(sums, splits, axis=1) for sums in both), strict=True)
        for score, (ours, theirs) in zip(measured, parts, strict=True):
            gaps = np.abs(score.of_sums(ours, lines=lines) - score.of_sums(theirs, lines=lines))
            p_value = 1.0 if place == task.baseline else _share_beyond(gaps[1:], float(gaps[0]))
            found[score.column.name].append(p_value)
    return found


def _named(scores: Sequence[Score], columns: Collection[str]) -> list[Score]:
    return [one for one in scores if one.column.name in columns]


def _joined(statistics: Mapping[str, Floats], measured: Sequence[Score]) -> Floats:
    return np.concatenate([statistics[one.column.name] for one in measured], axis=1)


def _products(tossed: np.ndarray[tuple[int, int], np.dtype[np.bool_]], columns: Floats) -> Floats:
    """(trials, statistics), in blocks of trials that bound memory."""
    step = max(BLOCK_ELEMENTS // len(columns), 1)
    blocks = range(0, len(tossed), step)
    return np.concatenate([tossed[at : at + step].astype(np.float64) @ columns for at in blocks])


@dataclass(frozen=True)
class PairedBootstrapTask:
    """The paired bootstrap of one direction."""

    draws: BootstrapTask
    baseline: int
    differences: Mapping[str, Sequence[float]]
    """Name of a column → every system's score less the baseline's."""

    def again(self, columns: Collection[str], *, resamples: int) -> Self:
        """Return the task with more resamples, of some columns."""
        scores = _named(self.draws.scores, columns)
        return replace(self, draws=replace(self.draws, scores=scores, resamples=resamples))


def bootstrap_p_values(task: PairedBootstrapTask) -> dict[str, list[float]]:
    """Name of a column → p-value of every system, 1 of the baseline, of scores that all have."""
    draws = resampled_scores(task.draws)
    return p_values_of_draws(draws, baseline=task.baseline, differences=task.differences)


def p_values_of_draws(
    draws: Mapping[str, Floats], *, baseline: int, differences: Mapping[str, Sequence[float]]
) -> dict[str, list[float]]:
    """Test every system of a direction; ``draws``: name of a column → (systems, resamples)."""
    return {
        column: [
            1.0
            if place == baseline
            else bootstrap_p_value(
                rows[place], rows[baseline], difference=differences[column][place]
            )
            for place in range(len(rows))
        ]
        for column, rows in draws.items()
    }


def bootstrap_p_value(ours: Floats, baseline: Floats, *, difference: float) -> float:
    """Of one system's draws beside the baseline's, (resamples,) each."""
    gaps = np.abs(ours - baseline)
    return _share_beyond(gaps - gaps.mean(), abs(difference))


def _share_beyond(gaps: Floats, measured: float) -> float:
    """At least one of all trials counts as beyond: the one that was measured."""
    return (int((gaps >= measured - TOLERANCE).sum()) + 1) / (len(gaps) + 1)


# As many trials as the tests need

PValues = Mapping[str, Sequence[float]]
"""Name of a column → one p-value per system, 1 of the baseline."""


def needed_resamples(tests: int) -> int:
    """Return the number of trials from which on the smallest of the p-values can be significant."""
    return math.ceil(tests / LEVEL)


def second_round(tests: int, *, resamples: int) -> int | None:
    """Return the trials of the second round; None where the first is enough, or none would be."""
    needed = needed_resamples(tests)
    return needed if resamples < needed <= MOST_RESAMPLES else None


def in_two_rounds(
    first: Mapping[str, PValues],
    again: Callable[[Mapping[str, Sequence[str]]], Mapping[str, PValues]],
    *,
    resamples: int,
) -> dict[str, PValues]:
    """Return the p-values of the first round where it settled them, else those of the second.

    Args:
        first: direction → p-values of the first round.
        again: from the directions and columns that are open to their p-values of the second round.
        resamples: of the first round.
    """
    columns = {name: _open(values, resamples=resamples) for name, values in first.items()}
    second = again({name: found for name, found in columns.items() if found})
    return {
        name: {
            column: [
                one if is_settled(one, resamples=resamples) else other
                for one, other in zip(values, second.get(name, {}).get(column, values), strict=True)
            ]
            for column, values in found.items()
        }
        for name, found in first.items()
    }


def is_settled(p_value: float, *, resamples: int) -> bool:
    """Return whether ``SETTLED`` trials or more were as far apart as the systems are."""
    return round(p_value * (resamples + 1)) > SETTLED


def _open(values: PValues, *, resamples: int) -> list[str]:
    """Return the columns with a p-value that is not settled; the baseline's always are."""
    return [
        column
        for column, found in values.items()
        if not all(is_settled(one, resamples=resamples) for one in found)
    ]


# All tests together


def holm(p_values: Sequence[float], *, tests: int | None = None) -> list[float]:
    """Return corrected p-values in the same order; at most ``LEVEL`` is significant.

    Args:
        tests: what to correct for, no less than there are p-values. Those that are missing count as
            1: they are not to be found significant.
    """
    order = np.argsort(p_values, kind="stable")
    factors = np.arange(tests or len(p_values), 0, -1)[: len(p_values)]
    corrected = np.maximum.accumulate(np.asarray(p_values)[order] * factors)
    found = np.empty(len(p_values))
    found[order] = np.minimum(corrected, 1.0)
    return [float(value) for value in found]


def compare_with_baseline(
    scores: Mapping[str, Mapping[str, Sequence[float]]],
    bootstrap: Mapping[str, PValues],
    randomised: Mapping[str, PValues],
    *,
    systems: Sequence[str],
    baseline: int,
    resamples: int,
    undecided: Sequence[str] = (),
) -> BaselineTests:
    """Compare every system with the baseline in every direction that was tested.

    Args:
        scores: direction → name of a column → one score per system.
        bootstrap: direction → p-values.
        randomised: direction → p-values.
        resamples: of the second round.
        undecided: directions that were not tested, but are corrected for: the baseline does not
            translate in them, which was not known before its translations were seen.
    """
    found: dict[str, dict[str, dict[str, PairedTest]]] = {name: {} for name in bootstrap}
    others = [place for place in range(len(systems)) if place != baseline]
    tests = len(others) * (len(bootstrap) + len(undecided))
    for column in dict.fromkeys(column for values in bootstrap.values() for column in values):
        cases = [
            (name, place) for name in bootstrap if column in bootstrap[name] for place in others
        ]
        of_draws = [bootstrap[name][column][place] for name, place in cases]
        of_swaps = [randomised[name][column][place] for name, place in cases]
        corrected = zip(holm(of_draws, tests=tests), holm(of_swaps, tests=tests), strict=True)
        for number, ((name, place), (draws_holm, swaps_holm)) in enumerate(
            zip(cases, corrected, strict=True)
        ):
            found[name].setdefault(column, {})[systems[place]] = PairedTest(
                difference=scores[name][column][place] - scores[name][column][baseline],
                bootstrap=of_draws[number],
                bootstrap_holm=draws_holm,
                randomisation=of_swaps[number],
                randomisation_holm=swaps_holm,
            )
    return BaselineTests(
        baseline=systems[baseline],
        directions=found,
        tests=tests,
        resamples=resamples,
        undecided=tuple(undecided),
    )
