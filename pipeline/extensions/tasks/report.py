"""Report the scores of task models by language, with means over languages and over runs."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import Any

RUN_MARK = "@"
"""Separator of system and run: ``lms@1`` is run 1 of the system ``lms``."""
TITLES = {"f1": "F1", "precision": "precision", "recall": "recall", "exact_match": "exact match"}
MAIN = {"tagger": ("f1",), "reader": ("f1", "exact_match")}
"""Head → scores that the tables show."""

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
    """Group scores, by name (of system and run) and language, into systems in the order given."""
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
    """Return the content of ``scores.json``, a function of the predictions and the data alone."""
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
    """Render a table per score with a row per language and a column per system."""
    what = "sentences" if head == "tagger" else "questions"
    lines = ["# Scores by language", ""]
    for score in MAIN[head]:
        lines += [f"## {TITLES[score]}, percent", ""]
        header = ["language", what, *(report.name for report in reports)]
        lines += [_row(header), _row(["---", "--:", *("--:" for _ in reports)])]
        for code, count in examples.items():
            values = [f"{report.languages[code][score]:.1f}" for report in reports]
            lines.append(_row([code, f"{count:,}", *values]))
        means = [_with_spread(report, score) for report in reports]
        lines += [_row(["mean", f"{sum(examples.values()):,}", *means]), ""]
    several = [report for report in reports if len(report.runs) > 1]
    if several:
        counts = ", ".join(f"{report.name} of {len(report.runs)}" for report in several)
        lines += [f"Means over runs ({counts}); ± is their standard deviation.", ""]
    if skipped:
        lines += [f"Left out, since not every system knows them: {', '.join(skipped)}.", ""]
    return "\n".join(lines)


def _with_spread(report: SystemReport, score: str) -> str:
    mean = f"{report.mean[score]:.1f}"
    return f"{mean} ± {report.spread[score]:.1f}" if report.spread else mean


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
