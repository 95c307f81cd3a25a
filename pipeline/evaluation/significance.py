"""Which differences between systems are more than chance: paired bootstrap over test lines.

- The lines of a test set are drawn with replacement a thousand times; every system is scored on
  the same draws (Koehn 2004), from sacreBLEU's sufficient statistics of the lines.
- Both directions of a pair have the same lines and share their draws; pairs are drawn
  independently. The draws of an average are the means of its directions' draws.
- A system is the best one only where its lead over each of the others is above zero in the middle
  95 % of the draws.
- A draw is a row of counts, how often it holds each line: the sums of all draws are then one
  matrix product, in blocks that bound memory.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pipeline.evaluation.averages import by_group
from pipeline.evaluation.directions import DirectionProfile
from pipeline.evaluation.scores import Comparison, Interval, Metric, Significance

RESAMPLES = 1000
MIN_LINES = 20
"""Test sets with fewer lines tell nothing of their spread: neither interval nor best system."""
BLOCK_ELEMENTS = 4_000_000
"""Draws times lines that are counted at a time; 32 MB each of positions and of counts."""

Floats = npt.NDArray[np.float64]

WIDTHS: Mapping[Metric, int] = {"bleu": 10, "chrf": 24, "language": 1, "language_restricted": 1}
"""Statistics per line; see ``bleu_chrf.LineStatistics``."""


@dataclass(frozen=True)
class BootstrapTask:
    """One direction of all systems."""

    paths: Sequence[Path]
    """Line statistics, one file per system."""
    seed: int
    resamples: int = RESAMPLES


def resampled_scores(task: BootstrapTask) -> dict[Metric, Floats]:
    """Metric → (systems, resamples) scores in 0–100, of the metrics that were measured."""
    statistics = [_read_statistics(path) for path in task.paths]
    metrics = list(statistics[0])
    columns = np.concatenate([one[metric] for one in statistics for metric in metrics], axis=1)
    counts = draw_counts(len(columns), resamples=task.resamples, seed=task.seed)
    sums = np.concatenate([block @ columns for block in counts])
    parts = np.split(sums, np.cumsum([WIDTHS[metric] for _ in statistics for metric in metrics]), 1)
    return {
        metric: np.stack(
            [
                score_sums(metric, parts[place], lines=len(columns))
                for place in range(offset, len(statistics) * len(metrics), len(metrics))
            ]
        )
        for offset, metric in enumerate(metrics)
    }


def draw_counts(lines: int, *, resamples: int, seed: int) -> Iterator[Floats]:
    """How often each draw holds each line: blocks of (draws, lines).

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


def score_sums(metric: Metric, sums: Floats, *, lines: int) -> Floats:
    """Scores in 0–100 of summed statistics, (draws, statistics) → (draws,)."""
    match metric:
        case "bleu":
            return bleu_of_sums(sums)
        case "chrf":
            return chrf_of_sums(sums)
        case "language" | "language_restricted":
            found: Floats = 100.0 * sums[:, 0] / lines
            return found


def bleu_of_sums(sums: Floats) -> Floats:
    """sacreBLEU's BLEU with its exponential smoothing, (draws, 10) → (draws,)."""
    hypothesis, reference = sums[:, 0], sums[:, 1]
    correct, total = sums[:, 2:6], sums[:, 6:10]
    zeros = np.cumsum((correct == 0) & (total > 0), axis=1)
    numerators = np.where(correct == 0, 0.5**zeros, correct)
    # Without any n-gram of an order sacreBLEU leaves its precision at 0, and so the score.
    scored = (total > 0).all(axis=1) & (correct > 0).any(axis=1)
    logarithms = np.log(100.0 * numerators / np.maximum(total, 1.0)).mean(axis=1)
    brevity = np.minimum(1.0 - reference / np.maximum(hypothesis, 1.0), 0.0)
    return np.where(scored, np.exp(brevity + logarithms), 0.0)


def chrf_of_sums(sums: Floats, *, beta: float = 2.0) -> Floats:
    """sacreBLEU's chrF of all the orders there are statistics for, (draws, 24) → (draws,)."""
    hypothesis, reference, matches = sums[:, 0::3], sums[:, 1::3], sums[:, 2::3]
    known = (hypothesis > 0) & (reference > 0)
    orders = np.maximum(known.sum(axis=1), 1)
    precision = _sum_where(known, matches / np.maximum(hypothesis, 1.0)) / orders
    recall = _sum_where(known, matches / np.maximum(reference, 1.0)) / orders
    weighted = beta**2 * precision + recall
    scores: Floats = 100.0 * (1 + beta**2) * precision * recall / np.where(weighted, weighted, 1.0)
    return scores


def _sum_where(known: npt.NDArray[np.bool_], values: Floats) -> Floats:
    summed: Floats = np.where(known, values, 0.0).sum(axis=1)
    return summed


def _read_statistics(path: Path) -> dict[Metric, Floats]:
    """(lines, statistics) of each metric a file has."""
    with np.load(path, allow_pickle=False) as arrays:
        return {
            metric: arrays[metric].astype(np.float64).reshape(-1, width)
            for metric, width in WIDTHS.items()
            if metric in arrays
        }


# What the draws say


def middle_95(scores: Floats) -> tuple[float, float]:
    """The smallest and the largest of scores without a fortieth of them at either end."""
    ordered, beyond = np.sort(scores), len(scores) // 40
    return float(ordered[beyond]), float(ordered[len(ordered) - beyond - 1])


def compare(systems: Sequence[str], scores: Sequence[float], draws: Floats) -> Comparison:
    """Intervals of all systems, and the one that is better than each of the others, if any.

    Args:
        scores: on the test set itself.
        draws: (systems, resamples).
    """
    leader = int(np.argmax(scores))
    others = [place for place in range(len(systems)) if place != leader]
    leads = [middle_95(draws[leader] - draws[place])[0] > 0.0 for place in others]
    return Comparison(
        intervals={
            name: Interval(*middle_95(row)) for name, row in zip(systems, draws, strict=True)
        },
        best=systems[leader] if leads and all(leads) else None,
    )


def compare_all(
    scores: Mapping[str, Mapping[Metric, Sequence[float]]],
    draws: Mapping[str, Mapping[Metric, Floats]],
    *,
    systems: Sequence[str],
    profiles: Sequence[DirectionProfile],
    resamples: int = RESAMPLES,
) -> Significance:
    """Compare the systems in every direction, and in every average whose directions all have draws.

    Args:
        scores: direction → metric → one score per system, of all directions.
        draws: direction → metric → (systems, resamples), of those with enough lines.
    """

    def joined(directions: Sequence[str]) -> dict[Metric, Comparison]:
        found: dict[Metric, Comparison] = {}
        for metric in WIDTHS:
            measured = [name for name in directions if metric in scores[name]]
            if measured and all(name in draws for name in measured):
                found[metric] = compare(
                    systems,
                    np.mean([scores[name][metric] for name in measured], axis=0).tolist(),
                    np.mean([draws[name][metric] for name in measured], axis=0),
                )
        return found

    members = by_group({name: name for name in scores}, profiles=profiles)
    return Significance(
        resamples=resamples,
        directions={name: joined([name]) for name in scores},
        averages={
            family: {group: joined(names) for group, names in groups.items()}
            for family, groups in members.items()
        },
    )
