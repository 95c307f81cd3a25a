"""Plan the sentences of each update as a function of (seed, update), for any number of ranks.

Every pair is an endless stream: epoch after epoch of its own lines, each epoch in an order of its
own, every line once per epoch, in alternating direction from epoch to epoch. A *window* takes from
each stream the share that its probability gives it, exactly (a pair's count after w windows is that
share of all draws, rounded). The window's sentences are sorted by length, cut into micro-batches
within the token budget, shuffled, and dealt out M at a time to the updates; the ranks share them by
size. Any window can be computed on its own: resuming does not read the past.

If a mixture weighs directions, each direction of a pair is a stream of its own. If it changes at
some update, a *phase* begins: its windows have numbers of their own, and it first draws the lines
that the last window of the phase before has left. Where phases ended is part of the cursor.
"""

import heapq
import itertools
import math
from collections import deque
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from pipeline.artifacts.shards import Mixture, Phase
from pipeline.batching.batch import SOURCE_EXTRA, TARGET_EXTRA, extra_labels
from pipeline.batching.settings import BatchesConfig
from pipeline.errors import ConfigError
from pipeline.kernels.compiled_loops import mark_cuts, measure, shuffle
from pipeline.seeds import derive_seed
from pipeline.terminal import counted, listed

Integers = npt.NDArray[np.signedinteger[Any]]

Cursor = tuple[int, ...]
"""Window and update within it; then the same two numbers where each earlier phase ended."""

PHASE_WINDOWS = 2**40
"""Window numbers reserved for each phase."""

IN_TURN = -1
"""Direction of a stream that alternates from epoch to epoch."""


@dataclass(frozen=True)
class PairOffsets:
    """Offsets, in tokens, of the lines of both sides of a pair, and the end of the last line.

    Languages are in the pair's order. The arrays may be mapped files: a window reads only the
    entries that it draws, and no process holds the lengths of a whole corpus.
    """

    first: npt.NDArray[np.int64]
    second: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.first) - 1

    @property
    def longest(self) -> int:
        """Tokens of the longest line of either side."""
        return self._measured[0]

    @property
    def longer(self) -> int:
        """Tokens of all lines, of the longer side of each."""
        return self._measured[1]

    @cached_property
    def _measured(self) -> tuple[int, int]:
        longest, longer = measure(self.first, self.second)
        return int(longest), int(longer)

    def lengths(self, line_N: Integers) -> tuple[Integers, Integers]:
        """Return the tokens of both sides of some lines."""
        first, second = (side[line_N + 1] - side[line_N] for side in (self.first, self.second))
        return first, second


@dataclass(frozen=True)
class MicroBatch:
    """Sentences of one micro-batch.

    ``pair_B`` indexes the planner's pairs; ``reverse_B`` is 0 for first → second language of the
    pair, 1 for second → first; ``line_B`` is the line. ``num_labels`` counts real target tokens
    (and tags that are labels), ``num_tokens`` the tokens of both sides.
    """

    pair_B: Integers
    reverse_B: Integers
    line_B: Integers
    num_labels: int
    num_tokens: int


@dataclass(frozen=True)
class GlobalStep:
    """The M micro-batches of one update, and the cursor of the next update."""

    micro_batches: tuple[MicroBatch, ...]
    next_cursor: Cursor

    @property
    def num_labels(self) -> int:
        """Labels of all micro-batches."""
        return sum(batch.num_labels for batch in self.micro_batches)

    def turns(self, ranks: int) -> list[list[int | None]]:
        """Assign a micro-batch to each rank, turn by turn, as indices.

        Ranks that share experts wait for each other in every turn, and all ranks at the end of an
        update. So the micro-batches of a turn have similar sizes, and the rank with the largest of
        one turn takes the smallest of the next. If the number of ranks does not divide M, some have
        None in the last turn, in which the smallest micro-batches are taken.
        """
        indices = range(len(self.micro_batches))
        by_size = sorted(indices, key=lambda index: -self.micro_batches[index].num_tokens)
        dealt: list[int | None] = [*by_size, *[None] * (-len(by_size) % ranks)]
        turns = [dealt[start : start + ranks] for start in range(0, len(dealt), ranks)]
        return [turn[::-1] if number % 2 else turn for number, turn in enumerate(turns)]

    def stand_in(self, *, without: Collection[int] = ()) -> MicroBatch:
        """Return one sentence for a rank without a micro-batch, which keeps it in step.

        Its loss counts nothing. A batch without any sentence would need every kernel and every
        reduction to bear it; this one costs next to nothing.
        """
        kept = [batch for index, batch in enumerate(self.micro_batches) if index not in without]
        smallest = min(kept, key=lambda batch: batch.num_tokens)
        return MicroBatch(
            smallest.pair_B[:1],
            smallest.reverse_B[:1],
            smallest.line_B[:1],
            num_labels=0,
            num_tokens=0,
        )


@dataclass(frozen=True)
class _Stream:
    """Epoch after epoch of a pair's lines, as a phase draws them."""

    pair: int
    name: str
    """Name of the pair or direction, which seeds the stream's random choices."""
    direction: int
    """0 or 1 as in ``MicroBatch.reverse_B``, or ``IN_TURN``."""
    share: float
    """Share of all draws of the phase."""


class _Place(NamedTuple):
    """Where the phases so far have left a stream."""

    rest: Integers = np.empty(0, np.int64)
    """Sentences that their last windows drew and no update took, as 2 · line + reverse."""
    begin: int = 0
    """Draws of the stream, including the rest."""


@dataclass(frozen=True)
class _PlannedPhase:
    """A phase of the mixture, with the planner's numbers."""

    streams: tuple[_Stream, ...]
    window_sentences: int
    last_update: int | None
    """Last update of the phase; None if it has no end."""


@dataclass(frozen=True)
class _Draws:
    """Draws of a window from a stream: some of the rest, then from ``start`` up to ``stop``."""

    stream: _Stream
    size: int
    """Lines of the pair, which are the draws of an epoch."""
    rest: Integers
    later: Integers
    """The rest that is left to later windows."""
    start: int
    stop: int

    def __len__(self) -> int:
        return len(self.rest) + self.stop - self.start

    def parts(self) -> Iterator[tuple[int, int, int]]:
        """Yield epoch, first and end position of the draws from each epoch that they touch."""
        for epoch in range(self.start // self.size, -(-self.stop // self.size)):
            begin = epoch * self.size
            yield epoch, max(self.start - begin, 0), min(self.stop - begin, self.size)


class _Sentences(NamedTuple):
    """Sentences of a window."""

    pair_N: Integers
    reverse_N: Integers
    line_N: Integers
    source_N: Integers
    """Tokens of the source, without tags and end-of-sentence."""
    target_N: Integers
    """Tokens of the target."""


@dataclass(frozen=True)
class PlannedWindow:
    """The sorted sentences of a window, and the range of each micro-batch.

    Micro-batch i has the sentences from ``starts[i]`` up to ``stops[i]``; micro-batches are in the
    order of training.
    """

    pair_N: Integers
    reverse_N: Integers
    line_N: Integers
    starts: list[int]
    stops: list[int]
    num_labels: list[int]
    num_tokens: list[int]

    def __len__(self) -> int:
        return len(self.starts)

    def micro_batches(self, start: int, stop: int) -> tuple[MicroBatch, ...]:
        """Return the micro-batches from ``start`` up to ``stop``."""
        return tuple(self.micro_batch(index) for index in range(start, stop))

    def micro_batch(self, index: int) -> MicroBatch:
        """Return one micro-batch."""
        part = slice(self.starts[index], self.stops[index])
        return MicroBatch(
            self.pair_N[part],
            self.reverse_N[part],
            self.line_N[part],
            num_labels=self.num_labels[index],
            num_tokens=self.num_tokens[index],
        )


class Planner:
    """Plans global steps from lengths and probabilities; holds no text."""

    def __init__(
        self,
        pairs: Mapping[str, PairOffsets],
        mixture: Mixture,
        config: BatchesConfig,
        *,
        seed: int,
    ) -> None:
        """Plan for ``pairs``, which are numbered in the sorted order of their names.

        Raises:
            ConfigError: the mixture is of other text, or a sentence exceeds the token budget.
        """
        self.names = tuple(sorted(pairs))
        probabilities = mixture.phases[0].probabilities
        missing = [name for name in self.names if name not in probabilities]
        if missing:
            raise ConfigError(
                f"The mixture has no probability for {', '.join(missing)}. Run mix on these shards."
            )
        others = sorted(set(probabilities) - set(self.names))
        known = mixture.train_lines
        changed = [name for name in self.names if known.get(name) not in (None, len(pairs[name]))]
        if others or changed:
            raise ConfigError(
                f"The mixture is of other shards: these have {'no' if others else 'more or fewer'} "
                f"training lines of {listed(others or changed)}. Run mix on these shards."
            )
        self._config = config
        self._seed = seed
        self._pairs = [pairs[name] for name in self.names]
        self._longest = max((pair.longest for pair in self._pairs), default=0)
        extra = max(SOURCE_EXTRA, TARGET_EXTRA)
        longest, most = self._longest + extra, config.tokens - extra
        if longest > config.tokens:
            shorten = f", or set shards.max_tokens to {most:,} or less and make the shards again"
            raise ConfigError(
                f"The longest training sentence has {longest:,} tokens with its tags, and "
                f"batches.tokens is {config.tokens:,}. Raise it{shorten if most > 0 else ''}."
            )
        line_type = np.int32 if max(map(len, self._pairs), default=0) < 2**31 else np.int64
        # numpy sorts whole numbers of 16 bits by their digits, several times as fast as others.
        length_type = np.uint16 if self._longest < 2**16 else np.int64
        # A window has millions of sentences: small types bound its memory.
        types: tuple[npt.DTypeLike, ...] = (np.int32, np.int8, line_type)
        self._types = (*types, length_type, length_type)
        self._phases = self._planned_phases(mixture)

    @property
    def window_sentences(self) -> int:
        """Sentences of a window of the first phase."""
        return self._phases[0].window_sentences

    def sentences_per_update(self, windows: int) -> float:
        """Return the mean number of sentence pairs that an update of the first windows draws."""
        planned = [self._plan(window) for window in range(windows)]
        updates = sum(len(window) // self._config.micro_batches for window in planned)
        return sum(len(window.line_N) for window in planned) / updates

    def steps(self, cursor: Cursor, *, update: int = 0) -> Generator[GlobalStep]:
        """Yield global steps from a cursor on, without end; (0, 0) is the first update.

        ``update`` updates come before it.
        """
        while True:
            phase = cursor[0] // PHASE_WINDOWS
            last = self._phases[phase].last_update
            with closing(self._steps_of_phase(cursor)) as steps:
                for step in steps:
                    update += 1
                    if update == last:
                        end, ends = step.next_cursor[:2], cursor[2:]
                        begin = ((phase + 1) * PHASE_WINDOWS, 0)
                        step = replace(step, next_cursor=(*begin, *ends, *end))
                    cursor = step.next_cursor
                    yield step
                    if update == last:
                        break

    def _steps_of_phase(self, cursor: Cursor) -> Generator[GlobalStep]:
        """Yield steps as if the cursor's phase had no end.

        The following window is planned in the meantime.
        """
        window, first, *ends = cursor
        micro_batches = self._config.micro_batches
        with closing(read_ahead(self._windows(window, self._places(ends)), depth=1)) as windows:
            for planned in windows:
                count = len(planned) // micro_batches
                for step in range(first, count):
                    start = step * micro_batches
                    following = (window, step + 1) if step + 1 < count else (window + 1, 0)
                    taken = planned.micro_batches(start, start + micro_batches)
                    yield GlobalStep(taken, (*following, *ends))
                window, first = window + 1, 0

    def window(self, window: int) -> list[MicroBatch]:
        """Return all micro-batches of a window of the first phase; a multiple of M of them."""
        planned = self._plan(window)
        return list(planned.micro_batches(0, len(planned)))

    def largest(self, cursor: Cursor) -> MicroBatch:
        """Return the micro-batch with most tokens of a cursor's window."""
        planned = self._plan(cursor[0], self._places(cursor[2:]))
        return planned.micro_batch(planned.num_tokens.index(max(planned.num_tokens)))

    def _windows(self, window: int, places: Mapping[str, _Place]) -> Generator[PlannedWindow]:
        while True:
            yield self._plan(window, places)
            window += 1

    def _places(self, ends: Sequence[int]) -> dict[str, _Place]:
        """Return where the phases that ended there have left their streams."""
        places: dict[str, _Place] = {}
        for window, update in zip(ends[::2], ends[1::2], strict=False):
            planned = self._plan(window, places)
            is_left_N = np.ones(len(planned.line_N), dtype=np.bool_)
            for index in range(update * self._config.micro_batches):
                is_left_N[planned.starts[index] : planned.stops[index]] = False
            # A window is sorted by length: in its order, short sentences would come first.
            generator = np.random.default_rng(derive_seed("rest of phase", self._seed, window))
            left_N = generator.permutation(np.flatnonzero(is_left_N))
            pair_N, reverse_N = planned.pair_N[left_N], planned.reverse_N[left_N]
            item_N = 2 * planned.line_N[left_N].astype(np.int64) + reverse_N
            for draws in self._draws(window, places):
                is_own_N = pair_N == draws.stream.pair
                if draws.stream.direction != IN_TURN:
                    is_own_N &= reverse_N == draws.stream.direction
                rest = np.concatenate([item_N[is_own_N], draws.later])
                places[draws.stream.name] = _Place(rest, draws.stop)
        return places

    def _plan(
        self, window: int, places: Mapping[str, _Place] = MappingProxyType({})
    ) -> PlannedWindow:
        """Sort a window's sentences, cut them into micro-batches, shuffle these and count."""
        drawn = self._sorted_sentences(window, places)
        direction_N = np.zeros(len(drawn.line_N), dtype=np.int32)
        if self._config.one_direction:
            direction_N = 2 * drawn.pair_N + drawn.reverse_N
        cuts = cut(drawn.source_N, drawn.target_N, direction_N, budget=self._config.tokens)
        bounds = [0, *cuts.tolist(), len(drawn.line_N)]
        bound_M = fill_up(bounds, multiple=self._config.micro_batches)
        generator = np.random.default_rng(derive_seed("micro-batch order", self._seed, window))
        order = generator.permutation(len(bound_M) - 1)
        sentences = np.diff(bound_M)
        source, target = (
            np.add.reduceat(length_N, bound_M[:-1], dtype=np.int64)
            for length_N in (drawn.source_N, drawn.target_N)
        )
        labels = target + sentences * extra_labels(self._config)
        return PlannedWindow(
            drawn.pair_N,
            drawn.reverse_N,
            drawn.line_N,
            starts=bound_M[:-1][order].tolist(),
            stops=bound_M[1:][order].tolist(),
            num_labels=labels[order].tolist(),
            num_tokens=(source + target + 2 * sentences)[order].tolist(),
        )

    def _sorted_sentences(self, window: int, places: Mapping[str, _Place]) -> _Sentences:
        """Return a window's sentences by target length, source length and order of drawing.

        If a micro-batch keeps to one direction, they are sorted by pair and direction first.
        """
        all_draws = [draws for draws in self._draws(window, places) if len(draws)]
        if not all_draws:
            raise ConfigError("A window has no sentence. Raise batches.window_steps.")
        number = sum(map(len, all_draws))
        whole = _Sentences(*(np.empty(number, dtype) for dtype in self._types))
        filled = 0
        for draws in all_draws:
            part = slice(filled, filled + len(draws))
            for field_N, values in zip(whole, self._sentences(draws), strict=True):
                field_N[part] = values
            filled = part.stop
        keys: tuple[Integers, ...] = (whole.source_N, whole.target_N)
        if self._config.one_direction:
            keys = (*keys, whole.reverse_N, whole.pair_N)
        order_N = np.lexsort(keys)
        for field_N in whole:
            field_N[:] = field_N[order_N]
        return whole

    def _draws(self, window: int, places: Mapping[str, _Place]) -> Iterator[_Draws]:
        """Yield a window's draws from every stream of its phase; ``places``: where it began."""
        phase = self._phases[window // PHASE_WINDOWS]
        for stream in phase.streams:
            rest, begin = places.get(stream.name, _Place())
            start, stop = (
                self._drawn(stream, windows, sentences=phase.window_sentences)
                for windows in (window % PHASE_WINDOWS, window % PHASE_WINDOWS + 1)
            )
            yield _Draws(
                stream,
                len(self._pairs[stream.pair]),
                rest[start:stop],
                rest[stop:],
                begin + max(0, start - len(rest)),
                begin + max(0, stop - len(rest)),
            )

    def _sentences(self, draws: _Draws) -> _Sentences:
        """Return the sentences of a stream's draws, by line and epoch: files are read in order."""
        parts = [self._lines(draws, *part) for part in draws.parts()] or [draws.rest[:0]]
        epochs = [np.full(len(lines), number) for number, lines in enumerate(parts)]
        # A line and its epoch in one number, which sorts faster than two.
        item_N = np.concatenate(parts) * len(parts) + np.concatenate(epochs)
        item_N.sort()
        line_N, epoch_N = np.divmod(item_N, len(parts))
        stream = draws.stream
        reverse_N = np.broadcast_to(np.int64(stream.direction), len(line_N))
        if stream.direction == IN_TURN:
            reverse_N = (line_N + epoch_N + draws.start // draws.size) & 1
        if len(draws.rest):
            rest_N = np.sort(draws.rest)
            line_N = np.concatenate([rest_N >> 1, line_N])
            reverse_N = np.concatenate([rest_N & 1, reverse_N])
        first_N, second_N = self._pairs[stream.pair].lengths(line_N)
        return _Sentences(
            np.broadcast_to(np.int64(stream.pair), len(line_N)),
            reverse_N,
            line_N,
            np.where(reverse_N, second_N, first_N),
            np.where(reverse_N, first_N, second_N),
        )

    def _lines(self, draws: _Draws, epoch: int, start: int, stop: int) -> Integers:
        """Return the lines of the draws from ``start`` up to ``stop`` of an epoch."""
        if stop - start == draws.size:  # all, in any order: they are sorted
            return np.arange(draws.size)
        key = derive_seed("epoch order", self._seed, draws.stream.name, epoch)
        return shuffled(np.arange(start, stop), size=draws.size, key=key)

    def _drawn(self, stream: _Stream, windows: int, *, sentences: int) -> int:
        """Return the number of draws from a stream in the first ``windows`` windows of a phase.

        It is the exact share, rounded at random.
        """
        offset = derive_seed("phase", self._seed, stream.name) / 2**63
        return math.floor(windows * sentences * stream.share + offset)

    def _planned_phases(self, mixture: Mixture) -> tuple[_PlannedPhase, ...]:
        ends = [phase.from_update - 1 for phase in mixture.phases[1:]]
        return tuple(
            _PlannedPhase(tuple(self._streams(phase)), self._window_sentences(phase), last)
            for phase, last in itertools.zip_longest(mixture.phases, ends)
        )

    def _streams(self, phase: Phase) -> Iterator[_Stream]:
        for pair, name in enumerate(self.names):
            probability, forward = phase.probabilities[name], phase.forward.get(name)
            if forward is None:
                yield _Stream(pair, name, IN_TURN, probability)
                continue
            first, second = name.split("-")
            yield _Stream(pair, f"{first}>{second}", 0, probability * forward)
            yield _Stream(pair, f"{second}>{first}", 1, probability * (1 - forward))

    def _window_sentences(self, phase: Phase) -> int:
        extra = max(SOURCE_EXTRA, TARGET_EXTRA)
        probability = np.array([phase.probabilities[name] for name in self.names])
        # Quotients of whole numbers: the same to the last bit, however the sums are taken.
        means = [(pair.longer + extra * len(pair)) / len(pair) for pair in self._pairs]
        mean = float(np.dot(means, probability) / probability.sum())
        wanted = self._config.window_steps * self._config.micro_batches * self._config.tokens
        return max(self._config.micro_batches, round(wanted / mean))


def cut(source: Integers, target: Integers, direction: Integers, *, budget: int) -> Integers:
    """Return where to cut sorted sentences to keep each side's padded size within the budget.

    Lengths are without tags and end-of-sentence, which are padded too.
    """
    is_cut = np.empty(len(source), dtype=np.bool_)
    mark_cuts(source, target, direction, SOURCE_EXTRA, TARGET_EXTRA, budget, is_cut)
    return np.flatnonzero(is_cut)


def fill_up(bounds: Sequence[int], *, multiple: int) -> Integers:
    """Halve the largest parts, the first of equals, until their number is a multiple (of M).

    Part i is from ``bounds[i]`` up to ``bounds[i + 1]``, also in the result.
    """
    parts = [(start - stop, start) for start, stop in itertools.pairwise(bounds)]
    heapq.heapify(parts)
    while len(parts) % multiple:
        size, start = -parts[0][0], parts[0][1]
        if size < 2:
            raise ConfigError(
                f"A window of {counted(len(parts), 'sentence')} cannot fill updates of {multiple} "
                "micro-batches. Raise batches.window_steps or lower batches.micro_batches."
            )
        heapq.heapreplace(parts, (-(size // 2), start))
        heapq.heappush(parts, (size // 2 - size, start + size // 2))
    return np.array([*sorted(start for _, start in parts), bounds[-1]])


def shuffled(positions: Integers, *, size: int, key: int) -> Integers:
    """Evaluate a keyed random permutation of range(size) at some positions, in O(1) memory.

    A four-round Feistel network on the next even power of two; positions that leave the range walk
    on along their cycle until they are back.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    rounds = np.random.default_rng(key).integers(0, 2**63, size=4, dtype=np.uint64)
    lines = np.empty(len(positions), dtype=np.int64)
    shuffle(positions, rounds, half, size, lines)
    return lines


def evaluation_batches(source: Integers, target: Integers, *, budget: int) -> list[Integers]:
    """Return line numbers of one direction, sorted by length and cut within a token budget."""
    order = np.lexsort((np.arange(len(source)), source, target))
    cuts = cut(
        source[order],
        target[order],
        np.zeros(len(order), dtype=np.int64),
        budget=budget,
    )
    return np.split(order, cuts) if len(order) else []


Item = TypeVar("Item")


def read_ahead(items: Generator[Item], *, depth: int) -> Generator[Item]:
    """Yield the same items in the same order, with up to ``depth`` of them taken in advance.

    One thread takes them, one after the other. Its errors are raised where the item is requested.
    Closing this generator waits for the current item, ends the thread and closes ``items``.
    """
    end = object()
    with closing(items):
        pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="read ahead")
        try:
            taken = deque(pool.submit(next, items, end) for _ in range(depth))
            while (item := taken.popleft().result()) is not end:
                taken.append(pool.submit(next, items, end))
                yield item  # type: ignore[misc]
        finally:
            pool.shutdown(cancel_futures=True)
