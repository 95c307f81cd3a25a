"""What the reports of an evaluation show, and the Markdown one.

Pure functions from scores to text. The page (``report_html``) shows the same tables, and adds
loss curves and sample translations.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from pipeline.metrics import (
    FAMILIES,
    GROUPS,
    DirectionProfile,
    Evaluation,
    Family,
    Group,
    LanguageAccuracy,
    Scores,
)

NO_VALUE = "–"

SCORES: Mapping[str, Callable[[Scores], float]] = {
    "BLEU": lambda scores: scores.bleu,
    "chrF++": lambda scores: scores.chrf,
}

Value = TypeVar("Value")


@dataclass(frozen=True)
class CurvePoint:
    """Losses in nats per token after an update, and the seconds of training up to there."""

    update: int
    seconds: float
    loss: float
    resources: Mapping[str, float] = field(default_factory=dict)
    """Resource group → validation loss."""


@dataclass(frozen=True)
class Curve:
    """Losses of the training run whose checkpoint a system translates with."""

    system: str
    training: tuple[CurvePoint, ...]
    validation: tuple[CurvePoint, ...]


@dataclass(frozen=True)
class StageRun:
    """One stage that a system rests on."""

    stage: str
    folder: str
    wall_seconds: float
    systems: tuple[str, ...]


@dataclass(frozen=True)
class History:
    """The runs behind the systems, inputs before what was made from them."""

    stages: tuple[StageRun, ...] = ()
    curves: tuple[Curve, ...] = ()
    missing: tuple[str, ...] = ()
    """Folders that are no longer there, or have changed since."""


# Rows and columns


@dataclass(frozen=True)
class AverageColumn:
    """One column of the tables of averages."""

    family: Family
    group: Group
    directions: int


@dataclass(frozen=True)
class Row:
    """A name and its values, with the places of those to set in bold."""

    name: str
    values: tuple[float | None, ...]
    best: frozenset[int] = frozenset()
    ceiling: bool = False
    """Not a system: what the references themselves reach."""


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
        case "no_training_data":
            return "No training data left"


def directions_by_family(evaluation: Evaluation) -> dict[Family, list[DirectionProfile]]:
    """The families that have directions, in a fixed order."""
    members = {
        family: [one for one in evaluation.directions if one.family == family]
        for family in FAMILIES
    }
    return {family: profiles for family, profiles in members.items() if profiles}


def average_columns(evaluation: Evaluation) -> list[AverageColumn]:
    """The families and resource groups that have directions, in a fixed order."""
    found = []
    for family, members in directions_by_family(evaluation).items():
        for group in GROUPS:
            count = sum(group in ("all", one.resource) for one in members)
            if count:
                found.append(AverageColumn(family=family, group=group, directions=count))
    return found


def score_tables(evaluation: Evaluation) -> dict[str, list[Row]]:
    """Title → one row per system over ``average_columns``, the best of each column marked."""
    return {title: _system_rows(evaluation, value) for title, value in SCORES.items()}


def accuracy_tables(evaluation: Evaluation) -> dict[str, list[Row]]:
    """As ``score_tables``, the references first; none where accuracy was not measured."""
    if evaluation.references is None:
        return {}
    priors: dict[str, Callable[[LanguageAccuracy], float]] = {
        "langdetect as it is, %": lambda found: found.plain,
        "langdetect restricted to the languages of this corpus, %": lambda found: found.restricted,
    }
    return {title: _accuracy_rows(evaluation, value) for title, value in priors.items()}


def _accuracy_rows(evaluation: Evaluation, value: Callable[[LanguageAccuracy], float]) -> list[Row]:
    def of_system(scores: Scores) -> float | None:
        return None if scores.language_accuracy is None else value(scores.language_accuracy)

    references = {} if evaluation.references is None else evaluation.references.averages
    ceiling = Row("References", _column_values(evaluation, references, value), ceiling=True)
    return [ceiling, *_system_rows(evaluation, of_system)]


def _system_rows(evaluation: Evaluation, value: Callable[[Scores], float | None]) -> list[Row]:
    return mark_best(
        [
            Row(system.name, _column_values(evaluation, system.averages, value))
            for system in evaluation.systems
        ]
    )


def _column_values(
    evaluation: Evaluation,
    averages: Mapping[Family, Mapping[Group, Value]],
    value: Callable[[Value], float | None],
) -> tuple[float | None, ...]:
    cells = [
        averages.get(column.family, {}).get(column.group) for column in average_columns(evaluation)
    ]
    return tuple(None if cell is None else value(cell) for cell in cells)


def direction_row(evaluation: Evaluation, profile: DirectionProfile) -> Row:
    """BLEU and chrF++ of every system in turn, the best of either marked."""
    name = str(profile.direction)
    scores = [system.directions[name].scores for system in evaluation.systems]
    best = {
        2 * place + offset
        for offset, value in enumerate(SCORES.values())
        for place in best_places([value(one) for one in scores])
    }
    values = tuple(value(one) for one in scores for value in SCORES.values())
    return Row(name=name, values=values, best=frozenset(best))


def mark_best(rows: Sequence[Row]) -> list[Row]:
    """Mark the best value of each column; none where there is nothing to compare."""
    columns = zip(*(row.values for row in rows), strict=True)
    best = [best_places(column) for column in columns]
    return [
        replace(row, best=frozenset(c for c, places in enumerate(best) if place in places))
        for place, row in enumerate(rows)
    ]


def best_places(values: Sequence[float | None]) -> list[int]:
    """Places of the largest value as printed; none if fewer than two values are there."""
    printed = [None if value is None else round(value, 1) for value in values]
    known = [value for value in printed if value is not None]
    if len(known) < 2:
        return []
    return [place for place, value in enumerate(printed) if value == max(known)]


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


def notes(evaluation: Evaluation, history: History) -> list[str]:
    """What a reader has to know to read the tables."""
    low, high = evaluation.thresholds
    found = [
        "Averages are arithmetic means over directions.",
        f"Resource groups go by the training lines of the pair: low up to {low:,}, high from "
        f"{high:,}, medium between; zero-shot pairs have none.",
    ]
    if evaluation.references is not None:
        found.append(
            "Language accuracy is the share of lines that langdetect assigns to the target "
            "language, plain and with its prior restricted to the languages of this corpus; its "
            "accuracy on the references is what a perfect system could expect."
        )
    if evaluation.undetectable:
        found.append(
            "langdetect does not know these target languages, which language accuracy leaves out: "
            f"{', '.join(evaluation.undetectable)}."
        )
    if history.missing:
        found.append(
            "Wall times leave out what is no longer where it was, or has changed since: "
            f"{', '.join(history.missing)}."
        )
    return found


def format_score(value: float | None) -> str:
    """A score as printed."""
    return NO_VALUE if value is None else f"{value:.1f}"


def format_duration(seconds: float) -> str:
    """Two units at most: ``2 h 5 min``, ``3 min 20 s``, ``4.2 s``."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    if seconds < 3599.5:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours:,} h {minutes} min"


# Markdown


def markdown_summary(evaluation: Evaluation) -> str:
    """The tables of averages: BLEU, then chrF++."""
    return "\n\n".join(
        f"{title}, averages over directions\n\n{_markdown_averages(evaluation, rows)}"
        for title, rows in score_tables(evaluation).items()
    )


def markdown_report(evaluation: Evaluation, history: History) -> str:
    """The whole report as Markdown."""
    sections = {
        "# Evaluation": markdown_summary(evaluation),
        "## Warnings": _bullets(evaluation.warnings),
        "## Language accuracy": "\n\n".join(
            f"{title}\n\n{_markdown_averages(evaluation, rows)}"
            for title, rows in accuracy_tables(evaluation).items()
        ),
        "## All directions": _markdown_directions(evaluation),
        "## Stages and wall times": _markdown_stages(history),
        "## Notes": _bullets(notes(evaluation, history)),
        "## Signatures": _bullets(
            [f"`{text}` ({where})" for text, where in signatures(evaluation)]
        ),
    }
    shown = [f"{title}\n\n{content}" for title, content in sections.items() if content]
    return "\n\n".join(shown) + "\n"


def _markdown_averages(evaluation: Evaluation, rows: Sequence[Row]) -> str:
    titles = [
        f"{family_title(evaluation, one.family)} {one.group} ({one.directions})"
        for one in average_columns(evaluation)
    ]
    return _markdown_table(["System", *titles], [[row.name, *_markdown_cells(row)] for row in rows])


def _markdown_directions(evaluation: Evaluation) -> str:
    titles = [f"{system.name} {score}" for system in evaluation.systems for score in SCORES]
    body = []
    for profiles in directions_by_family(evaluation).values():
        for profile in profiles:
            row = direction_row(evaluation, profile)
            body.append([row.name, f"{profile.training_lines:,}", *_markdown_cells(row)])
    return _markdown_table(["Direction", "Training lines", *titles], body)


def _markdown_stages(history: History) -> str:
    if not history.stages:
        return ""
    body = [
        [run.stage, run.folder, format_duration(run.wall_seconds), ", ".join(run.systems)]
        for run in history.stages
    ]
    return _markdown_table(["Stage", "Folder", "Wall time", "Systems"], body)


def _markdown_cells(row: Row) -> list[str]:
    cells = [format_score(value) for value in row.values]
    return [f"**{cell}**" if place in row.best else cell for place, cell in enumerate(cells)]


def _markdown_table(header: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    rule = ["---", *("---:" for _ in header[1:])]
    lines = [header, rule, *body]
    return "\n".join(f"| {' | '.join(_markdown_escape(cell) for cell in line)} |" for line in lines)


def _markdown_escape(cell: str) -> str:
    return cell.replace("|", "\\|").replace("\n", " ")


def _bullets(items: Sequence[str]) -> str:
    return "\n".join(f"- {item}" for item in items)
