"""The interface between the training loop and what it trains.

Updates, states, resuming, metrics and the choice of the kept weights are the same for all tasks.
Translation implements it in :mod:`pipeline.stages.pretrain`, labelling in
:mod:`pipeline.extensions.tasks.finetune_task`.
"""

from collections.abc import Generator, Mapping
from typing import Any, ClassVar, Protocol

from pipeline.artifacts.artifact import ArtifactWriter
from pipeline.artifacts.corpus import Direction
from pipeline.artifacts.manifest import Kind
from pipeline.batching.batch import AnyBatch
from pipeline.batching.feed import Update
from pipeline.batching.global_step import Cursor, MicroBatch
from pipeline.model.spec import ModelSpec


class Reader(Protocol):
    """The sentences of one split."""

    @property
    def offsets(self) -> Mapping[str, object]:
        """The pairs by name, in the order of their numbers."""

    def batch(self, plan: MicroBatch) -> AnyBatch:
        """Read and assemble the sentences of a plan."""


class Windows(Protocol):
    """The plan of the updates, in windows of several."""

    def largest(self, cursor: Cursor) -> MicroBatch:
        """Return the micro-batch of a window that has the most tokens."""


class Data(Protocol):
    """The data of a run: updates as a function of (seed, update), and validation sentences."""

    @property
    def train(self) -> Reader:
        """The training sentences."""

    @property
    def valid(self) -> Reader:
        """The validation sentences."""

    @property
    def planner(self) -> Windows:
        """The plan of the updates."""

    def check(self, *, max_positions: int) -> None:
        """Check that a model with ``max_positions`` positions can be trained on the data.

        Raises:
            ConfigError: it cannot.
        """

    def updates(
        self, cursor: Cursor, *, rank: int, ranks: int, update: int = 0, per_pass: int = 1
    ) -> Generator[Update]:
        """Yield one rank's updates from a cursor on, before which ``update`` were made.

        ``per_pass``: micro-batches of the rank that share a pass.
        """

    def validation(self, *, budget: int) -> list[tuple[Direction, MicroBatch]]:
        """Return every validation sentence once, in batches of one direction, in a fixed order."""


class Summary(Protocol):
    """The result of a validation: a dataclass whose fields go into the metrics."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def perplexity(self) -> float:
        """The perplexity over all validation tokens."""


class Task(Protocol):
    """A task: everything that a run needs to know apart from the model."""

    @property
    def data(self) -> Data:
        """The data of the run."""

    @property
    def makes(self) -> Kind:
        """The kind of the stage's artifact."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Further lines for the artifact's summary."""

    def summarize(self, losses: dict[Direction, tuple[float, int]]) -> Summary:
        """Average losses, given for each direction as (summed loss in nats, labels)."""

    def kept_by(self, found: Any) -> float:
        """Return the perplexity of a summary by which weights are kept; the lowest wins."""

    def describe(self, writer: ArtifactWriter, spec: ModelSpec) -> None:
        """Write what the artifact holds apart from its weights."""

    def trained_on(self) -> str:
        """Describe the training data, for example ``40 sentence pairs of 3 language pairs``."""
