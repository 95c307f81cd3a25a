"""What the reports of an evaluation show: rows and columns, notes, and how figures are printed.

Pure functions from scores and history to values; ``markdown`` and ``page`` lay them out.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TypeVar

from pipeline.evaluation.directions import FAMILIES, GROUPS, DirectionProfile, Family, Group
from pipeline.evaluation.language_accuracy import LanguageAccuracy
from pipeline.evaluation.scores import Comparison, Evaluation, Interval, Metric, Scores
from pipeline.evaluation.significance import MIN_LINES

NO_VALUE = "–"

SCORES: Mapping[str, tuple[Metric, Callable[[Scores], float]]] = {
    "BLEU": ("bleu", lambda scores: scores.bleu),
    "chrF++": ("chrf", lambda scores: scores.chrf),
}
PRIORS: Mapping[str, tuple[Metric, Callable[[LanguageAccuracy], float]]] = {
    "langdetect as it is, %": ("language", lambda found: found.plain),
    "langdetect restricted to the languages at hand, %": (
        "language_restricted",
        lambda found: found.restricted,
    ),
}

Value = TypeVar("Value")


@dataclass(frozen=True)
class Sample:
    """One test line with every system's translation; lines count from 1."""

    profile: DirectionProfile
    line: int
    source: str
    reference: str
    translations: Mapping[str, str]


@dataclass(frozen=True)
class Imprint:
    """When a report was made, and by which version of mmnmt."""

    made: datetime
    version: str

    @property
    def text(self) -> str:
        return f"{self.made:%Y-%m-%d %H:%M} UTC, mmnmt {self.version}"


# Rows and columns


@dataclass(frozen=True)
class AverageColumn:
    """One column of a table of averages, and how many directions each of its values is over."""

    family: Family
    group: Group
    directions: int


@dataclass(frozen=True)
class Row:
    """A name and its values, with their intervals and the places of those to set in bold."""

    name: str
    values: tuple[float | None, ...]
    intervals: tuple[Interval | None, ...]
    best: frozenset[int] = frozenset()
    ceiling: bool = False
    """Not a system: what the references themselves reach."""


@dataclass(frozen=True)
class AverageTable:
    """One score of all systems, averaged over the directions where it was measured."""

    title: str
    columns: tuple[AverageColumn, ...]
    rows: tuple[Row, ...]


def family_title(evaluation: Evaluation, family: Family) -> str:
    """What a family of directions is called."""
    pivot = (evaluation.pivot or "pivot").capitalize()
    match family:
        case "into_pivot":
            return f"Any → {pivot}"
        case "out_of_pivot":
            return f"{pivot} → Any"
        case "other":
            return "Other trained"
        case "zero_shot":
            return "Zero-shot"
        case "emptied":
            return "No training data left"
        case "unknown":
            return "Training data unknown"


def directions_by_family(evaluation: Evaluation) -> dict[Family, list[DirectionProfile]]:
    """The families that have directions, in a fixed order."""
    members = {
        family: [one for one in evaluation.directions if one.family == family]
        for family in FAMILIES
    }
    return {family: profiles for family, profiles in members.items() if profiles}


def average_columns(
    evaluation: Evaluation, *, measured: Callable[[DirectionProfile], bool] = lambda _: True
) -> tuple[AverageColumn, ...]:
    """The families and resource groups that have measured directions, in a fixed order."""
    found = []
    for family, members in directions_by_family(evaluation).items():
        for group in GROUPS:
            count = sum(group in ("all", one.resource) for one in members if measured(one))
            if count:
                found.append(AverageColumn(family=family, group=group, directions=count))
    return tuple(found)


def score_tables(evaluation: Evaluation) -> list[AverageTable]:
    """BLEU, then chrF++."""
    columns = average_columns(evaluation)
    return [
        AverageTable(title, columns, tuple(_system_rows(evaluation, columns, metric, value)))
        for title, (metric, value) in SCORES.items()
    ]


def accuracy_tables(evaluation: Evaluation) -> list[AverageTable]:
    """Language accuracy, the references first; none where it was not measured at all."""
    references = evaluation.references
    if references is None:
        return []
    columns = average_columns(
        evaluation, measured=lambda one: str(one.direction) in references.directions
    )
    tables = []
    for title, (metric, value) in PRIORS.items():
        ceiling = Row(
            "References",
            _column_values(columns, references.averages, value),
            tuple(None for _ in columns),
            ceiling=True,
        )
        rows = _system_rows(evaluation, columns, metric, _of_accuracy(value))
        tables.append(AverageTable(title, columns, (ceiling, *rows)))
    return tables


def _of_accuracy(value: Callable[[LanguageAccuracy], float]) -> Callable[[Scores], float | None]:
    def of_scores(scores: Scores) -> float | None:
        return None if scores.language_accuracy is None else value(scores.language_accuracy)

    return of_scores


def _system_rows(
    evaluation: Evaluation,
    columns: Sequence[AverageColumn],
    metric: Metric,
    value: Callable[[Scores], float | None],
) -> list[Row]:
    compared = [comparison_of_average(evaluation, one, metric) for one in columns]
    return [
        _row(system.name, _column_values(columns, system.averages, value), compared)
        for system in evaluation.systems
    ]


def _row(name: str, values: tuple[float | None, ...], compared: Sequence[Comparison | None]) -> Row:
    return Row(
        name=name,
        values=values,
        intervals=tuple(None if one is None else one.intervals[name] for one in compared),
        best=frozenset(
            place for place, one in enumerate(compared) if one is not None and one.best == name
        ),
    )


def comparison_of_average(
    evaluation: Evaluation, column: AverageColumn, metric: Metric
) -> Comparison | None:
    """How the systems compare in a column; None where its test sets are too small to tell."""
    if evaluation.significance is None:
        return None
    family = evaluation.significance.averages.get(column.family, {})
    return family.get(column.group, {}).get(metric)


def _column_values(
    columns: Sequence[AverageColumn],
    averages: Mapping[Family, Mapping[Group, Value]],
    value: Callable[[Value], float | None],
) -> tuple[float | None, ...]:
    cells = [averages.get(column.family, {}).get(column.group) for column in columns]
    return tuple(None if cell is None else value(cell) for cell in cells)


def direction_row(evaluation: Evaluation, profile: DirectionProfile) -> Row:
    """BLEU and chrF++ of every system in turn."""
    name = str(profile.direction)
    significance = evaluation.significance
    compared = {} if significance is None else significance.directions.get(name, {})
    cells = [
        _row(
            system.name,
            tuple(value(system.directions[name].scores) for _, value in SCORES.values()),
            [compared.get(metric) for metric, _ in SCORES.values()],
        )
        for system in evaluation.systems
    ]
    return Row(
        name=name,
        values=tuple(value for cell in cells for value in cell.values),
        intervals=tuple(interval for cell in cells for interval in cell.intervals),
        best=frozenset(
            len(SCORES) * number + place for number, cell in enumerate(cells) for place in cell.best
        ),
    )


# Notes


def signatures(evaluation: Evaluation) -> list[tuple[str, str]]:
    """sacreBLEU's signatures and what each applies to."""
    targets: dict[str, set[str]] = {}
    for system in evaluation.systems:
        for direction, one in system.directions.items():
            targets.setdefault(f"BLEU|{one.bleu_signature}", set()).add(direction.split("-")[1])
            targets.setdefault(f"chrF++|{one.chrf_signature}", set()).add("all")
    return [
        (signature, "all targets" if "all" in codes else f"into {', '.join(sorted(codes))}")
        for signature, codes in sorted(targets.items())
    ]


def notes(evaluation: Evaluation, *, missing: Sequence[str]) -> list[str]:
    """What a reader has to know to read the tables.

    Args:
        missing: folders behind the systems that could not be found.
    """
    low, high = evaluation.thresholds
    found = [
        "Averages are arithmetic means over directions; the number of directions stands with each "
        "column.",
        f"Resource groups go by the training lines of the pair: low up to {low:,}, high from "
        f"{high:,}, medium between; pairs without training lines have none.",
    ]
    if evaluation.significance is not None:
        found.append(significance_note(evaluation.significance.resamples))
    if evaluation.references is not None:
        found.append(
            "Language accuracy is the share of lines that langdetect assigns to the target "
            "language, plain and with its prior restricted to the languages at hand; its "
            "accuracy on the references is what a perfect system could expect."
        )
    if evaluation.undetectable:
        found.append(
            "langdetect does not know these target languages, which language accuracy leaves out: "
            f"{', '.join(evaluation.undetectable)}."
        )
    if missing:
        found.append(
            "Wall times and budgets leave out what is no longer where it was, or has changed "
            f"since: {', '.join(missing)}."
        )
    return found


def significance_note(resamples: int) -> str:
    """What intervals and bold print mean."""
    return (
        f"Behind a score stands the middle 95 % of {resamples:,} bootstrap resamples of the test "
        "lines, the same ones for all systems; a score is bold only if its lead over every other "
        "system is above zero in the middle 95 % of them. The two directions of a pair are "
        "resampled together and pairs independently of each other. Where a test set has fewer "
        f"than {MIN_LINES} lines there is neither."
    )


# Figures


def format_score(value: float | None) -> str:
    """A score as printed."""
    return NO_VALUE if value is None else f"{value:.1f}"


def format_interval(interval: Interval) -> str:
    """An interval as printed: ``29.8–31.2``."""
    return f"{interval.low:.1f}–{interval.high:.1f}"


def format_duration(seconds: float) -> str:
    """Two units at most: ``2 h 5 min``, ``3 min 20 s``, ``4.2 s``; what is shorter is not zero."""
    if seconds < 0.05:
        return "< 0.1 s" if seconds > 0 else "0 s"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    if seconds < 3599.5:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours:,} h {minutes} min"


def format_large(value: float | None) -> str:
    """Three digits and a unit: ``940``, ``18.4 M``, ``2.35 P``."""
    if value is None:
        return NO_VALUE
    for unit in ("", " k", " M", " G", " T", " P", " E"):
        if value < 999.5:
            return f"{value:.3g}{unit}" if value % 1 or value > 999 or unit else f"{value:.0f}"
        value /= 1000
    return f"{value:.3g} Z"


def format_count(number: int, noun: str) -> str:
    """``1 direction``, ``2 directions``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
