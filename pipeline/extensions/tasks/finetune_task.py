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
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from pipeline.artifacts.artifact import ArtifactWriter
from pipeline.artifacts.corpus import Direction
from pipeline.artifacts.manifest import Kind
from pipeline.artifacts.mixture import Mixture, temperature_probabilities
from pipeline.batching.batch import (
    SOURCE_EXTRA,
    Integers,
    Labelled,
    LabelledBatch,
    collate_spans,
    collate_tags,
)
from pipeline.batching.feed import Update, read_updates
from pipeline.batching.global_step import (
    GlobalStep,
    MicroBatch,
    PairOffsets,
    Planner,
    evaluation_batches,
)
from pipeline.config.recipe import Recipe
from pipeline.config.settings import shown
from pipeline.distributed.world import distributed_world, leave, local_device
from pipeline.errors import ArtifactError, ConfigError
from pipeline.extensions.tasks.files import TaskFiles
from pipeline.extensions.tasks.labeller import TASK_FILE, HeadKind, TaskSpec
from pipeline.extensions.tasks.named_entities import OUTSIDE, label, read_entities, tags_of
from pipeline.extensions.tasks.questions import check_windows, read_questions, windows_of
from pipeline.extensions.tasks.settings import TasksConfig
from pipeline.extensions.tasks.xlmr import PIECES_FILE, Pieces, Pretrained
from pipeline.model.regularization import Regularization
from pipeline.model.spec import ModelSpec
from pipeline.stage import StageCall
from pipeline.terminal import counted
from pipeline.training.engine import connect
from pipeline.training.loop import train_task

Collate: TypeAlias = Callable[[Sequence[Labelled], Sequence[int]], LabelledBatch]
Examples: TypeAlias = Mapping[str, list[Labelled]]


def run(call: StageCall) -> None:
    """Read the encoder and the text, train a head and all of the encoder, write the task model.

    Raises:
        ConfigError: the text is missing, or there is text of two tasks.
    """
    recipe = call.recipe
    heads: dict[str, HeadKind] = {"entities": "tagger", "questions": "reader"}
    given = [name for name in heads if name in call.raw]
    if len(given) != 1:
        raise ConfigError(
            "finetune_task trains on named entities (--entities) or on questions (--questions). "
            "Name one of them."
        )
    head = heads[given[0]]
    with distributed_world(stacks_dir=call.stacks_dir) as world:
        connect(world)
        folder = call.raw[given[0]].only_path()
        files = TaskFiles.entities(folder) if head == "tagger" else TaskFiles.questions(folder)
        tasks = recipe.section_of(TasksConfig)
        languages = files.trained_languages(tasks.languages)
        pretrained = Pretrained(call.raw["pretrained"].only_path())
        encoder = pretrained.spec(languages, recipe.model.language_modules)
        read = read_tagging if head == "tagger" else read_reading
        train, valid, tags = read(files, pretrained.pieces, recipe, languages)
        collate = collate_tags if head == "tagger" else collate_spans
        data = LabelledData(train, valid, recipe, languages=languages, collate=collate)
        spec = TaskSpec(head=head, encoder=encoder, tags=tags, tasks=tasks)
        model = spec.build(
            regularization=Regularization.of(recipe.training),
            device=local_device(world.local_rank),
        )
        pretrained.fill(model, encoder, seed=recipe.training.seed)
        train_task(call, model, Labelling(data, spec, pretrained.pieces), world=world)


def read_tagging(
    files: TaskFiles, pieces: Pieces, recipe: Recipe, languages: tuple[str, ...]
) -> tuple[Examples, Examples, tuple[str, ...]]:
    """Read the training and validation sentences of a tagger.

    Returns:
        Training examples, validation examples, and all training tags, ``O`` first.

    Raises:
        ArtifactError: a file is broken, or a dev file has a tag that no training file has.
    """
    train, valid = (files.read(split, read_entities, languages) for split in ("train", "dev"))
    tags = (OUTSIDE, *sorted(set[str]().union(*map(tags_of, train.values())) - {OUTSIDE}))
    for code, sentences in valid.items():
        if unknown := tags_of(sentences) - set(tags):
            raise ArtifactError(
                f"{files.path(code, 'dev')} has the tag {shown(min(unknown))!r}, which no training "
                "file has. Correct it, or train on text that has it."
            )
    limit = recipe.section_of(TasksConfig).max_tokens
    train_examples, valid_examples = (
        {
            code: [part for one in sentences for part in label(one, tags, pieces, max_tokens=limit)]
            for code, sentences in groups.items()
        }
        for groups in (train, valid)
    )
    return train_examples, valid_examples, tags


def read_reading(
    files: TaskFiles, pieces: Pieces, recipe: Recipe, languages: tuple[str, ...]
) -> tuple[Examples, Examples, tuple[str, ...]]:
    """Read the training and validation windows of a reader, which has no tags.

    Raises:
        ConfigError: the settings leave no room for windows, or have label smoothing.
        ArtifactError: a file is broken.
    """
    tasks = recipe.section_of(TasksConfig)
    check_windows(tasks)
    if recipe.loss.label_smoothing:
        raise ConfigError(
            f"loss.label_smoothing is {recipe.loss.label_smoothing}, which has no meaning for a "
            "reader: its labels are positions in a passage. Set it to 0."
        )
    train, valid = (
        {
            code: [window.labelled for _, window in windows_of(questions, pieces, tasks)]
            for code, questions in files.read(split, read_questions, languages).items()
        }
        for split in ("train", "dev")
    )
    return train, valid, ()


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
        self._labels = [_sizes(example.labels for example in group) for group in self._examples]
        self._tokens = [_sizes(example.ids for example in group) for group in self._examples]
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
        places = _places(plan)
        examples = [self._examples[pair][line] for pair, line in places]
        return self._collate(examples, [self._index[pair] for pair, _ in places])

    def counted(self, plan: MicroBatch) -> MicroBatch:
        """Return the plan with the numbers of labels and tokens of its examples."""
        places = _places(plan)
        return replace(
            plan,
            num_labels=sum(int(self._labels[pair][line]) for pair, line in places),
            num_tokens=sum(int(self._tokens[pair][line]) for pair, line in places),
        )

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


def _places(plan: MicroBatch) -> list[tuple[int, int]]:
    """Return the (index of the language, line) of every example of a plan."""
    return list(zip(plan.pair_B.tolist(), plan.line_B.tolist(), strict=True))


def _sizes(arrays: Iterable[Integers]) -> Integers:
    return np.fromiter(map(len, arrays), dtype=np.int64)


class LabelledData:
    """Splits of one training run, and its planner with the counts of labels and tokens here."""

    def __init__(
        self,
        train: Mapping[str, Sequence[Labelled]],
        valid: Mapping[str, Sequence[Labelled]],
        recipe: Recipe,
        *,
        languages: Sequence[str],
        collate: Collate,
    ) -> None:
        """Index the examples; raise ConfigError if one exceeds the recipe's batches."""
        self.train = LabelledSplit(train, languages=languages, collate=collate)
        self.valid = LabelledSplit(valid, languages=languages, collate=collate)
        if self.train.longest > recipe.batches.tokens:
            raise ConfigError(
                f"An example has {self.train.longest} tokens, and batches.tokens is "
                f"{recipe.batches.tokens}. Raise it, or lower tasks.max_tokens."
            )
        probabilities = temperature_probabilities(
            {name: len(offsets) for name, offsets in self.train.offsets.items()},
            sampling_temperature=recipe.mixture.sampling_temperature,
        )
        self._planner = Planner(
            self.train.offsets,
            Mixture.constant(probabilities),
            recipe.batches,
            seed=recipe.training.seed,
        )
        self._seed = recipe.training.seed

    @property
    def planner(self) -> "LabelledData":
        """Return the plan of the updates."""
        return self

    def largest(self, window: int) -> MicroBatch:
        """Return the micro-batch of a window with the most tokens."""
        return self.train.counted(self._planner.largest(window))

    def _steps(self, cursor: tuple[int, int]) -> Generator[GlobalStep]:
        with closing(self._planner.steps(cursor)) as steps:
            for step in steps:
                counted = tuple(map(self.train.counted, step.micro_batches))
                yield replace(step, micro_batches=counted)

    def updates(
        self,
        cursor: tuple[int, int],
        *,
        rank: int,
        ranks: int,
        update: int = 0,
        per_pass: int = 1,
    ) -> Generator[Update]:
        """Yield a rank's updates from a cursor on, without end; passes are read ahead."""
        return read_updates(
            self._steps(cursor),
            self.train.batch,
            rank=rank,
            ranks=ranks,
            update=update,
            per_pass=per_pass,
            seed=self._seed,
        )

    def validation(self, *, budget: int) -> list[tuple[Direction, MicroBatch]]:
        """Plan every validation example once, in batches of one language."""
        return self.valid.evaluation_plan(budget=budget)

    def check(self, *, max_positions: int) -> None:
        """Raise ConfigError without validation examples, or if one exceeds the positions."""
        if not self.valid.offsets:
            raise ConfigError(
                "The data has no dev file of a language that is trained on, by which to choose the "
                "best weights. Add dev files for at least one language."
            )
        longest = max(self.train.longest, self.valid.longest)
        if longest > max_positions:
            raise ConfigError(
                f"An example has {longest} tokens, and the model {max_positions} positions. Lower "
                "tasks.max_tokens."
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
        unit = "sentences, long ones in parts," if self.spec.head == "tagger" else "windows"
        return f"{sum(counts):,} {unit} of {counted(len(counts), 'language')}"


if __name__ == "__main__":
    from pipeline.cli import stage_main

    leave(stage_main("finetune_task"))
