"""The mixture: how often each pair is drawn, and the counts and temperature behind it."""

import math
from collections.abc import Mapping
from typing import NoReturn

from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.corpus import languages, line_counts
from pipeline.errors import ArtifactError, DataError
from pipeline.settings import shown

MIXTURE_NAME = "mixture.json"
SUM_TOLERANCE = 1e-6
"""Of probabilities that were written with all their digits."""


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
    """p_i ∝ (n_i / Σn)^(1/T) (MMNMT, §5.1): T = 1 is proportional, T = ∞ uniform.

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
    """Pair → probability that a sentence pair drawn for training is of this pair.

    Raises:
        ArtifactError: the file holds something else, or the probabilities do not sum to 1.
    """
    document = artifact.read_json(MIXTURE_NAME)
    pairs = document.get("pairs") if isinstance(document, dict) else None
    found: dict[str, float] = {}
    for name, entry in sorted(pairs.items()) if isinstance(pairs, dict) else ():
        probability = entry.get("probability") if isinstance(entry, dict) else None
        if not isinstance(probability, int | float) or not 0 <= probability <= 1:
            _refuse(artifact, f"gives pair {shown(name)!r} no probability from 0 to 1")
        found[name] = float(probability)
    total = math.fsum(found.values())
    if not math.isclose(total, 1, abs_tol=SUM_TOLERANCE):
        _refuse(artifact, f"has probabilities that sum to {total:g}, not to 1")
    return found


def _refuse(artifact: Artifact, problem: str) -> NoReturn:
    raise ArtifactError(f"{artifact.file(MIXTURE_NAME)} {problem}: run stage 'mix' again.")
