"""Which differences between systems are more than chance: paired bootstrap over test lines.

- The lines of a test set are drawn with replacement a thousand times; every system is scored on
  the same draws (Koehn 2004), from the sufficient statistics of the lines.
- Both directions of a pair have the same lines and share their draws; pairs are drawn
  independently. The draws of an average are the means of its directions' draws.
- A system is the best one only where its lead over each of the others is above zero in the middle
  95 % of the draws, and where both it and the baseline translate (``verdicts``).
- A draw is a row of counts, how often it holds each line: the sums of all draws are then one
  matrix product, in blocks that bound memory.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np

from pipeline.evaluation.averages import by_group
from pipeline.evaluation.directions import DirectionProfile
from pipeline.evaluation.score_slot import Column, Floats, Score
from pipeline.evaluation.scores import Comparison, Interval, Quality, Significance, Verdicts

RESAMPLES = 1000
MIN_LINES = 20
"""Test sets with fewer lines tell nothing of their spread: neither interval nor best system."""
BLOCK_ELEMENTS = 4_000_000
"""Draws times lines that are counted at a time; 32 MB each of positions and of counts."""


@dataclass(frozen=True)
class BootstrapTask:
    """One direction of all systems."""

    paths: Sequence[Path]
    """Line statistics, one file per system."""
    scores: Sequence[Score]
    """Those that have statistics in every file are resampled."""
    seed: int
    resamples: int = RESAMPLES


def resampled_scores(task: BootstrapTask) -> dict[str, Floats]:
    """Name of a column → (systems, resamples) scores, of those that were measured."""
    statistics = [read_statistics(path, task.scores) for path in task.paths]
    measured = [one for one in task.scores if all(one.column.name in found for found in statistics)]
    if not measured:
        return {}
    blocks = [found[one.column.name] for one in measured for found in statistics]
    lines = len(blocks[0])
    columns = np.concatenate(blocks, axis=1)
    counts = draw_counts(lines, resamples=task.resamples, seed=task.seed)
    sums = np.concatenate([block @ columns for block in counts])
    parts = iter(np.split(sums, np.cumsum([block.shape[1] for block in blocks]), axis=1))
    return {
        one.column.name: np.stack(
            [one.of_sums(part, lines=lines) for part in islice(parts, len(statistics))]
        )
        for one in measured
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


def read_statistics(path: Path, scores: Sequence[Score]) -> dict[str, Floats]:
    """(lines, statistics) of each score that a file has."""
    names = [one.column.name for one in scores]
    with np.load(path, allow_pickle=False) as arrays:
        found = {name: arrays[name] for name in names if name in arrays}
    return {name: rows.astype(np.float64).reshape(len(rows), -1) for name, rows in found.items()}


# What the draws say


def middle_95(scores: Floats) -> tuple[float, float]:
    """The smallest and the largest of scores without a fortieth of them at either end."""
    ordered, beyond = np.sort(scores), len(scores) // 40
    return float(ordered[beyond]), float(ordered[len(ordered) - beyond - 1])


def compare(
    systems: Sequence[str],
    scores: Sequence[float],
    draws: Floats,
    *,
    larger_is_better: bool | None = True,
) -> Comparison:
    """Intervals of all systems, and the one that is better than each of the others, if any.

    Args:
        scores: on the test set itself.
        draws: (systems, resamples).
    """
    sign = 1.0 if larger_is_better else -1.0
    leader = int(np.argmax(sign * np.asarray(scores)))
    others = [place for place in range(len(systems)) if place != leader]
    leads = [middle_95(sign * (draws[leader] - draws[place]))[0] > 0.0 for place in others]
    return Comparison(
        intervals={
            name: Interval(*middle_95(row)) for name, row in zip(systems, draws, strict=True)
        },
        best=systems[leader] if larger_is_better is not None and leads and all(leads) else None,
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
) -> Significance:
    """Compare the systems in every direction, and in every average whose directions all have draws.

    Args:
        scores: direction → name of a column → one score per system, of all directions.
        draws: direction → name of a column → (systems, resamples), of those with enough lines.
        verdicts: who translates in each of the directions and averages.
    """

    def joined(
        directions: Sequence[str], qualities: Mapping[str, Quality]
    ) -> dict[str, Comparison]:
        found: dict[str, Comparison] = {}
        for column in columns:
            measured = [name for name in directions if column.name in scores[name]]
            if measured and all(name in draws for name in measured):
                compared = compare(
                    systems,
                    np.mean([scores[name][column.name] for name in measured], axis=0).tolist(),
                    np.mean([draws[name][column.name] for name in measured], axis=0),
                    larger_is_better=column.larger_is_better,
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
    )
