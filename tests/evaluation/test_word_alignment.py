"""Word alignments: IBM Model 1 pair by pair, and a language whose dictionary is known."""

import math
import random
from collections import defaultdict

import pytest

from pipeline.evaluation.word_alignment import ITERATIONS, UNKNOWN, Aligner

LINES = [
    ("das Haus".split(), "the house".split()),
    ("das Buch".split(), "the book".split()),
    ("ein Buch".split(), "a book".split()),
    ("ein rotes Haus".split(), "a red house".split()),
    ([], ["nothing"]),
    (["nichts"], []),
]


def prior(i: int | None, sources: int, j: int, targets: int) -> float:
    """fast_align's, of Dyer et al. (2013), with its constants; None: of no source word."""
    if i is None:
        return 0.08

    def weight(place: int) -> float:
        return math.exp(-4.0 * abs((place + 1) / sources - (j + 1) / targets))

    return 0.92 * weight(i) / sum(map(weight, range(sources)))


def learned_by_hand() -> dict[tuple[str | None, str], float]:
    table: dict[tuple[str | None, str], float] = defaultdict(lambda: 1.0)
    for _ in range(ITERATIONS):
        counts: dict[tuple[str | None, str], float] = defaultdict(float)
        for source, target in LINES:
            if not source:
                continue
            for j, word in enumerate(target):
                places = [None, *range(len(source))]
                words = [None, *source]
                weights = [
                    prior(i, len(source), j, len(target)) * table[one, word]
                    for i, one in zip(places, words, strict=True)
                ]
                for one, weight in zip(words, weights, strict=True):
                    counts[one, word] += weight / sum(weights)
        totals: dict[str | None, float] = defaultdict(float)
        for (one, _), count in counts.items():
            totals[one] += count
        table = defaultdict(float, {key: n / totals[key[0]] for key, n in counts.items()})
    return table


def test_probabilities_are_those_of_expectation_maximization_by_hand() -> None:
    aligner, expected = Aligner(LINES), learned_by_hand()
    assert len(expected) > 15
    for (source, target), probability in expected.items():
        wanted = max(probability, UNKNOWN)
        assert aligner.probability(source or "", target) == pytest.approx(wanted, rel=1e-9)


def test_words_of_a_known_dictionary_are_found_in_any_order() -> None:
    generator = random.Random(1)
    dictionary = {f"s{number}": f"t{number}" for number in range(40)}

    def line() -> tuple[list[str], list[str], dict[int, int]]:
        source = generator.sample([*dictionary], k=generator.randint(3, 9))
        order = list(range(len(source)))
        if generator.random() < 0.3:
            first = generator.randrange(len(order) - 1)
            order[first], order[first + 1] = order[first + 1], order[first]
        return source, [dictionary[source[i]] for i in order], dict(enumerate(order))

    aligner = Aligner([line()[:2] for _ in range(300)])
    right = total = 0
    for _ in range(50):
        source, target, order = line()
        found = {j: i for i, j in aligner.align(source, target)}
        right += sum(found.get(j) == i for j, i in order.items())
        total += len(order)
    assert right / total > 0.98


def test_nothing_is_aligned_without_words_on_both_sides() -> None:
    aligner = Aligner(LINES)
    assert aligner.align([], ["the"]) == []
    assert aligner.align(["das"], []) == []
    assert Aligner([]).align(["unknown", "words"], ["on", "diagonals"]) == [(0, 0), (1, 1)]
