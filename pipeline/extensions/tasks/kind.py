"""Define what the stages need to know of a kind of task: its files, inputs, predictions, scores."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from pipeline.batching.batch import Labelled, LabelledBatch
from pipeline.config.settings import Route
from pipeline.extensions.tasks.files import TaskFiles
from pipeline.extensions.tasks.token_classifier import HeadKind, TaskModel, TaskSpec
from pipeline.extensions.tasks.xlmr import Pieces

Scores: TypeAlias = dict[str, float]
"""Name of a score → percent."""
Predictions: TypeAlias = list[dict[str, object]]


@dataclass(frozen=True)
class TaskKind:
    """A kind of task; its examples are sentences with entities, or questions.

    Attributes:
        head: the head that the model has.
        title: the title of reports.
        unit: the examples, in words.
        training_unit: the inputs that the examples are cut into, in words.
        titles: score that reports show → its title.
        find: finds the files of a folder.
        read: returns the examples of a file in a language.
        inputs: returns the inputs of examples, with labels.
        collate: joins inputs to a batch.
        predict: returns scores and predictions of a model for examples of a language by a route.
    """

    head: HeadKind
    title: str
    unit: str
    training_unit: str
    titles: dict[str, str]
    find: Callable[[Path], TaskFiles]
    read: Callable[[Path, str], list[Any]]
    inputs: Callable[[Sequence[Any], TaskSpec, Pieces], list[Labelled]]
    collate: Callable[[Sequence[Labelled], Sequence[int]], LabelledBatch]
    predict: Callable[
        [TaskModel, Sequence[Any], str, Route], tuple[Scores, list[dict[str, object]]]
    ]
