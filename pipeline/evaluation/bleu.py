"""BLEU from sufficient statistics per line.

The statistics are sacreBLEU's, of its own tokens, but counted for many lines at once; sacreBLEU
computes the score of a corpus from their sum. The tokenizer depends on the target language; some
tokenizers have a fallback in case they cannot be loaded.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
from sacrebleu.metrics.bleu import BLEU

from pipeline.errors import ConfigError
from pipeline.evaluation.chrf import shared_words
from pipeline.evaluation.scores import (
    Column,
    Floats,
    LineCount,
    LineStatistics,
    Rows,
    Score,
    TranslatedLines,
)
from pipeline.languages import parts_words_by_spaces
from pipeline.terminal import listed

BleuTokenizerOption = Literal["per-language", "13a", "flores101", "flores200"]

LANGUAGE_TOKENIZERS = {"zh": ("zh",), "ja": ("ja-mecab",), "ko": ("ko-mecab", "char")}
"""Target language, in any script → sacreBLEU tokenizers, of which the first that loads is used. All
other languages use 13a."""


def bleu_tokenizer(language: str, *, option: BleuTokenizerOption) -> str:
    """Return the sacreBLEU tokenizer of a target language; ConfigError if none can be loaded."""
    wanted = _usual_tokenizers(language) if option == "per-language" else (option,)
    failure: Exception | None = None
    for name in wanted:
        try:
            BLEU(tokenize=name)
        except Exception as error:  # sacreBLEU raises whatever its tokenizers' loaders raise
            failure = error
        else:
            return name
    fix = (
        "Run pip install 'sacrebleu[ja]'."
        if option == "per-language"
        else "Run once where it can be downloaded, point SACREBLEU to a directory that has it, or "
        "set evaluation.bleu_tokenizer to 'per-language' and leave spbleu out of evaluation.scores."
    )
    problem = " ".join(str(failure).split())  # sacreBLEU's are of several lines
    raise ConfigError(
        f"sacreBLEU's tokenizer {wanted[-1]!r} cannot be loaded ({problem}). {fix}"
    ) from failure


def words(bleu: BLEU, text: str) -> list[str]:
    """Return the tokens of a line by sacreBLEU's tokenizer."""
    tokenized: str = bleu.tokenizer(text.rstrip())
    return tokenized.split()


def _usual_tokenizers(language: str) -> tuple[str, ...]:
    return LANGUAGE_TOKENIZERS.get(language.split("_")[0], ("13a",))


@dataclass(frozen=True)
class Bleu(Score):
    """BLEU in 0–100."""

    option: BleuTokenizerOption
    tokenizers: Mapping[str, str]  # target language → name of sacreBLEU's tokenizer

    column = Column("bleu", "BLEU", out_of_100=True)

    @classmethod
    def into(cls, targets: Iterable[str], *, option: BleuTokenizerOption) -> Self:
        """Return BLEU into some languages; ConfigError if a tokenizer cannot be loaded."""
        return cls(option, {code: bleu_tokenizer(code, option=option) for code in targets})

    def line_statistics(self, lines: TranslatedLines) -> LineStatistics:
        """Return (lines, 10): lengths of both sides, matches and totals of orders 1 to 4."""
        bleu = BLEU(tokenize=self.tokenizers[lines.direction.target], force=True)
        sides = (lines.hypotheses, lines.references)
        hypotheses, references = ([words(bleu, text) for text in side] for side in sides)
        counts = shared_words(hypotheses, references, orders=bleu.max_ngram_order)
        lengths = [list(map(len, side)) for side in (hypotheses, references)]
        rows = np.concatenate([np.array(lengths).T, counts[:, :, 2], counts[:, :, 0]], axis=1)
        bleu.num_refs = 1
        return LineStatistics(rows.astype(np.int32), str(bleu.get_signature()))

    def of_corpus(self, rows: Rows) -> float:
        """Return sacreBLEU's score, to the last digit."""
        totals = rows.sum(axis=0, dtype=np.int64).tolist()
        return float(BLEU()._compute_score_from_stats(totals).score)

    def of_sums(self, sums: Floats, *, lines: LineCount) -> Floats:  # noqa: ARG002 (one signature)
        """Return BLEU with sacreBLEU's exponential smoothing, (draws, 10) → (draws,)."""
        hypothesis, reference = sums[:, 0], sums[:, 1]
        correct, total = sums[:, 2:6], sums[:, 6:10]
        zeros = np.cumsum((correct == 0) & (total > 0), axis=1)
        numerators = np.where(correct == 0, 0.5**zeros, correct)
        # Without any n-gram of an order sacreBLEU leaves its precision at 0, and so the score.
        scored = (total > 0).all(axis=1) & (correct > 0).any(axis=1)
        logarithms = np.log(100.0 * numerators / np.maximum(total, 1.0)).mean(axis=1)
        brevity = np.minimum(1.0 - reference / np.maximum(hypothesis, 1.0), 0.0)
        return np.where(scored, np.exp(brevity + logarithms), 0.0)

    @property
    def unspaced(self) -> list[str]:
        """Return the target languages without spaces, into which BLEU is low for any text."""
        by_spaces = [code for code, tokenizer in self.tokenizers.items() if tokenizer == "13a"]
        return [code for code in by_spaces if not parts_words_by_spaces(code)]

    def caveats(self) -> list[str]:
        """Return a warning for each fallback tokenizer, and for languages without spaces."""
        warnings = [
            f"BLEU into {code}: tokenizer {tokenizer} replaces {_usual_tokenizers(code)[0]}, "
            "which cannot be loaded here."
            for code, tokenizer in self.tokenizers.items()
            if self.option == "per-language" and tokenizer != _usual_tokenizers(code)[0]
        ]
        if self.unspaced:
            warnings.append(
                f"BLEU into {listed(self.unspaced)} takes all text between two spaces for one word "
                "(tokenizer 13a), and is low for any translation. Read chrF++, or add spbleu to "
                "evaluation.scores."
            )
        return warnings


@dataclass(frozen=True)
class SpBleu(Bleu):
    """BLEU of FLORES-200's pieces in all languages, in 0–100."""

    column = Column("spbleu", "spBLEU", out_of_100=True)
