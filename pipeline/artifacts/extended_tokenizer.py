"""Extend a tokenizer by languages and pieces, which get new ids; no old id changes."""

import struct
from collections.abc import Sequence

from sentencepiece import SentencePieceProcessor

from pipeline.artifacts.tokenizer import Numbering, TokenizerFiles
from pipeline.artifacts.vocabularies import text_pieces

_CONTROL_TYPE = b"\x18\x03"
"""Field 3 of a piece, its type: control. Without the field, a piece is an ordinary one."""


def with_languages(files: TokenizerFiles, added: Sequence[str]) -> TokenizerFiles:
    """Return the vocabulary with more languages; their tokens are new ids after all others."""
    numbering = _numbering(files)
    tokens = {code: numbering.size + number for number, code in enumerate(added)}
    description = files.description.model_copy(
        update={
            "languages": tuple(sorted([*files.description.languages, *added])),
            "numbering": numbering.model_copy(
                update={
                    "size": numbering.size + len(added),
                    "language_tokens": {**numbering.language_tokens, **tokens},
                }
            ),
        }
    )
    return TokenizerFiles(description, files.model, files.target_model)


def with_pieces_of(files: TokenizerFiles, trained: bytes) -> TokenizerFiles:
    """Return a SentencePiece vocabulary with the pieces of another model that it lacks.

    New pieces score below all old ones. BPE merges them last: it splits a text as before and
    then joins some neighbors; a unigram model takes one where the old pieces that it replaces
    have a lower total score.

    Args:
        files: The vocabulary, one SentencePiece model.
        trained: A SentencePiece model of the same type.
    """
    assert files.model is not None
    old, new = (SentencePieceProcessor(model_proto=model) for model in (files.model, trained))
    score_of = {new.id_to_piece(index): new.get_score(index) for index in text_pieces(new)}
    lowest = min((old.get_score(index) for index in text_pieces(old)), default=0.0)
    present = {old.id_to_piece(index) for index in range(old.get_piece_size())}
    added = {piece: lowest - 1 + score for piece, score in score_of.items() if piece not in present}
    numbering = _numbering(files)
    ids, size = list(numbering.pieces), numbering.size
    for index in text_pieces(old):  # an imported model may lack ids for pieces of its vocabulary
        if ids[index] is None and old.id_to_piece(index) in score_of:
            ids[index], size = size, size + 1
    ids += range(size, size + len(added))
    numbering = numbering.model_copy(update={"size": size + len(added), "pieces": tuple(ids)})
    # A field that repeats may stand anywhere in a protocol buffer: more pieces go to the end.
    model = files.model + b"".join(
        piece_field(piece, score=score) for piece, score in added.items()
    )
    return TokenizerFiles(files.description.model_copy(update={"numbering": numbering}), model)


def piece_field(piece: str, *, score: float = 0.0, control: bool = False) -> bytes:
    """Return a piece as field 1 of a SentencePiece model (``sentencepiece_model.proto``)."""
    text = piece.encode()
    body = _sized(text) + b"\x15" + struct.pack("<f", score) + _CONTROL_TYPE * control
    return _sized(body)


def _sized(content: bytes) -> bytes:
    """Return field 1 of a protocol buffer with this content."""
    length, size = len(content), bytearray()
    while length >= 0x80:
        size.append(length & 0x7F | 0x80)
        length >>= 7
    return b"\x0a" + bytes([*size, length]) + content


def _numbering(files: TokenizerFiles) -> Numbering:
    """Return the ids of a vocabulary, also where they follow from its pieces."""
    if files.description.numbering is not None:
        return files.description.numbering
    tokenizer = files.build()
    return Numbering(
        size=tokenizer.size,
        pad=tokenizer.pad_id,
        bos=tokenizer.bos_id,
        eos=tokenizer.eos_id,
        unk=tokenizer.unk_id,
        pieces=tuple(range(tokenizer.size - len(tokenizer.languages))),
        language_tokens={code: tokenizer.language_token_id(code) for code in tokenizer.languages},
    )
