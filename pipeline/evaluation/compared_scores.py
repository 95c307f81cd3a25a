"""Scores of an evaluation on the page of ``mmnmt report``, with intervals of ``scores.json``."""

from collections.abc import Mapping
from typing import Any

from pipeline.artifacts.artifact import Artifact, open_recorded
from pipeline.errors import UserError
from pipeline.evaluation.bleu import Bleu
from pipeline.evaluation.chrf import Chrf
from pipeline.evaluation.comet import Comet
from pipeline.evaluation.directions import FAMILIES, pivot_of, title_of_family
from pipeline.evaluation.spent import is_number
from pipeline.evaluation.tables import Cell, ReportSection, Table, headings, row, score_cell

TITLES = {one.column.name: one.column.title for one in (Bleu, Chrf, Comet)}

Means = Mapping[str, Mapping[str, Mapping[str, float]]]
"""System → family of directions → name of a column → mean score."""


def scores_section(name: str, evaluation: Artifact) -> ReportSection | None:
    """Return the main scores of an evaluation, averaged over the directions of each family."""
    systems: Means | None = evaluation.statistics.get("systems")
    if not isinstance(systems, dict):
        return None
    shown = [
        (family, column)
        for family in FAMILIES
        for column in dict.fromkeys(key for one in systems.values() for key in one.get(family, {}))
    ]
    inputs = evaluation.manifest.inputs
    record = inputs.get("training") or inputs.get("corpus")
    corpus = None if record is None else open_recorded(record)
    pivot = None if corpus is None else pivot_of(corpus)
    titles = headings(
        "System",
        *(
            f"{title_of_family(family, pivot=pivot)}, {TITLES.get(column, column)}"
            for family, column in shown
        ),
    )
    document = _document(evaluation)
    compared = {
        one: _within(document, "significance", "averages", one[0], "all", one[1]) for one in shown
    }
    baseline = _within(document, "verdicts", "baseline")
    scores = (
        row(system, *(_score(compared[one], systems[system], system, *one) for one in shown))
        for system in systems
    )
    differences = tuple(
        row(system, *(_difference(compared[one], systems, system, baseline, *one) for one in shown))
        for system in systems
        if baseline in systems and system != baseline
    )
    tables = [Table("", titles, tuple(scores))]
    if any(cell.value is not None for one in differences for cell in one.cells[1:]):
        tables.append(Table(f"Difference to {baseline}", titles, differences))
    return ReportSection(
        f"Scores of {name}",
        "Means over the directions of each type, with 95 % confidence intervals where the "
        "evaluation has them. Its own report has tests and all other scores.",
        tables=tuple(tables),
    )


def _score(
    compared: object,
    scores: Mapping[str, Mapping[str, float]],
    system: str,
    family: str,
    column: str,
) -> Cell:
    value, interval = scores.get(family, {}).get(column), _interval(compared, "intervals", system)
    note = "" if interval is None else f"{interval[0]:.1f}–{interval[1]:.1f}"
    return score_cell(value if is_number(value) else None, decimals=1, note=note)


def _difference(
    compared: object, systems: Means, system: str, baseline: Any, family: str, column: str
) -> Cell:
    """Return the difference of two means; none without an interval."""
    ours, theirs = (systems[one].get(family, {}).get(column) for one in (system, baseline))
    interval = _interval(compared, "differences", system)
    if not is_number(ours) or not is_number(theirs) or interval is None:
        return Cell(None)
    return Cell(ours - theirs, "+.1f", note=f"{interval[0]:+.1f} to {interval[1]:+.1f}")


def _interval(compared: object, kind: str, system: str) -> tuple[float, float] | None:
    low, high = (_within(compared, kind, system, edge) for edge in ("low", "high"))
    return (low, high) if is_number(low) and is_number(high) else None


def _within(document: object, *keys: str) -> object:
    """Return what a document has under some keys, one in another; None if it lacks one."""
    for key in keys:
        document = document.get(key) if isinstance(document, dict) else None
    return document


def _document(evaluation: Artifact) -> object:
    """Return the scores of an evaluation; None where they are damaged or of an old version."""
    try:
        return evaluation.read_json("scores.json") if evaluation.has("scores.json") else None
    except (UserError, ValueError):
        return None
