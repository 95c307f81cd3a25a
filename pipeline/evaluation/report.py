"""The report of an evaluation: order of its sections, and notes."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from pipeline import installed_version
from pipeline.artifacts.corpus import pair_name
from pipeline.evaluation import score_sections
from pipeline.evaluation.averages import RULE
from pipeline.evaluation.curves import curves_section
from pipeline.evaluation.history import History, budgets_section, trained_for
from pipeline.evaluation.samples import samples_section
from pipeline.evaluation.score_sections import TrainedFor
from pipeline.evaluation.scores import Evaluation, Significance
from pipeline.evaluation.statistics import MIN_LINES
from pipeline.evaluation.tables import (
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
            "Wall times and budgets leave out what is no longer where it was, or has changed "
            f"since: {', '.join(missing)}."
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
