"""Errors of scores over seeds, where systems have several runs.

A system with several runs has the mean score of its runs. The draws of such a mean, or of the
difference of two, are those of resampled lines plus the standard error of the measured mean over
seeds times a value of Student's t distribution:

- Their interval is that of the t test if runs differ much, and that of the bootstrap if they agree.
- Runs differ by chance on the lines of a test set, too. The standard error over seeds holds this
  part of the error of lines already, and so it is taken out of the resampled lines: their distance
  from their mean is scaled down. Counted twice, it widens intervals by up to 40 %.
- Three runs agree by chance now and then, more closely than their lines permit. So an interval is
  never narrower than that of the resampled lines alone.
- Seeds are not drawn with replacement: of three runs, the middle 95 % of such draws lie between
  the worst and the best run, which the expected score is outside of in one case of four.
- Systems with the same seeds are paired by seed. The value is the same for all directions, since
  each run has one model for all of them.

Legend: R runs of a system, B resamples.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from pipeline.evaluation.score_slot import Floats
from pipeline.seeds import derive_seed

LEVEL = 0.05
"""Largest corrected p-value that is significant."""
MOST_ERRORS = 10.0
"""Directions are not tested one by one where a significant difference would have to be more
standard errors over seeds. Three seeds allow 5 tests, five seeds 88; without the doubt about the
standard error, 392 tests need 3.8."""


@dataclass(frozen=True)
class _Runs:
    """Runs of a system, or differences of the runs of two systems with the same seeds."""

    labels: tuple[str, ...]
    draws_RB: Floats
    measured_R: Floats

    @property
    def own_variance(self) -> float:
        """Return the variance of the mean that comes from lines and that runs do not share."""
        moved_RB = self.draws_RB - self.measured_R[:, None]
        return float(moved_RB.var(axis=0, ddof=1).mean()) / len(moved_RB)


@dataclass(frozen=True)
class SeedErrors:
    """Runs of every system, and their share in the error of its mean over seeds."""

    runs: tuple[tuple[int, ...], ...]
    """Places of the runs of every system among all runs."""
    labels: tuple[tuple[str, ...], ...]
    """Seeds of these runs; systems with the same seeds are paired by seed."""
    seed: int
    """Seed of the draws, the same for all directions."""

    @classmethod
    def of_single_runs(cls, systems: int) -> Self:
        """Return the errors of systems that have one run each: none."""
        return cls(tuple((place,) for place in range(systems)), (("",),) * systems, seed=0)

    @property
    def repeated(self) -> tuple[int, ...]:
        """Return the places of the systems that have several runs."""
        return tuple(place for place, runs in enumerate(self.runs) if len(runs) > 1)

    @property
    def fewest_runs(self) -> int | None:
        """Return the least number of runs of the systems that have several, if any has."""
        return min((len(self.runs[place]) for place in self.repeated), default=None)

    def of_system(self, place: int, draws: Floats, measured: Floats) -> Floats:
        """Return the draws of a system from those of all runs, (resamples,).

        Args:
            place: of the system.
            draws: scores of resampled lines, (runs, resamples).
            measured: scores of the test set itself, (runs,).
        """
        return self._with_errors([self._runs_of(place, draws, measured)])

    def of_difference(self, place: int, other: int, draws: Floats, measured: Floats) -> Floats:
        """Return the draws of a system's score minus another's, as :meth:`of_system` does."""
        ours, theirs = (self._runs_of(one, draws, measured) for one in (place, other))
        if ours.labels == theirs.labels:
            return self._with_errors([_minus(ours, theirs)])
        nothing = _Runs(theirs.labels, 0.0 * theirs.draws_RB, 0.0 * theirs.measured_R)
        return self._with_errors([ours, _minus(nothing, theirs)])

    def _runs_of(self, place: int, draws: Floats, measured: Floats) -> _Runs:
        labelled = sorted(zip(self.labels[place], self.runs[place], strict=True))
        places = [run for _, run in labelled]
        return _Runs(tuple(label for label, _ in labelled), draws[places], measured[places])

    def _with_errors(self, parts: Sequence[_Runs]) -> Floats:
        """Return the draws of the sum of means over runs."""
        total_B: Floats = sum((one.draws_RB.mean(axis=0) for one in parts), start=np.zeros(()))
        repeated = [one for one in parts if len(one.labels) > 1]
        variance = float(total_B.var())
        if not repeated:
            return total_B
        own = min(sum(one.own_variance for one in repeated), variance)
        mean, scale = total_B.mean(), math.sqrt(1.0 - own / variance) if variance else 0.0
        found_B: Floats = mean + scale * (total_B - mean)
        for one in repeated:
            found_B += self.weights(one.labels, resamples=len(total_B)) @ one.measured_R
        return max(found_B, total_B, key=_width)

    def weights(self, labels: Sequence[str], *, resamples: int) -> Floats:
        """Return a weight of every run in every draw, (resamples, runs).

        The sum over runs of weight times score is the standard error of the mean score times a
        value of Student's t distribution with runs - 1 degrees of freedom: normal deviates, whose
        mean is taken off, weigh the runs, and a chi-square deviate divides them.
        """
        order = sorted(labels)
        generator = np.random.default_rng(derive_seed("seeds", self.seed, *order))
        normal = generator.standard_normal((resamples, len(order)))
        freedom = len(order) - 1
        scale = np.sqrt(generator.chisquare(freedom, size=(resamples, 1)) / freedom)
        weights: Floats = (normal - normal.mean(axis=1, keepdims=True)) / scale
        weights /= math.sqrt(len(order) * freedom)
        return np.take(weights, [order.index(label) for label in labels], axis=1)


def _width(draws_B: Floats) -> float:
    low, high = np.quantile(draws_B, (LEVEL / 2, 1 - LEVEL / 2))
    return float(high - low)


def _minus(ours: _Runs, theirs: _Runs) -> _Runs:
    return _Runs(ours.labels, ours.draws_RB - theirs.draws_RB, ours.measured_R - theirs.measured_R)


# What tests can find


def can_find(tests: int, *, runs: int | None) -> bool:
    """Return whether tests over so many runs can find a difference of a plausible size.

    Args:
        tests: number of tests that Holm's correction counts.
        runs: fewest runs of a system that has several; None: no system has.
    """
    return runs is None or needed_errors(tests, runs=runs) <= MOST_ERRORS


def needed_errors(tests: int, *, runs: int) -> float:
    """Return the least difference that one of the tests can find, in standard errors over seeds."""
    level, low, high = LEVEL / max(tests, 1), 0.0, 1.0
    while tail_of_t(high, freedom=runs - 1) > level:
        high *= 2.0
    for _ in range(60):
        middle = (low + high) / 2.0
        if tail_of_t(middle, freedom=runs - 1) > level:
            low = middle
        else:
            high = middle
    return high


def tail_of_t(value: float, *, freedom: int) -> float:
    """Return the probability that Student's t is farther from zero (Abramowitz & Stegun, 26.7)."""
    angle = math.atan2(value, math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    term, total = (cosine, 0.0) if freedom % 2 else (1.0, 0.0)
    for place in range(1 + freedom % 2, freedom, 2):
        total += term
        term *= cosine * cosine * place / (place + 1)
    inside = 2.0 / math.pi * (angle + sine * total) if freedom % 2 else sine * total
    return 1.0 - inside
