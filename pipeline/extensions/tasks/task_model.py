"""Write and load task models.

The artifact has ``task.json`` (shape and settings), ``sentencepiece.bpe.model``, ``weights/`` and
``metrics.jsonl``.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import ValidationError

from pipeline.artifacts.artifact import Artifact, ArtifactWriter
from pipeline.checkpoints.checkpoint import load_weights
from pipeline.config.settings import Settings, describe_validation
from pipeline.errors import CheckpointError
from pipeline.extensions.tasks.settings import TasksConfig
from pipeline.extensions.tasks.xlmr import PIECES_FILE, Pieces
from pipeline.model.labeller import Labeller, allocated
from pipeline.model.regularization import Regularization
from pipeline.model.spec import ModelSpec

TASK_FILE = "task.json"
Head = Literal["tagger", "reader"]


class TaskSpec(Settings):
    """Shape and settings of a task model."""

    head: Head
    encoder: ModelSpec
    tags: tuple[str, ...] = ()
    """Tags of a tagger, by index."""
    tasks: TasksConfig

    @property
    def has_two_routes(self) -> bool:
        """Whether the model has a shared route besides those of its language modules."""
        return self.encoder.model.has_shared_route

    def specific_languages(self) -> set[str] | None:
        """Return the languages that have modules; None if the model has no language modules."""
        modules = self.encoder.model.language_modules
        if modules is None:
            return None
        return set(self.encoder.languages if modules.languages is None else modules.languages)

    def can_be_asked(self, language: str) -> bool:
        """Return whether the model has a route for text in a language."""
        known = self.specific_languages()
        return known is None or language in known or self.has_two_routes


@dataclass(frozen=True)
class TaskModel:
    """A trained tagger or reader with its shape and vocabulary."""

    spec: TaskSpec
    model: Labeller
    pieces: Pieces

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(self.model.parameters()).device


def build_labeller(
    spec: TaskSpec,
    *,
    regularization: Regularization | None = None,
    device: torch.device | None = None,
) -> Labeller:
    """Build a model whose parameters are allocated but not set."""
    with torch.device("meta"):
        model = Labeller(
            spec.encoder,
            head=spec.head,
            num_tags=len(spec.tags),
            regularization=regularization,
        )
    return allocated(model, device or torch.device("cpu"))


def describe_task(writer: ArtifactWriter, spec: TaskSpec, pieces: Pieces) -> None:
    """Write all files of a task model but its weights."""
    writer.write_json(TASK_FILE, spec.model_dump(mode="json"))
    writer.path(PIECES_FILE).write_bytes(pieces.model)


def read_task_spec(artifact: Artifact) -> TaskSpec:
    """Read the shape and settings; raise CheckpointError if the artifact has none."""
    try:
        return TaskSpec.model_validate(artifact.read_json(TASK_FILE))
    except ValidationError as error:
        raise CheckpointError(
            f"{artifact.file(TASK_FILE)} does not describe a task model: "
            f"{describe_validation(error, TaskSpec)}"
        ) from error


def load_task_model(artifact: Artifact, *, device: torch.device) -> TaskModel:
    """Load a trained model in evaluation mode.

    Raises:
        CheckpointError: its files do not belong together.
    """
    spec = read_task_spec(artifact)
    model = build_labeller(spec, device=device)
    load_weights(model, artifact)
    pieces = Pieces(artifact.file(PIECES_FILE).read_bytes(), origin=artifact.directory)
    return TaskModel(spec, model.eval(), pieces)
