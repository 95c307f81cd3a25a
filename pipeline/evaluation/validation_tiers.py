"""Validation losses by resource tier, into the pivot and out of it (MMNMT, Figures 1 and 5).

``metrics.jsonl`` has the loss of every direction, the shards of a training the lines that decide
its tier. The number of tokens of a direction is in neither, so that losses are means over
directions.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from pipeline.artifacts.artifact import Artifact, open_recorded
from pipeline.artifacts.corpus import Resource, imported_lines, pair_name, resource_of
from pipeline.errors import UserError
from pipeline.evaluation.directions import Family, pivot_of

SIDES: tuple[Family, ...] = ("into_pivot", "out_of_pivot")


@dataclass(frozen=True)
class PairTiers:
    """The pivot of a training, and the resource tier of each of its pairs."""

    pivot: str
    tiers: Mapping[str, Resource]

    def mean_losses(self, losses: Mapping[str, float | None]) -> dict[str, dict[str, float]]:
        """Return the mean losses of directions by side of the pivot and tier.

        Args:
            losses: direction → loss. A mean with one that is None is left out.
        """
        found: dict[str, dict[str, list[float | None]]] = {}
        for direction, loss in losses.items():
            source, _, target = direction.partition("-")
            tier = self.tiers.get(pair_name(source, target))
            if tier is not None and self.pivot in (source, target):
                side = SIDES[target != self.pivot]
                found.setdefault(side, {}).setdefault(tier, []).append(loss)
        return {
            side: {
                tier: fmean(known)
                for tier, of_tier in tiers.items()
                for known in [[loss for loss in of_tier if loss is not None]]
                if len(known) == len(of_tier)
            }
            for side, tiers in found.items()
        }


def read_tiers(checkpoint: Artifact) -> PairTiers | None:
    """Return the tiers of a training; None without a pivot, or if its shards are gone."""
    record = checkpoint.manifest.inputs.get("shards")
    shards = None if record is None else open_recorded(record)
    thresholds = _thresholds(checkpoint.manifest.config.get("training"))
    if shards is None or not thresholds:
        return None
    try:
        pivot, lines = pivot_of(shards), imported_lines(shards)
    except UserError:
        return None
    if pivot is None:
        return None
    tiers = {pair: resource_of(count, thresholds=thresholds) for pair, count in lines.items()}
    return PairTiers(pivot, tiers)


def _thresholds(training: Any) -> tuple[int, ...]:
    found = training.get("resource_thresholds") if isinstance(training, dict) else None
    if not isinstance(found, list) or len(found) not in (2, 3):
        return ()
    return tuple(found) if all(isinstance(one, int) for one in found) else ()
