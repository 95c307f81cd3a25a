"""Shortlists: the pieces that a piece is likely translated by, learned from shards."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import islice

import numpy as np
import pytest

from data_prep.shortlist import (
    ITERATIONS,
    beginning,
    covering_sentences,
    likeliest,
    most_frequent,
    occurrences,
    spans,
    stored,
    translation_probabilities,
)
from pipeline.artifacts.shards import Shard


def shard_of(sentences: Sequence[Sequence[int]]) -> Shard:
    tokens = np.array([token for one in sentences for token in one], np.uint16)
    return Shard(tokens, np.cumsum([0, *map(len, sentences)], dtype=np.int64))


def random_sentences(rng: np.random.Generator, count: int) -> list[list[int]]:
    return [rng.integers(0, 9, rng.integers(1, 6)).tolist() for _ in range(count)]


def by_dictionaries(
    sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]
) -> dict[tuple[int, int], float]:
    """IBM Model 1 as Brown and others write it, over dictionaries."""
    probability: dict[tuple[int, int], float] = defaultdict(lambda: 1.0)
    for _ in range(ITERATIONS):
        expected: dict[tuple[int, int], float] = defaultdict(float)
        total: dict[int, float] = defaultdict(float)
        for source, target in zip(sources, targets, strict=True):
            for t in target:
                of_t = sum(probability[s, t] for s in source)
                for s in source:
                    expected[s, t] += probability[s, t] / of_t
                    total[s] += probability[s, t] / of_t
        probability = defaultdict(float, {(s, t): n / total[s] for (s, t), n in expected.items()})
    return probability


def test_probabilities_are_those_of_ibm_model_1_on_the_chosen_sentences() -> None:
    rng = np.random.default_rng(1)
    sources, targets = random_sentences(rng, 12), random_sentences(rng, 12)
    sources[3] = []
    chosen = np.array([0, 2, 5, 6, 7, 11])
    found = translation_probabilities(shard_of(sources), shard_of(targets), chosen)
    expected = by_dictionaries([sources[i] for i in chosen], [targets[i] for i in chosen])
    entries = {(int(s), int(t)): float(p) for s, t, p in zip(*found, strict=True)}
    assert entries.keys() == expected.keys()
    assert entries == pytest.approx(expected)


def test_a_dictionary_is_found_in_its_sentences() -> None:
    rng = np.random.default_rng(2)
    meaning = rng.permutation(300)
    sources = [rng.integers(0, 300, 8) for _ in range(2000)]
    targets = [rng.permutation(meaning[one]) for one in sources]
    sides = shard_of([[*one] for one in sources]), shard_of([[*one] for one in targets])
    lists = likeliest(*translation_probabilities(*sides, np.arange(2000)), 3)
    assert lists.keys() == set(range(300))
    right = sum(int(lists[piece][0]) == int(meaning[piece]) for piece in lists)
    assert right >= 298


def test_sentences_with_the_first_occurrences_come_first_as_many_as_fit() -> None:
    sources = [[1, 2], [1, 1], [], [2, 3], [1, 3]]
    targets = [[7], [7, 7], [8], [7], [9, 9]]
    sides = [shard_of(sources), shard_of(targets)]
    # Sentences 0, 3 (a first 3) and 4 (a first 9) have something new; 2 has no link.
    assert covering_sentences(sides, max_links=2 + 2 + 4).tolist() == [0, 3, 4]
    assert covering_sentences(sides, max_links=3).tolist() == [0]
    assert covering_sentences(sides, max_links=1).tolist() == [0]  # one at least
    assert covering_sentences(sides, max_links=100).tolist() == [0, 1, 3, 4]
    assert occurrences(np.array([5, 3, 5, 5, 3], np.uint16)).tolist() == [0, 0, 1, 2, 1]
    assert occurrences(np.array([], np.uint16)).tolist() == []
    assert spans(np.array([4, 0]), np.array([2, 3])).tolist() == [4, 5, 0, 1, 2]


def test_pairs_without_a_sentence_that_has_both_sides_have_no_entries() -> None:
    sides = shard_of([[], [1]]), shard_of([[2], []])
    chosen = covering_sentences(sides, max_links=10)
    assert not len(chosen)
    assert likeliest(*translation_probabilities(*sides, chosen), 3) == {}
    empty = shard_of([])
    assert not len(covering_sentences([empty, empty], max_links=10))


def test_the_beginning_of_a_side_is_its_first_sentences() -> None:
    side = shard_of([[1, 2], [], [3], [4, 4]])
    for sentences in range(6):
        found = beginning(side, sentences=sentences)
        assert len(found) == min(sentences, 4)
        assert [found[i].tolist() for i in range(len(found))] == [
            side[i].tolist() for i in range(len(found))
        ]
        assert found.tokens.size == found.offsets[-1]


def test_rows_hold_common_pieces_and_then_one_source_piece_each() -> None:
    side = shard_of([[4, 4, 6], [6, 6, 9]])
    assert most_frequent(side, 2).tolist() == [6, 4]
    assert most_frequent(side, 10).tolist() == [6, 4, 9]
    rows = stored({5: np.array([8]), 7: np.array([1, 2])}, np.array([6, 4, 9]), 2)
    assert rows.tolist() == [[-1, 6, 4], [-1, 9, -1], [5, 8, -1], [7, 1, 2]]
    assert rows.dtype == np.int32


def test_lists_are_cut_likeliest_first() -> None:
    sources, targets = np.array([1, 1, 1, 4]), np.array([2, 5, 6, 2])
    lists = likeliest(sources, targets, np.array([0.2, 0.2, 0.6, 1.0]), 2)
    assert {piece: one.tolist() for piece, one in islice(lists.items(), 9)} == {1: [6, 2], 4: [2]}
