"""Whether a system differs from the baseline in a direction: two tests, corrected for their number.

- Paired bootstrap: how often the difference of a draw, less the mean of them all, is as large as
  the one that was measured (Koehn 2004, as Moses and sacreBLEU count it).
- Approximate randomisation: how often it is as large once every line's two translations are
  swapped by the toss of a coin (Riezler and Maxwell 2005).
- Of as many tests as there are directions and systems, one in twenty would find a difference by
  chance. Holm's correction (1979) bounds the chance that any of them does.

Both count a trial as large as the measured difference where sacreBLEU wants it larger: scores that
count lines repeat their values, and two systems that are one have no difference beyond chance.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipeline.evaluation.score_slot import Column, Floats, Score
from pipeline.evaluation.scores import BaselineTests, PairedTest
from pipeline.evaluation.significance import RESAMPLES, read_statistics

LEVEL = 0.05
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


def _joined(statistics: Mapping[str, Floats], measured: Sequence[Score]) -> Floats:
    return np.concatenate([statistics[one.column.name] for one in measured], axis=1)


def _products(tossed: np.ndarray[tuple[int, int], np.dtype[np.bool_]], columns: Floats) -> Floats:
    """(trials, statistics), in blocks of trials that bound memory."""
    step = max(BLOCK_ELEMENTS // len(columns), 1)
    blocks = range(0, len(tossed), step)
    return np.concatenate([tossed[at : at + step].astype(np.float64) @ columns for at in blocks])


def bootstrap_p_value(ours: Floats, baseline: Floats, *, difference: float) -> float:
    """Of one system's draws beside the baseline's, (resamples,) each."""
    gaps = np.abs(ours - baseline)
    return _share_beyond(gaps - gaps.mean(), abs(difference))


def _share_beyond(gaps: Floats, measured: float) -> float:
    """At least one of all trials counts as beyond: the one that was measured."""
    return (int((gaps >= measured - TOLERANCE).sum()) + 1) / (len(gaps) + 1)


def holm(p_values: Sequence[float]) -> list[float]:
    """Corrected p-values in the same order: at most ``LEVEL`` is a difference beyond chance."""
    order = np.argsort(p_values, kind="stable")
    factors = np.arange(len(p_values), 0, -1)
    corrected = np.maximum.accumulate(np.asarray(p_values)[order] * factors)
    found = np.empty(len(p_values))
    found[order] = np.minimum(corrected, 1.0)
    return [float(value) for value in found]


def compare_with_baseline(
    scores: Mapping[str, Mapping[str, Sequence[float]]],
    draws: Mapping[str, Mapping[str, Floats]],
    randomised: Mapping[str, Mapping[str, Sequence[float]]],
    *,
    columns: Sequence[Column],
    systems: Sequence[str],
    baseline: int,
) -> BaselineTests:
    """Every system against the baseline in every direction that has draws.

    Args:
        scores: direction → name of a column → one score per system.
        draws: direction → name of a column → (systems, resamples).
        randomised: direction → name of a column → one p-value per system.
    """
    found: dict[str, dict[str, dict[str, PairedTest]]] = {name: {} for name in draws}
    others = [place for place in range(len(systems)) if place != baseline]
    for column in (one.name for one in columns):
        cases = [(name, place) for name in draws if column in draws[name] for place in others]
        differences = [
            scores[name][column][place] - scores[name][column][baseline] for name, place in cases
        ]
        bootstrap = [
            bootstrap_p_value(
                draws[name][column][place], draws[name][column][baseline], difference=difference
            )
            for (name, place), difference in zip(cases, differences, strict=True)
        ]
        swapped = [randomised[name][column][place] for name, place in cases]
        corrected = zip(holm(bootstrap), holm(swapped), strict=True)
        for number, ((name, place), (of_draws, of_swaps)) in enumerate(
            zip(cases, corrected, strict=True)
        ):
            found[name].setdefault(column, {})[systems[place]] = PairedTest(
                difference=differences[number],
                bootstrap=bootstrap[number],
                bootstrap_holm=of_draws,
                randomisation=swapped[number],
                randomisation_holm=of_swaps,
            )
    return BaselineTests(baseline=systems[baseline], directions=found)
