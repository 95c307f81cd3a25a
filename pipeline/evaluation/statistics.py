"""Confidence intervals and tests of scores, from resampled test lines and from seeds.

There is one estimator. A score, or a difference of two, varies over test lines and over seeds. Each
variance has its degrees of freedom; the half-widths that Student's t distribution gives them add up
in squares (Cochran and Cox 1957). A p-value is the level of the interval that ends at zero.
Intervals of scores in 0–100 end there, and intervals of their differences at -100 and 100.

- **Lines.** Lines are drawn with replacement, the same for all systems (paired bootstrap, Koehn
  2004). Directions with the same sentences share their draws, others are drawn independently.
  The draws of an average are the means of its directions' draws. The variance of the draws,
  times n / (n - 1) for n lines, is the variance over lines.
- **Seeds.** The score of a system with several runs is the mean over its runs, and the variance of
  this mean over seeds is added. Runs also differ by their luck with lines: this part, which both
  variances contain, counts once. Systems with the same seeds are paired by seed.
- **Tests.** The p-values of all directions and systems are corrected together (Holm 1979).

Some test sets, for example FLORES-200, NTREX-128 and Bible verses, have the same sentences in every
language. Scores of their directions vary together over sentences, so their lines are drawn
together. Equal text on a side that two pairs share tells which lines are the same sentence:

- A line has a key on each side: its text, how often the side has that text, and which of these
  occurrences it is. A repeated short line thus agrees only with a side that repeats it as often.
- Two pairs are parallel if at least half of the lines of the shorter pair have a key of the other,
  or by way of a third pair: de-fr and en-ja over de-en.
- Within a set, lines with a common key are one sentence, unless that would put two lines of a pair
  into one. Keys of texts that occur once are taken first.

Legend: R runs of a system, B resamples.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations, islice
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.corpus import read_lines
from pipeline.evaluation.scores import Column, Comparison, Difference, Floats, Interval, Score

# Sets of parallel test lines

Places = npt.NDArray[np.int64]
LEAST_SHARED = 0.5  # of the lines of the shorter of two parallel test sets


class Sentences(NamedTuple):
    """The sentence of every line of a pair, (lines,), and the number of sentences of its set."""

    of_lines: Places
    total: int


@dataclass(frozen=True)
class LineSet:
    """Pairs with test lines that are drawn together."""

    pairs: tuple[str, ...]
    sentences: int  # number of different sentences in the lines of all pairs
    of_lines: Mapping[str, Places]  # pair → sentence of every line, (lines,)


class Key(NamedTuple):
    """Text of a line on one side, with its place among the equal lines of that side."""

    occurrences: int
    occurrence: int
    text: str


_Keys = Mapping[str, Mapping[str, Sequence[Key]]]  # pair → language → keys of its lines


def find_line_sets(corpus: Artifact, pairs: Sequence[str]) -> list[LineSet]:
    """Return the sets of parallel test sets among some pairs of a corpus."""
    sides = {
        pair: {c: read_lines(corpus, "test", pair, c) for c in pair.split("-")} for pair in pairs
    }
    return group_lines(sides)


def group_lines(sides: Mapping[str, Mapping[str, Sequence[str]]]) -> list[LineSet]:
    """Return the sets of at least two parallel pairs, in the order of their first pairs.

    ``sides`` is pair → language → lines.
    """
    keys = {
        pair: {code: _line_keys(lines) for code, lines in texts.items()}
        for pair, texts in sides.items()
    }
    groups = {pair: [pair] for pair in keys}
    for code in dict.fromkeys(code for found in keys.values() for code in found):
        texts = {pair: set(found[code]) for pair, found in keys.items() if code in found}
        for one, other in combinations(texts, 2):
            least = LEAST_SHARED * min(len(texts[one]), len(texts[other]))
            is_apart = groups[one] is not groups[other]
            if is_apart and len(texts[one] & texts[other]) >= least:
                groups[one] += groups[other]
                groups.update(dict.fromkeys(groups[other], groups[one]))
    members = {id(group): group for group in groups.values()}.values()
    return [_line_set(group, keys) for group in members if len(group) > 1]


def _line_keys(lines: Sequence[str]) -> list[Key]:
    occurrences, seen = Counter(lines), Counter[str]()
    found = []
    for text in lines:
        found.append(Key(occurrences[text], seen[text], text))
        seen[text] += 1
    return found


def _line_set(pairs: Sequence[str], keys: _Keys) -> LineSet:
    """Return which lines of parallel pairs are one sentence."""
    sizes = [len(next(iter(keys[pair].values()))) for pair in pairs]
    starts = np.cumsum([0, *sizes]).tolist()
    holders: dict[tuple[str, Key], list[int]] = {}
    for pair, start in zip(pairs, starts, strict=False):
        for code, of_side in keys[pair].items():
            for number, key in enumerate(of_side, start=start):
                holders.setdefault((code, key), []).append(number)
    parents = list(range(sum(sizes)))  # of a union-find forest
    # A bit per pair: sentences are joined only if they have none in common.
    members = [1 << place for place, count in enumerate(sizes) for _ in range(count)]

    def root(line: int) -> int:
        while parents[line] != line:
            parents[line] = line = parents[parents[line]]
        return line

    for _, (first, *others) in sorted(holders.items(), key=lambda one: one[0][1].occurrences):
        for other in others:
            one, two = root(first), root(other)
            if one != two and not members[one] & members[two]:
                parents[two] = one
                members[one] |= members[two]
    _, sentences = np.unique([root(line) for line in range(len(parents))], return_inverse=True)
    parts = np.split(sentences.astype(np.int64), starts[1:-1])
    return LineSet(tuple(pairs), int(sentences.max()) + 1, dict(zip(pairs, parts, strict=True)))


LEVEL = 0.05
"""Largest corrected p-value that is significant; 1 - LEVEL is the level of the intervals."""
MIN_LINES = 20  # test sets with fewer lines have neither intervals nor tests
BLOCK_ELEMENTS = 4_000_000  # draws times lines counted at a time: 32 MB of positions and of counts
LEAST_LEVEL = 1e-12  # the smallest p-value

# Resampled lines


@dataclass(frozen=True)
class ResampleTask:
    """One direction of all runs."""

    paths: Sequence[Path]  # files of line statistics, one per run
    scores: Sequence[Score]  # to resample if every file has their statistics
    seed: int
    resamples: int
    sentences: Sentences | None = None
    """Sentences to draw, of which the lines are some; None: the lines themselves."""


def resampled_scores(task: ResampleTask) -> dict[str, Floats]:
    """Return the scores of all resamples, name of a column → (runs, resamples)."""
    return resample([read_statistics(path, task.scores) for path in task.paths], task)


def resample(statistics: Sequence[Mapping[str, Floats]], task: ResampleTask) -> dict[str, Floats]:
    """Return the scores of all resamples, name of a column → (runs, resamples).

    ``statistics`` has name of a column → (lines, statistics), for every run.
    """
    measured = [
        score for score in task.scores if all(score.column.name in found for found in statistics)
    ]
    if not measured:
        return {}
    blocks = [found[score.column.name] for score in measured for found in statistics]
    columns = np.concatenate(blocks, axis=1)
    sentences = task.sentences or Sentences(np.arange(len(columns)), len(columns))
    sums_of_blocks, drawn_of_blocks = [], []
    for block in draw_counts(sentences.total, resamples=task.resamples, seed=task.seed):
        of_lines = block[:, sentences.of_lines]
        sums_of_blocks.append(of_lines @ columns)
        drawn_of_blocks.append(of_lines.sum(axis=1))
    # A draw may miss all lines of a test set that has few of the set's sentences.
    drawn = np.maximum(np.concatenate(drawn_of_blocks), 1.0)
    ends = np.cumsum([block.shape[1] for block in blocks])
    parts = iter(np.split(np.concatenate(sums_of_blocks), ends, axis=1))
    return {
        score.column.name: np.stack(
            [score.of_draws(part, lines=drawn) for part in islice(parts, len(statistics))]
        )
        for score in measured
    }


def draw_counts(lines: int, *, resamples: int, seed: int) -> Iterator[Floats]:
    """Yield how often each draw holds each line, in blocks of (draws, lines).

    The draws are sacreBLEU's: ``numpy.random.default_rng(seed).choice(lines, (resamples, lines))``.
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
    names = [score.column.name for score in scores]
    with np.load(path, allow_pickle=False) as arrays:
        found = {name: arrays[name] for name in names if name in arrays}
    return {name: rows.astype(np.float64).reshape(len(rows), -1) for name, rows in found.items()}


# The estimator


@dataclass(frozen=True)
class Estimate:
    """A score or a difference of scores, with the variances that make its error."""

    value: float
    over_lines: float
    """Variance over test lines; no interval is narrower than this variance makes it."""
    terms: tuple[tuple[float, int], ...]
    """Variance and degrees of freedom of every source of error, lines first."""

    def half_width(self, level: float) -> float:
        """Return half the width of the confidence interval of level ``1 - level``."""
        squares = [t_quantile(level, freedom) ** 2 * variance for variance, freedom in self.terms]
        least = t_quantile(level, self.terms[0][1]) ** 2 * self.over_lines
        return math.sqrt(max(sum(squares), least))

    @property
    def interval(self) -> Interval:
        """Return the 95 % confidence interval."""
        half = self.half_width(LEVEL)
        return Interval(self.value - half, self.value + half)

    def within(self, low: float, high: float) -> tuple[float, float]:
        """Return the ends of the interval, neither of them outside the range of the value."""
        return max(self.interval.low, low), min(self.interval.high, high)

    @property
    def p_value(self) -> float:
        """Return the level of the interval that ends at zero: the two-sided p-value."""
        if self.half_width(LEVEL) == 0.0:
            return float(self.value == 0.0)
        low, high = math.log(LEAST_LEVEL), 0.0
        for _ in range(50):
            middle = (low + high) / 2.0
            reaches_zero = self.half_width(math.exp(middle)) >= abs(self.value)
            low, high = (middle, high) if reaches_zero else (low, middle)
        return math.exp(high)


@dataclass(frozen=True)
class Runs:
    """Scores of the runs of a system, ordered by seed, or differences of two such systems."""

    seeds: tuple[str, ...]
    measured_R: Floats  # of the test lines themselves
    draws_RB: Floats  # of resampled lines

    @classmethod
    def mean(cls, parts: Sequence[Self]) -> Self:
        """Return the average over directions."""
        measured_R = np.mean([part.measured_R for part in parts], axis=0)
        return cls(parts[0].seeds, measured_R, np.mean([part.draws_RB for part in parts], axis=0))


def estimate(*parts: Runs, lines: int) -> Estimate:
    """Estimate the sum of the means over runs of parts that have their seeds independently.

    The parts are one system, or two of which one is negated. An average has the number of lines of
    its smallest test set.
    """
    correction = lines / (lines - 1)
    total_B = np.sum([part.draws_RB.mean(axis=0) for part in parts], axis=0)
    over_lines = of_lines = correction * float(total_B.var())
    over_seeds = []
    for part in parts:
        runs = len(part.seeds)
        if runs > 1:
            moved_RB = part.draws_RB - part.measured_R[:, None]
            of_lines -= correction * float(moved_RB.var(axis=0, ddof=1).mean()) / runs
            over_seeds.append((float(part.measured_R.var(ddof=1)) / runs, runs - 1))
    value = float(sum(part.measured_R.mean() for part in parts))
    return Estimate(value, over_lines, ((max(of_lines, 0.0), lines - 1), *over_seeds))


def difference(ours: Runs, theirs: Runs, *, lines: int) -> Estimate:
    """Estimate the score of a system minus another's; systems with the same seeds are paired."""
    if ours.seeds != theirs.seeds:
        negated = Runs(theirs.seeds, -theirs.measured_R, -theirs.draws_RB)
        return estimate(ours, negated, lines=lines)
    measured_R, draws_RB = ours.measured_R - theirs.measured_R, ours.draws_RB - theirs.draws_RB
    return estimate(Runs(ours.seeds, measured_R, draws_RB), lines=lines)


LARGE = 19  # degrees of freedom from which an expansion of the quantile is exact to three digits


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


@lru_cache(maxsize=4096)
def t_quantile(level: float, freedom: int) -> float:
    """Return the distance from zero that Student's t exceeds with probability ``level``."""
    if freedom >= LARGE:  # Abramowitz & Stegun, 26.7.5
        z = NormalDist().inv_cdf(1.0 - level / 2.0)
        second = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
        return z + (z**3 + z) / (4 * freedom) + second + third
    low, high = 0.0, 1.0
    while tail_of_t(high, freedom=freedom) > level:
        low, high = high, 2.0 * high
    for _ in range(40):
        middle = (low + high) / 2.0
        is_inside = tail_of_t(middle, freedom=freedom) > level
        low, high = (middle, high) if is_inside else (low, middle)
    return high


def holm(p_values: Sequence[float], *, tests: int) -> list[float]:
    """Return p-values corrected for a number of tests, in order; missing p-values count as 1."""
    order = np.argsort(p_values, kind="stable")
    factors = np.arange(tests, 0, -1)[: len(p_values)]
    corrected = np.empty(len(p_values))
    corrected[order] = np.maximum.accumulate(np.asarray(p_values)[order] * factors)
    return [min(float(value), 1.0) for value in corrected]


# Comparisons


def compare(
    systems: Mapping[str, Runs],
    *,
    lines: int,
    column: Column,
    baseline: str,
    translating: Mapping[str, bool],
) -> Comparison:
    """Return the intervals of all systems, their differences to the baseline, and the best system.

    An average has the lines of its smallest test set. The best system translates, and so does the
    baseline, else there is none.
    """

    def against(name: str, other: str) -> Estimate:
        return difference(systems[name], systems[other], lines=lines)

    sign = 1.0 if column.larger_is_better else -1.0
    leader = max(systems, key=lambda name: sign * float(systems[name].measured_R.mean()))
    leads = [against(leader, name) for name in systems if name != leader]
    is_best = (
        bool(leads)
        and (translating[leader] and translating[baseline])
        and all(sign * one.value > 0 and one.p_value <= LEVEL for one in leads)
    )
    to_baseline = {name: against(name, baseline) for name in systems if name != baseline}
    least, most = (0.0, 100.0) if column.out_of_100 else (-math.inf, math.inf)
    return Comparison(
        intervals={
            name: Interval(*estimate(one, lines=lines).within(least, most))
            for name, one in systems.items()
        },
        best=leader if is_best else None,
        differences={
            name: Difference(*found.within(-most, most), found.value, found.p_value)
            for name, found in to_baseline.items()
        },
    )


def correct_tests(
    comparisons: Mapping[str, Mapping[str, Comparison]], *, decided: Collection[str], tests: int
) -> dict[str, dict[str, Comparison]]:
    """Return comparisons with the corrected p-values of all differences to the baseline.

    Args:
        comparisons: direction → name of a column → comparison.
        decided: directions to test. Where the baseline does not translate, nothing is tested.
        tests: number of tests to correct for, undecided directions included: that the baseline does
            not translate there was not known before its translations were seen.
    """
    found = {name: dict(columns) for name, columns in comparisons.items()}
    for column in dict.fromkeys(name for columns in comparisons.values() for name in columns):
        cases = [
            (name, system, one)
            for name, columns in comparisons.items()
            if name in decided and column in columns
            for system, one in columns[column].differences.items()
        ]
        corrected = holm([one.p_value for *_, one in cases], tests=tests)
        for (name, system, one), p_value in zip(cases, corrected, strict=True):
            before = found[name][column]
            differences = {**before.differences, system: replace(one, p_value_holm=p_value)}
            found[name][column] = replace(before, differences=differences)
    return found
