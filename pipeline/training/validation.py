"""What a validation found, as it stands in a run's metrics."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pipeline.artifacts.corpus import Direction, resource_of


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


def summarize_validation(
    losses: dict[Direction, tuple[float, int]],
    *,
    imported_lines: dict[str, int],
    thresholds: tuple[int, int],
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
        perplexity=math.exp(min(overall, 700.0)),
        directions={str(direction): mean([direction]) for direction in losses},
        pairs={pair: mean(chosen) for pair, chosen in by_pair.items()},
        resources={resource: mean(chosen) for resource, chosen in by_resource.items()},
    )
