"""Tables beside the averages: directions won, significant differences, languages that came out.

Pure functions from an evaluation to text cells; ``markdown`` and ``page`` lay them out.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.evaluation.directions import Family
from pipeline.evaluation.paired_tests import (
    LEVEL,
    MOST_RESAMPLES,
    SETTLED,
    needed_resamples,
)
from pipeline.evaluation.score_slot import Column
from pipeline.evaluation.scores import Evaluation, PairedTest, SystemScores
from pipeline.evaluation.tables import (
    AverageColumn,
    alone,
    average_columns,
    directions_by_family,
    family_title,
    format_score,
    is_decided,
    measures,
)
from pipeline.evaluation.verdicts import RULE

MATRIX_LANGUAGES = 16
"""Columns of a confusion matrix; the languages found less often are summed up in one more."""
SHOWN_LANGUAGES = 3
"""So many of the languages that came out instead are named."""


@dataclass(frozen=True)
class TextTable:
    """A table of words and figures; the first cell of a row is its name."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class TableSection:
    """Tables under one heading."""

    title: str
    lead: str
    tables: tuple[TextTable, ...]
    figures: tuple[str, ...] = ()
    """Charts with their legends, as HTML; the page alone has them."""


def comparison_sections(evaluation: Evaluation) -> list[TableSection]:
    """Those for which there is anything to show."""
    found = [
        _distinct_outputs(evaluation),
        _against_baseline(evaluation),
        _language_averages(evaluation),
        _found_languages(evaluation),
        _word_accuracy(evaluation),
    ]
    return [section for section in found if section is not None]


def _distinct_outputs(evaluation: Evaluation) -> TableSection:
    """The share of distinct outputs of every system, and what it lets the reports decide."""
    averages, verdicts = average_columns(evaluation), evaluation.verdicts
    rows = [
        (
            system.name,
            *(
                f"{verdicts.averages[one.family][one.group][system.name].distinct:.1f}"
                for one in averages
            ),
        )
        for system in evaluation.systems
    ]
    if not alone(evaluation):
        decided = ["decided" if one.decided else "not decided" for one in averages]
        rows.append((f"Against {verdicts.baseline}", *decided))
    head = [f"{family_title(evaluation, one.family)} {one.group_title}" for one in averages]
    return TableSection(
        "Distinct outputs",
        "How many different outputs a system has, in percent of the different sources, as means "
        f"over directions. {RULE} Where the baseline does not translate, nothing is decided: no "
        "score is bold, and no direction is won, better or worse. A system that does not translate "
        "is never bold.",
        (TextTable("Distinct outputs, % of distinct sources", ("System", *head), tuple(rows)),),
    )


def _against_baseline(evaluation: Evaluation) -> TableSection | None:
    if evaluation.wins is None:
        return None
    title = f"Directions won against {evaluation.wins.baseline}"
    if not any(is_decided(evaluation, one) for one in evaluation.directions):
        lead = f"Not decided: {evaluation.wins.baseline} does not translate in any direction."
        return TableSection(title, lead, ())
    tables = [*_win_tables(evaluation), *_test_tables(evaluation)]
    if not tables:
        return None
    return TableSection(
        title,
        "The win ratio is the share of directions in which a system scores better than the "
        "baseline, of those that are decided; a tie is no win." + _of_tests(evaluation),
        tuple(tables),
    )


def _of_tests(evaluation: Evaluation) -> str:
    """How differences were tested; where none could be significant, that they are not shown."""
    tested, drawn = evaluation.baseline_tests, evaluation.significance
    if tested is None or drawn is None:
        return ""
    needed = needed_resamples(tested.tests)
    if tested.resamples < needed:
        return (
            f" Differences are not tested: {tested.tests:,} tests need {needed:,} resamples, more "
            f"than the {MOST_RESAMPLES:,} that are drawn at most. To test them, set "
            "evaluation.resamples to that number, or evaluate fewer directions or systems at once."
        )
    more = (
        f", {tested.resamples:,} where fewer than {SETTLED} of these were as far apart"
        if tested.resamples > drawn.resamples
        else ""
    )
    return (
        f" A difference is significant where its p-value is at most {LEVEL}, corrected by Holm's "
        f"method for {tested.tests:,} tests (directions × systems): by paired bootstrap / by "
        f"approximate randomization, of {drawn.resamples:,} resamples{more}."
    )


def _win_tables(evaluation: Evaluation) -> list[TextTable]:
    wins, tables = evaluation.wins, []
    for column in evaluation.main_columns if wins is not None else ():
        averages = average_columns(evaluation, measured=measures(evaluation, column))
        if wins is None or column.larger_is_better is None or not averages:
            continue
        head = [f"{family_title(evaluation, one.family)} {one.group_title}" for one in averages]
        rows = [
            (
                name,
                *(
                    _win_ratio(found.get(one.family, {}).get(one.group, {}).get(column.name))
                    for one in averages
                ),
            )
            for name, found in wins.systems.items()
        ]
        undecided = [_undecided(evaluation, one) for one in averages]
        if any(undecided):
            rows.append(("Directions not decided", *map(str, undecided)))
        title = f"{column.title}: win ratio, %"
        tables.append(TextTable(title, ("System", *head), tuple(rows)))
    return tables


def _win_ratio(share: float | None) -> str:
    return "not decided" if share is None else f"{share:.1f}"


def _undecided(evaluation: Evaluation, average: AverageColumn) -> int:
    """Return how many directions of an average are not decided."""
    return sum(
        not evaluation.verdicts.decides(str(one.direction))
        for one in evaluation.directions
        if one.family == average.family and average.group in ("all", one.resource)
    )


def _test_tables(evaluation: Evaluation) -> list[TextTable]:
    """Directions by their verdict; none where no difference could have been significant."""
    tests = evaluation.baseline_tests
    if tests is None or tests.resamples < needed_resamples(tests.tests):
        return []
    tables = []
    others = [one.name for one in evaluation.systems if one.name != tests.baseline]
    for column in evaluation.main_columns:
        by_system: dict[str, list[PairedTest]] = {name: [] for name in others}
        for columns in tests.directions.values():
            for name, test in columns.get(column.name, {}).items():
                by_system[name].append(test)
        if column.larger_is_better is not None and (any(by_system.values()) or tests.undecided):
            undecided = str(len(tests.undecided))
            rows = tuple(
                (name, *_counts(column, found), undecided) for name, found in by_system.items()
            )
            head = ("System", "better", "worse", "not significant", "not decided")
            title = f"{column.title}: directions with a significant difference"
            tables.append(TextTable(title, head, rows))
    return tables


def _counts(column: Column, tests: Sequence[PairedTest]) -> tuple[str, str, str]:
    """Directions better, worse and neither, by either test."""
    sign = 1.0 if column.larger_is_better else -1.0
    counts = []
    for name in ("bootstrap_holm", "randomisation_holm"):
        sure = [sign * one.difference for one in tests if getattr(one, name) <= LEVEL]
        better, worse = sum(one > 0 for one in sure), sum(one < 0 for one in sure)
        counts.append((better, worse, len(tests) - better - worse))
    better_by, worse_by, neither_by = (
        " / ".join(map(str, one)) for one in zip(*counts, strict=True)
    )
    return better_by, worse_by, neither_by


def _language_averages(evaluation: Evaluation) -> TableSection | None:
    """The main scores by family and by script of the language that is not the pivot.

    A table holds one score, so that all systems stand side by side on a screen.
    """
    names = [system.name for system in evaluation.systems]
    tables = [
        TextTable(
            f"{column.heading} by {trait}",
            (trait.capitalize(), "Kind", "Directions", *names),
            tuple(
                (
                    one.value,
                    family_title(evaluation, one.family),
                    str(one.directions),
                    *(
                        format_score(one.systems[name].get(column.name), decimals=column.decimals)
                        for name in names
                    ),
                )
                for one in evaluation.language_averages
                if one.trait == trait
            ),
        )
        for trait in ("family", "script", "set")
        for column in evaluation.main_columns
    ]
    tables = [table for table in tables if table.rows]
    if not tables:
        return None
    return TableSection(
        "Averages by language",
        "Arithmetic means over directions, by family and script, and by the recipe's sets, of the "
        "source where the pivot is the target, else of the target.",
        tuple(tables),
    )


def _found_languages(evaluation: Evaluation) -> TableSection | None:
    """Of the first score that tells languages apart; the lines of a family's targets together."""
    names = [column.name for column in evaluation.columns]
    known = {
        name
        for one in evaluation.systems
        for two in one.directions.values()
        for name in two.outcomes
    }
    column = next((name for name in names if name in known), None)
    if column is None:
        return None
    rows = []
    for family, profiles in directions_by_family(evaluation).items():
        for target in sorted({one.direction.target for one in profiles}):
            directions = [str(one.direction) for one in profiles if one.direction.target == target]
            found = [_outcomes(one, directions, column) for one in evaluation.systems]
            if all(found):
                name = f"{evaluation.language_names.get(target, target)} ({target})"
                cells = [_shares(counts, target) for counts in found]
                rows.append((name, family_title(evaluation, family), *cells))
    if not rows:
        return None
    head = ("Asked for", "Kind", *(one.name for one in evaluation.systems))
    return TableSection(
        "Languages that came out",
        "Share of lines in the language that was asked for, and the languages most often found "
        "instead; then, for every system, the languages found most often where it missed any. "
        "Counts of every direction and family stand in scores.json.",
        (TextTable("By target language", head, tuple(rows)), *_matrices(evaluation, column)),
    )


def _matrices(evaluation: Evaluation, column: str) -> list[TextTable]:
    """One per system and family that has lines in a wrong language."""
    tables = []
    for system, families in evaluation.confusion.get(column, {}).items():
        for family, targets in families.items():
            wrong = {
                target: counts
                for target, counts in sorted(targets.items())
                if any(code != target for code in counts)
            }
            if wrong:
                title = f"{system}, {family_title(evaluation, family)}: languages found, % of lines"
                tables.append(_matrix(title, wrong))
    return tables


def _matrix(title: str, targets: Mapping[str, Mapping[str, int]]) -> TextTable:
    """Rows are languages asked for, columns the languages found most often; shares of a row."""
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
        rows.append((target, *(_cell(100 * cell / lines) for cell in cells)))
    return TextTable(title, ("Asked for", *shown, *(["others"] if others else [])), tuple(rows))


def _cell(share: float) -> str:
    """Nothing where there are no lines, so that the others stand out."""
    return f"{share:.1f}" if share else ""


WORD_TITLES = {
    "seen": "By whether the training lines have them",
    "frequency": "By how often the training lines have them",
    "fertility": "By number of subwords",
    "length": "By number of characters",
}

WORDS_OF = {
    "target": (
        "F-measure, in percent, of words of the target language: a word of a translation is right "
        "where the reference of its line has it too. The share is that of the references' words."
    ),
    "source": (
        "F-measure, in percent, of words of the source language: a source word is right where the "
        "reference has the word of the translation that is aligned to it. Alignments are learned "
        "from training lines and references (IBM Model 1). The share is that of source words "
        "aligned to the references."
    ),
}


def _word_accuracy(evaluation: Evaluation) -> TableSection | None:
    if evaluation.words is None:
        return None
    tables = []
    for trait, title in WORD_TITLES.items():
        rows = [
            row
            for family in directions_by_family(evaluation)
            for row in _word_rows(evaluation, family, trait)
        ]
        if rows:
            names = [one.name for one in evaluation.systems]
            tables.append(TextTable(title, ("Words", "Kind", "Share, %", *names), tuple(rows)))
    read = evaluation.words.training_lines
    lines = f" Training lines read: {min(read.values()):,} to {max(read.values()):,} per language."
    return TableSection(
        "Word accuracy",
        WORDS_OF[evaluation.words.side] + (lines if read else ""),
        tuple(tables),
    )


def _word_rows(evaluation: Evaluation, family: Family, trait: str) -> list[tuple[str, ...]]:
    """Kinds of words that any reference or translation has."""
    assert evaluation.words is not None
    kinds = evaluation.words.families.get(family, {}).get(trait, {})
    first = evaluation.systems[0].name
    total = sum(systems[first].reference for systems in kinds.values())
    return [
        (
            kind,
            family_title(evaluation, family),
            format_score(100.0 * systems[first].reference / max(total, 1), decimals=1),
            *(format_score(systems[one.name].f_measure, decimals=1) for one in evaluation.systems),
        )
        for kind, systems in kinds.items()
        if any(one.f_measure is not None for one in systems.values())
    ]


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
