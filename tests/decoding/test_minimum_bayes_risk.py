"""Tests of pipeline/decoding/minimum_bayes_risk.py."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sacrebleu.metrics.chrf import CHRF

from pipeline.decoding.hypotheses import Translation
from pipeline.decoding.minimum_bayes_risk import choose, expected_utility


def by_sacrebleu(texts: list[str]) -> list[float]:
    """The mean of sacreBLEU's chrF++ with each of the other texts as the reference."""
    peer, means = CHRF(word_order=2), []
    for row, one in enumerate(texts):
        others = texts[:row] + texts[row + 1 :]
        scores = [peer.sentence_score(one, [other]).score for other in others]
        means.append(sum(scores) / max(len(scores), 1))
    return means


words = st.sampled_from(["the", "cat", "sat.", "a", "Мы", "идём", "我们", "明天去。", "بيت"])
candidate_texts = st.lists(words, max_size=6).map(" ".join)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(candidate_texts, st.integers(-3, 0)), min_size=1, max_size=8))
@example([("a cat", -1)])
@example([("", 0), ("", -1), ("a cat", -3), ("a cat sat.", -2)])
@example([("the cat", -2), ("the cat", -1), ("the cat", -1)])
def test_the_choice_is_the_candidate_of_the_highest_mean_over_the_others(
    candidates: list[tuple[str, int]],
) -> None:
    texts = [text for text, _ in candidates]
    expected = by_sacrebleu(texts)
    assert expected_utility(texts) == pytest.approx(expected, abs=1e-9)
    translations = [Translation((row,), float(score)) for row, (_, score) in enumerate(candidates)]
    # Utilities that differ by rounding alone are tied.
    ranked = sorted(
        translations, key=lambda one: (-round(expected[one.tokens[0]], 6), -one.score, one.tokens)
    )
    assert choose(translations, texts) == ranked[0]
