"""The report of an evaluation: order of its sections, and notes."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from pipeline import installed_version
from pipeline.artifacts.corpus import pair_name
from pipeline.evaluation.averages import RULE
from pipeline.evaluation.curves import curves_section
from pipeline.evaluation.history import History, budgets_section, trained_for
from pipeline.evaluation.samples import samples_section
from pipeline.evaluation.score_sections import (
    TrainedFor,
    averages_section,
    baseline_section,
    directions_by_family,
    directions_section,
    family_title,
    main_tables,
    output_languages_section,
    overview_section,
    separate_sections,
    sets_section,
    word_accuracy_section,
)
from pipeline.evaluation.scores import Evaluation, Significance
from pipeline.evaluation.statistics import MIN_LINES
from pipeline.evaluation.tables import (
    BulletList,
    Cell,
    Report,
    ReportSection,
    Table,
    TextSample,
    bullets,
    joined,
)
from pipeline.terminal import counted


def imprint() -> str:
    """Return the present time and the installed version of mmnmt."""
    return f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, mmnmt {installed_version()}"


def evaluation_report(
    evaluation: Evaluation,
    history: History,
    samples: Sequence[TextSample] = (),
    *,
    made: str,
    further: Sequence[ReportSection] = (),
) -> Report:
    """Return the report of an evaluation.

    Args:
        evaluation: scores of all systems.
        history: runs behind the systems.
        samples: translated test lines to show.
        made: date and version.
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
        sets_section(evaluation),
        output_languages_section(evaluation),
        word_accuracy_section(evaluation),
        *further,
        curves_section(history.curves, runs),
        samples_section("Sample translations", samples),
        directions_section(evaluation),
        _notes_section(evaluation, history),
        _signatures_section(evaluation),
    )
    return Report(
        f"Translation quality of {counted(len(evaluation.systems), 'system')}",
        f"Evaluation report, {made}",
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


# Notes


def _notes_section(evaluation: Evaluation, history: History) -> ReportSection:
    return ReportSection("Notes", lists=bullets(_notes(evaluation, missing=history.missing)))


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
            "Wall times and budgets leave out what is no longer where it was, or has changed "
            f"since: {', '.join(missing)}."
        )


def _note_on_lines(significance: Significance) -> str:
    """Return which directions are resampled together, with the sizes of their line sets."""
    resampled = [name for name, columns in significance.directions.items() if columns]
    pairs = {pair for one in significance.shared_lines for pair in one.pairs}
    together = sum(pair_name(*name.split("-")) in pairs for name in resampled)
    if not together:
        return (
            "The two directions of a pair are resampled together, and pairs independently of each "
            "other: no two pairs have half of their test lines in common."
        )
    sizes = [
        f"{counted(len(one.pairs), 'pair')} with {counted(one.sentences, 'sentence')}"
        for one in significance.shared_lines
    ]
    return (
        f"{together} of {counted(len(resampled), 'direction')} have parallel test sets, known by "
        "equal lines in a language of both, and are resampled together, since their scores vary "
        f"together: {joined(sizes)}."
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
