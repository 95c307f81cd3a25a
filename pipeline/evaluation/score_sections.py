"""Sections of a report that are functions of the scores.

A table answers one question; systems are rows where columns would be many.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pipeline.evaluation.averages import RULE
from pipeline.evaluation.charts import Bar, bar_chart
from pipeline.evaluation.directions import (
    FAMILIES,
    GROUPS,
    DirectionProfile,
    Family,
    Group,
    title_of_family,
)
from pipeline.evaluation.score_slot import Column
from pipeline.evaluation.scores import Averages, Comparison, Evaluation, SystemScores
from pipeline.evaluation.statistics import LEVEL
from pipeline.evaluation.tables import (
    EMPTY,
    Cell,
    Figure,
    Heading,
    ReportSection,
    Row,
    Table,
    Value,
    bullets,
    headings,
    row,
    score_cell,
)
from pipeline.terminal import counted

NOT_DECIDED = "not decided"
SHOWN_MISTAKES = 20
SHOWN_DIRECTIONS = 400  # with more directions, only scores.json has their scores

TrainedFor = Callable[[str], str]  # name of a system → the training behind it, in a few words


def family_title(evaluation: Evaluation, family: Family) -> str:
    """Return the title of a family of directions."""
    return title_of_family(family, pivot=evaluation.pivot)


def directions_by_family(evaluation: Evaluation) -> dict[Family, list[DirectionProfile]]:
    """Return the families that have directions, in their fixed order."""
    profiles = evaluation.directions
    members = {family: [one for one in profiles if one.family == family] for family in FAMILIES}
    return {family: found for family, found in members.items() if found}


def direction_facts(evaluation: Evaluation) -> tuple[str, ...]:
    """Return the numbers of directions, of target languages and of test lines."""
    kinds = ", ".join(
        f"{len(profiles):,} {family_title(evaluation, family)}"
        for family, profiles in directions_by_family(evaluation).items()
    )
    return (
        f"{counted(len(evaluation.directions), 'direction')} ({kinds})",
        counted(len({one.direction.target for one in evaluation.directions}), "target language"),
        counted(sum(one.test_lines for one in evaluation.directions), "test line"),
    )


@dataclass(frozen=True)
class _Average:
    """A score averaged over the directions of a family and tier: a column of tables."""

    column: Column
    family: Family
    group: Group
    heading: Heading
    compared: Comparison | None  # how the systems compare; None if the test sets are too small

    def value(self, averages: Averages) -> float | None:
        return averages.get(self.family, {}).get(self.group, {}).get(self.column.name)

    def cell(self, system: SystemScores) -> Cell:
        spread = self.value(system.spread)
        value = self.value(system.averages)
        return _score_cell(system.name, value, self.column, self.compared, spread=spread)

    def difference(self, system: str) -> Cell:
        found = None if self.compared is None else self.compared.differences[system]
        if found is None:
            return Cell(None)
        sign = f"+.{self.column.decimals}f"
        return Cell(found.value, sign, note=f"{found.low:{sign}} to {found.high:{sign}}")


def _averages(
    evaluation: Evaluation, column: Column, tiers_of: Family | None = None
) -> list[_Average]:
    """Return averages over the directions in which every system has the score.

    They are of every family, or of the resource tiers of one family.
    """
    found = []
    families = directions_by_family(evaluation)
    keys: list[tuple[Family, Group]] = [(family, "all") for family in families]
    if tiers_of is not None:
        keys = [(tiers_of, group) for group in GROUPS[1:]]
    for family, group in keys:
        members = [
            one
            for one in families[family]
            if group in ("all", one.resource) and evaluation.is_measured(column, str(one.direction))
        ]
        if not members:
            continue
        decided = evaluation.verdicts.decides_average(family, group)
        note = counted(len(members), "direction") + ("" if decided else f", {NOT_DECIDED}")
        title = group.replace("_", " ") if tiers_of else family_title(evaluation, family)
        drawn = {} if evaluation.significance is None else evaluation.significance.averages
        compared = drawn.get(family, {}).get(group, {}).get(column.name)
        found.append(_Average(column, family, group, Heading(title, note), compared))
    return found


def _table(title: str, averages: Sequence[_Average], rows: Iterable[Row], *first: Heading) -> Table:
    columns = (*headings("System"), *first, *(one.heading for one in averages))
    return Table(title, columns, tuple(rows))


# Averages


def overview_section(evaluation: Evaluation) -> ReportSection:
    """Return bars of the main scores over all directions of each type."""
    columns = [column for column in reversed(evaluation.main_columns) if column.out_of_100]
    figures = []
    for average in (one for column in columns for one in _averages(evaluation, column)):
        column, compared, bars = average.column, average.compared, []
        for place, system in enumerate(evaluation.systems):
            found = None if compared is None else compared.intervals[system.name]
            value = round(average.value(system.averages) or 0.0, column.decimals)
            interval = None if found is None else (found.low, found.high)
            bars.append(Bar(system.name, value, place, interval))
        title = f"{column.title}, {average.heading.title}"
        chart = bar_chart(bars, title=title, x_label=column.heading)
        figures.append(Figure(chart, title=f"{title} ({average.heading.note})"))
    return ReportSection(
        "Overview",
        f"Mean {' and '.join(column.heading for column in columns)} over all directions of each "
        "type, with 95 % confidence intervals.",
        figures=tuple(figures),
    )


def main_tables(evaluation: Evaluation, trained_for: TrainedFor) -> tuple[Table, ...]:
    """Return the averages of the main scores over all directions, one table per score."""
    return _mean_tables(evaluation, evaluation.main_columns, trained_for)


def averages_section(evaluation: Evaluation, trained_for: TrainedFor) -> ReportSection:
    """Return the averages of the main scores, by type of direction and by resource tier."""
    by_tier = (
        _table(
            f"{column.heading}, {family_title(evaluation, family)}, by resource tier",
            averages,
            (row(_name(one), *(tier.cell(one) for tier in averages)) for one in evaluation.systems),
        )
        for column in evaluation.main_columns
        for family in directions_by_family(evaluation)
        if len(averages := _averages(evaluation, column, family)) > 1
    )
    return ReportSection(
        "Average scores",
        "Arithmetic means over directions. A score in bold is significantly better than the "
        "scores of all other systems at 95 %, and both its system and the baseline translate. The "
        "range after a score is its 95 % confidence interval.",
        tables=(*main_tables(evaluation, trained_for), *by_tier),
    )


def separate_sections(evaluation: Evaluation, trained_for: TrainedFor) -> list[ReportSection]:
    """Return the sections of the scores that stand apart from the main scores."""
    return [
        ReportSection(
            section.title, section.lead, tables=_mean_tables(evaluation, columns, trained_for)
        )
        for section, columns in evaluation.sections.items()
    ]


def _mean_tables(
    evaluation: Evaluation, columns: Sequence[Column], trained_for: TrainedFor
) -> tuple[Table, ...]:
    """Return one table per score that was measured anywhere; references come first."""
    tables = []
    for column in columns:
        averages = _averages(evaluation, column)
        rows = [
            row(_name(one), trained_for(one.name), *(mean.cell(one) for mean in averages))
            for one in evaluation.systems
        ]
        if evaluation.references is not None and column.ceiling:
            values = (one.value(evaluation.references) for one in averages)
            cells = (score_cell(value, decimals=column.decimals) for value in values)
            rows.insert(0, row("References", "", *cells, is_ceiling=True))
        if averages:
            training = Heading("Trained for", is_number=False)
            tables.append(_table(column.heading, averages, rows, training))
    return tuple(tables)


def _name(system: SystemScores) -> Cell:
    return Cell(system.name, note=counted(len(system.runs), "run") if system.runs else "")


def _score_cell(
    system: str,
    value: float | None,
    column: Column,
    compared: Comparison | None,
    *,
    spread: float | None = None,
) -> Cell:
    """Return a score with its spread over runs and its interval, bold for the best system."""
    notes = [] if spread is None else [f"± {spread:.{column.decimals}f}"]
    if compared is not None:
        found = compared.intervals[system]
        notes.append(f"{found.low:.{column.decimals}f}–{found.high:.{column.decimals}f}")
    is_best = compared is not None and compared.best == system
    return score_cell(value, decimals=column.decimals, note=", ".join(notes), bold=is_best)


# Comparison with the baseline


def baseline_section(evaluation: Evaluation) -> ReportSection:
    """Return differences, win ratios and significant differences against the baseline."""
    wins, verdicts, significance = evaluation.wins, evaluation.verdicts, evaluation.significance
    if not wins:
        return EMPTY
    title = f"Comparison with the baseline {verdicts.baseline}"
    if not any(verdicts.decides(str(one.direction)) for one in evaluation.directions):
        text = f"Not decided: {verdicts.baseline} does not translate in any direction."
        return ReportSection(title, items=bullets([text]))
    lead = (
        "The range after a difference is its 95 % confidence interval. The win ratio is the share "
        "of decided directions in which a system scores better than the baseline; a tie is no win."
    )
    if significance is not None and significance.tests:
        lead += (
            f" A difference is significant if its p-value is at most {LEVEL} after Holm's "
            f"correction for {significance.tests:,} tests (directions × systems). With two or "
            "three seeds, hardly any direction can be significant by itself: compare averages."
        )
    tables = []
    for column in evaluation.columns:
        averages = [one for one in _averages(evaluation, column) if one.compared is not None]
        rows = [row(name, *(one.difference(name) for one in averages)) for name in wins]
        if averages:
            name = f"{column.title}: difference to {verdicts.baseline}"
            tables.append(_table(name, averages, rows))
    ranked = [one for one in evaluation.main_columns if one.larger_is_better is not None]
    for column in ranked:
        averages = _averages(evaluation, column)
        rows = [
            row(name, *(_win_ratio(one.value(shares)) for one in averages))
            for name, shares in wins.items()
        ]
        if averages:
            tables.append(_table(f"{column.title}: win ratio, %", averages, rows))
    tables += [
        Table(
            f"{column.title}: directions with a significant difference",
            headings("System", "better", "worse", "not significant", NOT_DECIDED),
            tuple(row(name, *_counts(evaluation, column, name)) for name in wins),
        )
        for column in ranked
        if significance is not None
        and any(column.name in one for one in significance.directions.values())
    ]
    return ReportSection(title, f"{lead} {RULE}", tables=tuple(tables))


def _win_ratio(share: float | None) -> Cell:
    return Cell(NOT_DECIDED) if share is None else score_cell(share, decimals=1)


def _counts(evaluation: Evaluation, column: Column, system: str) -> tuple[int, int, int, int]:
    """Count directions that are significantly better and worse, not significant, not decided."""
    assert evaluation.significance is not None
    sign, name = -1.0 if column.larger_is_better is False else 1.0, column.name
    every = evaluation.significance.directions.values()
    found = [one[name].differences[system] for one in every if name in one]
    tested = [(sign * one.value, one.p_value_holm) for one in found if one.p_value_holm is not None]
    better = sum(value > 0 and p_value <= LEVEL for value, p_value in tested)
    worse = sum(value < 0 and p_value <= LEVEL for value, p_value in tested)
    return better, worse, len(tested) - better - worse, len(found) - len(tested)


# Languages


def sets_section(evaluation: Evaluation) -> ReportSection:
    """Return the main scores by set of the language that is not the pivot."""
    names, tables = [system.name for system in evaluation.systems], []
    for column in evaluation.main_columns if evaluation.set_averages else ():
        rows = (
            row(
                *(f"{one.name}, {family_title(evaluation, one.family)}", one.directions),
                *(
                    score_cell(one.systems[name].get(column.name), decimals=column.decimals)
                    for name in names
                ),
            )
            for one in evaluation.set_averages
        )
        titles = headings("Set and direction type", "Directions", *names)
        tables.append(Table(f"{column.heading} by set", titles, tuple(rows)))
    return ReportSection(
        "Averages by set of languages",
        "Arithmetic means over directions by the recipe's language sets. The language is the "
        "source if the pivot is the target, else the target.",
        tables=tuple(tables),
    )


def output_languages_section(evaluation: Evaluation) -> ReportSection:
    """Return the wrong languages of outputs by the first score that identifies languages."""
    names = [one.name for one in evaluation.columns if one.name in evaluation.confusion]
    confusion = evaluation.confusion[names[0]] if names else {}
    mistakes = [
        (lines / sum(counts.values()), system, family_title(evaluation, family), target, code)
        for system, families in confusion.items()
        for family, targets in families.items()
        for target, counts in targets.items()
        for code, lines in counts.items()
        if code != target
    ]
    largest = sorted(mistakes, key=lambda one: (-one[0], *one[1:]))[:SHOWN_MISTAKES]
    words = ("System", "Direction type", "Target language", "Found instead")
    table = Table(
        f"Largest shares of lines in another language, at most {SHOWN_MISTAKES}",
        headings(*words, "% of lines", words=words),
        tuple(row(*one[1:], Cell(100 * one[0], ".1f")) for one in largest),
    )
    return ReportSection(
        "Output languages",
        "Languages that were found in place of the target language. scores.json has the counts of "
        "every direction.",
        tables=(table,) if mistakes else (),
    )


# Words

WORD_TITLES = {
    "seen": "By occurrence in the training lines",
    "frequency": "By frequency in the training lines",
    "fertility": "By number of subwords",
    "length": "By number of characters",
}
WORDS_OF = {
    "target": "words of the target language: a word of a translation is correct if the reference "
    "of its line has it too. The share counts the references' words.",
    "source": "words of the source language: a source word is correct if the reference has the "
    "word of the translation that is aligned to it (IBM Model 1). The share counts source "
    "words aligned to the references.",
}


def word_accuracy_section(evaluation: Evaluation) -> ReportSection:
    """Return the accuracy of words by frequency, fertility and length, if it was measured."""
    if evaluation.words is None:
        return EMPTY
    names = [one.name for one in evaluation.systems]
    tables = []
    for trait, title in WORD_TITLES.items():
        rows = []
        for family in directions_by_family(evaluation):
            kinds = evaluation.words.families.get(family, {}).get(trait, {})
            total = sum(systems[names[0]].reference for systems in kinds.values())
            for kind, systems in kinds.items():
                share = 100.0 * systems[names[0]].reference / max(total, 1)
                shown = [share, *(systems[name].f_measure for name in names)]
                if any(one is not None for one in shown[1:]):
                    cells = (score_cell(one, decimals=1) for one in shown)
                    rows.append(row(f"{kind}, {family_title(evaluation, family)}", *cells))
        if rows:
            tables.append(Table(title, headings("Words", "Share, %", *names), tuple(rows)))
    read = evaluation.words.training_lines.values()
    lines = f" Training lines read: {min(read):,} to {max(read):,} per language." if read else ""
    return ReportSection(
        "Word accuracy",
        f"F-measure, in percent, of {WORDS_OF[evaluation.words.side]}{lines}",
        tables=tuple(tables),
    )


# Directions


def directions_section(evaluation: Evaluation) -> ReportSection:
    """Return the main scores of every system in every direction, unless these are too many."""
    profiles = [one for found in directions_by_family(evaluation).values() for one in found]
    has_synthetic, columns = any(one.synthetic_lines for one in profiles), evaluation.main_columns
    rows: dict[str, list[Row]] = {column.name: [] for column in columns}
    for one in profiles:
        direction, names = one.direction, evaluation.language_names
        note = f"{names[direction.source]} → {names[direction.target]}"
        if not evaluation.verdicts.decides(str(direction)):
            note += f", {NOT_DECIDED}"
        first: list[Cell | Value] = [
            Cell(f"{direction.source} → {direction.target}", note=note),
            *(family_title(evaluation, one.family), one.training_lines),
            *([one.synthetic_lines] if has_synthetic else []),
        ]
        significance = evaluation.significance
        drawn = {} if significance is None else significance.directions.get(str(direction), {})
        for column in columns:
            scores = (
                _score_cell(
                    system.name,
                    system.directions[str(direction)].scores.get(column.name),
                    column,
                    drawn.get(column.name),
                )
                for system in evaluation.systems
            )
            rows[column.name].append(row(*first, *scores))
    titles = headings(
        *("Direction", "Direction type", "Training lines"),
        *(["Synthetic lines"] if has_synthetic else []),
        *(system.name for system in evaluation.systems),
        words=["Direction type"],
    )
    tables = (Table(one.heading, titles, tuple(rows[one.name])) for one in columns)
    return ReportSection(
        "Scores by direction",
        "Training lines are counted for the language pair. Bold print and intervals are as in the "
        "averages. scores.json has all figures.",
        tables=tuple(tables) if len(profiles) <= SHOWN_DIRECTIONS else (),
    )
