"""Minimum Bayes risk: choose the candidate that agrees most with the others.

Candidates stand for the translations that the model finds likely. The expected utility of one is
its mean chrF++ with each of the others as the reference (Kumar and Byrne, 2004; Eikema and Aziz,
2020). A candidate is not its own reference; a text that occurs several times counts each time.
"""

from collections.abc import Sequence

import numpy as np

from pipeline.decoding.hypotheses import Translation

DECIMALS = 9
"""Decimals of an expected utility: candidates that differ only by rounding are tied."""


def choose(candidates: Sequence[Translation], texts: Sequence[str]) -> Translation:
    """Return the candidate of the highest expected utility.

    Args:
        candidates: hypotheses of one source.
        texts: their texts.
    """
    return highest(candidates, expected_utility(texts))


def highest(candidates: Sequence[Translation], values: Sequence[float]) -> Translation:
    """Return the candidate of the highest value.

    Ties go to the higher score of the model, then to the earlier candidate.
    """
    keys = [(value, one.score) for value, one in zip(values, candidates, strict=True)]
    return candidates[keys.index(max(keys))]


def expected_utility(texts: Sequence[str]) -> list[float]:
    """Return the mean chrF++ of every text over all others as references; 0 if there are none."""
    from pipeline.evaluation.chrf import pairwise_chrf  # loads numba and sacreBLEU

    utility_TT = pairwise_chrf(texts)
    np.fill_diagonal(utility_TT, 0.0)
    mean_T = utility_TT.sum(axis=1) / max(len(texts) - 1, 1)
    means: list[float] = mean_T.round(DECIMALS).tolist()
    return means
