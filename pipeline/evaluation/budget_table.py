"""The budgets of systems as a table, and what a reader has to know of it."""

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.evaluation.budgets import OPERATIONS_PER_PARAMETER, Spent, SystemTraining
from pipeline.evaluation.history import History
from pipeline.evaluation.tables import NO_VALUE, format_count, format_duration, format_large
from pipeline.terminal import counted

SPENT_COLUMNS = ("Updates", "Source tokens", "Target tokens", "FLOP", "Wall time")
BUDGET_GROUPS = {
    "Parameters": ("Total", "Active"),
    "Its own training": SPENT_COLUMNS,
    "With all it rests on": SPENT_COLUMNS,
}
"""Title → columns of the table, after the system's name."""


@dataclass(frozen=True)
class BudgetRow:
    """A system and its cells, one per column of BUDGET_GROUPS."""

    name: str
    cells: tuple[str, ...]


def budget_rows(history: History) -> list[BudgetRow]:
    """One row per system, the baselines without training included."""
    return [
        BudgetRow(
            training.system,
            (
                *_parameter_cells(training),
                *_spent_cells(None if training.own is None else training.own.spent),
                *_total_cells(training),
            ),
        )
        for training in history.trainings
    ]


def _parameter_cells(training: SystemTraining) -> tuple[str, str]:
    if training.parameters is None:
        return NO_VALUE, NO_VALUE
    return format_large(training.parameters.total), format_large(training.parameters.active)


def _spent_cells(spent: Spent | None) -> tuple[str, ...]:
    if spent is None:
        return (NO_VALUE,) * len(SPENT_COLUMNS)
    return (
        f"{spent.updates:,}",
        format_large(spent.source_tokens),
        format_large(spent.target_tokens),
        format_large(spent.operations),
        NO_VALUE if spent.seconds is None else format_duration(spent.seconds),
    )


def _total_cells(training: SystemTraining) -> tuple[str, ...]:
    if not training.is_trained:
        return _spent_cells(None)
    cells = _spent_cells(training.total)
    if training.complete:
        return cells
    return tuple(cell if cell == NO_VALUE else f"≥ {cell}" for cell in cells)


def trained_for(history: History, system: str) -> str:
    """What stands beside the scores of a system: ``2,100 updates (3.0 ×)``.

    The factor is over the least trained of the systems; without it where there is one alone.
    """
    training = history.training_of(system)
    if training is None:
        return NO_VALUE
    if not training.is_trained:
        return "no training" if training.complete else "training not found"
    updates = training.total.updates
    text = format_count(updates, "update")
    if not training.complete:
        return f"at least {text}"
    least = _least_updates(history)
    return f"{text} ({updates / least:.1f} ×)" if least else text


def _least_updates(history: History) -> int | None:
    """Updates of the least trained system; None with fewer than two to compare."""
    found = [one.total.updates for one in history.trainings if one.is_trained and one.complete]
    return min(found) if len(found) > 1 else None


def budget_notes(history: History) -> list[str]:
    """How budgets are counted, and what is behind each of them."""
    if not any(one.is_trained for one in history.trainings):
        return []
    found = [
        "Updates stand with everything a system's weights rest on: its own training and, each once "
        "and whole, those of all checkpoints it was assembled from or trained on from.",
        f"FLOP is an estimate: {OPERATIONS_PER_PARAMETER} for each token and each parameter that "
        "multiplies it. Source tokens meet the encoder, target tokens the decoder and the output; "
        "of the experts of a layer only those count that a token meets. Fuse distillation takes "
        "every batch through the model twice, and both passes count. Wall times are of the "
        "training stages, on however many processes.",
    ]
    if _least_updates(history):
        found.append(
            "× is how often a system has the updates of the least trained one: where it is not "
            "1.0, a lead may be that of longer training."
        )
    for training in history.trainings:
        found += _notes_of(training)
    return found


def _notes_of(training: SystemTraining) -> list[str]:
    found = []
    if training.before:
        runs = [f"{run.folder} ({counted(run.spent.updates, 'update')})" for run in training.before]
        found.append(f"{training.system} rests on {_listed(runs)}.")
    if training.groups_from:
        found.append(
            f"{training.system}: the embeddings of {_listed(training.groups_from)} decided its "
            "language groups; that training gave no weights and is not counted."
        )
    if not training.complete:
        found.append(
            f"{training.system}: not all it was trained from can be found any more; what is "
            "counted is the least that was spent."
        )
    return found


def _listed(items: Sequence[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"
