"""The report of an evaluation: order of its sections, overview, samples and notes."""

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from difflib import SequenceMatcher
from importlib.metadata import PackageNotFoundError, version
from typing import Self

from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.corpus import pair_name, read_hypotheses, read_lines
from pipeline.evaluation.averages import RULE
from pipeline.evaluation.curves import curves_section
from pipeline.evaluation.directions import FAMILIES, DirectionProfile, title_of_family
from pipeline.evaluation.history import History, budgets_section, stages_section, trained_for
from pipeline.evaluation.repeated_runs import group_runs
from pipeline.evaluation.score_sections import (
    TrainedFor,
    averages_section,
    baseline_section,
    directions_by_family,
    directions_section,
    family_title,
    language_averages_section,
    main_tables,
    output_languages_section,
    overview_section,
    separate_sections,
    word_accuracy_section,
)
from pipeline.evaluation.scores import Evaluation, Significance, SystemScores
from pipeline.evaluation.statistics import MIN_LINES
from pipeline.evaluation.tables import (
    BulletList,
    Cell,
    Report,
    ReportSection,
    SampleText,
    Table,
    TextSample,
    bullets,
    joined,
)
from pipeline.languages import language, parts_words_by_spaces
from pipeline.seeds import derive_seed
from pipeline.terminal import counted

SAMPLE_DIRECTIONS = 3
SAMPLE_LINES = 2
SAMPLE_CHARACTERS = 240
MARKED = "The page underlines words that an alignment with the reference leaves over."
"""Samples per family of directions: directions, lines of each, and the longest reference shown."""


@dataclass(frozen=True)
class Imprint:
    """When a report was made, and by which version of mmnmt."""

    made: datetime
    version: str

    @classmethod
    def now(cls) -> Self:
        """Return the present time and the installed version."""
        try:
            installed = version("mmnmt")
        except PackageNotFoundError:
            installed = "(not installed)"
        return cls(made=datetime.now(UTC), version=installed)

    @property
    def text(self) -> str:
        """Return both on one line."""
        return f"{self.made:%Y-%m-%d %H:%M} UTC, mmnmt {self.version}"


@dataclass(frozen=True)
class Sample:
    """A test line with the translations of all systems."""

    profile: DirectionProfile
    line: int
    """Counted from 1."""
    source: str
    reference: str
    translations: Mapping[str, str]


def evaluation_report(
    evaluation: Evaluation,
    history: History,
    samples: Sequence[Sample] = (),
    *,
    imprint: Imprint,
    further: Sequence[ReportSection] = (),
) -> Report:
    """Return the report of an evaluation.

    Args:
        evaluation: scores of all systems.
        history: runs behind the systems.
        samples: translated test lines to show.
        imprint: date and version.
        further: sections that follow those of the scores.
    """
    runs = {run: place for place, one in enumerate(evaluation.systems) for run in one.run_names}
    training = _trained_for(evaluation, history)
    sections = (
        overview_section(evaluation),
        _warnings_section(evaluation),
        averages_section(evaluation, training) if evaluation.main_columns else None,
        budgets_section(history),
        *separate_sections(evaluation, training),
        baseline_section(evaluation),
        language_averages_section(evaluation),
        output_languages_section(evaluation),
        word_accuracy_section(evaluation),
        *further,
        curves_section(history.curves, runs),
        _samples_section(evaluation, samples),
        directions_section(evaluation),
        stages_section(history),
        _notes_section(evaluation, history),
        _signatures_section(evaluation),
    )
    return Report(
        f"Translation quality of {counted(len(evaluation.systems), 'system')}",
        f"Evaluation report, {imprint.text}",
        _facts(evaluation),
        tuple(section for section in sections if section is not None),
        generator="mmnmt evaluate",
    )


def summary_tables(evaluation: Evaluation, history: History) -> tuple[Table, ...]:
    """Return the averages of the main scores, which the command prints."""
    return main_tables(evaluation, _trained_for(evaluation, history))


def _trained_for(evaluation: Evaluation, history: History) -> TrainedFor:
    """Return the description of a system's training; of runs that differ in it, all of theirs."""
    runs = {one.name: one.run_names for one in evaluation.systems}
    return lambda system: " / ".join(
        dict.fromkeys(trained_for(history, run) for run in runs[system])
    )


def _facts(evaluation: Evaluation) -> tuple[str, ...]:
    targets = {one.direction.target for one in evaluation.directions}
    lines = sum(one.test_lines for one in evaluation.directions)
    kinds = (
        f"{len(profiles):,} {family_title(evaluation, family)}"
        for family, profiles in directions_by_family(evaluation).items()
    )
    return (
        f"{counted(len(evaluation.directions), 'direction')} ({', '.join(kinds)})",
        counted(len(targets), "target language"),
        counted(lines, "test line"),
    )


def _warnings_section(evaluation: Evaluation) -> ReportSection | None:
    lists = bullets(evaluation.warnings)
    return ReportSection("Warnings", lists=lists) if lists else None


# Samples


def choose_samples(
    corpus: Artifact,
    systems: Mapping[str, Artifact],
    *,
    profiles: Sequence[DirectionProfile],
    seed: int,
) -> list[Sample]:
    """Draw test lines by seed: a few lines of a few directions of every family.

    Of a system with several runs, the first translates them.
    """
    systems = {name: systems[runs[0]] for name, runs in group_runs(systems).items()}
    samples: list[Sample] = []
    for family in FAMILIES:
        members = [profile for profile in profiles if profile.family == family]
        step = max(len(members) / SAMPLE_DIRECTIONS, 1.0)
        for index in range(min(len(members), SAMPLE_DIRECTIONS)):
            samples += _samples_of_direction(
                corpus, systems, profile=members[int(index * step)], seed=seed
            )
    return samples


def _samples_of_direction(
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


def _samples_section(evaluation: Evaluation, samples: Sequence[Sample]) -> ReportSection | None:
    if not samples:
        return None
    ordered = sorted(samples, key=lambda one: FAMILIES.index(one.profile.family))
    return ReportSection(
        "Sample translations",
        f"Test lines drawn at random by the evaluation's seed. {MARKED}"
        + (
            " Systems with several runs are shown by their first run."
            if any(one.runs for one in evaluation.systems)
            else ""
        ),
        samples=tuple(
            text_sample(
                one, systems=[system.name for system in evaluation.systems], pivot=evaluation.pivot
            )
            for one in ordered
        ),
    )


def text_sample(sample: Sample, *, systems: Sequence[str], pivot: str | None) -> TextSample:
    """Return a test line with its translations, which mark what the reference does not have.

    Args:
        sample: the line.
        systems: names in the order of their colors.
        pivot: language of the title of the family.
    """
    direction = sample.profile.direction
    source, target = direction.source, direction.target
    return TextSample(
        f"{language(source).name} → {language(target).name}",
        sample.line,
        (
            SampleText("source", sample.source, source),
            SampleText("reference", sample.reference, target),
            *(
                SampleText(
                    name,
                    text := sample.translations[name],
                    target,
                    place,
                    marks=differences(text, sample.reference, code=target),
                )
                for place, name in enumerate(systems)
                if name in sample.translations
            ),
        ),
        group=title_of_family(sample.profile.family, pivot=pivot),
    )


def differences(text: str, reference: str, *, code: str) -> tuple[tuple[int, int], ...]:
    """Return start and end of the words of a text that an alignment to the reference leaves over.

    In a language without spaces, every letter is a word.
    """
    word = re.compile(r"\w+|[^\w\s]" if parts_words_by_spaces(code) else r"\S")
    found = list(word.finditer(text))
    matcher = SequenceMatcher(
        None, word.findall(reference), [one.group() for one in found], autojunk=False
    )
    return tuple(
        (found[first].start(), found[last - 1].end())
        for kind, _, _, first, last in matcher.get_opcodes()
        if kind in ("insert", "replace")
    )


# Notes


def _notes_section(evaluation: Evaluation, history: History) -> ReportSection:
    return ReportSection("Notes", lists=bullets(_notes(evaluation, missing=history.missing)))


def _notes(evaluation: Evaluation, *, missing: Sequence[str]) -> Iterator[str]:
    """Yield definitions, and the directories behind the systems that are missing."""
    yield "Averages are arithmetic means over directions; each column states their number."
    *lowest, low, high = evaluation.thresholds
    below = "".join(f"extremely low up to {bound:,}, " for bound in lowest)
    yield (
        "Resource groups are defined by the training lines of the pair before cleaning: "
        f"{below}low up to {low:,}, high from {high:,}, medium between; pairs without training "
        "lines have none."
    )
    if evaluation.significance is not None:
        yield (
            "95 % confidence intervals have the standard error of "
            f"{evaluation.significance.resamples:,} resamples of the test lines, the same for all "
            "systems. A score is bold if its lead over every other system is significant at 95 %, "
            f"and if both its system and the baseline translate. {RULE} Test sets of "
            f"fewer than {MIN_LINES} lines have neither intervals nor bold scores."
        )
        yield from _notes_on_lines(evaluation.significance)
        yield from _notes_on_seeds(evaluation.systems)
    directions = [str(one.direction) for one in evaluation.directions]
    for section, columns in evaluation.sections.items():
        if any(evaluation.is_measured(one, name) for one in columns for name in directions):
            yield section.note
    if evaluation.undetectable:
        yield (
            "langdetect does not know these target languages, which language accuracy leaves out: "
            f"{', '.join(evaluation.undetectable)}."
        )
    if missing:
        yield (
            "Wall times and budgets leave out what is no longer where it was, or has changed "
            f"since: {', '.join(missing)}."
        )


def _notes_on_lines(significance: Significance) -> Iterator[str]:
    """Yield which directions are resampled together, with the sizes of their line sets."""
    resampled = [name for name, columns in significance.directions.items() if columns]
    if not resampled:
        return
    pairs = {pair for one in significance.shared_lines for pair in one.pairs}
    together = sum(pair_name(*name.split("-")) in pairs for name in resampled)
    if not together:
        yield (
            "The two directions of a pair are resampled together, and pairs independently of each "
            "other: no two pairs have half of their test lines in common."
        )
        return
    sizes = [
        f"{counted(len(one.pairs), 'pair')} with {counted(one.sentences, 'sentence')}"
        for one in significance.shared_lines
    ]
    yield (
        f"{together} of {counted(len(resampled), 'direction')} have parallel test sets, known by "
        "equal lines in a language of both, and are resampled together, since their scores vary "
        f"together: {joined(sizes)}."
    )
    if together < len(resampled):
        yield (
            f"The other {len(resampled) - together} are resampled independently, but for the two "
            "directions of a pair."
        )


def _notes_on_seeds(systems: Sequence[SystemScores]) -> Iterator[str]:
    """Yield how runs with different seeds are averaged and compared, if a system has several."""
    repeated = [f"{one.name} of {len(one.runs)}" for one in systems if one.runs]
    if not repeated:
        return
    yield (
        f"Scores of systems with several runs ({', '.join(repeated)}) are means over the runs; ± "
        "is the standard deviation over runs. Their intervals add the standard error over seeds "
        "by Student's t distribution; with two or three seeds they are too wide rather than too "
        "narrow. Systems with the same seeds are paired by seed and line."
    )
    if len(repeated) < len(systems):
        yield (
            "Systems with one run have intervals over test lines alone: another seed of them may "
            "score differently."
        )


def _signatures_section(evaluation: Evaluation) -> ReportSection | None:
    """Return the signatures of the scores, and the target languages that each applies to."""
    targets: dict[str, set[str]] = {}
    for system in evaluation.systems:
        for direction, one in system.directions.items():
            for column in evaluation.columns:
                if column.name in one.signatures:
                    signature = f"{column.title}|{one.signatures[column.name]}"
                    target = direction.split("-")[1] if column.by_target else "all"
                    targets.setdefault(signature, set()).add(target)
    if not targets:
        return None
    items = (
        Cell(
            signature,
            note="all targets" if "all" in codes else f"into {', '.join(sorted(codes))}",
            code=True,
        )
        for signature, codes in sorted(targets.items())
    )
    return ReportSection("Signatures", lists=(BulletList(tuple(items)),))
