"""chrF++ and chrF from statistics per line or of all pairs of texts, and shared n-grams for BLEU.

The statistics are sacreBLEU's, counted as integers for many lines at once; sacreBLEU computes the
score of a corpus from their sum.

Legend: T texts, N n-grams of one order, K pairs of an n-gram and a text that has it.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from string import punctuation
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from sacrebleu.metrics.chrf import CHRF

from pipeline.evaluation.scores import (
    Column,
    Floats,
    LineCount,
    LineStatistics,
    Rows,
    Score,
    TranslatedLines,
)
from pipeline.kernels.compiled_loops import (
    ITEM_BITS,
    Integers,
    add_shared_by_pairs,
    count_shared_ngrams,
)


def shared_words(
    hypotheses: Iterable[Sequence[str]], references: Iterable[Sequence[str]], *, orders: int
) -> npt.NDArray[np.int32]:
    """Count n-grams of words of hypothesis, of reference and of both, (lines, orders, 3)."""
    numbers: dict[str, int] = {}
    return _shared(_words(hypotheses, numbers), _words(references, numbers), orders=orders)


_Items = tuple[Integers, Integers]  # items of all lines, and where each line begins, (lines + 1,)


def _shared(hypotheses: _Items, references: _Items, *, orders: int) -> npt.NDArray[np.int32]:
    lines = len(hypotheses[1]) - 1
    found = np.empty((lines, orders, 3), dtype=np.int32)
    count_shared_ngrams(*hypotheses, *references, found)
    return found


def _characters(texts: Sequence[str]) -> _Items:
    codes = np.frombuffer("".join(texts).encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    return codes.astype(np.int64), np.cumsum([0, *map(len, texts)], dtype=np.int64)


def _words(texts: Iterable[Sequence[str]], numbers: dict[str, int]) -> _Items:
    """Return words as numbers, which new words receive in order."""
    items, starts = list[int](), [0]
    for words in texts:
        items += [numbers.setdefault(word, len(numbers)) for word in words]
        starts.append(len(items))
    return np.array(items, dtype=np.int64), np.array(starts, dtype=np.int64)


CHARACTER_ORDERS, WORD_ORDERS = 6, 2
BETA = 2.0  # weight of recall relative to precision
_MARKS = frozenset(punctuation)


@dataclass(frozen=True)
class Chrf(Score):
    """chrF++ in 0–100, with n-grams of up to 6 characters and up to 2 words."""

    column = Column("chrf", "chrF++", out_of_100=True)
    word_orders: ClassVar[int] = WORD_ORDERS

    def line_statistics(self, lines: TranslatedLines) -> LineStatistics:
        """Return (lines, 24): n-grams of hypothesis, reference and both; characters, then words."""
        chrf = self._peer()
        chrf.num_refs = 1
        counts = _shared_ngrams(lines.hypotheses, lines.references)
        rows = counts[:, : 3 * (CHARACTER_ORDERS + self.word_orders)]
        return LineStatistics(rows, str(chrf.get_signature()))

    def of_corpus(self, rows: Rows) -> float:
        """Return sacreBLEU's score, to the last digit."""
        totals = rows.sum(axis=0, dtype=np.int64).tolist()
        return float(self._peer()._compute_score_from_stats(totals).score)

    def of_sums(self, sums: Floats, *, lines: LineCount) -> Floats:  # noqa: ARG002 (one signature)
        """Return the score over the orders that have n-grams, (draws, statistics) → (draws,)."""
        hypothesis, reference, matches = sums[:, 0::3], sums[:, 1::3], sums[:, 2::3]
        known = (hypothesis > 0) & (reference > 0)
        orders = np.maximum(known.sum(axis=1), 1)
        precision, recall = (
            np.where(known, matches / np.maximum(side, 1.0), 0.0).sum(axis=1) / orders
            for side in (hypothesis, reference)
        )
        return _f_score(precision, recall)

    def _peer(self) -> Any:
        return CHRF(char_order=CHARACTER_ORDERS, word_order=self.word_orders)


@dataclass(frozen=True)
class PlainChrf(Chrf):
    """chrF in 0–100, with n-grams of up to 6 characters; 18 statistics per line."""

    column = Column("plain_chrf", "chrF", out_of_100=True)
    word_orders: ClassVar[int] = 0


def line_chrf(hypotheses: Sequence[str], references: Sequence[str]) -> Floats:
    """Return chrF++ of every line by itself, (lines,), as sacreBLEU's ``sentence_score`` does."""
    sums = _shared_ngrams(hypotheses, references).astype(np.float64)
    return Chrf().of_sums(sums, lines=1)


def _shared_ngrams(hypotheses: Sequence[str], references: Sequence[str]) -> npt.NDArray[np.int32]:
    sides = hypotheses, references
    without_spaces = (["".join(text.split()) for text in side] for side in sides)
    characters = _shared(*map(_characters, without_spaces), orders=CHARACTER_ORDERS)
    of_words = shared_words(*(map(words, side) for side in sides), orders=WORD_ORDERS)
    counts = np.concatenate([characters, of_words], axis=1)
    # Orders without any n-gram in the reference do not count against the hypothesis.
    counts[:, :, 0] *= counts[:, :, 1] > 0
    return counts.reshape(len(counts), -1)


def pairwise_chrf(texts: Sequence[str]) -> Floats:
    """Return chrF++ of every text (rows) with every text as its reference (columns), (T, T).

    The n-grams of each text are counted once, for all pairs. The scores equal sacreBLEU's
    ``sentence_score``.
    """
    precision_TT, orders_TT = np.zeros((2, len(texts), len(texts)))
    characters = _characters(["".join(text.split()) for text in texts])
    of_words = _words(map(words, texts), {})
    for items, orders in ((characters, CHARACTER_ORDERS), (of_words, WORD_ORDERS)):
        for shared_TT in _shared_by_pairs(items, orders=orders):
            total_T = shared_TT.diagonal()
            orders_TT += np.outer(total_T > 0, total_T > 0)
            precision_TT += shared_TT / np.maximum(total_T, 1)[:, None]
    precision_TT /= np.maximum(orders_TT, 1)
    return _f_score(precision_TT, precision_TT.T)  # the recall of a pair is the precision of (b, a)


def _shared_by_pairs(items: _Items, *, orders: int) -> Iterator[Integers]:
    """Yield the number of shared n-grams of all pairs of texts for each order, (T, T)."""
    (item_N, starts), texts = items, len(items[1]) - 1
    text_N = np.repeat(np.arange(texts), np.diff(starts))
    place_N, ngram_N = np.arange(len(item_N)), np.zeros(len(item_N), dtype=np.int64)
    for order in range(orders):
        fits_N = place_N + order < starts[1:][text_N[place_N]]
        place_N, ngram_N = place_N[fits_N], ngram_N[fits_N]
        # A longer n-gram is a shorter one and one more item.
        longer_N = ngram_N << ITEM_BITS | item_N[place_N + order]
        _, ngram_N = np.unique(longer_N, return_inverse=True)
        pair_K, count_K = np.unique(ngram_N * texts + text_N[place_N], return_counts=True)
        shared_TT = np.zeros((texts, texts), dtype=np.int64)
        add_shared_by_pairs(pair_K // texts, pair_K % texts, count_K, shared_TT)
        yield shared_TT


def _f_score(precision: Floats, recall: Floats) -> Floats:
    weighted = BETA**2 * precision + recall
    scores: Floats = 100.0 * (1 + BETA**2) * precision * recall
    scores /= np.where(weighted, weighted, 1.0)
    return scores


def words(text: str) -> list[str]:
    """Split a text into words as sacreBLEU's chrF does.

    An ASCII punctuation mark that ends a longer word, or else begins it, becomes a word of its own:
    ``(hi)`` is ``(hi`` and ``)``.
    """
    found = []
    for word in text.split():
        # The place where a word is cut in two; 0: nowhere.
        cut = (len(word) - 1 if word[-1] in _MARKS else int(word[0] in _MARKS)) % len(word)
        found += [word[:cut], word[cut:]] if cut else [word]
    return found
