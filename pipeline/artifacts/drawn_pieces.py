"""Pieces of a line drawn anew: the same for a seed in every process.

Unigram models draw among the n best segmentations (Kudo, Subword Regularization, 2018), others
leave merges out (Provilkov and others, BPE-Dropout, 2020). SentencePiece does both, but its draws
differ from process to process whatever its seed (measured with 0.2.3), so that it is asked for
segmentations and scores alone.
"""

import math
import random
import re
from functools import cached_property
from itertools import pairwise

from sentencepiece import SentencePieceProcessor

SPACE = "▁"
"""How SentencePiece spells a space."""


class DrawnPieces:
    """Of one SentencePiece model."""

    def __init__(self, processor: SentencePieceProcessor) -> None:
        self._processor = processor

    def draw(self, line: str, *, alpha: float, nbest: int, seed: int) -> list[int]:
        """Ids of a line; ``alpha``: the power of probabilities, or the share of merges left out."""
        generator = random.Random(seed)
        if self._has_nbest:
            return self._one_of_best(line, alpha=alpha, nbest=nbest, generator=generator)
        return self._by_merges(line, rate=alpha, generator=generator)

    @cached_property
    def _has_nbest(self) -> bool:
        try:
            self._processor.nbest_encode_as_ids("a", 2)
        except RuntimeError:  # of other models than unigram ones
            return False
        return True

    def _one_of_best(
        self, line: str, *, alpha: float, nbest: int, generator: random.Random
    ) -> list[int]:
        """In proportion to P(segmentation)^alpha."""
        best: list[list[int]] = self._processor.nbest_encode_as_ids(line, nbest)
        scores = [sum(map(self._processor.get_score, ids)) for ids in best]
        weights = [math.exp(alpha * (score - max(scores))) for score in scores]
        (chosen,) = generator.choices(best, weights)
        return chosen

    def _by_merges(self, line: str, *, rate: float, generator: random.Random) -> list[int]:
        """Byte-pair encoding from characters on, without a share of the merges of every step.

        What stands for no text of its own (unknown characters and their bytes) stays as it is.
        """
        pieces: list[str] = self._processor.encode(line, out_type=str)
        ids: list[int] = self._processor.encode(line, out_type=int)
        found: list[int] = []
        run = ""
        for piece, index in zip(pieces, ids, strict=True):
            if piece in self._score:
                run += piece
                continue
            found += self._merged(run, rate=rate, generator=generator)
            found.append(index)
            run = ""
        return found + self._merged(run, rate=rate, generator=generator)

    def _merged(self, text: str, *, rate: float, generator: random.Random) -> list[int]:
        words = re.split(f"(?={SPACE})", text) if self._begins_words_alone else [text]
        return [
            index
            for word in words
            for index in self._merged_word(word, rate=rate, generator=generator)
        ]

    @cached_property
    def _begins_words_alone(self) -> bool:
        """Whether no piece reaches over a space, so that words can be taken one by one."""
        return not any(SPACE in piece[1:] for piece in self._score)

    def _merged_word(self, word: str, *, rate: float, generator: random.Random) -> list[int]:
        symbols = list(word)
        while True:
            possible = [
                (-self._score[pair], place)
                for place, pair in enumerate(map("".join, pairwise(symbols)))
                if pair in self._score and generator.random() >= rate
            ]
            if not possible:
                break
            _, place = min(possible)
            symbols[place : place + 2] = [symbols[place] + symbols[place + 1]]
        return [int(self._processor.piece_to_id(symbol)) for symbol in symbols]

    @cached_property
    def _score(self) -> dict[str, float]:
        """Pieces of text; of those that can be merged the one of the highest score comes first."""
        model = self._processor
        return {
            model.id_to_piece(index): model.get_score(index)
            for index in range(model.get_piece_size())
            if not (
                model.is_control(index)
                or model.is_unknown(index)
                or model.is_byte(index)
                or model.is_unused(index)
            )
        }
