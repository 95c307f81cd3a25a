"""Choose among the hypotheses of a source by a COMET model.

As the utility of minimum Bayes risk, the model scores every candidate against every other one as
the reference (Fernandes and others, 2022, arXiv 2205.00978). A model without references scores each
candidate by the source only.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from pipeline.decoding.hypotheses import Translation
from pipeline.decoding.minimum_bayes_risk import highest
from pipeline.errors import ConfigError

DECIMALS = 5
"""Decimals of a value: candidates that differ by the rounding of other batches are tied."""


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
        """Load the model.

        Args:
            model_dir: directory of the model.
            against_others: whether candidates are references of each other.

        Raises:
            ConfigError: the model cannot be loaded, or needs references and has none.
        """
        from pipeline.evaluation.comet import load_model  # loads COMET

        self._model = load_model(Path(model_dir))
        self._against_others = against_others
        if self._model.requires_references() and not against_others:
            raise ConfigError(
                f"decoding.comet names {model_dir}, a model that needs references, and choose = "
                '"rerank" has none. Name a model for quality estimation.'
            )

    def choose(self, of_sources: Sequence[Candidates]) -> list[Translation]:
        """Return the best candidate of every source; equal texts are scored once."""
        from pipeline.evaluation.comet import scores_of

        samples = [sample for one in of_sources for sample in self._samples(one)]
        scores = iter(scores_of(self._model, samples))
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
        return [round(means[text], DECIMALS) for text in one.texts]
