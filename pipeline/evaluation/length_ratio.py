"""Length ratio: characters of the translations by those of their references."""

from dataclasses import dataclass

import numpy as np

from pipeline.evaluation.outputs_section import OUTPUTS
from pipeline.evaluation.score_slot import Column, Floats, LineStatistics, Score, TranslatedLines


@dataclass(frozen=True)
class LengthRatio(Score):
    """1 where translations are as long as references; neither end of the scale is the good one."""

    column = Column(
        "length_ratio", "Length ratio", larger_is_better=None, decimals=2, section=OUTPUTS
    )

    def line_statistics(self, lines: TranslatedLines) -> LineStatistics:
        """(lines, 2): characters of hypothesis and reference, without white space at the ends."""
        pairs = zip(lines.hypotheses, lines.references, strict=True)
        counted = [[len(one.strip()), len(other.strip())] for one, other in pairs]
        return LineStatistics(np.array(counted, dtype=np.int32))

    def of_sums(self, sums: Floats, *, lines: int) -> Floats:  # noqa: ARG002 (one signature)
        """Of characters, (draws, 2) → (draws,)."""
        found: Floats = sums[:, 0] / np.maximum(sums[:, 1], 1.0)
        return found
