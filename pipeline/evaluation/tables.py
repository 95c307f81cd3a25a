"""What the reports of an evaluation show: rows and columns, notes, and how figures are printed.

Pure functions from scores and history to values; ``markdown`` and ``page`` lay them out.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from pipeline.evaluation.directions import FAMILIES, GROUPS, DirectionProfile, Family, Group
from pipeline.evaluation.score_slot import Column, Section
from pipeline.evaluation.scores import Comparison, Evaluation, Interval, Scores
from pipeline.evaluation.significance import MIN_LINES
from pipeline.evaluation.verdicts import RULE

NO_VALUE = "–"
NOT_DECIDED = ", not decided"


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
    decided: bool = True
    """Whether there can be a verdict: the baseline of several systems translates."""

    @property
    def group_title(self) -> str:
        """What the resource group is called."""
        return self.group.replace("_", " ")

    @property
    def note(self) -> str:
        """The number of directions, and that nothing is decided where that is so."""
        return f"{format_count(self.directions, 'direction')}{'' if self.decided else NOT_DECIDED}"


@dataclass(frozen=True)
class Row:
    """A name and its values, with their intervals and the places of those to set in bold."""

    name: str
    values: tuple[float | None, ...]
    intervals: tuple[Interval | None, ...]
    decimals: tuple[int, ...]
    """Of each value, as printed."""
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
                verdicts = evaluation.verdicts
                decided = alone(evaluation) or verdicts.decides_average(family, group)
                found.append(AverageColumn(family, group, count, decided=decided))
    return tuple(found)


def alone(evaluation: Evaluation) -> bool:
    """Return whether there is but one system, so that there is no verdict to be had."""
    return len(evaluation.systems) == 1


def is_decided(evaluation: Evaluation, profile: DirectionProfile) -> bool:
    """Return whether there can be a verdict on a direction; of one system there is none to miss."""
    return alone(evaluation) or evaluation.verdicts.decides(str(profile.direction))


def kind_of(evaluation: Evaluation, profile: DirectionProfile) -> str:
    """Return the title of a direction's family, and that nothing is decided where that is so."""
    note = "" if is_decided(evaluation, profile) else NOT_DECIDED
    return f"{family_title(evaluation, profile.family)}{note}"


def score_tables(evaluation: Evaluation) -> list[AverageTable]:
    """One table per main score."""
    return _average_tables(evaluation, evaluation.main_columns)


def section_tables(evaluation: Evaluation) -> dict[Section, list[AverageTable]]:
    """The tables of scores that stand apart; sections without any measured score are left out."""
    tables = {
        section: _average_tables(evaluation, columns)
        for section, columns in evaluation.sections.items()
    }
    return {section: found for section, found in tables.items() if found}


def _average_tables(evaluation: Evaluation, columns: Sequence[Column]) -> list[AverageTable]:
    """One per score that was measured anywhere; the references first, where they have it."""
    tables = []
    for column in columns:
        averages = average_columns(evaluation, measured=measures(evaluation, column))
        if averages:
            rows = (*_ceiling(evaluation, averages, column), *_rows(evaluation, averages, column))
            tables.append(AverageTable(column.heading, averages, rows))
    return tables


def measures(evaluation: Evaluation, column: Column) -> Callable[[DirectionProfile], bool]:
    """Whether every system has a score in a direction."""
    return lambda profile: evaluation.is_measured(column, str(profile.direction))


def _ceiling(
    evaluation: Evaluation, averages: Sequence[AverageColumn], column: Column
) -> list[Row]:
    if evaluation.references is None or not column.ceiling:
        return []
    values = _column_values(averages, evaluation.references.averages, column)
    compared = [None for _ in averages]
    return [_row("References", values, compared, [column] * len(averages), ceiling=True)]


def _rows(evaluation: Evaluation, averages: Sequence[AverageColumn], column: Column) -> list[Row]:
    compared = [comparison_of_average(evaluation, one, column) for one in averages]
    shown = [column] * len(averages)
    return [
        _row(one.name, _column_values(averages, one.averages, column), compared, shown)
        for one in evaluation.systems
    ]


def _row(
    name: str,
    values: tuple[float | None, ...],
    compared: Sequence[Comparison | None],
    columns: Sequence[Column],
    *,
    ceiling: bool = False,
) -> Row:
    return Row(
        name=name,
        values=values,
        intervals=tuple(None if one is None else one.intervals[name] for one in compared),
        decimals=tuple(column.decimals for column in columns),
        best=frozenset(
            place for place, one in enumerate(compared) if one is not None and one.best == name
        ),
        ceiling=ceiling,
    )


def comparison_of_average(
    evaluation: Evaluation, average: AverageColumn, column: Column
) -> Comparison | None:
    """How the systems compare in an average; None where its test sets are too small to tell."""
    if evaluation.significance is None:
        return None
    family = evaluation.significance.averages.get(average.family, {})
    return family.get(average.group, {}).get(column.name)


def _column_values(
    averages: Sequence[AverageColumn],
    scores: Mapping[Family, Mapping[Group, Scores]],
    column: Column,
) -> tuple[float | None, ...]:
    return tuple(scores.get(one.family, {}).get(one.group, {}).get(column.name) for one in averages)


def direction_row(evaluation: Evaluation, profile: DirectionProfile) -> Row:
    """The main scores of every system in turn."""
    name, columns = str(profile.direction), evaluation.main_columns
    significance = evaluation.significance
    compared = {} if significance is None else significance.directions.get(name, {})
    cells = [
        _row(
            system.name,
            tuple(system.directions[name].scores.get(column.name) for column in columns),
            [compared.get(column.name) for column in columns],
            columns,
        )
        for system in evaluation.systems
    ]
    return Row(
        name=name,
        values=tuple(value for cell in cells for value in cell.values),
        intervals=tuple(interval for cell in cells for interval in cell.intervals),
        decimals=tuple(decimals for cell in cells for decimals in cell.decimals),
        best=frozenset(
            len(columns) * number + place
            for number, cell in enumerate(cells)
            for place in cell.best
        ),
    )


# Notes


def signatures(evaluation: Evaluation) -> list[tuple[str, str]]:
    """The scores' signatures and what each applies to."""
    targets: dict[str, set[str]] = {}
    for system in evaluation.systems:
        for direction, one in system.directions.items():
            for column in evaluation.columns:
                if column.name in one.signatures:
                    signature = f"{column.title}|{one.signatures[column.name]}"
                    target = direction.split("-")[1] if column.by_target else "all"
                    targets.setdefault(signature, set()).add(target)
    return [
        (signature, "all targets" if "all" in codes else f"into {', '.join(sorted(codes))}")
        for signature, codes in sorted(targets.items())
    ]


def notes(evaluation: Evaluation, *, missing: Sequence[str]) -> list[str]:
    """What a reader has to know to read the tables.

    Args:
        missing: folders behind the systems that could not be found.
    """
    found = [
        "Averages are arithmetic means over directions; the number of directions stands with each "
        "column.",
        f"Resource groups go by the training lines of the pair before cleaning: "
        f"{_bounds(evaluation.thresholds)}; pairs without training lines have none.",
    ]
    if evaluation.significance is not None:
        found.append(significance_note(evaluation.significance.resamples))
    found += [section.note for section in section_tables(evaluation)]
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


def _bounds(thresholds: Sequence[int]) -> str:
    """Which numbers of lines each resource group has."""
    *lowest, low, high = thresholds
    below = "".join(f"extremely low up to {bound:,}, " for bound in lowest)
    return f"{below}low up to {low:,}, high from {high:,}, medium between"


def significance_note(resamples: int) -> str:
    """What intervals and bold print mean."""
    return (
        f"Behind a score stands the middle 95 % of {resamples:,} bootstrap resamples of the test "
        "lines, the same ones for all systems; a score is bold only if its lead over every other "
        f"system is above zero in the middle 95 % of them, and if the system and the baseline "
        f"translate. {RULE} The two directions of a pair are "
        "resampled together and pairs independently of each other. Where a test set has fewer "
        f"than {MIN_LINES} lines there is neither."
    )


# Figures


def format_score(value: float | None, *, decimals: int) -> str:
    """A score as printed."""
    return NO_VALUE if value is None else f"{value:.{decimals}f}"


def format_interval(interval: Interval, *, decimals: int) -> str:
    """An interval as printed: ``29.8–31.2``."""
    return f"{interval.low:.{decimals}f}–{interval.high:.{decimals}f}"


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
