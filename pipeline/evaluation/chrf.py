"""chrF++, from sufficient statistics that are kept per line.

They are sacreBLEU's own, counted as integers of many lines at once, and so is the score of a
corpus, which sacreBLEU computes from their sum.
"""

from dataclasses import dataclass
from string import punctuation
from typing import Any

import numpy as np
import numpy.typing as npt
from sacrebleu.metrics.chrf import CHRF

from pipeline.evaluation.score_slot import (
    Column,
    Floats,
    LineStatistics,
    Rows,
    Score,
    TranslatedLines,
)
from pipeline.evaluation.shared_ngrams import shared_characters, shared_words

CHARACTER_ORDERS, WORD_ORDERS = 6, 2
BETA = 2.0
"""How much more recall weighs than precision."""
_MARKS = frozenset(punctuation)


@dataclass(frozen=True)
class Chrf(Score):
    """chrF++ in 0–100: n-grams of characters up to 6, of words up to 2."""

    column = Column("chrf", "chrF++", out_of_100=True)

    def line_statistics(self, lines: TranslatedLines) -> LineStatistics:
        """(lines, 24): n-grams of hypothesis, of reference, in both; characters, then words."""
        chrf, sides = _chrf(), (lines.hypotheses, lines.references)
        hypotheses, references = (["".join(text.split()) for text in side] for side in sides)
        characters = shared_characters(hypotheses, references, orders=CHARACTER_ORDERS)
        hypothesis_words, reference_words = (map(words, side) for side in sides)
        of_words = shared_words(hypothesis_words, reference_words, orders=WORD_ORDERS)
        counts = np.concatenate([characters, of_words], axis=1)
        # What the reference has no n-gram of is not counted against the hypothesis.
        counts[:, :, 0] *= counts[:, :, 1] > 0
        chrf.num_refs = 1
        return LineStatistics(counts.reshape(len(counts), -1), str(chrf.get_signature()))

    def of_corpus(self, rows: Rows) -> float:
        """As sacreBLEU computes it, to the last digit."""
        totals = rows.sum(axis=0, dtype=np.int64).tolist()
        return float(_chrf()._compute_score_from_stats(totals).score)

    def of_sums(self, sums: Floats, *, lines: int) -> Floats:  # noqa: ARG002 (one signature)
        """Of all the orders there are statistics for, (draws, 24) → (draws,)."""
        hypothesis, reference, matches = sums[:, 0::3], sums[:, 1::3], sums[:, 2::3]
        known = (hypothesis > 0) & (reference > 0)
        orders = np.maximum(known.sum(axis=1), 1)
        precision = _sum_where(known, matches / np.maximum(hypothesis, 1.0)) / orders
        recall = _sum_where(known, matches / np.maximum(reference, 1.0)) / orders
        weighted = BETA**2 * precision + recall
        scores: Floats = 100.0 * (1 + BETA**2) * precision * recall
        scores /= np.where(weighted, weighted, 1.0)
        return scores


def _sum_where(known: npt.NDArray[np.bool_], values: Floats) -> Floats:
    summed: Floats = np.where(known, values, 0.0).sum(axis=1)
    return summed


def words(text: str) -> list[str]:
    """Split at white space; a mark that ends a longer word, or else begins it, is one of its own.

    As sacreBLEU's chrF splits off ASCII punctuation: ``(hi)`` is ``(hi`` and ``)``.
    """
    found = []
    for word in text.split():
        if len(word) == 1:
            found.append(word)
        elif word[-1] in _MARKS:
            found += [word[:-1], word[-1]]
        elif word[0] in _MARKS:
            found += [word[0], word[1:]]
        else:
            found.append(word)
    return found


def _chrf() -> Any:
    return CHRF(char_order=CHARACTER_ORDERS, word_order=WORD_ORDERS)
