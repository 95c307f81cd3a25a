"""BLEU and chrF++, which are sacreBLEU's own.

Its sufficient statistics are kept per sentence, and the score of a corpus is what sacreBLEU
computes from their sum. The BLEU tokenizer follows the target language; one that cannot be loaded
has a named fallback.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from pipeline.errors import ConfigError

Counts = npt.NDArray[np.int32]
BleuTokenizerOption = Literal["per-language", "13a", "flores200"]

LANGUAGE_TOKENIZERS = {
    "zh": ("zh",),
    "ja": ("ja-mecab", "char"),
    "ko": ("ko-mecab", "char"),
}
"""Target language, in any script → sacreBLEU tokenizers, the first that loads is taken; all others:
13a."""


def bleu_tokenizer(language: str, *, option: BleuTokenizerOption) -> str:
    """Name of the sacreBLEU tokenizer for a target language, the fallback where it is needed.

    Raises:
        ConfigError: none of the tokenizers can be loaded.
    """
    usual = LANGUAGE_TOKENIZERS.get(language.split("_")[0], ("13a",))
    wanted = usual if option == "per-language" else (option,)
    failure: Exception | None = None
    for name in wanted:
        try:
            BLEU(tokenize=name)
        except Exception as error:  # sacreBLEU raises whatever its tokenizers' loaders raise
            failure = error
        else:
            return name
    raise ConfigError(
        f"sacreBLEU's tokenizer {wanted[-1]!r} cannot be loaded ({failure}): run once where it can "
        "be downloaded, point SACREBLEU to a folder that holds it, or set "
        "evaluation.bleu_tokenizer to 'per-language'."
    ) from failure


@dataclass(frozen=True)
class LineStatistics:
    """sacreBLEU's sufficient statistics, one row per sentence, and the signatures."""

    bleu: Counts
    """(lines, 10): lengths of hypothesis and reference, matches of order 1–4, totals of 1–4."""
    chrf: Counts
    """(lines, 24): n-grams of hypothesis, of reference, in both; characters 1–6, then words 1–2."""
    bleu_signature: str
    chrf_signature: str


def line_statistics(
    hypotheses: Sequence[str], references: Sequence[str], *, tokenizer: str
) -> LineStatistics:
    """BLEU and chrF++ statistics of every line.

    Args:
        hypotheses: one per line.
        references: as many, in the same order.
        tokenizer: sacreBLEU's name of the BLEU tokenizer.
    """
    assert len(hypotheses) == len(references) > 0
    # The per-sentence statistics have no public name in sacreBLEU 2.x; its own significance tests
    # call the same method.
    bleu, chrf = BLEU(tokenize=tokenizer, force=True), _chrf()
    bleu_rows = bleu._extract_corpus_statistics(hypotheses, [references])
    chrf_rows = chrf._extract_corpus_statistics(hypotheses, [references])
    return LineStatistics(
        bleu=np.array(bleu_rows, dtype=np.int32),
        chrf=np.array(chrf_rows, dtype=np.int32),
        bleu_signature=str(bleu.get_signature()),
        chrf_signature=str(chrf.get_signature()),
    )


def corpus_bleu(statistics: Counts) -> float:
    """BLEU in 0–100 from the statistics of the lines, as sacreBLEU computes it."""
    totals = statistics.sum(axis=0, dtype=np.int64).tolist()
    return float(BLEU()._compute_score_from_stats(totals).score)


def corpus_chrf(statistics: Counts) -> float:
    """chrF++ in 0–100 from the statistics of the lines, as sacreBLEU computes it."""
    totals = statistics.sum(axis=0, dtype=np.int64).tolist()
    return float(_chrf()._compute_score_from_stats(totals).score)


def _chrf() -> Any:
    return CHRF(word_order=2)
