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

# Samples per family of directions: directions, lines of each, and the longest reference shown.
DIRECTIONS, LINES, CHARACTERS = 3, 2, 240


def choose_samples(
    corpus: Artifact,
    systems: Mapping[str, Artifact],
    *,
    profiles: Sequence[DirectionProfile],
    seed: int,
    pivot: str | None,
) -> list[TextSample]:
    """Return a few lines of a few directions of every family, with the first run of each system."""
    first = {name: systems[runs[0]] for name, runs in group_runs(systems).items()}
    samples = []
    for family in FAMILIES:
        members = [profile.direction for profile in profiles if profile.family == family]
        step = max(len(members) / DIRECTIONS, 1.0)
        for index in range(min(len(members), DIRECTIONS)):
            way = members[int(index * step)]
            codes = (way.source, way.target)
            sources, references = (read_lines(corpus, "test", way.pair, code) for code in codes)
            translated = {name: read_hypotheses(one, way) for name, one in first.items()}
            lines = range(len(references))
            short = [line for line in lines if len(references[line]) <= CHARACTERS] or [*lines]
            generator = random.Random(derive_seed("evaluate samples", seed, str(way)))
            samples += [
                TextSample(
                    " → ".join(language(code).name for code in codes),
                    line + 1,
                    (
                        SampleText("source", sources[line], way.source),
                        SampleText("reference", references[line], way.target),
                        *(
                            SampleText(name, found[line].text, way.target, place)
                            for place, (name, found) in enumerate(translated.items())
                        ),
                    ),
                    group=title_of_family(family, pivot=pivot),
                )
                for line in sorted(generator.sample(short, min(LINES, len(short))))
            ]
    return samples


def samples_section(title: str, samples: Sequence[TextSample]) -> ReportSection:
    """Return the section of the samples."""
    lead = "Test lines drawn at random. Systems with several runs are shown by their first run."
    return ReportSection(title, lead, samples=tuple(samples))
