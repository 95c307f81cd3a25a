"""Read the micro-batches of a training stage from shards, ahead of their use."""

import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, islice
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.corpus import (
    Direction,
    Split,
    directions_of,
    language_of,
    line_counts,
)
from pipeline.artifacts.shards import Flags, Mixture, Shard, open_shard
from pipeline.artifacts.tokenizer import Tokenizer, load_tokenizer, tags, tokenizer_folder
from pipeline.batching.batch import (
    SOURCE_EXTRA,
    TARGET_EXTRA,
    AnyBatch,
    Batch,
    Pass,
    Ragged,
    Sentences,
    assemble,
    extra_labels,
    in_one_buffer,
)
from pipeline.batching.global_step import (
    Cursor,
    GlobalStep,
    MicroBatch,
    PairOffsets,
    Planner,
    evaluation_batches,
    read_ahead,
)
from pipeline.batching.settings import BatchesConfig, TagScheme
from pipeline.config.settings import EXTRA_TOKENS
from pipeline.distributed.process import BUSY_TIME
from pipeline.errors import ArtifactError, ConfigError
from pipeline.kernels.compiled_loops import gather, locate
from pipeline.seeds import derive_seed

Integers = npt.NDArray[np.int64]

PASSES_AHEAD = 4
"""Passes of a rank that are assembled in advance."""

LOOK_SECONDS = 1.0
"""Least time between two looks at the sizes of a pair's files: a micro-batch can have hundreds of
pairs, and takes a GPU a few milliseconds."""
Read = Callable[[MicroBatch], AnyBatch]
"""Reads and assembles the sentences of a plan."""


@dataclass(frozen=True)
class _Pair:
    name: str
    languages: tuple[str, str]
    sides: tuple[Shard, Shard]
    files: dict[Path, int]
    """Its files with their bytes, as checked."""

    def refuse_cut_off(self) -> None:
        """Refuse files that changed in size: reading beyond the end of one kills a process."""
        for path, size in self.files.items():
            try:
                found = f"has {path.stat().st_size:,} bytes"
            except OSError as error:
                found = f"cannot be read ({error.strerror})"
            if found != f"has {size:,} bytes":
                raise ArtifactError(
                    f"{path} {found}, and had {size:,} when this run began. Restore it from a copy "
                    "or run its stage again, and change nothing meanwhile."
                )


class _Files:
    """Addresses of the mapped files of all pairs, for loops that go from file to file.

    Legend: P pairs, 2 the sides of a pair.
    """

    def __init__(self, pairs: Sequence[_Pair]) -> None:
        self._pairs = pairs  # keeps the files mapped
        self._looked_P = np.full(len(pairs), -np.inf)  # when the sizes of files were seen last
        sides = [pair.sides for pair in pairs]
        self.size_P = np.array([len(first) for first, _ in sides], dtype=np.int64)
        self.offsets_P2 = _table([[side.offsets.ctypes.data for side in both] for both in sides])
        self.tokens_P2 = _table([[side.tokens.ctypes.data for side in both] for both in sides])
        self.width_P2 = _table([[side.tokens.itemsize for side in both] for both in sides])
        self.begins_P2 = _table([[_address(side.begins) for side in both] for both in sides])

    def read(self, plan: MicroBatch, *, with_begins: bool) -> tuple[Ragged, Ragged, Ragged | None]:
        """Return the tokens of the sources and of the targets of a plan.

        ``with_begins`` adds 1 where a token of the sources begins a word that a segmenter found.
        """
        now = time.monotonic()
        for number in np.unique(plan.pair_B):
            if now - self._looked_P[number] >= LOOK_SECONDS:
                self._pairs[number].refuse_cut_off()
                self._looked_P[number] = now
        start_2B, length_2B = np.empty((2, 2, len(plan.line_B)), dtype=np.int64)
        where = (plan.pair_B, plan.reverse_B, plan.line_B)
        locate(*where, self.size_P, self.offsets_P2, start_2B, length_2B)

        def gathered(role: int, items_P2: Integers, width_P2: Integers) -> Ragged:
            item_N = np.empty(int(length_2B[role].sum()), dtype=np.int64)
            side_B = 1 - plan.reverse_B if role else plan.reverse_B
            place = (plan.pair_B, side_B, start_2B[role], length_2B[role])
            gather(*place, items_P2, width_P2, item_N)
            return Ragged(item_N, length_2B[role])

        begins = gathered(0, self.begins_P2, np.ones_like(self.width_P2)) if with_begins else None
        tokens = self.tokens_P2, self.width_P2
        return gathered(0, *tokens), gathered(1, *tokens), begins


class _Languages:
    """Languages and tags by pair and direction, as tables.

    Legend: P pairs, 2 the directions of a pair, X tokens of a tag.
    """

    def __init__(self, pairs: Sequence[_Pair], tokenizer: Tokenizer, scheme: TagScheme) -> None:
        number = {code: index for index, code in enumerate(tokenizer.languages)}
        both = [[Direction(*pair.languages), Direction(*pair.languages[::-1])] for pair in pairs]
        found = [
            [tags(tokenizer, scheme, source=way.source, target=way.target) for way in ways]
            for ways in both
        ]
        self._source_P2 = _table([[number[way.source] for way in ways] for ways in both])
        self._target_P2 = _table([[number[way.target] for way in ways] for ways in both])
        self._prefix_P2X = np.array([[one.source_prefix for one in ways] for ways in found])
        eos = tokenizer.eos_id
        self._ending_P2X = np.array([[(eos, *one.source_suffix) for one in ways] for ways in found])
        self._prompt_P2X = np.array([[one.decoder_prompt for one in ways] for ways in found])

    def label(
        self, plan: MicroBatch, source: Ragged, target: Ragged, source_begins: Ragged | None
    ) -> Sentences:
        """Combine the sentences of a plan with their languages and tags."""
        direction = (plan.pair_B, plan.reverse_B)
        return Sentences(
            source=source,
            target=target,
            source_prefix=_rows(self._prefix_P2X[direction]),
            source_ending=_rows(self._ending_P2X[direction]),
            decoder_prompt=_rows(self._prompt_P2X[direction]),
            source_language_B=self._source_P2[direction],
            target_language_B=self._target_P2[direction],
            pair_B=plan.pair_B.astype(np.int64),
            line_B=plan.line_B.astype(np.int64),
            source_begins=source_begins,
        )


def _address(begins: Flags | None) -> int:
    """Return the address of a mapped file; 0 if there is none."""
    return 0 if begins is None else int(begins.ctypes.data)


def _table(rows: Sequence[Sequence[int]]) -> Integers:
    return np.array(rows, dtype=np.int64).reshape(-1, 2)


def _rows(ids_BX: Integers) -> Ragged:
    """Convert a matrix of ids to ``Ragged``."""
    sentences, length = ids_BX.shape
    return Ragged(ids_BX.ravel(), np.full(sentences, length, dtype=np.int64))


class SplitData:
    """All pairs of one split, memory-mapped; turns line numbers into batches."""

    def __init__(
        self, shards: Artifact, split: Split, *, tokenizer: Tokenizer, config: BatchesConfig
    ) -> None:
        self._tokenizer, self._directory, self._config = tokenizer, shards.directory, config
        shards.check(shards.names(f"{split}/"))
        self._pairs = [
            _open_pair(shards, split, name, segmented=tokenizer.segmenters)
            for name in sorted(line_counts(shards, split))
        ]
        self._files = _Files(self._pairs)
        self._languages = _Languages(self._pairs, tokenizer, config.tag_scheme)

    @property
    def tag_is_label(self) -> bool:
        """Whether the prompt's language token is predicted."""
        return self._config.tag_is_label

    @cached_property
    def offsets(self) -> dict[str, PairOffsets]:
        """Offsets of sentences, by pair."""
        return {
            pair.name: PairOffsets(pair.sides[0].offsets, pair.sides[1].offsets)
            for pair in self._pairs
        }

    @property
    def sides(self) -> dict[str, tuple[Shard, Shard]]:
        """The shards of every pair, in the order of its languages."""
        return {pair.name: pair.sides for pair in self._pairs}

    def longest(self) -> int:
        """Return the tokens of the longest sentence of either side, tags and eos included."""
        longest = max((pair.longest for pair in self.offsets.values()), default=0)
        return longest + max(SOURCE_EXTRA, TARGET_EXTRA)

    def batch(self, plan: MicroBatch) -> Batch:
        """Read and assemble the sentences of a plan.

        Raises:
            ArtifactError: the shards hold an id that the vocabulary has not.
        """
        has_begins = bool(self._tokenizer.segmenters)
        source, target, begins = self._files.read(plan, with_begins=has_begins)
        largest = max(int(side.ids_N.max(initial=0)) for side in (source, target))
        if largest >= self._tokenizer.size:
            raise ArtifactError(
                f"{self._directory} holds the token id {largest} where its tokenizer has "
                f"{self._tokenizer.size} ids. Restore it from a copy, or move it away and run "
                "make_shards again."
            )
        sentences = self._languages.label(plan, source, target, begins)
        return assemble(
            sentences, eos_id=self._tokenizer.eos_id, tag_is_label=self._config.tag_is_label
        )

    def evaluation_plan(self, *, budget: int) -> list[tuple[Direction, MicroBatch]]:
        """Plan every line once in each direction, in fixed batches of one direction."""
        plan = []
        for index, pair in enumerate(self._pairs):
            for reverse in (0, 1):
                source, target = pair.sides[reverse], pair.sides[1 - reverse]
                direction = Direction(pair.languages[reverse], pair.languages[1 - reverse])
                source_lengths, target_lengths = source.lengths, target.lengths
                for lines in evaluation_batches(source_lengths, target_lengths, budget=budget):
                    targets = int(target_lengths[lines].sum())
                    sources = int(source_lengths[lines].sum())
                    micro_batch = MicroBatch(
                        np.full_like(lines, index),
                        np.full_like(lines, reverse),
                        lines,
                        num_labels=targets + len(lines) * extra_labels(self._config),
                        num_tokens=sources + targets + 2 * len(lines),
                    )
                    plan.append((direction, micro_batch))
        return plan


def read_joined(plans: Sequence[MicroBatch], read: Read, *, shares: bool) -> AnyBatch:
    """Read micro-batches as one batch.

    ``shares`` says whether micro-batches can share passes in this training. A single one
    must then say so, too: ranks with more would have other operators, and so another order of
    gradients.
    """
    batch = read(
        MicroBatch(
            np.concatenate([plan.pair_B for plan in plans]),
            np.concatenate([plan.reverse_B for plan in plans]),
            np.concatenate([plan.line_B for plan in plans]),
            num_labels=sum(plan.num_labels for plan in plans),
            num_tokens=sum(plan.num_tokens for plan in plans),
        )
        if len(plans) > 1
        else plans[0]
    )
    if not shares:
        return batch
    assert isinstance(batch, Batch), "labelling tasks have a pass per micro-batch"
    return batch.shared([len(plan.line_B) for plan in plans])


@dataclass(frozen=True)
class Update:
    """The micro-batches of a rank in an update.

    Attributes:
        step: all micro-batches of the update.
        number: of the update, from 1.
        indices: the step's micro-batches that this rank takes, turn by turn; None where other ranks
            take one more. One sentence stands in there.
        read: reads a plan.
        per_pass: turns that share a pass.
        seed: seed of the training.
        ahead: the passes, which are read ahead: consumed once, before the next update is requested.
    """

    step: GlobalStep
    number: int
    indices: list[int | None]
    read: Read
    per_pass: int
    seed: int
    ahead: Iterator[Pass] = field(default_factory=lambda: iter(()))

    def passes(self, *, without: Collection[int] = ()) -> Iterator[Pass]:
        """Read the passes, which leave the micro-batches ``without`` out.

        A stand-in takes part in a pass only where the rank has nothing else.
        """
        turns = self.taken(without=without)
        for start in range(0, len(turns), self.per_pass):
            taken = turns[start : start + self.per_pass]
            counting = tuple(index for index in taken if index is not None)
            chosen: Sequence[int | None] = counting or (None,)
            plans = [self.plan(index, without=without) for index in chosen]
            batch = read_joined(plans, self.read, shares=self.per_pass > 1)
            yield Pass(batch.keyed(*map(self.seed_of, chosen)), counting)

    def taken(self, *, without: Collection[int]) -> list[int | None]:
        """Return this rank's micro-batches, turn by turn; None where a stand-in takes the turn."""
        return [None if index in without else index for index in self.indices]

    def plan(self, index: int | None, *, without: Collection[int]) -> MicroBatch:
        """Return the plan of a micro-batch, or of a stand-in that is in none of ``without``."""
        step = self.step
        return step.stand_in(without=without) if index is None else step.micro_batches[index]

    def seed_of(self, index: int | None) -> int:
        """Return the seed of a micro-batch's random numbers, or of a stand-in's."""
        name: str | int = "stand-in" if index is None else index
        return derive_seed("dropout", self.seed, self.number, name)


class TrainingData:
    """Planner and readers of one training run."""

    def __init__(
        self,
        shards: Artifact,
        mixture: Mixture,
        config: BatchesConfig,
        *,
        seed: int,
    ) -> None:
        self.tokenizer = load_tokenizer(tokenizer_folder(shards))
        self.train = SplitData(shards, "train", tokenizer=self.tokenizer, config=config)
        self.valid = SplitData(shards, "valid", tokenizer=self.tokenizer, config=config)
        self.mixture, self.seed = mixture, seed
        self.planner = Planner(self.train.offsets, mixture, config, seed=seed)
        drawn = {way.pair for way in _directions(self.train) if mixture.draws(way)}
        lines = line_counts(shards, "train")
        self.train_lines = {pair: count for pair, count in lines.items() if pair in drawn}

    def updates(
        self, cursor: Cursor, *, rank: int, ranks: int, update: int = 0, per_pass: int = 1
    ) -> Generator[Update]:
        """Yield a rank's updates from a cursor on, as :func:`read_updates` does."""
        return read_updates(
            self.planner.steps(cursor, update=update),
            self.train.batch,
            rank=rank,
            ranks=ranks,
            update=update,
            per_pass=per_pass,
            seed=self.seed,
        )

    def validation(self, *, budget: int) -> list[tuple[Direction, MicroBatch]]:
        """Return micro-batches of one direction each, of the directions that are validated."""
        plan, ways = self.valid.evaluation_plan(budget=budget), self.validated()
        return [one for one in plan if one[0] in ways]

    def validated(self) -> set[Direction]:
        """Return trained directions, and zero-shot directions into trained target languages.

        Only those that the shards have validation sentences of.
        """
        ways = list(_directions(self.train))
        drawn = {_without_marks(way) for way in ways if self.mixture.draws(way)}
        left_out, targets = {*map(_without_marks, ways)} - drawn, {way.target for way in drawn}
        return {
            way for way in _directions(self.valid) if way.target in targets and way not in left_out
        }

    def check(self, *, max_positions: int) -> None:
        """Check that a model with ``max_positions`` positions can be trained on the data.

        Raises:
            ConfigError: there are no validation sentences, a sentence exceeds the positions, or a
                direction is drawn into a language that the tokenizer does not write.
        """
        for way in _directions(self.train):
            if self.mixture.draws(way):
                self.tokenizer.refuse_to_write(language_of(way.target))
        if self.tokenizer.output_size is not None and self.train.tag_is_label:
            raise ConfigError(
                "batches.tag_is_label is true, and the tokenizer has pieces of their own for the "
                "languages translated into, no language tokens among them. Set it to false."
            )
        if not self.validated():
            raise ConfigError(
                "The shards have no validation sentences of a direction that the mixture draws, "
                "and the best checkpoint is chosen by them. Give the corpus a valid set for at "
                "least one such pair."
            )
        longest = max(self.train.longest(), self.valid.longest())
        if longest > max_positions:
            raise ConfigError(
                f"The longest sentence has {longest:,} tokens with its tags, and the model "
                f"{max_positions:,} positions. Set shards.max_tokens to "
                f"{max_positions - EXTRA_TOKENS:,} or less and make the shards again (only a model "
                "that is trained from scratch can have more model.max_positions instead)."
            )


def _without_marks(way: Direction) -> Direction:
    """Return a direction without marks of text that a machine wrote."""
    return Direction(language_of(way.source), language_of(way.target))


def _directions(data: SplitData) -> Iterator[Direction]:
    """Yield both directions of every pair."""
    return (way for pair in data.offsets for way in directions_of(pair))


def read_updates(
    steps: Generator[GlobalStep],
    read: Read,
    *,
    rank: int,
    ranks: int,
    update: int,
    per_pass: int,
    seed: int,
) -> Generator[Update]:
    """Yield a rank's updates of planned steps, their passes read ahead.

    Closing the generator ends the reading thread and closes ``steps``.

    ``update`` updates come before the first step; ``per_pass`` micro-batches share a pass.
    """
    planned = (
        Update(step, number, [turn[rank] for turn in step.turns(ranks)], read, per_pass, seed)
        for number, step in enumerate(steps, start=update + 1)
    )
    gpu = torch.cuda.current_device() if torch.cuda.is_available() else None
    with closing(steps), closing(read_ahead(_passes(planned, gpu), depth=PASSES_AHEAD)) as arriving:
        passes = BUSY_TIME.awaited(arriving)
        for first, one in passes:
            others = (other for _, other in islice(passes, -(-len(first.indices) // per_pass) - 1))
            complete = replace(first, ahead=chain([one], others))
            yield complete
            for _ in complete.ahead:  # an update that leaves micro-batches out reads its own
                pass


def _passes(updates: Iterator[Update], gpu: int | None) -> Generator[tuple[Update, Pass]]:
    if gpu is not None:  # a thread begins with GPU 0, where pinning would take memory of each rank
        torch.cuda.set_device(gpu)
    for update in updates:
        for each in update.passes():
            batch = each.batch if gpu is None else in_one_buffer(each.batch, pinned=True)
            yield update, replace(each, batch=batch)


def _open_pair(shards: Artifact, split: Split, name: str, *, segmented: Collection[str]) -> _Pair:
    """Open a pair's shards; ``segmented`` are the languages with a segmenter."""
    first, second = name.split("-")
    languages = language_of(first), language_of(second)
    sides = (
        open_shard(shards, split, name, first, has_begins=languages[0] in segmented),
        open_shard(shards, split, name, second, has_begins=languages[1] in segmented),
    )
    counted = line_counts(shards, split)[name]
    if {len(side) for side in sides} != {counted}:
        raise shards.refusal(
            f"{shards.directory} has {len(sides[0]):,} and {len(sides[1]):,} sentences of "
            f"{split}/{name}, its statistics say {counted:,}"
        )
    files = {
        shards.directory / file: shards.manifest.files[file].size
        for file in shards.names(f"{split}/{name}/")
    }
    return _Pair(name, languages, sides, files)
