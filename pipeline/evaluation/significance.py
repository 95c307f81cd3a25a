"""Significance of differences between systems: paired bootstrap and approximate randomization.

Confidence intervals and the best system (bold in reports) come from the paired bootstrap:

- The lines of a test set are drawn with replacement a thousand times; every system is scored on
  the same draws (Koehn 2004), from the sufficient statistics of the lines.
- Directions whose test lines are the same sentences (``line_sets``) share their draws, as both
  directions of a pair do; others are drawn independently. The draws of an average are the means of
  its directions' draws.
- A system is the best one only if its lead over each of the others is above zero in the middle
  95 % of the draws, and if both it and the baseline translate.
- A draw is a row of counts, how often it holds each line: the sums of all draws are then one
  matrix product, in blocks that bound memory.

A system with several runs, trained with different seeds, has the mean score of its runs, and draws
with the errors over seeds (``seed_errors``).

Every system is tested against the baseline in every direction by two tests:

- Paired bootstrap: how often the difference of a draw, minus the mean of all draws, is as large as
  the measured one (Koehn 2004, as Moses and sacreBLEU count it).
- Approximate randomization: how often the difference is as large once the two translations of
  every line are swapped by the toss of a coin (Riezler and Maxwell 2005). It says nothing about
  seeds, and is left out if a system has several runs.

The p-value of a system with several runs is how often the difference of a draw is as far from the
measured one as that is from zero.

With as many tests as there are directions and systems, one in twenty would be significant by
chance. Holm's correction (1979) bounds the probability that any of them is. Both tests count a
trial that is as large as the measured difference, whereas sacreBLEU counts larger ones only: scores
that count lines repeat their values, and two identical systems must not differ significantly.

A p-value of n trials is at least 1 / (n + 1), so of m tests Holm's correction can find a difference
only with m / ``LEVEL`` trials. Most tests need far fewer, so the trials come in two rounds:

- The first round has the recipe's number of resamples. A test in which ``SETTLED`` of them or more
  were as large as the measured difference keeps its p-value.
- The others are drawn again, m / ``LEVEL`` times, and have the p-value of those trials.

Such a p-value is as valid as one of a fixed number of trials: under the null hypothesis it is at
most a with probability at most a. Let p1 and p2 be those of n1 < n2 trials and c the smallest p1
that ends the first round, (SETTLED + 1) / (n1 + 1). For a >= c, the result is at most a only where
p1 is: it is p1, or p1 < c. For a < c, it is at most a only where p2 is. Both have a probability of
at most a. (Besag and Clifford 1991 end by the same rule after every trial.)
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Self

import numpy as np

from pipeline.evaluation.averages import by_group
from pipeline.evaluation.directions import DirectionProfile
from pipeline.evaluation.line_sets import Sentences
from pipeline.evaluation.score_slot import Column, Floats, LineCount, Score
from pipeline.evaluation.scores import (
    BaselineTests,
    Comparison,
    Interval,
    PairedTest,
    Quality,
    SharedLines,
    Significance,
    Verdicts,
)
from pipeline.evaluation.seed_errors import LEVEL, SeedErrors

RESAMPLES = 1000
MIN_LINES = 20
"""Test sets with fewer lines have neither intervals nor a best system."""
BLOCK_ELEMENTS = 4_000_000
"""Draws times lines that are counted at a time: 32 MB each of positions and of counts."""


@dataclass(frozen=True)
class BootstrapTask:
    """One direction of all systems."""

    paths: Sequence[Path]
    """Files of line statistics, one per run of a system."""
    scores: Sequence[Score]
    """Scores to resample if every file has their statistics."""
    seed: int
    resamples: int = RESAMPLES
    sentences: Sentences | None = None
    """Sentences to draw, of which the lines are some; None: the lines themselves."""


def resampled_scores(task: BootstrapTask) -> dict[str, Floats]:
    """Return the scores of all resamples, name of a column → (runs, resamples)."""
    return resample([read_statistics(path, task.scores) for path in task.paths], task)


def resample(statistics: Sequence[Mapping[str, Floats]], task: BootstrapTask) -> dict[str, Floats]:
    """Return the scores of all resamples, name of a column → (runs, resamples).

    Args:
        statistics: name of a column → (lines, statistics), for every run of a system.
        task: which scores to resample, and how.
    """
    measured = [one for one in task.scores if all(one.column.name in found for found in statistics)]
    if not measured:
        return {}
    blocks = [found[one.column.name] for one in measured for found in statistics]
    columns = np.concatenate(blocks, axis=1)
    sums, drawn = _drawn_sums(columns, task)
    parts = iter(np.split(sums, np.cumsum([block.shape[1] for block in blocks]), axis=1))
    return {
        one.column.name: np.stack(
            [one.of_sums(part, lines=drawn) for part in islice(parts, len(statistics))]
        )
        for one in measured
    }


def _drawn_sums(columns: Floats, task: BootstrapTask) -> tuple[Floats, LineCount]:
    """Return the sums of statistics over drawn lines, (resamples, statistics), and their number."""
    sentences = task.sentences
    if sentences is None:
        counts = draw_counts(len(columns), resamples=task.resamples, seed=task.seed)
        return np.concatenate([block @ columns for block in counts]), len(columns)
    sums, drawn = [], []
    for block in draw_counts(sentences.total, resamples=task.resamples, seed=task.seed):
        of_lines = block[:, sentences.of_lines]
        sums.append(of_lines @ columns)
        drawn.append(of_lines.sum(axis=1))
    # A draw may miss all lines of a test set that has few of the set's sentences.
    return np.concatenate(sums), np.maximum(np.concatenate(drawn), 1.0)


def draw_counts(lines: int, *, resamples: int, seed: int) -> Iterator[Floats]:
    """Yield how often each draw holds each line, in blocks of (draws, lines).

    The draws are those of ``numpy.random.default_rng(seed).choice(lines, (resamples, lines))``.
    """
    generator = np.random.default_rng(seed)
    step = max(BLOCK_ELEMENTS // lines, 1)
    for start in range(0, resamples, step):
        draws = min(step, resamples - start)
        chosen = generator.integers(lines, size=(draws, lines))
        chosen += np.arange(draws)[:, None] * lines
        counted = np.bincount(chosen.ravel(), minlength=draws * lines)
        yield counted.reshape(draws, lines).astype(np.float64)


def read_statistics(path: Path, scores: Sequence[Score]) -> dict[str, Floats]:
    """Return the statistics of every score that a file has, (lines, statistics)."""
    names = [one.column.name for one in scores]
    with np.load(path, allow_pickle=False) as arrays:
        found = {name: arrays[name] for name in names if name in arrays}
    return {name: rows.astype(np.float64).reshape(len(rows), -1) for name, rows in found.items()}


# Intervals and the best system


def middle_95(scores: Floats) -> tuple[float, float]:
    """Return the range between the 2.5 % and 97.5 % quantiles of scores."""
    ordered, beyond = np.sort(scores), len(scores) // 40
    return float(ordered[beyond]), float(ordered[len(ordered) - beyond - 1])


def compare(
    systems: Sequence[str],
    scores: Sequence[float],
    draws: Floats,
    *,
    larger_is_better: bool | None = True,
    baseline: str | None = None,
    seeds: SeedErrors | None = None,
    of_runs: Sequence[float] | None = None,
) -> Comparison:
    """Return the intervals of all systems, and the one that is better than all others, if any.

    Args:
        systems: names.
        scores: of the systems on the test set itself.
        draws: scores of resamples, (runs, resamples).
        larger_is_better: which end of the scale is better; None: neither.
        baseline: system whose difference to the others has an interval, too; None: the first.
        seeds: runs of the systems; None: every system has one.
        of_runs: scores of the runs on the test set itself; None: those of the systems.
    """
    base = 0 if baseline is None else systems.index(baseline)
    sign = 1.0 if larger_is_better else -1.0
    errors = seeds or SeedErrors.of_single_runs(len(systems))
    measured = np.asarray(scores if of_runs is None else of_runs)

    def difference(place: int, other: int) -> Floats:
        return errors.of_difference(place, other, draws, measured)

    leader = int(np.argmax(sign * np.asarray(scores)))
    others = [place for place in range(len(systems)) if place != leader]
    leads = [middle_95(sign * difference(leader, place))[0] > 0.0 for place in others]
    return Comparison(
        intervals={
            name: Interval(*middle_95(errors.of_system(place, draws, measured)))
            for place, name in enumerate(systems)
        },
        best=systems[leader] if larger_is_better is not None and leads and all(leads) else None,
        differences={
            name: Interval(*middle_95(difference(place, base)))
            for place, name in enumerate(systems)
            if place != base
        },
    )


def compare_all(
    scores: Mapping[str, Mapping[str, Sequence[float]]],
    draws: Mapping[str, Mapping[str, Floats]],
    *,
    columns: Sequence[Column],
    systems: Sequence[str],
    profiles: Sequence[DirectionProfile],
    verdicts: Verdicts,
    resamples: int = RESAMPLES,
    shared_lines: Sequence[SharedLines] = (),
    seeds: SeedErrors | None = None,
) -> Significance:
    """Compare the systems in every direction, and in every average whose directions all have draws.

    Args:
        scores: direction → name of a column → one score per run, for all directions.
        draws: direction → name of a column → (runs, resamples), if there are enough lines.
        columns: of the scores.
        systems: names.
        profiles: directions.
        verdicts: which systems translate in every direction and average.
        resamples: number of draws.
        shared_lines: pairs whose lines are drawn together.
        seeds: runs of the systems; None: every system has one.
    """
    runs_of = (seeds or SeedErrors.of_single_runs(len(systems))).runs

    def joined(
        directions: Sequence[str], qualities: Mapping[str, Quality]
    ) -> dict[str, Comparison]:
        found: dict[str, Comparison] = {}
        for column in columns:
            measured = [name for name in directions if column.name in scores[name]]
            if measured and all(name in draws for name in measured):
                of_runs = np.mean([scores[name][column.name] for name in measured], axis=0)
                compared = compare(
                    systems,
                    [float(of_runs[list(places)].mean()) for places in runs_of],
                    np.mean([draws[name][column.name] for name in measured], axis=0),
                    larger_is_better=column.larger_is_better,
                    baseline=verdicts.baseline,
                    seeds=seeds,
                    of_runs=of_runs.tolist(),
                )
                best = compared.best
                sound = best and all(qualities[one].translates for one in (best, verdicts.baseline))
                found[column.name] = compared if sound else replace(compared, best=None)
        return found

    members = by_group({name: name for name in scores}, profiles=profiles)
    return Significance(
        resamples=resamples,
        directions={name: joined([name], verdicts.directions[name]) for name in scores},
        averages={
            family: {
                group: joined(names, verdicts.averages[family][group])
                for group, names in groups.items()
            }
            for family, groups in members.items()
        },
        shared_lines=tuple(shared_lines),
    )


SETTLED = 10
"""Number of trials at least as far apart as the systems that settles a p-value: the p-value is then
large, and its relative standard error is about a third."""
MOST_RESAMPLES = 50_000
"""Limit of the second round: 15 minutes of one core for 188 directions of 2,000 lines and four
systems."""
TOLERANCE = 1e-9
"""Largest difference between scores that are equal except for rounding."""


@dataclass(frozen=True)
class RandomisationTask:
    """One direction of all systems."""

    paths: Sequence[Path]
    """Files of line statistics, one per system."""
    baseline: int
    """Index of the baseline among the systems."""
    scores: Sequence[Score]
    seed: int
    trials: int = RESAMPLES

    def again(self, columns: Collection[str], *, trials: int) -> Self:
        """Return the task for some columns, with more trials."""
        return replace(self, scores=_named(self.scores, columns), trials=trials)


def randomisation_p_values(task: RandomisationTask) -> dict[str, list[float]]:
    """Return p-values by column and system, 1 for the baseline, of scores that all systems have."""
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
    """Return the products (trials, statistics), in blocks of trials that bound memory."""
    step = max(BLOCK_ELEMENTS // len(columns), 1)
    blocks = range(0, len(tossed), step)
    return np.concatenate([tossed[at : at + step].astype(np.float64) @ columns for at in blocks])


@dataclass(frozen=True)
class PairedBootstrapTask:
    """Paired bootstrap test of one direction."""

    draws: BootstrapTask
    baseline: int
    scores: Mapping[str, Sequence[float]]
    """Name of a column → score of every run."""
    seeds: SeedErrors | None = None
    """Runs of the systems; None: every system has one."""

    def again(self, columns: Collection[str], *, resamples: int) -> Self:
        """Return the task for some columns, with more resamples."""
        scores = _named(self.draws.scores, columns)
        return replace(self, draws=replace(self.draws, scores=scores, resamples=resamples))


def bootstrap_p_values(task: PairedBootstrapTask) -> dict[str, list[float]]:
    """Return p-values by column and system, 1 for the baseline, of scores that all systems have."""
    return p_values_of_draws(
        resampled_scores(task.draws), baseline=task.baseline, scores=task.scores, seeds=task.seeds
    )


def p_values_of_draws(
    draws: Mapping[str, Floats],
    *,
    baseline: int,
    scores: Mapping[str, Sequence[float]],
    seeds: SeedErrors | None = None,
) -> dict[str, list[float]]:
    """Return p-values by column and system from draws, name of a column → (runs, resamples).

    Args:
        draws: scores of resamples.
        baseline: index of the baseline among the systems.
        scores: name of a column → one score per run.
        seeds: runs of the systems; None: every system has one.
    """

    def p_value(column: str, place: int, errors: SeedErrors) -> float:
        if place == baseline:
            return 1.0
        measured = np.asarray(scores[column])
        ours, theirs = (measured[list(errors.runs[one])].mean() for one in (place, baseline))
        gaps = errors.of_difference(place, baseline, draws[column], measured)
        is_over_seeds = bool({place, baseline} & {*errors.repeated})
        of_gaps = p_value_over_seeds if is_over_seeds else bootstrap_p_value
        return of_gaps(gaps, difference=float(ours - theirs))

    found = {}
    for column, rows in draws.items():
        errors = seeds or SeedErrors.of_single_runs(len(rows))
        found[column] = [p_value(column, place, errors) for place in range(len(errors.runs))]
    return found


def bootstrap_p_value(gaps: Floats, *, difference: float) -> float:
    """Return the p-value of a system from the draws of its difference to the baseline."""
    distances = np.abs(gaps)
    return _share_beyond(distances - distances.mean(), abs(difference))


def p_value_over_seeds(gaps: Floats, *, difference: float) -> float:
    """Return the p-value of a system if it or the baseline has several runs.

    The mean of the gaps, which :func:`bootstrap_p_value` takes off, is dominated by single draws of
    the t distribution of two or three runs; their distance from the difference is not.
    """
    return _share_beyond(np.abs(gaps - difference), abs(difference))


def _share_beyond(gaps: Floats, measured: float) -> float:
    """Return the share of trials beyond the measured difference, which itself counts as one."""
    return (int((gaps >= measured - TOLERANCE).sum()) + 1) / (len(gaps) + 1)


# Number of trials

PValues = Mapping[str, Sequence[float]]
"""Name of a column → one p-value per system, 1 for the baseline."""


def needed_resamples(tests: int) -> int:
    """Return the least number of trials with which a p-value can be significant."""
    return math.ceil(tests / LEVEL)


def second_round(tests: int, *, resamples: int) -> int | None:
    """Return the trials of the second round; None if the first suffices, or none would."""
    needed = needed_resamples(tests)
    return needed if resamples < needed <= MOST_RESAMPLES else None


def in_two_rounds(
    first: Mapping[str, PValues],
    again: Callable[[Mapping[str, Sequence[str]]], Mapping[str, PValues]],
    *,
    resamples: int,
) -> dict[str, PValues]:
    """Return the p-values that the first round settled, and those of the second for the others.

    Args:
        first: direction → p-values of the first round.
        again: returns the p-values of the second round for open columns by direction.
        resamples: number of resamples of the first round.
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
    """Return whether at least ``SETTLED`` trials were as far apart as the systems."""
    return round(p_value * (resamples + 1)) > SETTLED


def _open(values: PValues, *, resamples: int) -> list[str]:
    """Return the columns with an unsettled p-value; those of the baseline are always settled."""
    return [
        column
        for column, found in values.items()
        if not all(is_settled(one, resamples=resamples) for one in found)
    ]


# All tests together


def holm(p_values: Sequence[float], *, tests: int | None = None) -> list[float]:
    """Return corrected p-values in the same order; at most ``LEVEL`` is significant.

    Args:
        p_values: of one column.
        tests: number of tests to correct for, at least the number of p-values; missing p-values
            count as 1.
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
    randomised: Mapping[str, PValues] | None,
    *,
    systems: Sequence[str],
    baseline: int,
    resamples: int,
    undecided: Sequence[str] = (),
    runs: int | None = None,
) -> BaselineTests:
    """Compare every system with the baseline in every direction that was tested.

    Args:
        scores: direction → name of a column → one score per system.
        bootstrap: direction → p-values.
        randomised: direction → p-values; None if systems have several runs.
        systems: names.
        baseline: index of the baseline.
        resamples: of the second round.
        undecided: directions that were not tested but are corrected for: the baseline does not
            translate in them, which was not known before its translations were seen.
        runs: fewest runs of a system that has several; None: no system has.
    """
    found: dict[str, dict[str, dict[str, PairedTest]]] = {name: {} for name in bootstrap}
    others = [place for place in range(len(systems)) if place != baseline]
    tests = len(others) * (len(bootstrap) + len(undecided))
    for column in dict.fromkeys(column for values in bootstrap.values() for column in values):
        cases = [
            (name, place) for name in bootstrap if column in bootstrap[name] for place in others
        ]
        of_draws = [bootstrap[name][column][place] for name, place in cases]
        of_swaps: list[float | None] = [None] * len(cases)
        swaps_holm: list[float | None] = [None] * len(cases)
        if randomised is not None:
            swapped = [randomised[name][column][place] for name, place in cases]
            of_swaps, swaps_holm = [*swapped], [*holm(swapped, tests=tests)]
        p_values = zip(of_draws, holm(of_draws, tests=tests), of_swaps, swaps_holm, strict=True)
        for (name, place), of_case in zip(cases, p_values, strict=True):
            difference = scores[name][column][place] - scores[name][column][baseline]
            found[name].setdefault(column, {})[systems[place]] = PairedTest(difference, *of_case)
    return BaselineTests(
        baseline=systems[baseline],
        directions=found,
        tests=tests,
        resamples=resamples,
        undecided=tuple(undecided),
        runs=runs,
    )
