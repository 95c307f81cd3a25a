"""langdetect's random walk over a line's n-grams, of all lines of a batch at once.

A text is walked seven times: from the prior, the probabilities of all languages are multiplied by
those of n-grams drawn at random, until one language is certain or a thousand were drawn; the means
of the seven ends are the answer. Every text's walk starts from one seed, so that all of them read
the same stream of random words, each at its own pace: the stream is drawn once, and a line's state
is its position in it. Draws, updates and tests are those of langdetect 1.0.9 and of CPython's
``random``, in their order.
"""

import math
from random import Random

import numpy as np
import numpy.typing as npt

from pipeline.evaluation.language_grams import Floats, GramsOfLines, Integers

TRIALS = 7
ALPHA, ALPHA_WIDTH = 0.5, 0.05
BASE_FREQUENCY = 10_000
CONVERGED = 0.99999
UPDATES_PER_TEST = 5
MAX_TESTS = 201
"""After the first update of a trial, and after every fifth up to the thousandth."""
WORDS_OF_NORMAL_PAIR = 4
WORDS_AHEAD = 1 << 13
"""Words that are there before a round beyond the furthest position. A round draws at most
``MIN_ROWS`` times five numbers, each from two words on average at worst."""
BLOCK_LINES = 2048
"""Lines that are walked at a time."""
MIN_ROWS = 128
"""Where fewer lines are under way, each takes several stages at a time: the last ones of a block
are those that never become certain, and would take a thousand updates one call after another."""


class RandomWords:
    """The 32-bit outputs of ``random.Random(seed)``, and what CPython makes of them."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self.words = np.empty(0, dtype=np.uint32)
        self._normal_pairs: dict[int, tuple[float, float]] = {}

    def extend(self, count: int) -> None:
        """Have at least so many words."""
        missing = max(count - len(self.words), 0)
        if missing:
            missing = max(missing, len(self.words))
            drawn = self._random.getrandbits(32 * missing).to_bytes(4 * missing, "little")
            self.words = np.concatenate([self.words, np.frombuffer(drawn, dtype="<u4")])

    def normal_pair(self, position: int) -> tuple[float, float]:
        """What two calls of ``gauss(0, 1)`` give from a position on."""
        found = self._normal_pairs.get(position)
        if found is None:
            angle = self._uniform(position) * math.tau
            radius = math.sqrt(-2.0 * math.log(1.0 - self._uniform(position + 2)))
            found = (math.cos(angle) * radius, math.sin(angle) * radius)
            self._normal_pairs[position] = found
        return found

    def _uniform(self, position: int) -> float:
        high, low = self.words[position : position + 2].tolist()
        uniform: float = ((high >> 5) * 67108864.0 + (low >> 6)) / 9007199254740992.0
        return uniform


def language_probabilities(
    grams: GramsOfLines, *, probabilities: Floats, prior: Floats, seed: int
) -> Floats:
    """(lines, profiles), as langdetect finds them; of lines without n-grams: zeros.

    Args:
        probabilities: (n-grams, profiles).
        prior: (profiles,), of sum 1.
    """
    found = np.zeros((len(grams.counts), len(prior)))
    stream, starts = RandomWords(seed), grams.starts
    walked = np.flatnonzero(grams.counts)
    for first in range(0, len(walked), BLOCK_LINES):
        lines = walked[first : first + BLOCK_LINES]
        walk = _Walk(starts[lines], grams.counts[lines], prior=prior, stream=stream)
        found[lines] = walk.run(grams.places, probabilities)
    return found


class _Walk:
    """The state of some lines' walks; ``rows`` are numbers among these lines."""

    def __init__(
        self, starts: Integers, counts: Integers, *, prior: Floats, stream: RandomWords
    ) -> None:
        self._starts, self._counts = starts, counts
        self._shifts = np.array([32 - int(count).bit_length() for count in counts], np.uint32)
        self._prior, self._stream = prior, stream
        self._positions = np.zeros(len(counts), dtype=np.int64)
        self._trials = np.zeros(len(counts), dtype=np.int64)
        self._tests = np.zeros(len(counts), dtype=np.int64)
        self._weights = np.zeros(len(counts))
        self._second_normals = np.zeros(len(counts))
        self._current = np.tile(prior, (len(counts), 1))
        self._sum = np.zeros((len(counts), len(prior)))

    def run(self, places: npt.NDArray[np.int32], probabilities: Floats) -> Floats:
        """Walk all lines to their ends; (lines, profiles) means of the trials."""
        fresh, running = np.arange(len(self._counts)), np.arange(0)
        while len(fresh) or len(running):
            self._stream.extend(int(self._positions.max()) + WORDS_AHEAD)
            self._begin_trials(fresh)
            stages = max(MIN_ROWS // max(len(running), 1), 1)
            ended = np.concatenate(
                [
                    self._advance(fresh, 1, 1, places, probabilities),
                    self._advance(running, stages, UPDATES_PER_TEST, places, probabilities),
                ]
            )
            rows = np.concatenate([fresh, running])
            running = rows[~ended]
            fresh = self._end_trials(rows[ended])
        return self._sum

    def _begin_trials(self, rows: Integers) -> None:
        """From the prior, with a smoothing drawn from a normal; these are drawn in pairs."""
        first = self._trials[rows] % 2 == 0
        for row in rows[first].tolist():
            pair = self._stream.normal_pair(int(self._positions[row]))
            self._weights[row], self._second_normals[row] = pair
        self._positions[rows[first]] += WORDS_OF_NORMAL_PAIR
        self._weights[rows[~first]] = self._second_normals[rows[~first]]
        self._weights[rows] = (ALPHA + self._weights[rows] * ALPHA_WIDTH) / BASE_FREQUENCY
        self._current[rows] = self._prior
        self._tests[rows] = 0

    def _advance(
        self,
        rows: Integers,
        stages: int,
        updates: int,
        places: npt.NDArray[np.int32],
        probabilities: Floats,
    ) -> npt.NDArray[np.bool_]:
        """Take so many stages of updates, each with its test; which lines' trials have ended.

        A line whose trial ends before the last stage stays where it was then, in the stream too.
        """
        drawn, ends = self._draw(rows, stages * updates)
        grams = places[self._starts[rows][:, None] + drawn]
        current, weights = self._current[rows], self._weights[rows][:, None]
        tests, positions = self._tests[rows], self._positions[rows]
        ended = np.zeros(len(rows), dtype=np.bool_)
        for stage in range(stages):
            stepped = current.copy()
            for column in grams.T[stage * updates : (stage + 1) * updates]:
                factors = probabilities[column]
                factors += weights
                stepped *= factors
            stepped /= stepped.sum(axis=1, keepdims=True)
            current = np.where(ended[:, None], current, stepped)
            positions = np.where(ended, positions, ends[:, (stage + 1) * updates - 1])
            tests += ~ended
            ended |= (current.max(axis=1) > CONVERGED) | (tests >= MAX_TESTS)
            if ended.all():
                break
        self._current[rows], self._tests[rows], self._positions[rows] = current, tests, positions
        return ended

    def _draw(self, rows: Integers, draws: int) -> tuple[Integers, Integers]:
        """Numbers below each line's count as ``random.choice`` draws them, and the positions after
        them, both (rows, draws).

        The leading bits of a word are a number; one that is too large is thrown away.
        """
        drawn = np.empty((len(rows), draws), dtype=np.int64)
        ends = np.empty((len(rows), draws), dtype=np.int64)
        filled = np.zeros(len(rows), dtype=np.int64)
        counts, shifts = self._counts[rows], self._shifts[rows]
        positions = self._positions[rows]
        waiting = np.arange(len(rows))
        while len(waiting):
            position, place = positions[waiting], filled[waiting]
            numbers = self._stream.words[position] >> shifts[waiting]
            position += 1
            drawn[waiting, place], ends[waiting, place] = numbers, position
            place += numbers < counts[waiting]
            positions[waiting], filled[waiting] = position, place
            waiting = waiting[place < draws]
        return drawn, ends

    def _end_trials(self, rows: Integers) -> Integers:
        """Count the ended trials in; those of the lines that have another one before them."""
        self._sum[rows] += self._current[rows] / TRIALS
        self._trials[rows] += 1
        return rows[self._trials[rows] < TRIALS]
