"""Test lines with the translations of all systems, drawn by seed."""

import random
from collections.abc import Mapping, Sequence

from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.corpus import read_hypotheses, read_lines
from pipeline.evaluation.averages import group_runs
from pipeline.evaluation.directions import FAMILIES, DirectionProfile, title_of_family
from pipeline.evaluation.tables import ReportSection, SampleText, TextSample
from pipeline.languages import language
from pipeline.seeds import derive_seed

DIRECTIONS, LINES, CHARACTERS = 3, 2, 240
"""Samples per family of directions: directions, lines of each, and the longest reference shown."""


def choose_samples(
    corpus: Artifact,
    systems: Mapping[str, Artifact],
    *,
    profiles: Sequence[DirectionProfile],
    seed: int,
    pivot: str | None,
) -> list[TextSample]:
    """Return a few lines of a few directions of every family.

    Args:
        corpus: with sources and references.
        systems: run → translations; a system with several runs is shown by its first.
        profiles: directions to choose from.
        seed: of the choice.
        pivot: language of the titles of families.
    """
    first = {name: systems[runs[0]] for name, runs in group_runs(systems).items()}
    samples: list[TextSample] = []
    for family in FAMILIES:
        members = [profile for profile in profiles if profile.family == family]
        step = max(len(members) / DIRECTIONS, 1.0)
        for index in range(min(len(members), DIRECTIONS)):
            profile = members[int(index * step)]
            samples += _samples_of_direction(corpus, first, profile, seed=seed, pivot=pivot)
    return samples


def _samples_of_direction(
    corpus: Artifact,
    systems: Mapping[str, Artifact],
    profile: DirectionProfile,
    *,
    seed: int,
    pivot: str | None,
) -> list[TextSample]:
    direction = profile.direction
    source, target = direction.source, direction.target
    sources, references = (
        read_lines(corpus, "test", direction.pair, code) for code in (source, target)
    )
    translated = {name: read_hypotheses(one, direction) for name, one in systems.items()}
    lines = range(len(references))
    short = [line for line in lines if len(references[line]) <= CHARACTERS] or list(lines)
    generator = random.Random(derive_seed("evaluate samples", seed, str(direction)))
    return [
        TextSample(
            f"{language(source).name} → {language(target).name}",
            line + 1,
            (
                SampleText("source", sources[line], source),
                SampleText("reference", references[line], target),
                *(
                    SampleText(name, found[line].text, target, place)
                    for place, (name, found) in enumerate(translated.items())
                ),
            ),
            group=title_of_family(profile.family, pivot=pivot),
        )
        for line in sorted(generator.sample(short, min(LINES, len(short))))
    ]


def samples_section(title: str, samples: Sequence[TextSample]) -> ReportSection:
    """Return the section of the samples."""
    return ReportSection(
        title,
        "Test lines drawn at random. Systems with several runs are shown by their first run.",
        samples=tuple(samples),
    )
