"""The report of an evaluation: order of its sections, sample translations, and notes."""

import random
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime

from pipeline import installed_version
from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.corpus import pair_name, read_hypotheses, read_lines
from pipeline.evaluation import score_sections
from pipeline.evaluation.averages import RULE, group_runs
from pipeline.evaluation.curves import curves_section
from pipeline.evaluation.directions import FAMILIES, DirectionProfile, title_of_family
from pipeline.evaluation.history import History, budgets_section, trained_for
from pipeline.evaluation.score_sections import TrainedFor
from pipeline.evaluation.scores import Evaluation, Significance
from pipeline.evaluation.statistics import MIN_LINES
from pipeline.evaluation.tables import (
    Cell,
    Report,
    ReportSection,
    Row,
    Table,
    bullets,
    headings,
    joined,
    row,
)
from pipeline.languages import language
from pipeline.seeds import derive_seed
from pipeline.terminal import counted

# Samples per family of directions: directions, lines of each, and the longest reference shown.
DIRECTIONS, LINES, CHARACTERS = 3, 2, 240


def imprint() -> str:
    """Return the present time and the installed version of mmnmt."""
    return f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, mmnmt {installed_version()}"


def evaluation_report(
    evaluation: Evaluation,
    history: History,
    samples: Sequence[Table] = (),
    *,
    made: str,
    further: Sequence[ReportSection] = (),
) -> Report:
    """Return the report of an evaluation."""
    runs = {run: place for place, one in enumerate(evaluation.systems) for run in one.run_names}
    training = describe_training(evaluation, history)
    signatures = tuple(_signatures(evaluation))
    sections = (
        score_sections.overview_section(evaluation),
        ReportSection("Warnings", items=bullets(evaluation.warnings)),
        score_sections.averages_section(evaluation, training),
        budgets_section(history),
        *score_sections.separate_sections(evaluation, training),
        score_sections.baseline_section(evaluation),
        score_sections.sets_section(evaluation),
        score_sections.output_languages_section(evaluation),
        score_sections.word_accuracy_section(evaluation),
        *further,
        curves_section(history.curves, runs),
        samples_section("Sample translations", samples),
        score_sections.directions_section(evaluation),
        ReportSection("Notes", items=bullets(_notes(evaluation, missing=history.missing))),
        ReportSection("Signatures", items=signatures),
    )
    return Report(
        f"Translation quality of {counted(len(evaluation.systems), 'system')}",
        f"Evaluation report, {made}",
        score_sections.direction_facts(evaluation),
        tuple(section for section in sections if not section.is_empty),
        generator="mmnmt evaluate",
    )


def summary_tables(evaluation: Evaluation, history: History) -> tuple[Table, ...]:
    """Return the averages of the main scores, which the command prints."""
    return score_sections.main_tables(evaluation, describe_training(evaluation, history))


def describe_training(evaluation: Evaluation, history: History) -> TrainedFor:
    """Describe the training of a system, or each training of its runs if they differ."""
    runs = {one.name: one.run_names for one in evaluation.systems}
    return lambda system: " / ".join(
        dict.fromkeys(trained_for(history, run) for run in runs[system])
    )


def _notes(evaluation: Evaluation, *, missing: Sequence[str]) -> Iterator[str]:
    """Yield definitions, and the directories behind the systems that are missing."""
    *lowest, low, high = evaluation.thresholds
    below = "".join(f"extremely low up to {bound:,}, " for bound in lowest)
    yield (
        "Resource tiers are defined by the training lines of the pair before cleaning: "
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
        yield _note_on_lines(evaluation.significance)
    repeated = [f"{one.name} of {len(one.runs)}" for one in evaluation.systems if one.runs]
    if repeated:
        yield (
            f"Scores of systems with several runs ({', '.join(repeated)}) are means over the runs; "
            "± is the standard deviation over runs. Their intervals add the standard error over "
            "seeds by Student's t distribution; with two or three seeds they are too wide rather "
            "than too narrow. Systems with the same seeds are paired by seed and line. Systems "
            "with one run have intervals over test lines only."
        )
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
            "Wall times and budgets leave out runs that have moved or changed: "
            f"{', '.join(missing)}."
        )


def _note_on_lines(significance: Significance) -> str:
    """Return which directions are resampled together, with the sizes of their line sets."""
    resampled = [name for name, columns in significance.directions.items() if columns]
    sets = {tuple(pairs.split(", ")): size for pairs, size in significance.shared_lines.items()}
    shared = {pair for pairs in sets for pair in pairs}
    together = sum(pair_name(*name.split("-")) in shared for name in resampled)
    if not together:
        return (
            "The two directions of a pair are resampled together, and pairs independently of each "
            "other: no two pairs have half of their test lines in common."
        )
    sizes = [
        f"{counted(len(pairs), 'pair')} with {counted(size, 'sentence')}"
        for pairs, size in sets.items()
    ]
    return (
        f"{together} of {counted(len(resampled), 'direction')} have parallel test sets, known by "
        "equal lines in a language of both, and are resampled together, since their scores vary "
        f"together: {joined(sizes)}."
    )


def _signatures(evaluation: Evaluation) -> Iterator[Cell]:
    """Yield the signatures of the scores with the target languages that each applies to."""
    targets: dict[str, set[str]] = {}
    titles = {one.name: one.title for one in evaluation.columns}
    for system in evaluation.systems:
        for direction, scored in system.directions.items():
            for name, signature in scored.signatures.items():
                target = direction.split("-")[1]
                targets.setdefault(f"{titles[name]}|{signature}", set()).add(target)
    everything = {one.direction.target for one in evaluation.directions}
    for signature, codes in sorted(targets.items()):
        note = "all targets" if codes == everything else f"into {', '.join(sorted(codes))}"
        yield Cell(signature, note=note, code=True)


# Samples


def choose_samples(
    corpus: Artifact,
    systems: Mapping[str, Artifact],
    *,
    profiles: Sequence[DirectionProfile],
    seed: int,
    pivot: str | None,
) -> list[Table]:
    """Return a few lines of a few directions by family, by the first run of each system."""
    first = {name: systems[runs[0]] for name, runs in group_runs(systems).items()}
    tables = []
    for family in FAMILIES:
        members = [profile.direction for profile in profiles if profile.family == family]
        rows, step = list[Row](), max(len(members) / DIRECTIONS, 1.0)
        for index in range(min(len(members), DIRECTIONS)):
            way = members[int(index * step)]
            codes = (way.source, way.target)
            sources, references = (read_lines(corpus, "test", way.pair, code) for code in codes)
            versions = {"source": sources, "reference": references}
            for name, one in first.items():
                versions[name] = [found.text for found in read_hypotheses(one, way)]
            lines = range(len(references))
            short = [line for line in lines if len(references[line]) <= CHARACTERS] or [*lines]
            generator = random.Random(derive_seed("evaluate samples", seed, str(way)))
            title = " → ".join(language(code).name for code in codes)
            rows += [
                row(f"{title}, line {line + 1:,}", name, texts[line].strip() or "(empty)")
                for line in sorted(generator.sample(short, min(LINES, len(short))))
                for name, texts in versions.items()
            ]
        if rows:
            titles = ("Line", "Version", "Text")
            title = title_of_family(family, pivot=pivot)
            tables.append(Table(title, headings(*titles, words=titles), tuple(rows)))
    return tables


def samples_section(title: str, samples: Sequence[Table]) -> ReportSection:
    """Return the section of the samples."""
    lead = "Test lines drawn at random. Systems with several runs are shown by their first run."
    return ReportSection(title, lead, tables=tuple(samples))
