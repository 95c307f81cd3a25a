"""SentencePiece models with their pieces in another order.

A model is a protocol buffer: a series of fields, each a key and a value. Pieces are its field 1,
one after the other, and their ids are their order; everything else stays byte for byte. (Field
numbers: ``sentencepiece_model.proto`` of google/sentencepiece.)
"""

from collections.abc import Iterator, Sequence

from sentencepiece import SentencePieceProcessor

_PIECES = 1
_CONTROL_TYPE = b"\x18\x03"
"""Field 3 of a piece, its type: control."""
_NO_SCORE = b"\x15" + bytes(4)
"""Field 2 of a piece: 0.0."""


def with_pieces(model: bytes, pieces: Sequence[str]) -> bytes:
    """The same model with unknown, ``<s>``, ``</s>`` and then these pieces, and no others.

    Args:
        pieces: some or all of its ordinary pieces.
    """
    processor = SentencePieceProcessor(model_proto=model)
    found = list(_fields(model))
    stored = [value for number, value in found if number == _PIECES]
    rest = b"".join(value for number, value in found if number != _PIECES)
    chosen = [
        stored[processor.unk_id()],
        _control("<s>"),
        _control("</s>"),
        *(stored[processor.piece_to_id(piece)] for piece in pieces),
    ]
    return b"".join(chosen) + rest


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """The number of each field, and the field with its key."""
    start = 0
    while start < len(message):
        key, position = _varint(message, start)
        match key & 7:
            case 0:
                _, position = _varint(message, position)
            case 1:
                position += 8
            case 2:
                length, position = _varint(message, position)
                position += length
            case 5:
                position += 4
            case wire_type:
                raise ValueError(f"wire type {wire_type}")
        yield key >> 3, message[start:position]
        start = position


def _varint(message: bytes, position: int) -> tuple[int, int]:
    """A number in groups of seven bits, the lowest first, and where it ends."""
    number = shift = 0
    while True:
        byte = message[position]
        number |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            return number, position


def _control(piece: str) -> bytes:
    """Field 1 with a short piece of the type control."""
    text = piece.encode()
    body = bytes([0x0A, len(text)]) + text + _NO_SCORE + _CONTROL_TYPE
    return bytes([0x0A, len(body)]) + body
