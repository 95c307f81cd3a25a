"""Which source word each target word translates: IBM Model 1 with fast_align's prior.

A target word is aligned to one source word or to none. Its prior prefers the diagonal,
p(i) ∝ exp(-λ |i/I - j/J|), with the constants of fast_align (Dyer et al., 2013); translation
probabilities are learned by expectation maximization.

Legend: E (source word, target word) pairs of positions, U distinct pairs of words, W source words.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

DIAGONAL_TENSION = 4.0
NULL_SHARE = 0.08
"""Prior of a target word that translates nothing."""
ITERATIONS = 5
UNKNOWN = 1e-7
"""Probability of a translation that no line has."""
NULL = ""
"""The source word of target words that translate nothing; no text has it."""

Words = Sequence[str]
Floats = npt.NDArray[np.float64]


class Aligner:
    """Translation probabilities of words."""

    def __init__(self, lines: Sequence[tuple[Words, Words]]) -> None:
        """Learn from sentence pairs as words, source first; those with an empty side are no use."""
        numbers: dict[tuple[str, str], int] = {}
        place_E: list[int] = []
        prior_E: list[Floats] = []
        starts: list[int] = []
        for source, target in lines:
            if not source:
                continue
            for j, word in enumerate(target):
                starts.append(len(place_E))
                place_E += [
                    numbers.setdefault((one, word), len(numbers)) for one in (NULL, *source)
                ]
                prior_E.append(_prior(len(source), len(target), j))
        self._numbers = numbers
        self._probability_U: list[float] = []
        if numbers:
            sources = {source: place for place, (source, _) in enumerate(numbers)}
            source_U = np.array([sources[source] for source, _ in numbers])
            self._probability_U = _learn(
                np.array(place_E), np.concatenate(prior_E), np.array(starts), source_U
            ).tolist()

    def probability(self, source: str, target: str) -> float:
        """Return p(target | source), of words."""
        place = self._numbers.get((source, target))
        return UNKNOWN if place is None else max(self._probability_U[place], UNKNOWN)

    def align(self, source: Words, target: Words) -> list[tuple[int, int]]:
        """Return (source index, target index) of every target word that translates one."""
        found = []
        for j, word in enumerate(target if source else ()):
            prior = _prior(len(source), len(target), j)
            known = [self.probability(one, word) for one in (NULL, *source)]
            best = int(np.argmax(prior * np.array(known)))
            if best > 0:
                found.append((best - 1, j))
        return found


def _prior(sources: int, targets: int, j: int) -> Floats:
    """Return p(i) of target word j, first that of no source word; (sources + 1,)."""
    distance = np.abs((np.arange(sources) + 1) / sources - (j + 1) / targets)
    weight = np.exp(-DIAGONAL_TENSION * distance)
    return np.concatenate([[NULL_SHARE], (1 - NULL_SHARE) * weight / weight.sum()])


def _learn(
    place_E: npt.NDArray[np.int64],
    prior_E: Floats,
    starts: npt.NDArray[np.int64],
    source_U: npt.NDArray[np.int64],
) -> Floats:
    """Return p(target | source) of every distinct pair of words, (U,).

    Args:
        starts: where the positions of each target word begin.
    """
    sizes = np.diff(np.append(starts, len(place_E)))
    probability_U = np.full(len(source_U), 1.0)
    for _ in range(ITERATIONS):
        weight_E = probability_U[place_E] * prior_E
        posterior_E = weight_E / np.repeat(np.add.reduceat(weight_E, starts), sizes)
        count_U = np.bincount(place_E, weights=posterior_E, minlength=len(source_U))
        count_W = np.bincount(source_U, weights=count_U)
        probability_U = count_U / count_W[source_U]
    return probability_U
