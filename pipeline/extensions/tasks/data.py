"""Plan and assemble batches of labeled examples: sentences to tag, or windows to find answers in.

The planner of translation plans them: a language takes the place of a pair, and the direction from
a language to itself that of a direction. The planner draws languages with probability ∝ n^(1/T),
on any number of ranks. Labels are not tokens here, so that its counts of labels and tokens are
replaced by those of the examples.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from pipeline.artifacts.corpus import Direction
from pipeline.artifacts.mixture import Mixture, temperature_probabilities
from pipeline.batching.batch import SOURCE_EXTRA
from pipeline.batching.feed import Update, read_updates
from pipeline.batching.global_step import (
    GlobalStep,
    MicroBatch,
    PairOffsets,
    Planner,
    evaluation_batches,
)
from pipeline.batching.labelled import Labelled, LabelledBatch
from pipeline.config.recipe import Recipe
from pipeline.errors import ConfigError

Integers = npt.NDArray[np.int64]
Collate: TypeAlias = Callable[[Sequence[Labelled], Sequence[int]], LabelledBatch]


class LabelledSplit:
    """All examples of a split by language, which plans of line numbers turn into batches."""

    def __init__(
        self,
        examples: Mapping[str, Sequence[Labelled]],
        *,
        languages: Sequence[str],
        collate: Collate,
    ) -> None:
        """Index the examples.

        Args:
            examples: language → its examples.
            languages: the model's languages, by index.
            collate: makes a batch of examples and the indices of their languages.
        """
        present = [code for code in sorted(examples) if examples[code]]
        self.directions = [Direction(code, code) for code in present]
        self._examples = [examples[code] for code in present]
        self._index = [list(languages).index(code) for code in present]
        self._collate = collate
        self._labels = [_sizes(one.labels for one in group) for group in self._examples]
        self._tokens = [_sizes(one.ids for one in group) for group in self._examples]
        self.offsets: dict[str, PairOffsets] = {}
        for direction, tokens in zip(self.directions, self._tokens, strict=True):
            begins = np.concatenate([[0], np.cumsum(tokens - SOURCE_EXTRA)])
            self.offsets[str(direction)] = PairOffsets(begins, begins)

    @property
    def longest(self) -> int:
        """Number of tokens of the longest example, specials included."""
        return max((int(tokens.max()) for tokens in self._tokens), default=0)

    @property
    def num_examples(self) -> dict[str, int]:
        """Language → number of its examples."""
        counts = zip(self.directions, self._examples, strict=True)
        return {direction.source: len(group) for direction, group in counts}

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


def _sizes(arrays: Generator[Integers]) -> Integers:
    return np.fromiter(map(len, arrays), dtype=np.int64)


@dataclass(frozen=True)
class LabelledPlanner:
    """Planner of translation that counts labels and tokens of examples."""

    planner: Planner
    split: LabelledSplit

    def largest(self, window: int) -> MicroBatch:
        """Return the micro-batch of a window with the most tokens."""
        return self.split.counted(self.planner.largest(window))

    def steps(self, cursor: tuple[int, int]) -> Generator[GlobalStep]:
        """Yield global steps from a cursor on, without end."""
        with closing(self.planner.steps(cursor)) as steps:
            for step in steps:
                counted = tuple(map(self.split.counted, step.micro_batches))
                yield replace(step, micro_batches=counted)


class LabelledData:
    """Splits and planner of one training run."""

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
        planner = Planner(
            self.train.offsets,
            Mixture.constant(probabilities),
            recipe.batches,
            seed=recipe.training.seed,
        )
        self.planner = LabelledPlanner(planner, self.train)
        self._seed = recipe.training.seed

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
            self.planner.steps(cursor),
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
