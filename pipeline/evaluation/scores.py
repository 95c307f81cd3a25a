"""What an evaluation holds: the scores of every system, and how sure they are."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pipeline.evaluation.directions import DirectionProfile, Family, Group
from pipeline.evaluation.language_accuracy import LanguageAccuracy

Metric = Literal["bleu", "chrf", "language", "language_restricted"]
"""As the line statistics of a direction are named; the last two are language accuracies."""


@dataclass(frozen=True)
class Scores:
    """Scores in 0–100; no language accuracy where langdetect does not know the target."""

    bleu: float
    chrf: float
    language_accuracy: LanguageAccuracy | None


@dataclass(frozen=True)
class DirectionScores:
    """What one system reached in one direction."""

    scores: Scores
    lines: int
    empty: int
    """Hypotheses without text."""
    truncated: int
    """Hypotheses cut at the maximum length."""
    bleu_signature: str
    chrf_signature: str


@dataclass(frozen=True)
class SystemScores:
    """What one system reached, direction (``de-en``) by direction and averaged."""

    name: str
    directions: Mapping[str, DirectionScores]
    averages: Mapping[Family, Mapping[Group, Scores]]


@dataclass(frozen=True)
class ReferenceAccuracy:
    """Language accuracy of the references: what langdetect allows a perfect system."""

    directions: Mapping[str, LanguageAccuracy]
    averages: Mapping[Family, Mapping[Group, LanguageAccuracy]]


@dataclass(frozen=True)
class Interval:
    """The middle 95 % of a score over resampled test lines."""

    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """All systems by one metric, over the same resampled lines."""

    intervals: Mapping[str, Interval]
    """By system."""
    best: str | None
    """The system that is better than every other one in 97.5 % of the resamples; None if none."""


@dataclass(frozen=True)
class Significance:
    """Paired bootstrap of every direction and average that has enough test lines for it."""

    resamples: int
    directions: Mapping[str, Mapping[Metric, Comparison]]
    averages: Mapping[Family, Mapping[Group, Mapping[Metric, Comparison]]]


@dataclass(frozen=True)
class Evaluation:
    """All scores of an evaluation, systems in the order they were given."""

    pivot: str | None
    thresholds: tuple[int, int]
    directions: tuple[DirectionProfile, ...]
    language_names: Mapping[str, str]
    """Code → English name, of all languages of the corpus."""
    tokenizers: Mapping[str, str]
    """Target language → BLEU tokenizer."""
    systems: tuple[SystemScores, ...]
    references: ReferenceAccuracy | None
    undetectable: tuple[str, ...]
    """Target languages langdetect does not know; left out of language accuracy."""
    warnings: tuple[str, ...]
    significance: Significance | None = None
