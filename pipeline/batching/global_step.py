"""Which sentences each update sees: a function of (seed, update) alone, whatever the world size.

Every pair is an endless stream: epoch after epoch of its own lines, each epoch in an order of its
own, every line once per epoch, in alternating direction from epoch to epoch. A *window* takes from
each stream the share its probability gives it, exactly (a pair's count after w windows is that
share of all draws, rounded). The window's sentences are sorted by length, cut into micro-batches
within the token budget, shuffled, and dealt out M at a time to the updates, whose ranks share them
by size. Any window can be computed on its own, so that resuming reads nothing of the past.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeline.config import BatchesConfig
from pipeline.errors import ConfigError
from pipeline.seeds import derive_seed

Integers = npt.NDArray[np.int64]

SOURCE_EXTRA = 2
"""Tokens added to a source: one tag and end-of-sentence."""
TARGET_EXTRA = 2
"""Tokens added to a decoder input: the longest prompt."""


@dataclass(frozen=True)
class PairLengths:
    """Token counts of both sides of a pair's training lines, languages in the pair's order."""

    first: npt.NDArray[np.int32]
    second: npt.NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.first)


@dataclass(frozen=True)
class MicroBatch:
    """Sentences of one micro-batch.

    ``pair_B`` indexes the planner's pairs; ``reverse_B`` is 0 for first → second language of the
    pair, 1 for second → first; ``line_B`` is the line. ``num_labels`` counts real target tokens
    (and tags that are labels), ``num_tokens`` those of both sides.
    """

    pair_B: Integers
    reverse_B: Integers
    line_B: Integers
    num_labels: int
    num_tokens: int


@dataclass(frozen=True)
class GlobalStep:
    """The M micro-batches of one update, and where the next update begins."""

    micro_batches: tuple[MicroBatch, ...]
    next_cursor: tuple[int, int]

    @property
    def num_labels(self) -> int:
        return sum(batch.num_labels for batch in self.micro_batches)

    def turns(self, ranks: int) -> list[list[int]]:
        """Which micro-batch each rank takes, turn by turn, as indices; ``ranks`` divides M.

        Ranks that share experts wait for each other in every turn, and all ranks at the end of an
        update. So the micro-batches of a turn are of similar size, and whoever took the largest of
        one takes the smallest of the next.
        """
        indices = range(len(self.micro_batches))
        by_size = sorted(indices, key=lambda index: -self.micro_batches[index].num_tokens)
        turns = [by_size[start : start + ranks] for start in range(0, len(by_size), ranks)]
        return [turn[::-1] if number % 2 else turn for number, turn in enumerate(turns)]


class Planner:
    """Plans global steps from lengths and probabilities; holds no text."""

    def __init__(
        self,
        pairs: Mapping[str, PairLengths],
        probabilities: Mapping[str, float],
        config: BatchesConfig,
        *,
        seed: int,
    ) -> None:
        """Both mappings are by pair name; the pairs are numbered in sorted order.

        Raises:
            ConfigError: the pairs differ from those of the probabilities, or a sentence exceeds
                the token budget.
        """
        self.names = tuple(sorted(pairs))
        missing = [name for name in self.names if name not in probabilities]
        if missing:
            raise ConfigError(
                f"The mixture has no probability for {', '.join(missing)}: run mix on these shards."
            )
        others = sorted(set(probabilities) - set(self.names))
        if others:
            raise ConfigError(
                f"The mixture is of other shards: these have no training lines of "
                f"{', '.join(others)}; run mix on these shards."
            )
        self._config = config
        self._seed = seed
        self._size = np.array([len(pairs[name]) for name in self.names], dtype=np.int64)
        self._probability = np.array([probabilities[name] for name in self.names])
        self._offset = np.concatenate([[0], np.cumsum(self._size)])
        first = np.concatenate([pairs[name].first for name in self.names])
        second = np.concatenate([pairs[name].second for name in self.names])
        self._lengths = np.stack([first, second], axis=1)
        longest = int(self._lengths.max(initial=0)) + max(SOURCE_EXTRA, TARGET_EXTRA)
        if longest > config.tokens:
            raise ConfigError(
                f"The longest training sentence has {longest} tokens with its tags, and "
                f"batches.tokens is {config.tokens}: raise it, or lower shards.max_tokens."
            )
        self.window_sentences = self._window_sentences()

    def steps(self, cursor: tuple[int, int]) -> Iterator[GlobalStep]:
        """Global steps from a cursor on, without end; (0, 0) is the first update."""
        window, first = cursor
        while True:
            batches = self.window(window)
            count = len(batches) // self._config.micro_batches
            for step in range(first, count):
                start = step * self._config.micro_batches
                following = (window, step + 1) if step + 1 < count else (window + 1, 0)
                yield GlobalStep(
                    tuple(batches[start : start + self._config.micro_batches]), following
                )
            window, first = window + 1, 0

    def window(self, window: int) -> list[MicroBatch]:
        """All micro-batches of a window, update after update; a multiple of M of them."""
        pair, reverse, line = self._draw(window)
        lengths = self._lengths[self._offset[pair] + line]
        source = np.where(reverse == 1, lengths[:, 1], lengths[:, 0])
        target = np.where(reverse == 1, lengths[:, 0], lengths[:, 1])
        direction = 2 * pair + reverse if self._config.one_direction else np.zeros_like(pair)
        order = np.lexsort((line, pair, source, target, direction))
        cuts = cut(
            source[order] + SOURCE_EXTRA,
            target[order] + TARGET_EXTRA,
            direction[order],
            budget=self._config.tokens,
        )
        parts = fill_up(np.split(order, cuts), multiple=self._config.micro_batches)
        generator = np.random.default_rng(derive_seed("micro-batch order", self._seed, window))
        return [
            MicroBatch(
                pair[p],
                reverse[p],
                line[p],
                num_labels=int(target[p].sum()) + len(p) * self._config.extra_labels,
                num_tokens=int(source[p].sum() + target[p].sum()) + 2 * len(p),
            )
            for p in (parts[i] for i in generator.permutation(len(parts)))
        ]

    def _draw(self, window: int) -> tuple[Integers, Integers, Integers]:
        """Pair, direction and line of every sentence of a window."""
        pairs, reverses, lines = [], [], []
        for index, name in enumerate(self.names):
            draws = np.arange(self._drawn(index, window), self._drawn(index, window + 1))
            size = int(self._size[index])
            line = np.empty_like(draws)
            epochs = draws // size
            for epoch in np.unique(epochs):
                chosen = epochs == epoch
                key = derive_seed("epoch order", self._seed, name, int(epoch))
                line[chosen] = shuffled(draws[chosen] % size, size=size, key=key)
            pairs.append(np.full_like(draws, index))
            reverses.append((line + epochs) % 2)
            lines.append(line)
        return np.concatenate(pairs), np.concatenate(reverses), np.concatenate(lines)

    def _drawn(self, index: int, window: int) -> int:
        """Sentences of a pair drawn before a window: its exact share, randomly rounded."""
        phase = derive_seed("phase", self._seed, self.names[index]) / 2**63
        share = float(self._probability[index])
        return math.floor(window * self.window_sentences * share + phase)

    def _window_sentences(self) -> int:
        longer = self._lengths.max(axis=1) + max(SOURCE_EXTRA, TARGET_EXTRA)
        means = [longer[a:b].mean() for a, b in zip(self._offset, self._offset[1:], strict=False)]
        mean = float(np.dot(means, self._probability) / self._probability.sum())
        wanted = self._config.window_steps * self._config.micro_batches * self._config.tokens
        return max(self._config.micro_batches, round(wanted / mean))


def cut(source: Integers, target: Integers, direction: Integers, *, budget: int) -> list[int]:
    """Where to cut sorted sentences, so that no side's padded size exceeds the budget."""
    cuts = []
    start = longest = 0
    for index, length in enumerate(np.maximum(source, target).tolist()):
        longest = max(longest, length)
        full = (index - start + 1) * longest > budget
        if index > start and (full or direction[index] != direction[index - 1]):
            cuts.append(index)
            start, longest = index, length
    return cuts


def fill_up(parts: list[Integers], *, multiple: int) -> list[Integers]:
    """Halve the largest parts until their number is a multiple (of M)."""
    parts = list(parts)
    while len(parts) % multiple:
        largest = max(range(len(parts)), key=lambda i: len(parts[i]))
        part = parts[largest]
        if len(part) < 2:
            raise ConfigError(
                f"A window of {len(parts)} sentences cannot fill updates of {multiple} "
                "micro-batches: raise batches.window_steps or lower batches.micro_batches."
            )
        parts[largest : largest + 1] = [part[: len(part) // 2], part[len(part) // 2 :]]
    return parts


def shuffled(positions: Integers, *, size: int, key: int) -> Integers:
    """A keyed random permutation of range(size), evaluated at some positions in O(1) memory.

    A four-round Feistel network on the next even power of two; positions that leave the range walk
    on along their cycle until they are back.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half) - 1)
    shift = np.uint64(half)
    rounds = np.random.default_rng(key).integers(0, 2**63, size=4, dtype=np.uint64)
    out = positions.astype(np.uint64)
    todo = np.ones(len(out), dtype=bool)
    while todo.any():
        left, right = out[todo] >> shift, out[todo] & mask
        for constant in rounds:
            left, right = right, left ^ (_mix(right, constant) & mask)
        out[todo] = (left << shift) | right
        todo = out >= np.uint64(size)
    return out.astype(np.int64)


def _mix(values: npt.NDArray[np.uint64], constant: np.uint64) -> npt.NDArray[np.uint64]:
    """The finaliser of splitmix64: every input bit reaches every output bit."""
    mixed = values * np.uint64(0x9E3779B97F4A7C15) + constant
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def evaluation_batches(
    source: Sequence[int], target: Sequence[int], *, budget: int
) -> list[Integers]:
    """Line numbers of one direction, sorted by length and cut within a token budget."""
    source_array, target_array = np.asarray(source), np.asarray(target)
    order = np.lexsort((np.arange(len(source_array)), source_array, target_array))
    cuts = cut(
        source_array[order] + SOURCE_EXTRA,
        target_array[order] + TARGET_EXTRA,
        np.zeros(len(order), dtype=np.int64),
        budget=budget,
    )
    return np.split(order, cuts) if len(order) else []
