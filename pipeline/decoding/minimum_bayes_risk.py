"""Choose among the hypotheses of a source by minimum Bayes risk, or by a COMET model.

Minimum Bayes risk chooses the candidate that agrees most with the others. Candidates stand for the
translations that the model finds likely. The expected utility of one is its mean chrF++ with each
of the others as the reference (Kumar and Byrne, 2004; Eikema and Aziz, 2020), or its mean score by
a COMET model (Fernandes and others, 2022, arXiv 2205.00978). A candidate is not its own reference;
a text that occurs several times counts each time. A COMET model without references scores each
candidate by the source only.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pipeline.decoding.hypotheses import Translation
from pipeline.errors import ConfigError

DECIMALS = 9
"""Decimals of an expected utility: candidates that differ only by rounding are tied."""
COMET_DECIMALS = 5
"""Decimals of a score by COMET: candidates that differ by the rounding of other batches are tied.
"""


def choose(candidates: Sequence[Translation], texts: Sequence[str]) -> Translation:
    """Return the candidate of one source with the highest expected utility."""
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


class Candidates(NamedTuple):
    """Hypotheses of a source, and their texts."""

    source: str
    hypotheses: Sequence[Translation]
    texts: Sequence[str]

    @property
    def distinct(self) -> list[str]:
        """Texts without repetition."""
        return list(dict.fromkeys(self.texts))


class CometChoice:
    """A COMET model that chooses translations, on this rank's device."""

    def __init__(self, model_dir: str, *, against_others: bool) -> None:
        """Load the model; ``against_others``: candidates are references of each other.

        Raises:
            ConfigError: the model cannot be loaded, or needs references and has none.
        """
        from pipeline.evaluation.comet import load_model, scores_of  # loads COMET

        self._model, self._scores_of = load_model(Path(model_dir)), scores_of
        self._against_others = against_others
        if self._model.requires_references() and not against_others:
            raise ConfigError(
                f"decoding.comet names {model_dir}, a model that needs references, and choose = "
                '"rerank" has none. Name a model for quality estimation.'
            )

    def choose(self, of_sources: Sequence[Candidates]) -> list[Translation]:
        """Return the best candidate of every source; equal texts are scored once."""
        samples = [sample for one in of_sources for sample in self._samples(one)]
        scores = iter(self._scores_of(self._model, samples))
        return [highest(one.hypotheses, self._values(one, scores)) for one in of_sources]

    def _samples(self, one: Candidates) -> list[dict[str, str]]:
        pairs = [{"src": one.source, "mt": text} for text in one.distinct]
        if not self._against_others:
            return pairs
        return [pair | {"ref": reference} for pair in pairs for reference in one.distinct]

    def _values(self, one: Candidates, scores: Iterator[float]) -> list[float]:
        """Return the score of every candidate, or its mean over the others as references."""
        times, means = Counter(one.texts), {}
        for text in one.distinct:
            if not self._against_others:
                means[text] = next(scores)
                continue
            utility = dict(zip(one.distinct, islice(scores, len(times)), strict=True))
            total = sum(utility[other] * number for other, number in times.items())
            means[text] = (total - utility[text]) / max(len(one.texts) - 1, 1)
        return [round(means[text], COMET_DECIMALS) for text in one.texts]
