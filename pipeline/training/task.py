"""What the training loop knows of that which it trains, and translation as one such task.

Updates, states, resuming, curves and the choice of the kept weights are the same for all tasks.
"""

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from pipeline.artifacts.artifact import ArtifactWriter
from pipeline.artifacts.corpus import Direction
from pipeline.artifacts.manifest import Kind
from pipeline.artifacts.tokenizer import tokenizer_folder
from pipeline.batching.feed import TrainingData, Update
from pipeline.batching.global_step import MicroBatch
from pipeline.batching.labelled import AnyBatch
from pipeline.checkpoints.checkpoint import write_model_files
from pipeline.model.spec import ModelSpec
from pipeline.stages import StageCall
from pipeline.summary import counted
from pipeline.training.validation import Validation, summarize_validation


class Reader(Protocol):
    """The sentences of one split."""

    @property
    def offsets(self) -> Mapping[str, object]:
        """By the name of a pair, in the order of their numbers."""

    def batch(self, plan: MicroBatch) -> AnyBatch:
        """Read and assemble the sentences of a plan."""


class Windows(Protocol):
    """Who plans the updates."""

    def largest(self, window: int) -> MicroBatch:
        """The micro-batch of most tokens of a window."""


class Data(Protocol):
    """What a run reads: updates as a function of (seed, update), and sentences to validate on."""

    @property
    def train(self) -> Reader: ...
    @property
    def valid(self) -> Reader: ...
    @property
    def planner(self) -> Windows: ...

    def check(self, *, max_positions: int) -> None:
        """Raises ConfigError where a model of so many positions cannot be trained on it."""

    def updates(
        self, cursor: tuple[int, int], *, rank: int, ranks: int, update: int = 0
    ) -> Generator[Update]:
        """Updates from a cursor on, before which ``update`` were made, as a rank sees them."""

    def validation(self, *, budget: int) -> list[tuple[Direction, MicroBatch]]:
        """Every validation sentence once, in batches of one direction, in a fixed order."""


class Summary(Protocol):
    """What a validation found: a dataclass of what the metrics are to say, this among it."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def perplexity(self) -> float:
        """The lower, the better the weights."""


class Task(Protocol):
    """What is trained, beside its model."""

    @property
    def data(self) -> Data: ...
    @property
    def makes(self) -> Kind:
        """The kind of artifact."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What else its summary is to say, a line each."""

    def summarize(self, losses: dict[Direction, tuple[float, int]]) -> Summary:
        """Of summed losses by direction: (nats, labels)."""

    def kept_by(self, found: Any) -> float:
        """Of a summary: what is lowest where weights are kept."""

    def describe(self, writer: ArtifactWriter, spec: ModelSpec) -> None:
        """Write what the artifact has beside its weights."""

    def trained_on(self) -> str:
        """``40 sentence pairs of 3 language pairs``."""


@dataclass(frozen=True)
class Translation:
    """Sentence pairs of shards, drawn by a mixture."""

    call: StageCall
    data: TrainingData
    makes: Kind = "checkpoint"
    notes: tuple[str, ...] = ()

    def summarize(self, losses: dict[Direction, tuple[float, int]]) -> Validation:
        """By direction, pair and resource tier."""
        return summarize_validation(
            losses,
            imported_lines=self.data.imported_lines,
            thresholds=self.call.recipe.training.resource_thresholds,
        )

    def kept_by(self, found: Validation) -> float:
        """The perplexity of all directions, or of one resource tier."""
        return found.perplexity_of(self.call.recipe.training.best_by)

    def describe(self, writer: ArtifactWriter, spec: ModelSpec) -> None:
        """Shape and tokenizer."""
        tokenizer_dir = tokenizer_folder(self.call.artifacts["shards"])
        write_model_files(writer, spec=spec, tokenizer_dir=tokenizer_dir)

    def trained_on(self) -> str:
        """Lines and pairs."""
        lines = self.data.train_lines
        return (
            f"{counted(sum(lines.values()), 'sentence pair')} of "
            f"{counted(len(lines), 'language pair')}"
        )
