"""From shards to micro-batches: what a training stage reads of its data."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.corpus import Direction, Split, imported_lines, line_counts
from pipeline.artifacts.shards import Shard, open_shard
from pipeline.artifacts.tokenizer import Tags, Tokenizer, load_tokenizer, tags, tokenizer_folder
from pipeline.batching.batch import Batch, Example, collate
from pipeline.batching.global_step import (
    SOURCE_EXTRA,
    TARGET_EXTRA,
    MicroBatch,
    PairLengths,
    Planner,
    evaluation_batches,
)
from pipeline.config import BatchesConfig
from pipeline.errors import ArtifactError, ConfigError


@dataclass(frozen=True)
class _Pair:
    name: str
    languages: tuple[str, str]
    sides: tuple[Shard, Shard]


class SplitData:
    """All pairs of one split, memory-mapped; turns line numbers into batches."""

    def __init__(
        self, shards: Artifact, split: Split, *, tokenizer: Tokenizer, config: BatchesConfig
    ) -> None:
        self._tokenizer, self._directory, self._config = tokenizer, shards.directory, config
        shards.check(shards.names(f"{split}/"))
        self._pairs = [
            _open_pair(shards, split, name) for name in sorted(line_counts(shards, split))
        ]
        self._tags: dict[Direction, Tags] = {
            direction: tags(
                tokenizer, config.tag_scheme, source=direction.source, target=direction.target
            )
            for pair in self._pairs
            for direction in (Direction(*pair.languages), Direction(*pair.languages[::-1]))
        }
        self._language = {code: index for index, code in enumerate(tokenizer.languages)}

    def lengths(self) -> dict[str, PairLengths]:
        """Token counts by pair."""
        return {
            pair.name: PairLengths(pair.sides[0].lengths, pair.sides[1].lengths)
            for pair in self._pairs
        }

    def longest(self) -> int:
        """Tokens of the longest sentence of either side, with its tags and end-of-sentence."""
        sides = (side.lengths.max(initial=0) for pair in self._pairs for side in pair.sides)
        return int(max(sides, default=0)) + max(SOURCE_EXTRA, TARGET_EXTRA)

    def batch(self, plan: MicroBatch) -> Batch:
        """Read and assemble the sentences of a plan.

        Raises:
            ArtifactError: the shards hold an id that the vocabulary has not.
        """
        rows = zip(plan.pair_B, plan.reverse_B, plan.line_B, strict=True)
        examples = [self._example(int(p), int(r), int(line)) for p, r, line in rows]
        batch = collate(
            examples, eos_id=self._tokenizer.eos_id, tag_is_label=self._config.tag_is_label
        )
        largest = max(int(ids.max()) for ids in (batch.source_N, batch.target_N))
        if largest >= self._tokenizer.size:
            raise ArtifactError(
                f"{self._directory} holds the token id {largest} where its tokenizer has "
                f"{self._tokenizer.size} ids: make the shards again."
            )
        return batch

    def _example(self, index: int, reverse: int, line: int) -> Example:
        pair = self._pairs[index]
        source, target = (1, 0) if reverse else (0, 1)
        direction = Direction(pair.languages[source], pair.languages[target])
        tag = self._tags[direction]
        return Example(
            source=pair.sides[source][line],
            target=pair.sides[target][line],
            source_prefix=tag.source_prefix,
            decoder_prompt=tag.decoder_prompt,
            source_language=self._language[direction.source],
            target_language=self._language[direction.target],
            pair=index,
            line=line,
        )

    def evaluation_plan(self, *, budget: int) -> list[tuple[Direction, MicroBatch]]:
        """Every line once in each direction, in batches of one direction, in a fixed order."""
        plan = []
        for index, pair in enumerate(self._pairs):
            for reverse in (0, 1):
                source, target = pair.sides[reverse], pair.sides[1 - reverse]
                direction = Direction(pair.languages[reverse], pair.languages[1 - reverse])
                target_lengths = target.lengths
                for lines in evaluation_batches(
                    source.lengths.tolist(), target_lengths.tolist(), budget=budget
                ):
                    targets = int(target_lengths[lines].sum())
                    sources = int(source.lengths[lines].sum())
                    micro_batch = MicroBatch(
                        np.full_like(lines, index),
                        np.full_like(lines, reverse),
                        lines,
                        num_labels=targets + len(lines) * self._config.extra_labels,
                        num_tokens=sources + targets + 2 * len(lines),
                    )
                    plan.append((direction, micro_batch))
        return plan


class TrainingData:
    """Planner and readers of one training run."""

    def __init__(
        self,
        shards: Artifact,
        probabilities: Mapping[str, float],
        config: BatchesConfig,
        *,
        seed: int,
    ) -> None:
        self.tokenizer = load_tokenizer(tokenizer_folder(shards))
        self.train = SplitData(shards, "train", tokenizer=self.tokenizer, config=config)
        self.valid = SplitData(shards, "valid", tokenizer=self.tokenizer, config=config)
        self.planner = Planner(self.train.lengths(), probabilities, config, seed=seed)
        self.train_lines = line_counts(shards, "train")
        self.imported_lines = imported_lines(shards)

    def validation(self, *, budget: int) -> list[tuple[Direction, MicroBatch]]:
        return self.valid.evaluation_plan(budget=budget)

    def check(self, *, max_positions: int) -> None:
        """Raises ConfigError without validation sentences, or where one exceeds the positions."""
        if not self.valid.lengths():
            raise ConfigError(
                "The shards have no validation sentences, and the best checkpoint is chosen by "
                "them: give the corpus a valid set for at least one pair."
            )
        longest = max(self.train.longest(), self.valid.longest())
        if longest > max_positions:
            raise ConfigError(
                f"The longest sentence has {longest} tokens with its tags, and the model "
                f"{max_positions} positions: raise model.max_positions, or lower "
                "shards.max_tokens and make the shards again."
            )


def _open_pair(shards: Artifact, split: Split, name: str) -> _Pair:
    first, second = name.split("-")
    sides = (open_shard(shards, split, name, first), open_shard(shards, split, name, second))
    counted = line_counts(shards, split)[name]
    if {len(side) for side in sides} != {counted}:
        raise ArtifactError(
            f"{shards.directory} has {len(sides[0]):,} and {len(sides[1]):,} sentences of "
            f"{split}/{name}, its statistics say {counted:,}: run make_shards again."
        )
    return _Pair(name, (first, second), sides)
