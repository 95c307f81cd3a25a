"""Sample translations: a few lines of a few directions of every family, drawn by seed."""

import random
from collections.abc import Mapping, Sequence

from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.corpus import read_hypotheses, read_lines
from pipeline.evaluation.directions import FAMILIES, DirectionProfile
from pipeline.evaluation.tables import Sample
from pipeline.seeds import derive_seed

SAMPLE_DIRECTIONS = 3
SAMPLE_LINES = 2
SAMPLE_CHARACTERS = 240
"""Samples per family: directions, lines of each, and the longest reference that is shown."""


def choose_samples(
    corpus: Artifact,
    systems: Mapping[str, Artifact],
    *,
    profiles: Sequence[DirectionProfile],
    seed: int,
) -> list[Sample]:
    """Samples in the order of families, directions and lines."""
    samples: list[Sample] = []
    for family in FAMILIES:
        members = [profile for profile in profiles if profile.family == family]
        step = max(len(members) / SAMPLE_DIRECTIONS, 1.0)
        for index in range(min(len(members), SAMPLE_DIRECTIONS)):
            samples += _sample_direction(
                corpus, systems, profile=members[int(index * step)], seed=seed
            )
    return samples


def _sample_direction(
    corpus: Artifact, systems: Mapping[str, Artifact], *, profile: DirectionProfile, seed: int
) -> list[Sample]:
    direction = profile.direction
    sources = read_lines(corpus, "test", direction.pair, direction.source)
    references = read_lines(corpus, "test", direction.pair, direction.target)
    translated = {
        name: read_hypotheses(translations, direction) for name, translations in systems.items()
    }
    lines = range(len(references))
    short = [line for line in lines if len(references[line]) <= SAMPLE_CHARACTERS] or list(lines)
    generator = random.Random(derive_seed("evaluate samples", seed, str(direction)))
    return [
        Sample(
            profile=profile,
            line=line + 1,
            source=sources[line],
            reference=references[line],
            translations={name: found[line].text for name, found in translated.items()},
        )
        for line in sorted(generator.sample(short, min(SAMPLE_LINES, len(short))))
    ]
