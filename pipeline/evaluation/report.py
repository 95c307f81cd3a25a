"""The report of an evaluation: its sections in their order, as functions of the scores.

A table answers one question; systems are rows where columns would be many.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from operator import sub

from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.corpus import read_hypotheses, read_lines
from pipeline.artifacts.spelling import is_blank
from pipeline.evaluation.averages import RULE, group_runs
from pipeline.evaluation.charts import Bar, Series, bar_chart, heat_map, line_chart
from pipeline.evaluation.history import History, budgets_section, curves_section, trained_for
from pipeline.evaluation.nearest_neighbor import NEAREST_NEIGHBOR
from pipeline.evaluation.scores import (
    FAMILIES,
    GROUPS,
    Averages,
    Column,
    Comparison,
    DirectionProfile,
    Evaluation,
    Family,
    Group,
    SystemScores,
    title_of_family,
)
from pipeline.evaluation.statistics import LEVEL, MIN_LINES
from pipeline.evaluation.tables import (
    Cell,
    Figure,
    Heading,
    Report,
    ReportSection,
    Row,
    Table,
    Value,
    headings,
    row,
    score_cell,
    section_of_notes,
)
from pipeline.languages import language, without_region
from pipeline.machine import installed_version
from pipeline.seeds import derive_seed
from pipeline.terminal import counted, listed

NOT_DECIDED = "not decided"
SHOWN_MISTAKES = 20
SHOWN_DIRECTIONS = 400  # with more directions, only scores.json has their scores
MAPPED = 20  # a type with more directions is also shown as a map and by its sorted differences
# Samples per family of directions: directions, lines of each, and the longest reference shown.
DIRECTIONS, LINES, CHARACTERS = 3, 2, 240
SAMPLES_LEAD = "Test lines drawn at random. Systems with several runs are shown by their first run."


def imprint() -> str:
    """Return the present time and the installed version of mmnmt."""
    return f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, mmnmt {installed_version()}"


def evaluation_report(
    evaluation: Evaluation,
    history: History,
    samples: Sequence[Table] = (),
    *,
    made: str,
    covers: str,
    analyses: Sequence[ReportSection] = (),
) -> Report:
    """Return the report; ``made`` says when and how, ``covers`` where data and systems are."""
    runs = {run: place for place, one in enumerate(evaluation.systems) for run in one.run_names}
    sections = (
        section_of_notes("Verdict", (*verdict(evaluation), covers)),
        overview_section(evaluation),
        section_of_notes("Warnings", evaluation.warnings),
        averages_section(evaluation, history),
        budgets_section(history),
        baseline_section(evaluation),
        sets_section(evaluation),
        output_languages_section(evaluation),
        word_accuracy_section(evaluation),
        *analyses,
        curves_section(history.curves, runs),
        ReportSection("Sample translations", SAMPLES_LEAD, tables=tuple(samples)),
        directions_section(evaluation),
        section_of_notes("Notes", _notes(evaluation)),
        ReportSection("Signatures", items=tuple(_signatures(evaluation))),
    )
    title = f"Translation quality of {counted(len(evaluation.systems), 'system')}"
    facts = direction_facts(evaluation)
    return Report(title, f"Evaluation report, {made}", facts, sections, "mmnmt evaluate")


def _family_title(evaluation: Evaluation, family: Family) -> str:
    return title_of_family(family, pivot=evaluation.pivot)


def _by_family(evaluation: Evaluation) -> dict[Family, list[DirectionProfile]]:
    """Return the families that have directions, in their fixed order."""
    profiles = evaluation.directions
    members = {
        family: [profile for profile in profiles if profile.family == family] for family in FAMILIES
    }
    return {family: found for family, found in members.items() if found}


def direction_facts(evaluation: Evaluation) -> tuple[str, ...]:
    """Return the numbers of directions, of target languages and of test lines."""
    kinds = ", ".join(
        f"{len(profiles):,} {_family_title(evaluation, family)}"
        for family, profiles in _by_family(evaluation).items()
    )
    return (
        f"{counted(len(evaluation.directions), 'direction')} ({kinds})",
        counted(
            len({profile.direction.target for profile in evaluation.directions}), "target language"
        ),
        counted(sum(profile.test_lines for profile in evaluation.directions), "test line"),
    )


# Averages


@dataclass(frozen=True)
class _Mean:
    """A score averaged over the directions of a family and tier: a column of tables."""

    column: Column
    family: Family
    group: Group
    heading: Heading
    compared: Comparison | None  # how the systems compare; None if the test sets are too small

    def value(self, averages: Averages) -> float | None:
        return averages.get(self.family, {}).get(self.group, {}).get(self.column.name)

    def cell(self, system: SystemScores) -> Cell:
        value, spread = self.value(system.averages), self.value(system.spread)
        return _score_cell(system.name, value, self.column, self.compared, spread=spread)

    def difference(self, system: str) -> Cell:
        if self.compared is None:
            return Cell(None)
        found, sign = self.compared.differences[system], f"+.{self.column.decimals}f"
        return Cell(found.value, sign, note=f"{found.low:{sign}} to {found.high:{sign}}")


def _means(evaluation: Evaluation, column: Column, tiers_of: Family | None = None) -> list[_Mean]:
    """Return averages over the directions in which every system has the score.

    They are of every family, or of the resource tiers of one family.
    """
    found = []
    families = _by_family(evaluation)
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
        title = group.replace("_", " ") if tiers_of else _family_title(evaluation, family)
        drawn = {} if evaluation.significance is None else evaluation.significance.averages
        compared = drawn.get(family, {}).get(group, {}).get(column.name)
        found.append(_Mean(column, family, group, Heading(title, note), compared))
    return found


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


def verdict(evaluation: Evaluation) -> Iterator[str]:
    """Yield which systems lead by the last main score, and which leads are significant."""
    column = (evaluation.main_columns or evaluation.columns)[-1]
    best = min if column.larger_is_better is False else max
    means, leads, sure = _means(evaluation, column), dict[str, list[str]](), list[str]()
    for mean in means:
        values = {one.name: mean.value(one.averages) or 0.0 for one in evaluation.systems}
        if len({*values.values()}) == 1 < len(values):
            continue  # equal systems, for example without a translation, have no leader
        leader = best(values, key=values.__getitem__)
        place = f"{mean.heading.title} {values[leader]:.{column.decimals}f}"
        place += f", {NOT_DECIDED}" if NOT_DECIDED in mean.heading.note else ""
        leads.setdefault(leader, []).append(place)
        if mean.compared is not None and mean.compared.best == leader:
            sure.append(mean.heading.title)
    named = "; ".join(f"{name} ({', '.join(places)})" for name, places in leads.items())
    yield f"Best by mean {column.heading}: {named or 'no system is ahead'}."
    if len(evaluation.systems) > 1 and any(mean.compared for mean in means):
        which = f"The lead in {listed(sure)}" if sure else "No lead"
        yield f"{which} over all other systems is significant at 95 %."


def overview_section(evaluation: Evaluation) -> ReportSection:
    """Return bars of the main scores over all directions of each type."""
    columns = [column for column in reversed(evaluation.main_columns) if column.out_of_100]
    figures = []
    for mean in (one for column in columns for one in _means(evaluation, column)):
        bars = []
        for place, system in enumerate(evaluation.systems):
            found = None if mean.compared is None else mean.compared.intervals[system.name]
            value = round(mean.value(system.averages) or 0.0, mean.column.decimals)
            interval = None if found is None else (found.low, found.high)
            bars.append(Bar(system.name, value, place, interval))
        title = f"{mean.column.title}, {mean.heading.title}"
        chart = bar_chart(bars, title=title, x_label=mean.column.heading)
        figures.append(Figure(chart, title=f"{title} ({mean.heading.note})"))
    return ReportSection(
        "Overview",
        f"Mean {' and '.join(column.heading for column in columns)} over all directions of each "
        "type, with 95 % confidence intervals.",
        figures=tuple(figures),
    )


def mean_tables(
    evaluation: Evaluation, history: History, columns: Sequence[Column]
) -> tuple[Table, ...]:
    """Return one table per score that was measured anywhere, over all directions of each type."""
    trainings = {
        system.name: " / ".join(
            dict.fromkeys(trained_for(history, run) for run in system.run_names)
        )
        for system in evaluation.systems
    }
    first = (*headings("System"), Heading("Trained for", is_number=False))
    return tuple(
        Table(
            column.heading,
            (*first, *(mean.heading for mean in means)),
            tuple(
                row(_name(system), trainings[system.name], *(mean.cell(system) for mean in means))
                for system in evaluation.systems
            ),
        )
        for column in columns
        if (means := _means(evaluation, column))
    )


def _name(system: SystemScores) -> Cell:
    return Cell(system.name, note=counted(len(system.runs), "run") if system.runs else "")


def averages_section(evaluation: Evaluation, history: History) -> ReportSection:
    """Return the averages by type of direction, and of the main scores by resource tier."""
    by_tier = list[Table]()
    for column in evaluation.main_columns:
        for family in _by_family(evaluation):
            tiers = _means(evaluation, column, family)
            title = f"{column.heading}, {_family_title(evaluation, family)}, by resource tier"
            rows = (row(_name(one), *(t.cell(one) for t in tiers)) for one in evaluation.systems)
            by_tier += _table_of_means(title, tiers, rows) if len(tiers) > 1 else ()
    return ReportSection(
        "Average scores",
        "Arithmetic means over directions, with 95 % confidence intervals. The notes define bold.",
        tables=(*mean_tables(evaluation, history, evaluation.columns), *by_tier),
    )


# Comparison with the baseline


def baseline_section(evaluation: Evaluation) -> ReportSection:
    """Return differences, win ratios and significant differences against the baseline."""
    wins, verdicts, significance = evaluation.wins, evaluation.verdicts, evaluation.significance
    title = f"Comparison with the baseline {verdicts.baseline}"
    if wins and not any(
        verdicts.decides(str(profile.direction)) for profile in evaluation.directions
    ):
        text = f"Not decided: {verdicts.baseline} does not translate in any direction."
        return section_of_notes(title, [text])
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
    differences, ratios, counts = list[Table](), list[Table](), list[Table]()
    for column in evaluation.columns if wins else ():
        means = _means(evaluation, column)
        drawn = [mean for mean in means if mean.compared is not None]
        name = f"{column.title}: difference to {verdicts.baseline}"
        rows = (row(name, *(mean.difference(name) for mean in drawn)) for name in wins)
        differences += _table_of_means(name, drawn, rows)
        if not column.is_main or column.larger_is_better is None:  # nothing to win
            continue
        name = f"{column.title}: win ratio, %"
        rows = (
            row(name, *(score_cell(mean.value(shares), decimals=1) for mean in means))
            for name, shares in wins.items()
        )
        ratios += _table_of_means(name, means, rows)
        if significance and any(column.name in one for one in significance.directions.values()):
            titles = headings("System", "better", "worse", "not significant", NOT_DECIDED)
            rows = (row(name, *_counts(evaluation, column, name)) for name in wins)
            name = f"{column.title}: directions with a significant difference"
            counts.append(Table(name, titles, tuple(rows)))
    return ReportSection(title, f"{lead} {RULE}", tables=(*differences, *ratios, *counts))


def _table_of_means(title: str, means: Sequence[_Mean], rows: Iterator[Row]) -> Iterator[Table]:
    if means:
        columns = (*headings("System"), *(mean.heading for mean in means))
        yield Table(title, columns, tuple(rows))


def _counts(evaluation: Evaluation, column: Column, system: str) -> tuple[int, int, int, int]:
    """Count directions that are significantly better and worse, not significant, not decided."""
    assert evaluation.significance is not None
    sign, name = 1.0 if column.larger_is_better else -1.0, column.name
    every = evaluation.significance.directions.values()
    found = [one[name].differences[system] for one in every if name in one]
    tested = [(sign * one.value, one.p_value_holm) for one in found if one.p_value_holm is not None]
    better = sum(value > 0 and p_value <= LEVEL for value, p_value in tested)
    worse = sum(value < 0 and p_value <= LEVEL for value, p_value in tested)
    return better, worse, len(tested) - better - worse, len(found) - len(tested)


# Languages and words


def sets_section(evaluation: Evaluation) -> ReportSection:
    """Return the main scores by set of the language that is not the pivot."""
    names, tables = [system.name for system in evaluation.systems], []
    for column in evaluation.main_columns if evaluation.set_averages else ():
        rows = []
        for one in evaluation.set_averages:
            values = (one.systems[name].get(column.name) for name in names)
            cells = (score_cell(value, decimals=column.decimals) for value in values)
            title = f"{one.name}, {_family_title(evaluation, one.family)}"
            rows.append(row(title, one.directions, *cells))
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
    columns = [column for column in evaluation.columns if column.name in evaluation.confusion]
    confusion = evaluation.confusion[columns[0].name] if columns else {}
    identifier = columns[0].title.removesuffix(", %") if columns else ""
    mistakes = [
        (lines / sum(counts.values()), system, _family_title(evaluation, family), target, code)
        for system, families in confusion.items()
        for family, targets in families.items()
        for target, counts in targets.items()
        for code, lines in counts.items()
        if code != without_region(target)
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
        f"Languages found in place of the target language ({identifier}). scores.json has the "
        "counts of every direction and identifier.",
        tables=(table,) if mistakes else (),
    )


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
    words, names, tables = evaluation.words, [system.name for system in evaluation.systems], []
    if words is None:
        return ReportSection("")
    for trait, title in WORD_TITLES.items():
        rows = []
        for family in _by_family(evaluation):
            kinds = words.families.get(family, {}).get(trait, {})
            total = sum(systems[names[0]].reference for systems in kinds.values())
            for kind, systems in kinds.items():
                share = 100.0 * systems[names[0]].reference / max(total, 1)
                shown = [systems[name].f_measure for name in names]
                if any(one is not None for one in shown):
                    cells = (score_cell(one, decimals=1) for one in (share, *shown))
                    rows.append(row(f"{kind}, {_family_title(evaluation, family)}", *cells))
        if rows:
            tables.append(Table(title, headings("Words", "Share, %", *names), tuple(rows)))
    read = words.training_lines.values()
    lines = f" Training lines read: {min(read):,} to {max(read):,} per language." if read else ""
    return ReportSection(
        "Word accuracy",
        f"F-measure, in percent, of {WORDS_OF[words.side]}{lines}",
        tables=tuple(tables),
    )


# Directions


def directions_section(evaluation: Evaluation) -> ReportSection:
    """Return the main scores of every system in every direction, unless these are too many."""
    profiles = [member for members in _by_family(evaluation).values() for member in members]
    synthetic = ["Synthetic lines"] if any(profile.synthetic_lines for profile in profiles) else []
    significance, tables = evaluation.significance, []
    titles = headings(
        *("Direction", "Direction type", "Training lines", *synthetic),
        *(system.name for system in evaluation.systems),
        words=["Direction type"],
    )
    for column in evaluation.main_columns:
        rows = []
        for one in profiles:
            way, name, names = one.direction, str(one.direction), evaluation.language_names
            note = f"{names[way.source]} → {names[way.target]}"
            note += "" if evaluation.verdicts.decides(name) else f", {NOT_DECIDED}"
            drawn = {} if significance is None else significance.directions.get(name, {})
            first: list[Cell | Value] = [
                Cell(f"{way.source} → {way.target}", note=note),
                *(_family_title(evaluation, one.family), one.training_lines),
                *([one.synthetic_lines] if synthetic else []),
            ]
            for system in evaluation.systems:
                value = system.directions[name].scores.get(column.name)
                first.append(_score_cell(system.name, value, column, drawn.get(column.name)))
            rows.append(row(*first))
        tables.append(Table(column.heading, titles, tuple(rows)))
    return ReportSection(
        "Scores by direction",
        "Training lines are counted for the language pair. scores.json has all figures. Maps have "
        "a column per direction, most training lines first; differences are in falling order.",
        figures=tuple(_maps(evaluation)) if evaluation.main_columns else (),
        tables=tuple(tables) if len(profiles) <= SHOWN_DIRECTIONS else (),
    )


def _maps(evaluation: Evaluation) -> Iterator[Figure]:
    """Yield a map of scores and the sorted differences of each type with many directions."""
    baseline = evaluation.verdicts.baseline
    for family, members in _by_family(evaluation).items():
        column = evaluation.main_columns[-1]
        members.sort(key=lambda one: -one.training_lines)
        ways = [w for one in members if evaluation.is_measured(column, w := str(one.direction))]
        if len(ways) <= MAPPED:
            continue
        scores = {
            system.name: [system.directions[way].scores[column.name] for way in ways]
            for system in evaluation.systems
        }
        title = f"{column.title}, {_family_title(evaluation, family)}"
        high = max(map(max, scores.values()))
        yield Figure(heat_map(scores, ways, title=title, x_label="", high=high), title)
        gains = {name: map(sub, values, scores[baseline]) for name, values in scores.items()}
        series = [
            Series(name, tuple(enumerate(sorted(gains[name], reverse=True))), place)
            for place, name in enumerate(scores)
            if name != baseline
        ]
        if series:
            title += f": difference to {baseline}"
            chart = line_chart(series, title=title, x_label="directions", y_label=column.title)
            yield Figure(chart, title)


def _shown(text: str) -> str:
    return "(empty)" if is_blank(text) else text.strip()


def choose_samples(
    corpus: Artifact,
    systems: Mapping[str, Artifact],
    *,
    profiles: Sequence[DirectionProfile],
    seed: int,
    pivot: str | None,
) -> list[Table]:
    """Return a few lines of a few directions by family, by the first run of each system."""
    first = {name: systems[runs[0]] for name, runs in group_runs(systems).items()}
    tables = []
    for family in FAMILIES:
        members = [profile.direction for profile in profiles if profile.family == family]
        rows, step = list[Row](), max(len(members) / DIRECTIONS, 1.0)
        for index in range(min(len(members), DIRECTIONS)):
            way = members[int(index * step)]
            codes = (way.source, way.target)
            sources, references = (read_lines(corpus, "test", way.pair, code) for code in codes)
            versions = {"source": sources, "reference": references}
            for name, one in first.items():
                versions[name] = [hypothesis.text for hypothesis in read_hypotheses(one, way)]
            lines = range(len(references))
            short = [line for line in lines if len(references[line]) <= CHARACTERS] or [*lines]
            generator = random.Random(derive_seed("evaluate samples", seed, str(way)))
            title = " → ".join(language(code).name for code in codes)
            rows += [
                row(f"{title}, line {line + 1:,}", name, _shown(texts[line]))
                for line in sorted(generator.sample(short, min(LINES, len(short))))
                for name, texts in versions.items()
            ]
        if rows:
            titles = ("Line", "Version", "Text")
            title = title_of_family(family, pivot=pivot)
            tables.append(Table(title, headings(*titles, words=titles), tuple(rows)))
    return tables


# Notes


def _notes(evaluation: Evaluation) -> Iterator[str]:
    """Yield the definitions behind the figures."""
    *lowest, low, high = evaluation.thresholds
    below = "".join(f"extremely low up to {bound:,}, " for bound in lowest)
    yield (
        "Resource tiers are defined by the training lines of the pair before cleaning: "
        f"{below}low up to {low:,}, high from {high:,}, medium between; pairs without training "
        "lines have none."
    )
    if evaluation.significance is not None:
        yield (
            "95 % confidence intervals have the standard error of "
            f"{evaluation.significance.resamples:,} resamples of the test lines, the same for all "
            "systems. A score is bold if its lead over every other system is significant at 95 %, "
            f"and if both its system and the baseline translate. {RULE} Test sets of "
            f"fewer than {MIN_LINES} lines have neither intervals nor bold scores. Intervals of "
            "scores in 0–100 are limited to this range."
        )
        sets = ", ".join(
            f"{counted(len(pairs.split(', ')), 'pair')} with {counted(size, 'sentence')}"
            for pairs, size in evaluation.significance.shared_lines.items()
        )
        yield (
            "The directions of pairs with parallel test sets, known by equal lines in a language "
            f"of both, are resampled together, since their scores vary together: {sets}."
            if sets
            else "The two directions of a pair are resampled together, and pairs independently of "
            "each other: no two pairs have half of their test lines in common."
        )
    if any(system.name == NEAREST_NEIGHBOR for system in evaluation.systems):
        yield (
            f'"{NEAREST_NEIGHBOR}" answers a line by the translation of the most similar training '
            "line. A line unlike all of them, or of a direction without any, stays as it is."
        )
    repeated = [
        f"{system.name} of {len(system.runs)}" for system in evaluation.systems if system.runs
    ]
    if repeated:
        yield (
            f"Scores of systems with several runs ({', '.join(repeated)}) are means over the runs; "
            "± is the standard deviation over runs. Their intervals add the standard error over "
            "seeds by Student's t distribution; with two or three seeds they are too wide rather "
            "than too narrow. Systems with the same seeds are paired by seed and line. Systems "
            "with one run have intervals over test lines only."
        )
    yield from filter(None, dict.fromkeys(column.note for column in evaluation.columns))
    unknown = {name: codes for name, codes in evaluation.undetectable.items() if codes}
    for identifier, codes in unknown.items():
        yield (
            f"{identifier} does not know these target languages, which its accuracy leaves out: "
            f"{', '.join(codes)}."
        )
    shared = set[str].intersection(*map(set, unknown.values())) if len(unknown) > 1 else set()
    if shared:
        yield (
            "No identifier knows these target languages, which have no language accuracy: "
            f"{', '.join(sorted(shared))}."
        )


def _signatures(evaluation: Evaluation) -> Iterator[Cell]:
    """Yield the signatures of the scores with the target languages that each applies to."""
    targets: dict[str, set[str]] = {}
    titles = {column.name: column.title for column in evaluation.columns}
    for system in evaluation.systems:
        for direction, scored in system.directions.items():
            for name, signature in scored.signatures.items():
                target = direction.split("-")[1]
                targets.setdefault(f"{titles[name]}|{signature}", set()).add(target)
    everything = {profile.direction.target for profile in evaluation.directions}
    for signature, codes in sorted(targets.items()):
        note = "all targets" if codes == everything else f"into {', '.join(sorted(codes))}"
        yield Cell(signature, note=note, code=True)
