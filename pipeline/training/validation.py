"""What a validation found, as it stands in a run's metrics."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from pipeline.artifacts.corpus import Direction, Resource, resource_of


@dataclass(frozen=True)
class Validation:
    """Token-mean losses, in nats, and the perplexity overall.

    Attributes:
        directions, pairs, resources: losses by direction, language pair and resource tier.
    """

    loss: float
    perplexity: float
    directions: Mapping[str, float]
    pairs: Mapping[str, float]
    resources: Mapping[str, float]

    def perplexity_of(self, tier: Resource | Literal["all"]) -> float:
        """Overall, or of the pairs of one resource tier, of which there must be some."""
        return self.perplexity if tier == "all" else perplexity_of_loss(self.resources[tier])


def perplexity_of_loss(loss: float) -> float:
    return math.exp(min(loss, 700.0))


def summarize_validation(
    losses: dict[Direction, tuple[float, int]],
    *,
    imported_lines: dict[str, int],
    thresholds: tuple[int, ...],
) -> Validation:
    """Means over tokens of summed losses: direction → (nats, labels)."""

    def mean(chosen: Iterable[Direction]) -> float:
        pairs = [losses[direction] for direction in chosen]
        return sum(loss for loss, _ in pairs) / sum(labels for _, labels in pairs)

    by_pair: dict[str, list[Direction]] = {}
    by_resource: dict[str, list[Direction]] = {}
    for direction in losses:
        by_pair.setdefault(direction.pair, []).append(direction)
        resource = resource_of(imported_lines.get(direction.pair, 0), thresholds=thresholds)
        by_resource.setdefault(resource, []).append(direction)
    overall = mean(losses)
    return Validation(
        loss=overall,
        perplexity=perplexity_of_loss(overall),
        directions={str(direction): mean([direction]) for direction in losses},
        pairs={pair: mean(chosen) for pair, chosen in by_pair.items()},
        resources={resource: mean(chosen) for resource, chosen in by_resource.items()},
    )
