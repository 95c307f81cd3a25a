"""chrF++, which is sacreBLEU's own, from sufficient statistics that are kept per line."""

from dataclasses import dataclass
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

BETA = 2.0
"""How much more recall weighs than precision."""


@dataclass(frozen=True)
class Chrf(Score):
    """chrF++ in 0–100: n-grams of characters up to 6, of words up to 2."""

    column = Column("chrf", "chrF++", out_of_100=True)

    def line_statistics(self, lines: TranslatedLines) -> LineStatistics:
        """(lines, 24): n-grams of hypothesis, of reference, in both; characters, then words."""
        chrf = _chrf()
        rows = chrf._extract_corpus_statistics(lines.hypotheses, [lines.references])
        return LineStatistics(np.array(rows, dtype=np.int32), str(chrf.get_signature()))

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


def _chrf() -> Any:
    return CHRF(word_order=2)
