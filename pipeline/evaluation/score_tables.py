"""Sections of the report that are functions of the scores alone.

Averages over directions, scores by direction, comparison with the baseline, averages by language,
output languages and word accuracy.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipeline.evaluation.averages import RULE
from pipeline.evaluation.directions import FAMILIES, GROUPS, DirectionProfile, Family, Group
from pipeline.evaluation.score_slot import Column
from pipeline.evaluation.scores import (
    Comparison,
    Evaluation,
    Interval,
    PairedTest,
    Scores,
    SystemScores,
)
from pipeline.evaluation.statistics import LEVEL
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
from pipeline.terminal import counted

NOT_DECIDED = "not decided"
MATRIX_LANGUAGES = 16
"""Columns of a confusion matrix; less frequent languages are summed up in one more."""
SHOWN_LANGUAGES = 3
"""Number of wrong output languages that are named per target language and system."""

TrainedFor = Callable[[str], str]
"""Name of a system → the training behind it, in a few words."""


# Directions and the columns of averages


@dataclass(frozen=True)
class AverageColumn:
    """A column of a table of averages: a family of directions and a resource group."""

    family: Family
    group: Group
    directions: int
    """Number of directions that the averages are over."""
    decided: bool = True
    """Whether the baseline translates, so that systems can be compared."""

    @property
    def note(self) -> str:
        """Return the number of directions, and whether the average is not decided."""
        return counted(self.directions, "direction") + ("" if self.decided else f", {NOT_DECIDED}")


def family_title(evaluation: Evaluation, family: Family) -> str:
    """Return the title of a family of directions."""
    return title_of_family(family, pivot=evaluation.pivot)


def title_of_family(family: Family, *, pivot: str | None) -> str:
    """Return the title of a family of directions around a pivot."""
    pivot = (pivot or "pivot").capitalize()
    match family:
        case "into_pivot":
            return f"Any → {pivot}"
        case "out_of_pivot":
            return f"{pivot} → Any"
        case "other":
            return "Other trained"
        case "pivot_joined":
            return "Joined over a pivot"
        case "zero_shot":
            return "Zero-shot"
        case "emptied":
            return "No training data left"
        case "unknown":
            return "Training data unknown"


def directions_by_family(evaluation: Evaluation) -> dict[Family, list[DirectionProfile]]:
    """Return the families that have directions, in their fixed order."""
    members = {
        family: [one for one in evaluation.directions if one.family == family]
        for family in FAMILIES
    }
    return {family: profiles for family, profiles in members.items() if profiles}


def average_columns(
    evaluation: Evaluation, column: Column | None = None
) -> tuple[AverageColumn, ...]:
    """Return the families and resource groups that have directions, in their fixed order.

    Args:
        evaluation: scores of all systems.
        column: a score; only directions where every system has it count.
    """
    found = []
    for family, members in directions_by_family(evaluation).items():
        for group in GROUPS:
            count = sum(
                group in ("all", one.resource)
                and (column is None or evaluation.is_measured(column, str(one.direction)))
                for one in members
            )
            if count:
                decided = _is_alone(evaluation) or evaluation.verdicts.decides_average(
                    family, group
                )
                found.append(AverageColumn(family, group, count, decided=decided))
    return tuple(found)


def _average_headings(
    evaluation: Evaluation, averages: Iterable[AverageColumn], *, notes: bool
) -> Iterator[Heading]:
    for one in averages:
        title = one.group.replace("_", " ")
        group = family_title(evaluation, one.family)
        yield Heading(title, group=group, note=one.note if notes else "")


def _is_alone(evaluation: Evaluation) -> bool:
    """Return whether there is but one system, so that there is nothing to decide."""
    return len(evaluation.systems) == 1


def _is_decided(evaluation: Evaluation, profile: DirectionProfile) -> bool:
    return _is_alone(evaluation) or evaluation.verdicts.decides(str(profile.direction))


# Averages


def main_tables(evaluation: Evaluation, trained_for: TrainedFor) -> tuple[Table, ...]:
    """Return the averages of the main scores, one table per score."""
    return _average_tables(evaluation, evaluation.main_columns, trained_for)


def averages_section(evaluation: Evaluation, trained_for: TrainedFor) -> ReportSection:
    """Return the averages of the main scores."""
    return ReportSection(
        "Average scores by resource group",
        "Arithmetic means over directions; each column states their number. A score in bold is "
        "significantly better than that of every other system at 95 %, and both "
        "its system and the baseline translate. The range beside a score is its 95 % confidence "
        "interval.",
        tables=main_tables(evaluation, trained_for),
    )


def separate_sections(evaluation: Evaluation, trained_for: TrainedFor) -> list[ReportSection]:
    """Return the sections of scores that stand apart from the main ones, if they were measured."""
    return [
        ReportSection(section.title, section.lead, tables=tables)
        for section, columns in evaluation.sections.items()
        if (tables := _average_tables(evaluation, columns, trained_for))
    ]


def _average_tables(
    evaluation: Evaluation, columns: Sequence[Column], trained_for: TrainedFor
) -> tuple[Table, ...]:
    """Return one table per score that was measured anywhere; references come first."""
    tables = []
    for column in columns:
        averages = average_columns(evaluation, column)
        if not averages:
            continue
        compared = [comparison_of_average(evaluation, one, column) for one in averages]
        rows = [
            row(
                Cell(system.name, note=counted(len(system.runs), "run") if system.runs else ""),
                trained_for(system.name),
                *(
                    _system_cell(
                        system.name,
                        _average(system.averages, one, column),
                        column,
                        found,
                        spread=_average(system.spread, one, column),
                    )
                    for one, found in zip(averages, compared, strict=True)
                ),
            )
            for system in evaluation.systems
        ]
        if evaluation.references is not None and column.ceiling:
            values = [_average(evaluation.references.averages, one, column) for one in averages]
            cells = (score_cell(value, decimals=column.decimals) for value in values)
            rows.insert(0, row("References", "", *cells, is_ceiling=True))
        first = headings("System", "Trained for", words=["Trained for"])
        titles = _average_headings(evaluation, averages, notes=True)
        tables.append(Table(column.heading, (*first, *titles), tuple(rows)))
    return tuple(tables)


def comparison_of_average(
    evaluation: Evaluation, average: AverageColumn, column: Column
) -> Comparison | None:
    """Return how the systems compare in an average; None if its test sets are too small."""
    if evaluation.significance is None:
        return None
    family = evaluation.significance.averages.get(average.family, {})
    return family.get(average.group, {}).get(column.name)


def _average(
    scores: Mapping[Family, Mapping[Group, Scores]], average: AverageColumn, column: Column
) -> float | None:
    return scores.get(average.family, {}).get(average.group, {}).get(column.name)


def _system_cell(
    system: str,
    value: float | None,
    column: Column,
    compared: Comparison | None,
    *,
    spread: float | None = None,
) -> Cell:
    """Return a score with its spread over runs and its interval, bold if it is the best one."""
    notes = [] if spread is None else [f"± {spread:.{column.decimals}f}"]
    if compared is not None:
        notes.append(_range(compared.intervals[system], decimals=column.decimals))
    return score_cell(
        value,
        decimals=column.decimals,
        note=", ".join(notes),
        bold=compared is not None and compared.best == system,
    )


def _range(interval: Interval, *, decimals: int) -> str:
    return f"{interval.low:.{decimals}f}–{interval.high:.{decimals}f}"


# Directions


def directions_section(evaluation: Evaluation) -> ReportSection | None:
    """Return the main scores of every system in every direction."""
    if not evaluation.main_columns:
        return None
    titles = [
        Heading(column.heading, group=system.name)
        for system in evaluation.systems
        for column in evaluation.main_columns
    ]
    rows = [
        direction_row(evaluation, profile)
        for profiles in directions_by_family(evaluation).values()
        for profile in profiles
    ]
    synthetic = ["Synthetic lines"] if has_synthetic_lines(evaluation) else []
    first = headings("Direction", "Training lines", *synthetic)
    also = " Synthetic lines have a machine translation, and train the direction alone."
    return ReportSection(
        "Scores by direction",
        f"Training lines are those of the language pair.{also if synthetic else ''} Bold print and "
        "confidence intervals are as in the averages.",
        tables=(Table("", (*first, *titles), tuple(rows), group_title="Direction type"),),
    )


def has_synthetic_lines(evaluation: Evaluation) -> bool:
    """Return whether machine translations train a direction."""
    return any(profile.synthetic_lines for profile in evaluation.directions)


def direction_row(evaluation: Evaluation, profile: DirectionProfile) -> Row:
    """Return the main scores of all systems in a direction."""
    direction, names = profile.direction, evaluation.language_names
    long_name = f"{names[direction.source]} → {names[direction.target]}"
    undecided = "" if _is_decided(evaluation, profile) else f", {NOT_DECIDED}"
    significance = evaluation.significance
    compared = {} if significance is None else significance.directions.get(str(direction), {})
    return row(
        Cell(f"{direction.source} → {direction.target}", note=f"{long_name}{undecided}"),
        profile.training_lines,
        *([profile.synthetic_lines] if has_synthetic_lines(evaluation) else []),
        *(
            _system_cell(system.name, scores.get(column.name), column, compared.get(column.name))
            for system in evaluation.systems
            for scores in [system.directions[str(direction)].scores]
            for column in evaluation.main_columns
        ),
        group=family_title(evaluation, profile.family),
    )


# Comparison with the baseline


def distinct_outputs_section(evaluation: Evaluation) -> ReportSection:
    """Return the share of distinct outputs of every system, and what it allows to decide."""
    averages, verdicts = average_columns(evaluation), evaluation.verdicts
    rows = [
        row(
            system.name,
            *(
                score_cell(
                    verdicts.averages[one.family][one.group][system.name].distinct, decimals=1
                )
                for one in averages
            ),
        )
        for system in evaluation.systems
    ]
    if not _is_alone(evaluation):
        decided = ("decided" if one.decided else NOT_DECIDED for one in averages)
        rows.append(row(f"Comparison with {verdicts.baseline}", *decided))
    titles = _average_headings(evaluation, averages, notes=False)
    return ReportSection(
        "Distinct outputs",
        "Number of different outputs in percent of the different sources, as means over "
        f"directions. {RULE} Where the baseline does not translate, nothing is decided: no score "
        "is bold, and no direction is won, better or worse. A system that does not translate is "
        "never bold.",
        tables=(
            Table(
                "Distinct outputs, % of distinct sources",
                (*headings("System"), *titles),
                tuple(rows),
            ),
        ),
    )


def baseline_section(evaluation: Evaluation) -> ReportSection | None:
    """Return win ratios and significant differences against the baseline."""
    if evaluation.wins is None:
        return None
    title = f"Comparison with the baseline {evaluation.wins.baseline}"
    if not any(_is_decided(evaluation, one) for one in evaluation.directions):
        return ReportSection(
            title,
            f"Not decided: {evaluation.wins.baseline} does not translate in any direction.",
        )
    tables = (
        *_difference_tables(evaluation),
        *_win_tables(evaluation),
        *_test_tables(evaluation),
    )
    if not tables:
        return None
    return ReportSection(
        title,
        "The range beside a difference is its 95 % confidence interval. The win "
        "ratio is the share of decided directions in which a system "
        "scores better than the baseline; a tie is no win." + _description_of_tests(evaluation),
        tables=tables,
    )


def _description_of_tests(evaluation: Evaluation) -> str:
    tested = evaluation.baseline_tests
    if tested is None:
        return ""
    return (
        f" A difference is significant if its p-value is at most {LEVEL} after Holm's correction "
        f"for {tested.tests:,} tests (directions × systems). With two or three seeds, hardly any "
        "direction can be significant by itself: averages are what so few seeds can decide."
    )


def _difference_tables(evaluation: Evaluation) -> Iterator[Table]:
    """Yield the differences of averages to the baseline, with their intervals, if there are any."""
    baseline = evaluation.verdicts.baseline
    by_name = {one.name: one for one in evaluation.systems}
    for column in evaluation.columns:
        averages = average_columns(evaluation, column)
        compared = [comparison_of_average(evaluation, one, column) for one in averages]
        rows = [
            row(
                name,
                *(
                    _difference_cell(
                        _average(system.averages, one, column),
                        _average(by_name[baseline].averages, one, column),
                        column,
                        None if found is None else found.differences.get(name),
                    )
                    for one, found in zip(averages, compared, strict=True)
                ),
            )
            for name, system in by_name.items()
            if name != baseline
        ]
        if any(found is not None and found.differences for found in compared):
            titles = _average_headings(evaluation, averages, notes=True)
            yield Table(
                f"{column.title}: difference to {baseline}",
                (*headings("System"), *titles),
                tuple(rows),
            )


def _difference_cell(
    ours: float | None, theirs: float | None, column: Column, interval: Interval | None
) -> Cell:
    if ours is None or theirs is None:
        return Cell(None)
    sign = f"+.{column.decimals}f"
    note = "" if interval is None else f"{interval.low:{sign}} to {interval.high:{sign}}"
    return Cell(ours - theirs, sign, note=note)


def _win_tables(evaluation: Evaluation) -> Iterator[Table]:
    wins = evaluation.wins
    for column in evaluation.main_columns:
        averages = average_columns(evaluation, column)
        if wins is None or column.larger_is_better is None or not averages:
            continue
        rows = [
            row(name, *(_win_ratio(_average(found, one, column)) for one in averages))
            for name, found in wins.systems.items()
        ]
        undecided = [_undecided(evaluation, one) for one in averages]
        if any(undecided):
            rows.append(row("Directions not decided", *undecided))
        titles = _average_headings(evaluation, averages, notes=False)
        yield Table(f"{column.title}: win ratio, %", (*headings("System"), *titles), tuple(rows))


def _win_ratio(share: float | None) -> Cell:
    return Cell(NOT_DECIDED) if share is None else score_cell(share, decimals=1)


def _undecided(evaluation: Evaluation, average: AverageColumn) -> int:
    """Return how many directions of an average are not decided."""
    return sum(
        not evaluation.verdicts.decides(str(one.direction))
        for one in evaluation.directions
        if one.family == average.family and average.group in ("all", one.resource)
    )


def _test_tables(evaluation: Evaluation) -> Iterator[Table]:
    """Count directions by their verdict."""
    tests = evaluation.baseline_tests
    if tests is None:
        return
    others = [one.name for one in evaluation.systems if one.name != tests.baseline]
    for column in evaluation.main_columns:
        by_system: dict[str, list[PairedTest]] = {name: [] for name in others}
        for columns in tests.directions.values():
            for name, test in columns.get(column.name, {}).items():
                by_system[name].append(test)
        if column.larger_is_better is not None and (any(by_system.values()) or tests.undecided):
            rows = (
                row(name, *_counts(column, found), len(tests.undecided))
                for name, found in by_system.items()
            )
            yield Table(
                f"{column.title}: directions with a significant difference",
                headings("System", "better", "worse", "not significant", NOT_DECIDED),
                tuple(rows),
            )


def _counts(column: Column, tests: Sequence[PairedTest]) -> tuple[int, int, int]:
    """Count directions that are significantly better, worse, and neither."""
    sign = 1.0 if column.larger_is_better else -1.0
    sure = [sign * one.difference for one in tests if one.p_value_holm <= LEVEL]
    better, worse = sum(one > 0 for one in sure), sum(one < 0 for one in sure)
    return better, worse, len(tests) - better - worse


# Languages


def language_averages_section(evaluation: Evaluation) -> ReportSection | None:
    """Return the main scores by family, script and set of the language that is not the pivot."""
    names = [system.name for system in evaluation.systems]
    tables = tuple(
        # One score per table, so that all systems fit on a screen side by side.
        Table(
            f"{column.heading} by {trait}",
            headings(
                trait.capitalize(), "Direction type", "Directions", *names, words=["Direction type"]
            ),
            tuple(
                row(
                    one.value,
                    family_title(evaluation, one.family),
                    one.directions,
                    *(
                        score_cell(one.systems[name].get(column.name), decimals=column.decimals)
                        for name in names
                    ),
                )
                for one in evaluation.language_averages
                if one.trait == trait
            ),
        )
        for trait in ("family", "script", "set")
        for column in evaluation.main_columns
    )
    tables = tuple(table for table in tables if table.rows)
    if not tables:
        return None
    return ReportSection(
        "Averages by language",
        "Arithmetic means over directions by language family, by script and by the recipe's "
        "language sets. The language is the source if the pivot is the target, else the target.",
        tables=tables,
    )


def output_languages_section(evaluation: Evaluation) -> ReportSection | None:
    """Return the languages of the outputs by the first score that identifies languages."""
    known = {
        name
        for system in evaluation.systems
        for direction in system.directions.values()
        for name in direction.outcomes
    }
    column = next((one.name for one in evaluation.columns if one.name in known), None)
    if column is None:
        return None
    rows = []
    for family, profiles in directions_by_family(evaluation).items():
        for target in sorted({one.direction.target for one in profiles}):
            directions = [str(one.direction) for one in profiles if one.direction.target == target]
            found = [_outcomes(one, directions, column) for one in evaluation.systems]
            if all(found):
                name = f"{evaluation.language_names.get(target, target)} ({target})"
                cells = (_shares(counts, target) for counts in found)
                rows.append(row(name, family_title(evaluation, family), *cells))
    if not rows:
        return None
    names = [one.name for one in evaluation.systems]
    titles = headings("Target language", "Direction type", *names, words=["Direction type", *names])
    return ReportSection(
        "Output languages",
        "Share of lines in the target language, and the languages most often found instead. The "
        "page has confusion matrices of the rows with at least one line in another language, "
        "scores.json the counts of every direction.",
        tables=(
            Table("By target language", titles, tuple(rows)),
            *_matrices(evaluation, column),
        ),
    )


def _outcomes(system: SystemScores, directions: Sequence[str], column: str) -> Counter[str]:
    total: Counter[str] = Counter()
    for name in directions:
        total.update(system.directions[name].outcomes.get(column, {}))
    return total


def _shares(counts: Counter[str], target: str) -> str:
    lines = counts.total()
    others = sorted((-count, code) for code, count in counts.items() if code != target)
    instead = ", ".join(
        f"{code} {-100 * count / lines:.1f}" for count, code in others[:SHOWN_LANGUAGES]
    )
    right = f"{100 * counts[target] / lines:.1f} %"
    return f"{right}; {instead}" if instead else right


def _matrices(evaluation: Evaluation, column: str) -> Iterator[Table]:
    """Yield one confusion matrix per system and family that has lines in a wrong language."""
    for system, families in evaluation.confusion.get(column, {}).items():
        for family, targets in families.items():
            wrong = {
                target: counts
                for target, counts in sorted(targets.items())
                if any(code != target for code in counts)
            }
            if wrong:
                title = f"{system}, {family_title(evaluation, family)}: output language, % of lines"
                yield _matrix(title, wrong)


def _matrix(title: str, targets: Mapping[str, Mapping[str, int]]) -> Table:
    """Return a confusion matrix: rows are target languages, columns the most frequent outputs."""
    totals: Counter[str] = Counter()
    for counts in targets.values():
        totals.update(counts)
    often = sorted(totals, key=lambda code: (-totals[code], code))
    shown, others = sorted(often[:MATRIX_LANGUAGES]), often[MATRIX_LANGUAGES:]
    rows = []
    for target, counts in targets.items():
        lines = sum(counts.values())
        cells = [counts.get(code, 0) for code in shown]
        if others:
            cells.append(sum(counts.get(code, 0) for code in others))
        # A cell without lines stays empty, so that the others stand out.
        rows.append(row(target, *(f"{100 * one / lines:.1f}" if one else "" for one in cells)))
    more = ["others"] if others else []
    titles = headings("Target language", *shown, *more)
    return Table(title, titles, tuple(rows), is_page_only=True)


# Words

WORD_TITLES = {
    "seen": "By occurrence in the training lines",
    "frequency": "By frequency in the training lines",
    "fertility": "By number of subwords",
    "length": "By number of characters",
}
WORDS_OF = {
    "target": (
        "F-measure, in percent, of words of the target language: a word of a translation is "
        "correct if the reference of its line has it too. The share is that of the references' "
        "words."
    ),
    "source": (
        "F-measure, in percent, of words of the source language: a source word is correct if the "
        "reference has the word of the translation that is aligned to it. Alignments are learned "
        "from training lines and references (IBM Model 1). The share is that of source words "
        "aligned to the references."
    ),
}


def word_accuracy_section(evaluation: Evaluation) -> ReportSection | None:
    """Return the accuracy of words by frequency, fertility and length, if it was measured."""
    if evaluation.words is None:
        return None
    names = [one.name for one in evaluation.systems]
    titles = headings("Words", "Direction type", "Share, %", *names, words=["Direction type"])
    tables = (
        Table(
            title,
            titles,
            tuple(
                one
                for family in directions_by_family(evaluation)
                for one in _word_rows(evaluation, family, trait)
            ),
        )
        for trait, title in WORD_TITLES.items()
    )
    read = evaluation.words.training_lines.values()
    lines = f" Training lines read: {min(read):,} to {max(read):,} per language." if read else ""
    return ReportSection(
        "Word accuracy",
        WORDS_OF[evaluation.words.side] + lines,
        tables=tuple(table for table in tables if table.rows),
    )


def _word_rows(evaluation: Evaluation, family: Family, trait: str) -> Iterator[Row]:
    """Yield the kinds of words that any reference or translation has."""
    assert evaluation.words is not None
    kinds = evaluation.words.families.get(family, {}).get(trait, {})
    first = evaluation.systems[0].name
    total = sum(systems[first].reference for systems in kinds.values())
    for kind, systems in kinds.items():
        if any(one.f_measure is not None for one in systems.values()):
            yield row(
                kind,
                family_title(evaluation, family),
                score_cell(100.0 * systems[first].reference / max(total, 1), decimals=1),
                *(
                    score_cell(systems[one.name].f_measure, decimals=1)
                    for one in evaluation.systems
                ),
            )
