"""Random sentences, worse translations of them, and line statistics as evaluate stores them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pipeline.artifacts.corpus import Direction
from pipeline.evaluation.bleu import Bleu
from pipeline.evaluation.chrf import Chrf
from pipeline.evaluation.scores import Rows, TranslatedLines

BLEU_INTO, CHRF_PLUS = Bleu("13a", {"en": "13a"}), Chrf()
WORDS = "a cat the dog sat on mat . , 12 houses were built near rivers".split()


def sentences(lines: int, *, seed: int) -> list[str]:
    generator = np.random.default_rng(seed)
    return [" ".join(generator.choice(WORDS, size=generator.integers(3, 15))) for _ in range(lines)]


def damaged(references: Sequence[str], *, share: float, seed: int) -> list[str]:
    """The references with a share of their words replaced."""
    generator = np.random.default_rng(seed)
    return [
        " ".join(
            str(generator.choice(WORDS)) if generator.random() < share else word
            for word in line.split()
        )
        for line in references
    ]


def line_statistics(hypotheses: Sequence[str], references: Sequence[str]) -> dict[str, Rows]:
    lines = TranslatedLines(Direction("de", "en"), hypotheses, references, lambda: [])
    return {one.column.name: one.line_statistics(lines).rows for one in (BLEU_INTO, CHRF_PLUS)}


def stored(path: Path, statistics: dict[str, Rows], **more: npt.NDArray[np.bool_]) -> Path:
    np.savez_compressed(path, **statistics, **more)
    return path.with_suffix(".npz")
