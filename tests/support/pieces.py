"""SentencePiece models."""

import io
from collections.abc import Iterable
from typing import Any

import sentencepiece


def train_pieces(lines: Iterable[str], *, size: int, **settings: Any) -> bytes:
    """Train a model; its ids are those of other software (unk, bos and eos, no padding)."""
    stream = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=stream,
        vocab_size=size,
        hard_vocab_limit=False,
        minloglevel=2,
        **{"character_coverage": 1.0, **settings},
    )
    return stream.getvalue()
