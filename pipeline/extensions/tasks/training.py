"""Train a tagger or a reader in the training loop of translation models."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.artifacts.artifact import ArtifactWriter
from pipeline.artifacts.corpus import Direction
from pipeline.artifacts.manifest import Kind
from pipeline.distributed.world import World, local_device
from pipeline.extensions.tasks.data import LabelledData
from pipeline.extensions.tasks.task_model import TaskSpec, build_labeller, describe_task
from pipeline.extensions.tasks.xlmr import Pieces, Pretrained
from pipeline.model.regularization import Regularization
from pipeline.model.spec import ModelSpec
from pipeline.stages.stage import StageCall
from pipeline.terminal import counted
from pipeline.training.loop import train_task


@dataclass(frozen=True)
class LabellingSummary:
    """Validation losses: means over labels, in nats."""

    loss: float
    perplexity: float
    """Exponential of the loss; the kept weights have the lowest."""
    languages: Mapping[str, float]
    """Language → loss."""


@dataclass(frozen=True)
class Labelling:
    """The task of training a tagger or a reader (:class:`pipeline.training.task.Task`)."""

    data: LabelledData
    spec: TaskSpec
    pieces: Pieces
    makes: Kind = "task_model"
    notes: tuple[str, ...] = ()

    def summarize(self, losses: dict[Direction, tuple[float, int]]) -> LabellingSummary:
        """Average the losses over all labels and by language."""
        loss = sum(nats for nats, _ in losses.values()) / sum(n for _, n in losses.values())
        return LabellingSummary(
            loss=loss,
            perplexity=math.exp(min(loss, 700.0)),
            languages={way.source: nats / count for way, (nats, count) in losses.items()},
        )

    def kept_by(self, found: LabellingSummary) -> float:
        """Return the perplexity, by which the best weights are kept."""
        return found.perplexity

    def describe(self, writer: ArtifactWriter, spec: ModelSpec) -> None:
        """Write shape, settings and pieces."""
        assert spec == self.spec.encoder
        describe_task(writer, self.spec, self.pieces)

    def trained_on(self) -> str:
        """Describe the examples and languages of the training data."""
        counts = self.data.train.num_examples
        what = "sentences, long ones in parts," if self.spec.head == "tagger" else "windows"
        return f"{sum(counts.values()):,} {what} of {counted(len(counts), 'language')}"


def train_labeller(
    call: StageCall, world: World, *, data: LabelledData, spec: TaskSpec, pretrained: Pretrained
) -> None:
    """Train a head and all of a pretrained encoder, and write the task model."""
    model = build_labeller(
        spec,
        regularization=Regularization.of(call.recipe.training),
        device=local_device(world.local_rank),
    )
    pretrained.fill(model, spec.encoder, seed=call.recipe.training.seed)
    train_task(call, model, Labelling(data, spec, pretrained.pieces), world=world)
