"""The mixture: how often each pair is drawn, and the counts and temperature behind it."""

import math
from collections.abc import Mapping

from pipeline.artifacts import Artifact
from pipeline.corpus import languages, line_counts
from pipeline.errors import DataError

MIXTURE_NAME = "mixture.json"


def lines_per_language(artifact: Artifact) -> dict[str, int]:
    """Language → training lines of a corpus or shards over all its pairs, for every language.

    A pivot's lines count once in each of its pairs.
    """
    totals = dict.fromkeys(languages(artifact), 0)
    for pair, count in line_counts(artifact, "train").items():
        for code in pair.split("-"):
            totals[code] += count
    return totals


def temperature_probabilities(
    counts: Mapping[str, int], *, sampling_temperature: float
) -> dict[str, float]:
    """p_i ∝ (n_i / Σn)^(1/T) (mmnmt.md §5): T = 1 is proportional, T = ∞ uniform.

    What has a count of zero has the probability zero at every temperature.

    Raises:
        DataError: every count is zero.
    """
    largest = max(counts.values(), default=0)
    if largest <= 0:
        raise DataError("There is nothing to draw from: every pair has 0 training lines.")
    # Relative to the largest count the logarithms are at most 0, so that no power overflows.
    weights = {
        name: math.exp((math.log(count) - math.log(largest)) / sampling_temperature)
        if count
        else 0.0
        for name, count in counts.items()
    }
    total = math.fsum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def read_mixture(artifact: Artifact) -> dict[str, float]:
    """Pair → probability that a sentence pair drawn for training is of this pair."""
    pairs: dict[str, dict[str, float]] = artifact.read_json(MIXTURE_NAME)["pairs"]
    return {name: float(entry["probability"]) for name, entry in sorted(pairs.items())}
