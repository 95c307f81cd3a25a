"""finetune_task: train an XLM-R to find named entities, or answers in passages.

Reads a Hugging Face folder with an XLM-R, and files of named entities or of questions by language;
makes a task model in the training loop of translation models.

The planner of translation plans the batches: a language takes the place of a pair, and the
direction from a language to itself the place of a direction. It draws languages with probability
∝ n^(1/T), on any number of ranks. Labels are not tokens here: counts of labels
and tokens of the examples replace the planner's.
"""

if __name__ == "__main__":
    from pipeline.machine import prepare_process

    prepare_process()  # before torch is loaded

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from pipeline.artifacts.artifact import ArtifactWriter
from pipeline.artifacts.corpus import Direction
from pipeline.artifacts.manifest import Kind
from pipeline.artifacts.shards import Mixture
from pipeline.batching.batch import SOURCE_EXTRA, Labelled, LabelledBatch
from pipeline.batching.feed import Update, read_updates
from pipeline.batching.global_step import (
    Cursor,
    GlobalStep,
    MicroBatch,
    PairOffsets,
    Planner,
    evaluation_batches,
)
from pipeline.config.recipe import Recipe
from pipeline.distributed.world import distributed_world, leave, local_device
from pipeline.errors import ConfigError
from pipeline.extensions.tasks import TasksConfig
from pipeline.extensions.tasks.named_entities import NAMED_ENTITIES, training_tags
from pipeline.extensions.tasks.questions import QUESTIONS
from pipeline.extensions.tasks.token_classifier import TASK_FILE, TaskKind, TaskSpec
from pipeline.extensions.tasks.xlmr import PIECES_FILE, Pieces, Pretrained
from pipeline.model.spec import ModelSpec
from pipeline.model.sublayer import Regularization
from pipeline.stage import StageCall
from pipeline.temperature_sampling import checked_shares, temperature_probabilities
from pipeline.terminal import counted
from pipeline.training.engine import connect
from pipeline.training.loop import train_task

Collate: TypeAlias = Callable[[Sequence[Labelled], Sequence[int]], LabelledBatch]


KINDS: dict[str, TaskKind] = {"entities": NAMED_ENTITIES, "questions": QUESTIONS}


def run(call: StageCall) -> None:
    """Read the encoder and the text, train a head and all of the encoder, write the task model.

    Raises:
        ConfigError: the text is missing or there is text of two tasks, a reader is to be trained
            with label smoothing, or a resource tier is to choose the weights.
    """
    recipe = call.recipe
    given = [name for name in KINDS if name in call.raw]
    if len(given) != 1:
        raise ConfigError(
            "finetune_task trains on named entities (--entities) or on questions (--questions). "
            "Name one of them."
        )
    kind = KINDS[given[0]]
    if kind is QUESTIONS and recipe.loss.label_smoothing:
        raise ConfigError(
            f"loss.label_smoothing is {recipe.loss.label_smoothing}, which has no meaning for a "
            "reader: its labels are positions in a passage. Set it to 0."
        )
    if recipe.training.best_by != "all":
        raise ConfigError(
            f"training.best_by is {recipe.training.best_by!r}, which is for translation models. "
            'Set it to "all".'
        )
    with distributed_world(stacks_dir=call.stacks_dir) as world:
        call.open_inputs()
        connect(world)
        files = kind.find(call.raw[given[0]].only_path())
        tasks = recipe.section_of(TasksConfig)
        languages = files.trained_languages(tasks.languages)
        pretrained = Pretrained(call.raw["pretrained"].only_path())
        encoder = pretrained.spec(languages, recipe.model.language_modules)
        train, valid = (files.read(split, kind.read, languages) for split in ("train", "dev"))
        tags = training_tags(files, train, valid) if kind is NAMED_ENTITIES else ()
        spec = TaskSpec(head=kind.head, encoder=encoder, tags=tags, tasks=tasks)
        training_split, validation_split = (
            LabelledSplit(
                {code: kind.inputs(found, spec, pretrained.pieces) for code, found in of.items()},
                languages=languages,
                collate=kind.collate,
            )
            for of in (train, valid)
        )
        data = LabelledData(training_split, validation_split, recipe)
        model = spec.build(
            regularization=Regularization.of(recipe.training), device=local_device(world.local_rank)
        )
        pretrained.fill(model, encoder, seed=recipe.training.seed)
        train_task(call, model, Labelling(data, spec, pretrained.pieces, kind), world=world)


class LabelledSplit:
    """All examples of a split by language, which plans of line numbers turn into batches."""

    def __init__(
        self,
        examples: Mapping[str, Sequence[Labelled]],
        *,
        languages: Sequence[str],
        collate: Collate,
    ) -> None:
        """Index the examples by language; ``languages`` are the model's."""
        present = [code for code in sorted(examples) if examples[code]]
        self.directions = [Direction(code, code) for code in present]
        self._examples = [examples[code] for code in present]
        self._index = [list(languages).index(code) for code in present]
        self._collate = collate
        self._tokens = [
            np.array([len(example.ids) for example in group], dtype=np.int64)
            for group in self._examples
        ]
        self.offsets: dict[str, PairOffsets] = {}
        for direction, tokens in zip(self.directions, self._tokens, strict=True):
            begins = np.concatenate([[0], np.cumsum(tokens - SOURCE_EXTRA)])
            self.offsets[str(direction)] = PairOffsets(begins, begins)

    @property
    def longest(self) -> int:
        """Number of tokens of the longest example, specials included."""
        return max((int(tokens.max()) for tokens in self._tokens), default=0)

    def batch(self, plan: MicroBatch) -> LabelledBatch:
        """Assemble the examples of a plan."""
        return self._collate(self._of(plan), [self._index[pair] for pair in plan.pair_B.tolist()])

    def counted(self, plan: MicroBatch) -> MicroBatch:
        """Return the plan with the numbers of labels and tokens of its examples."""
        examples = self._of(plan)
        return replace(
            plan,
            num_labels=sum(len(example.labels) for example in examples),
            num_tokens=sum(len(example.ids) for example in examples),
        )

    def _of(self, plan: MicroBatch) -> list[Labelled]:
        places = zip(plan.pair_B.tolist(), plan.line_B.tolist(), strict=True)
        return [self._examples[pair][line] for pair, line in places]

    def evaluation_plan(self, *, budget: int) -> list[tuple[Direction, MicroBatch]]:
        """Plan every example once, in batches of one language, in a fixed order."""
        plan = []
        for index, direction in enumerate(self.directions):
            lengths = self._tokens[index] - SOURCE_EXTRA
            for lines in evaluation_batches(lengths, lengths, budget=budget):
                same = np.full_like(lines, index)
                batch = MicroBatch(same, np.zeros_like(lines), lines, num_labels=0, num_tokens=0)
                plan.append((direction, self.counted(batch)))
        return plan


class LabelledData:
    """Splits of one training run, and its planner with the counts of labels and tokens here."""

    def __init__(self, train: LabelledSplit, valid: LabelledSplit, recipe: Recipe) -> None:
        """Plan the training split; raise ConfigError if an example exceeds the batches."""
        self.train, self.valid = train, valid
        if self.train.longest > recipe.batches.tokens:
            raise ConfigError(
                f"An example has {self.train.longest} tokens, and batches.tokens is "
                f"{recipe.batches.tokens}. Raise it, or lower tasks.max_tokens."
            )
        probabilities = temperature_probabilities(
            {name: len(offsets) for name, offsets in self.train.offsets.items()},
            sampling_temperature=recipe.mixture.sampling_temperature,
        )
        self._seed = recipe.training.seed
        self._max_tokens = recipe.section_of(TasksConfig).max_tokens
        mixture = Mixture.constant(checked_shares(probabilities))
        self._planner = Planner(self.train.offsets, mixture, recipe.batches, seed=self._seed)

    @property
    def planner(self) -> "LabelledData":
        """Return the plan of the updates."""
        return self

    def largest(self, cursor: Cursor) -> MicroBatch:
        """Return the micro-batch of a cursor's window with the most tokens."""
        return self.train.counted(self._planner.largest(cursor))

    def _steps(self, cursor: Cursor) -> Generator[GlobalStep]:
        with closing(self._planner.steps(cursor)) as steps:
            for step in steps:
                counted = tuple(map(self.train.counted, step.micro_batches))
                yield replace(step, micro_batches=counted)

    def updates(
        self, cursor: Cursor, *, rank: int, ranks: int, update: int = 0, per_pass: int = 1
    ) -> Generator[Update]:
        """Yield a rank's updates from a cursor on, without end; passes are read ahead."""
        place = {"rank": rank, "ranks": ranks, "update": update, "per_pass": per_pass}
        return read_updates(self._steps(cursor), self.train.batch, seed=self._seed, **place)

    def validation(self, *, budget: int) -> list[tuple[Direction, MicroBatch]]:
        """Plan every validation example once, in batches of one language."""
        return self.valid.evaluation_plan(budget=budget)

    def check(self, *, max_positions: int) -> None:
        """Raise ConfigError without validation examples, or if one may exceed the positions."""
        if not self.valid.offsets:
            raise ConfigError(
                "The data has no dev file of a language that is trained on, by which to choose the "
                "best weights. Add dev files for at least one language."
            )
        if self._max_tokens > max_positions:  # if not here, then in a test example
            raise ConfigError(
                f"tasks.max_tokens is {self._max_tokens}, and the model has {max_positions} "
                "positions. Lower it."
            )


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
    kind: TaskKind
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
        writer.write_json(TASK_FILE, self.spec.model_dump(mode="json"))
        writer.path(PIECES_FILE).write_bytes(self.pieces.model)

    def trained_on(self) -> str:
        """Describe the examples and languages of the training data."""
        counts = [len(offsets) for offsets in self.data.train.offsets.values()]
        return f"{sum(counts):,} {self.kind.training_unit} of {counted(len(counts), 'language')}"


if __name__ == "__main__":
    from pipeline.cli import stage_main

    leave(stage_main("finetune_task"))
