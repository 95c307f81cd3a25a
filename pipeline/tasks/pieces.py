"""XLM-R's vocabulary: a SentencePiece model whose ids are moved by one, with fairseq's specials.

``<s>`` is 0, ``<pad>`` 1, ``</s>`` 2, ``<unk>`` 3, and piece i of the model i + 1; behind the last
one stands ``<mask>`` (Hugging Face's ``tokenization_xlm_roberta.py``). Text that looks like a
special stays text.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from sentencepiece import SentencePieceProcessor

from pipeline.errors import CheckpointError

Integers = npt.NDArray[np.int64]

BOS, PAD, EOS, UNKNOWN = range(4)
OFFSET = 1
PIECES_FILE = "sentencepiece.bpe.model"


class Located(NamedTuple):
    """Ids of a text, and which of its characters each stands for: [begin, end), no space around.

    A piece of nothing but space has an empty range.
    """

    ids: Integers
    begin: Integers
    end: Integers


class Pieces:
    """Text to ids."""

    def __init__(self, model: bytes, *, origin: Path) -> None:
        """Raises CheckpointError where it is no SentencePiece model as XLM-R has one."""
        self.model = model
        try:
            self._processor = SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise CheckpointError(
                f"{origin / PIECES_FILE} is not a SentencePiece model: restore it from where it "
                "was published."
            ) from error
        specials = [self._processor.id_to_piece(index) for index in range(3)]
        if specials != ["<unk>", "<s>", "</s>"]:
            raise CheckpointError(
                f"{origin / PIECES_FILE} begins with {', '.join(specials)} where XLM-R's begins "
                "with <unk>, <s>, </s>: name the folder of an XLM-R."
            )

    @property
    def size(self) -> int:
        """Ids, ``<mask>`` included."""
        size: int = self._processor.get_piece_size()
        return size + OFFSET + 1

    def encode(self, text: str) -> Integers:
        """Ids without specials."""
        return _moved(self._processor.encode(text))

    def locate(self, text: str) -> Located:
        """Ids without specials, and where each lies in the text."""
        found = self._processor.encode(text, out_type="offset_mapping")
        range_N2 = np.array(found["offsets"], dtype=np.int64).reshape(-1, 2)
        begin, end = _trimmed(text, range_N2[:, 0], range_N2[:, 1])
        return Located(_moved(found["ids"]), begin, end)


def _moved(ids: object) -> Integers:
    found = np.asarray(ids, dtype=np.int64)
    return np.where(found == 0, UNKNOWN, found + OFFSET)


def _trimmed(text: str, begin: Integers, end: Integers) -> tuple[Integers, Integers]:
    """Ranges of characters without the space at their beginnings and ends."""
    size = len(text)
    is_word = np.fromiter((not letter.isspace() for letter in text), dtype=bool, count=size)
    places = np.arange(size)
    # the first letter from a place on, and the place behind the last letter before it
    following = np.minimum.accumulate(np.append(np.where(is_word, places, size), size)[::-1])[::-1]
    preceding = np.maximum.accumulate(np.append(0, np.where(is_word, places + 1, 0)))
    begin = np.minimum(following[begin], end)
    return begin, np.maximum(preceding[end], begin)
