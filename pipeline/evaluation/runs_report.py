"""The page of ``mmnmt report``: scores, losses, budgets, experts, analyses and translations."""

from collections.abc import Iterator, Mapping, Sequence

from pipeline.artifacts.artifact import Artifact, open_recorded
from pipeline.artifacts.corpus import hypotheses_name
from pipeline.errors import UserError
from pipeline.evaluation.compared_runs import ComparedRuns, Translated
from pipeline.evaluation.compared_scores import scores_section
from pipeline.evaluation.curves import curves_section, losses_section
from pipeline.evaluation.directions import describe_directions, pivot_of
from pipeline.evaluation.history import History, budgets_section, checkpoint_of, trace_history
from pipeline.evaluation.routing_tables import languages_section, loads_section
from pipeline.evaluation.samples import choose_samples, samples_section
from pipeline.evaluation.settings import EvaluationConfig
from pipeline.evaluation.tables import Report, ReportSection, bullets
from pipeline.model.moe.routing_statistics import ROUTING_FILE, RoutingStatistics
from pipeline.terminal import counted
from pipeline.training.settings import TrainingConfig


def runs_report(
    compared: ComparedRuns, *, made: str, analyses: Sequence[ReportSection] = ()
) -> Report:
    """Return the report of any number of runs.

    Args:
        compared: runs and what was made from them.
        made: date and version.
        analyses: sections about the analyses.
    """
    history = trace_history(compared.runs)
    places = {run: place for place, runs in enumerate(compared.systems.values()) for run in runs}
    routing, damaged = _read_routing(compared.runs)
    first = {runs[0]: routing[runs[0]] for runs in compared.systems.values() if runs[0] in routing}
    sections = (
        *(scores_section(name, one) for name, one in compared.evaluations.items()),
        losses_section(history.curves),
        curves_section(history.curves, places),
        budgets_section(history),
        loads_section(routing),
        languages_section(first),
        *analyses,
        *(_samples_section(one, compared.systems) for one in compared.translated.values()),
        _notes_section(compared, history, damaged),
    )
    return Report(
        f"Comparison of {counted(len(compared.systems), 'system')}" if places else "Analyses",
        f"Report on runs, {made}",
        (counted(len(compared.systems), "system"), counted(len(compared.runs), "run")),
        tuple(section for section in sections if section is not None),
        generator="report",
    )


def _read_routing(
    runs: Mapping[str, Artifact],
) -> tuple[dict[str, RoutingStatistics], list[str]]:
    """Return the routing statistics of the runs that have them, and the runs with damaged ones."""
    found, damaged = {}, []
    for name, run in runs.items():
        checkpoint = checkpoint_of(run)
        if checkpoint is None or not checkpoint.has(ROUTING_FILE):
            continue
        try:
            found[name] = RoutingStatistics.from_json(checkpoint.read_json(ROUTING_FILE))
        except (UserError, ValueError):
            damaged.append(name)
    return found, damaged


def _samples_section(
    translated: Translated, systems: Mapping[str, Sequence[str]]
) -> ReportSection | None:
    """Return some test lines of the directions that all systems translated, by their first run."""
    corpus = open_recorded(translated.corpus)
    training = None if translated.training is None else open_recorded(translated.training)
    if corpus is None:
        return None
    translations = {
        system: translated.runs[run]
        for system, runs in systems.items()
        for run in [next((run for run in runs if run in translated.runs), None)]
        if run is not None
    }
    profiles = [
        profile
        for profile in describe_directions(
            corpus, thresholds=TrainingConfig().resource_thresholds, training=training
        )
        if all(run.has(hypotheses_name(profile.direction)) for run in translations.values())
    ]
    samples = choose_samples(
        corpus,
        translations,
        profiles=profiles,
        seed=EvaluationConfig().seed,
        pivot=pivot_of(training or corpus),
    )
    return samples_section(f"Translations of {corpus.directory.name}", samples)


def _notes_section(
    compared: ComparedRuns, history: History, damaged: list[str]
) -> ReportSection | None:
    lists = bullets(_notes(compared, history, damaged))
    return ReportSection("Notes", lists=lists) if lists else None


def _notes(compared: ComparedRuns, history: History, damaged: list[str]) -> Iterator[str]:
    drawn = {curve.system for curve in history.curves}
    if bare := [run for run in compared.runs if run not in drawn]:
        yield f"No losses are recorded for {', '.join(bare)}."
    if compared.missing:
        yield (
            "Left out, since their translations are no longer where they were, or have changed: "
            f"{', '.join(compared.missing)}."
        )
    if compared.unreadable:
        yield f"Left out, with no manifest of this version: {', '.join(compared.unreadable)}."
    if damaged:
        yield f"The routing statistics are damaged of {', '.join(damaged)}."
    if history.missing:
        yield (
            "Budgets leave out what is no longer where it was, or has changed since: "
            f"{', '.join(history.missing)}."
        )
