"""Tables beside the averages: directions won, differences beyond chance, languages that came out.

Pure functions from an evaluation to text cells; ``markdown`` and ``page`` lay them out.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.evaluation.directions import Family
from pipeline.evaluation.paired_tests import LEVEL
from pipeline.evaluation.score_slot import Column
from pipeline.evaluation.scores import Evaluation, PairedTest, SystemScores
from pipeline.evaluation.tables import (
    average_columns,
    directions_by_family,
    family_title,
    format_score,
    measures,
)

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
        _against_baseline(evaluation),
        _language_averages(evaluation),
        _found_languages(evaluation),
        _word_accuracy(evaluation),
    ]
    return [section for section in found if section is not None]


def _against_baseline(evaluation: Evaluation) -> TableSection | None:
    if evaluation.wins is None:
        return None
    tables = [*_win_tables(evaluation), *_test_tables(evaluation)]
    if not tables:
        return None
    return TableSection(
        f"Directions won against {evaluation.wins.baseline}",
        "The win ratio is the share of directions in which a system scores better than the "
        "baseline; a tie is no win. A difference is beyond chance where its p-value, by Holm's "
        "correction for all directions and systems, is at most "
        f"{LEVEL}: by paired bootstrap / by approximate randomisation.{_too_few(evaluation)}",
        tuple(tables),
    )


def _too_few(evaluation: Evaluation) -> str:
    """Where resamples are so few that the smallest p-value is too large once it is corrected."""
    tested, drawn = evaluation.baseline_tests, evaluation.significance
    if tested is None or drawn is None:
        return ""
    counts = Counter(
        column
        for columns in tested.directions.values()
        for column, systems in columns.items()
        for _ in systems
    )
    tests, resamples = max(counts.values(), default=0), drawn.resamples
    if tests <= LEVEL * (resamples + 1):
        return ""
    return (
        f" Of {resamples:,} resamples none can be: {tests:,} tests want "
        f"{math.ceil(tests / LEVEL):,} or more (evaluation.resamples)."
    )


def _win_tables(evaluation: Evaluation) -> list[TextTable]:
    wins, tables = evaluation.wins, []
    for column in evaluation.main_columns if wins is not None else ():
        averages = average_columns(evaluation, measured=measures(evaluation, column))
        if wins is None or column.larger_is_better is None or not averages:
            continue
        head = [f"{family_title(evaluation, one.family)} {one.group}" for one in averages]
        rows = [
            (
                name,
                *(
                    format_score(found[one.family][one.group].get(column.name), decimals=1)
                    for one in averages
                ),
            )
            for name, found in wins.systems.items()
        ]
        title = f"{column.title}: win ratio, %"
        tables.append(TextTable(title, ("System", *head), tuple(rows)))
    return tables


def _test_tables(evaluation: Evaluation) -> list[TextTable]:
    tests = evaluation.baseline_tests
    if tests is None:
        return []
    tables = []
    for column in evaluation.main_columns:
        by_system: dict[str, list[PairedTest]] = {}
        for columns in tests.directions.values():
            for name, test in columns.get(column.name, {}).items():
                by_system.setdefault(name, []).append(test)
        if by_system and column.larger_is_better is not None:
            rows = tuple((name, *_counts(column, found)) for name, found in by_system.items())
            head = ("System", "better", "worse", "not told apart")
            tables.append(TextTable(f"{column.title}: directions beyond chance", head, rows))
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
    """The main scores by family and by script of the language that is not the pivot."""
    columns = evaluation.main_columns
    tables = []
    for trait in ("family", "script", "set"):
        rows = [
            (
                one.value,
                family_title(evaluation, one.family),
                str(one.directions),
                *(
                    format_score(
                        one.systems[system.name].get(column.name), decimals=column.decimals
                    )
                    for system in evaluation.systems
                    for column in columns
                ),
            )
            for one in evaluation.language_averages
            if one.trait == trait
        ]
        names = [
            f"{system.name} {column.heading}" for system in evaluation.systems for column in columns
        ]
        if rows and names:
            head = (trait.capitalize(), "Kind", "Directions", *names)
            tables.append(TextTable(f"By {trait}", head, tuple(rows)))
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
