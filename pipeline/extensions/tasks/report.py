"""Scores of task models by language, their means, and means over runs of one system."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import Any

from pipeline.evaluation.averages import RUN_MARK

TITLES = {"f1": "F1", "precision": "precision", "recall": "recall", "exact_match": "exact match"}
MAIN = {"tagger": ("f1",), "reader": ("f1", "exact_match")}
"""Scores that the tables show."""

Scores = Mapping[str, float]


@dataclass(frozen=True)
class SystemReport:
    """Scores of one system."""

    name: str
    runs: Mapping[str, Mapping[str, Scores]]
    """Run → language → score → percent."""
    languages: Mapping[str, Scores]
    """Language → score → mean over runs."""
    mean: Scores
    """Score → mean over languages of the means over runs."""
    spread: Scores
    """Score → standard deviation over runs of the mean over languages; empty for one run."""


def describe_systems(scores: Mapping[str, Mapping[str, Scores]]) -> list[SystemReport]:
    """Return one report per system from scores by name (and run) and language, in their order."""
    grouped: dict[str, dict[str, Mapping[str, Scores]]] = {}
    for name, found in scores.items():
        system, _, run = name.partition(RUN_MARK)
        grouped.setdefault(system, {})[run] = found
    return [_describe(system, runs) for system, runs in grouped.items()]


def _describe(name: str, runs: Mapping[str, Mapping[str, Scores]]) -> SystemReport:
    all_runs = list(runs.values())
    languages = {code: _mean([found[code] for found in all_runs]) for code in all_runs[0]}
    means = [_mean(list(found.values())) for found in all_runs]
    spread = {score: stdev(found[score] for found in means) for score in means[0] if len(means) > 1}
    return SystemReport(name, runs, languages, _mean(means), spread)


def _mean(scores: Sequence[Scores]) -> dict[str, float]:
    return {score: fmean(found[score] for found in scores) for score in scores[0]}


def scores_document(
    reports: Sequence[SystemReport],
    *,
    head: str,
    examples: Mapping[str, int],
    skipped: Mapping[str, int],
) -> dict[str, Any]:
    """Return the contents of ``scores.json``, a function of the predictions and the data alone."""
    return {
        "head": head,
        "examples": dict(examples),
        "left_out": dict(skipped),
        "systems": [asdict(report) for report in reports],
    }


def markdown(
    reports: Sequence[SystemReport],
    *,
    head: str,
    examples: Mapping[str, int],
    skipped: Mapping[str, int],
) -> str:
    """Return one table per score: languages down, systems across."""
    # Stages of training and decoding load this module, and Jinja2 is for evaluations alone.
    from pipeline.evaluation.rendering import render_markdown
    from pipeline.evaluation.tables import Report, ReportSection, Table, bullets, headings, row

    unit = "sentences" if head == "tagger" else "questions"
    columns = headings("Language", unit, *(report.name for report in reports))
    tables = (
        Table(
            f"{TITLES[score]}, %",
            columns,
            (
                *(
                    row(code, count, *(f"{one.languages[code][score]:.1f}" for one in reports))
                    for code, count in examples.items()
                ),
                row("mean", sum(examples.values()), *(_mean_text(one, score) for one in reports)),
            ),
        )
        for score in MAIN[head]
    )
    notes = []
    several = [report for report in reports if len(report.runs) > 1]
    if several:
        counts = ", ".join(f"{report.name} of {len(report.runs)}" for report in several)
        notes.append(f"Means over runs ({counts}); ± is their standard deviation.")
    if skipped:
        notes.append(f"Left out, since not every system knows them: {', '.join(skipped)}.")
    section = ReportSection("Scores by language", tables=tuple(tables), items=bullets(notes))
    task = "Named entities" if head == "tagger" else "Question answering"
    return render_markdown(Report(task, "", (), (section,)))


def _mean_text(report: SystemReport, score: str) -> str:
    mean = f"{report.mean[score]:.1f}"
    return f"{mean} ± {report.spread[score]:.1f}" if report.spread else mean
