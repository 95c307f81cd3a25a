"""Scores of evaluations on the page of ``mmnmt report``, with the intervals in ``scores.json``."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipeline.artifacts.artifact import Artifact, open_recorded
from pipeline.errors import UserError
from pipeline.evaluation.bleu import Bleu
from pipeline.evaluation.chrf import Chrf
from pipeline.evaluation.comet import Comet
from pipeline.evaluation.directions import FAMILIES, pivot_of, title_of_family
from pipeline.evaluation.spent import is_number
from pipeline.evaluation.tables import (
    Cell,
    Heading,
    ReportSection,
    Row,
    Table,
    headings,
    row,
    score_cell,
)

COLUMNS = {one.column.name: one.column for one in (Bleu, Chrf, Comet)}

Means = Mapping[str, Mapping[str, Mapping[str, float]]]
"""System → family of directions → name of a column → mean score."""


def scores_section(name: str, evaluation: Artifact) -> ReportSection | None:
    """Return the main scores of an evaluation, averaged over the directions of each family."""
    systems = evaluation.statistics.get("systems")
    if not isinstance(systems, dict):
        return None
    shown = [
        (family, column)
        for family in FAMILIES
        for column in dict.fromkeys(key for one in systems.values() for key in one.get(family, {}))
    ]
    pivot = _pivot(evaluation)
    titles = [
        Heading(
            f"{title_of_family(family, pivot=pivot)}, "
            f"{COLUMNS[column].heading if column in COLUMNS else column}"
        )
        for family, column in shown
    ]
    document = _document(evaluation)
    baseline = _within(document, "verdicts", "baseline")
    scores = Table(
        "",
        (*headings("System"), *titles),
        tuple(
            row(system, *(_score(document, systems, system, *of_mean) for of_mean in shown))
            for system in systems
        ),
    )
    differences = tuple(_difference_rows(document, systems, shown, baseline))
    tables = [scores]
    if any(cell.value is not None for one in differences for cell in one.cells[1:]):
        title = f"Difference to {baseline}"
        tables.append(Table(title, (*headings("System"), *titles), differences))
    return ReportSection(
        f"Scores of {name}",
        "Means over the directions of each type, with 95 % confidence intervals where the "
        "evaluation has them. Its own report has tests and all other scores.",
        tables=tuple(tables),
    )


def _difference_rows(
    document: object, systems: Means, shown: Sequence[tuple[str, str]], baseline: object
) -> Iterator[Row]:
    if baseline in systems:
        for system in systems:
            if system != baseline:
                yield row(
                    system,
                    *(_difference(document, systems, system, baseline, *one) for one in shown),
                )


def _score(document: object, systems: Means, system: str, family: str, column: str) -> Cell:
    value = _mean(systems, system, family, column)
    interval = _interval(document, "intervals", system, family, column)
    note = "" if interval is None else f"{interval[0]:.1f}–{interval[1]:.1f}"
    return score_cell(value, decimals=1, note=note)


def _difference(
    document: object, systems: Means, system: str, baseline: Any, family: str, column: str
) -> Cell:
    """Return the difference of two means; none without an interval."""
    ours, theirs = (_mean(systems, one, family, column) for one in (system, baseline))
    interval = _interval(document, "differences", system, family, column)
    if ours is None or theirs is None or interval is None:
        return Cell(None)
    return Cell(ours - theirs, "+.1f", note=f"{interval[0]:+.1f} to {interval[1]:+.1f}")


def _mean(systems: Means, system: str, family: str, column: str) -> float | None:
    value = systems[system].get(family, {}).get(column)
    return value if is_number(value) else None


def _interval(
    document: object, kind: str, system: str, family: str, column: str
) -> tuple[float, float] | None:
    found = _within(document, "significance", "averages", family, "all", column, kind, system)
    low, high = (_within(found, edge) for edge in ("low", "high"))
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


def _pivot(evaluation: Artifact) -> str | None:
    inputs = evaluation.manifest.inputs
    record = inputs.get("training") or inputs.get("corpus")
    corpus = None if record is None else open_recorded(record)
    return None if corpus is None else pivot_of(corpus)
