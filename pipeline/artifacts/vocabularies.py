"""Vocabularies: pieces of text and their ids, without language tokens.

There are SentencePiece models (unigram, BPE or characters, each with an optional fallback on
bytes), SentencePiece models over UTF-8 bytes, and plain bytes. Any sequence of byte ids decodes:
invalid UTF-8 is dropped and counted.
"""

import struct
from collections.abc import Sequence
from itertools import groupby
from typing import Annotated, Literal, NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, model_validator
from sentencepiece import SentencePieceProcessor

from pipeline.artifacts.spelling import message_field, with_any_rule
from pipeline.errors import ArtifactError

DESCRIPTION_NAME = "tokenizer.json"
MODEL_NAME = "sentencepiece.model"
TARGET_MODEL_NAME = "sentencepiece.target.model"

Integers = npt.NDArray[np.int64]

SPECIALS = {"pad": 0, "bos": 1, "eos": 2, "unk": 3}
"""Ids of the specials in new vocabularies; an imported vocabulary has its own."""


class Decoded(NamedTuple):
    """Text of ids."""

    text: str
    dropped: int = 0
    """Dropped byte sequences that are not valid UTF-8, one per replacement character."""


TokenId = Annotated[int, Field(ge=0, lt=2**31 - 1, strict=True)]


class Numbering(BaseModel):
    """Ids of an imported or extended vocabulary, which do not follow from the order of its pieces.

    Some of the ``size`` ids may belong to nothing: embedding rows that no text reaches.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    size: TokenId
    """Number of ids, language tokens included."""
    pad: TokenId
    bos: TokenId
    eos: TokenId
    unk: TokenId
    pieces: tuple[TokenId | None, ...]
    """Id of each piece of the vocabulary, in its order; None if the model does not know the
    piece."""
    language_tokens: dict[str, TokenId]
    """Ids of the languages, and ids reserved for languages that the model lacks."""

    @property
    def num_unused(self) -> int:
        """Number of ids that belong to nothing."""
        specials = {self.pad, self.bos, self.eos, self.unk}
        return self.size - len({*specials, *self.language_tokens.values(), *self.pieces} - {None})

    @model_validator(mode="after")
    def _check(self) -> Self:
        specials = [self.pad, self.bos, self.eos, self.unk]
        given = [*specials, *self.language_tokens.values()]
        given += [
            index for index in self.pieces if index is not None and index not in set(specials)
        ]
        if len(set(given)) < len(given):
            raise ValueError("two pieces, specials or languages have one id")
        if max(given) >= self.size:
            raise ValueError(f"an id lies beyond size {self.size}")
        return self


class Vocabulary(Protocol):
    """Interface of the vocabulary of a tokenizer, without language tokens."""

    size: int
    pad_id: int
    bos_id: int
    eos_id: int
    unk_id: int

    def encode_batch(self, lines: Sequence[str]) -> list[list[int]]:
        """Return the ids of each line."""

    def places_batch(self, lines: Sequence[str]) -> list[Integers]:
        """Return the character that each id of ``encode_batch`` begins at.

        Several ids of one character begin at that character; so does the id of a space that no
        character stands for.
        """

    def decode(self, ids: list[int]) -> Decoded:
        """Return the text of ids without specials."""

    def piece(self, index: int) -> str | None:
        """Return the vocabulary's spelling of an id; None if it is not a piece of text."""


class SentencePieceVocabulary:
    """SentencePiece model with the special ids that it defines.

    With ``has_specials``, it must define four distinct specials, as a vocabulary without its own
    numbering does. ``name`` is the file name for messages. A model of text that has no rule of
    normalization gets one (``spelling.py``).

    Raises:
        ArtifactError: The bytes are not a model, or a special is missing.
    """

    def __init__(
        self,
        model: bytes,
        *,
        has_specials: bool = True,
        is_text: bool = True,
        name: str = MODEL_NAME,
    ) -> None:
        if not model:  # SentencePiece accepts an empty model, and then fails in every call
            raise _damaged(f"{name} is empty")
        try:
            # The characters of a model over bytes stand for bytes: a rule would change them.
            ruled = with_any_rule(model) if is_text else model
            self._processor = SentencePieceProcessor(model_proto=ruled)
        except RuntimeError as error:
            raise _damaged(f"{name} is not a SentencePiece model") from error
        self.size = self._processor.get_piece_size()
        self.pad_id = self._processor.pad_id()
        self.bos_id = self._processor.bos_id()
        self.eos_id = self._processor.eos_id()
        self.unk_id = self._processor.unk_id()
        self._bytes = _byte_pieces(self._processor)
        if has_specials:
            self._check_specials()

    def encode_batch(self, lines: Sequence[str]) -> list[list[int]]:
        """Return the ids of each line."""
        encoded: list[list[int]] = self._processor.encode(list(lines), out_type=int, num_threads=1)
        return encoded

    def places_batch(self, lines: Sequence[str]) -> list[Integers]:
        """Return the character that each id begins at."""
        encoded = [self._processor.encode(line, out_type="offset_mapping") for line in lines]
        ranges = [np.array(each["offsets"], dtype=np.int64).reshape(-1, 2) for each in encoded]
        return [range_N2[:, 0] for range_N2 in ranges]

    def decode(self, ids: list[int]) -> Decoded:
        """Return the text; fallback bytes that are not valid UTF-8 are dropped.

        SentencePiece itself puts replacement characters.
        """
        if self._bytes.keys().isdisjoint(ids):
            return Decoded(str(self._processor.decode(ids)))
        kept, dropped = self._without_invalid(ids)
        return Decoded(str(self._processor.decode(kept)), dropped)

    def _without_invalid(self, ids: list[int]) -> tuple[list[int], int]:
        """Return the ids without invalid UTF-8, and the number of dropped sequences."""
        kept: list[int] = []
        dropped = 0
        index_of = {byte: index for index, byte in self._bytes.items()}
        for are_bytes, run in groupby(ids, self._bytes.__contains__):
            if not are_bytes:
                kept += run
                continue
            decoded = decode_bytes(bytes(map(self._bytes.__getitem__, run)))
            kept += map(index_of.__getitem__, decoded.text.encode())
            dropped += decoded.dropped
        return kept, dropped

    def piece(self, index: int) -> str | None:
        """Return the piece of an id; None for control and unknown pieces."""
        is_text = index < self.size and not (
            self._processor.is_control(index) or self._processor.is_unknown(index)
        )
        return str(self._processor.id_to_piece(index)) if is_text else None

    def _check_specials(self) -> None:
        ids = {"pad": self.pad_id, "bos": self.bos_id, "eos": self.eos_id, "unk": self.unk_id}
        if min(ids.values()) < 0 or len(set(ids.values())) < len(ids):
            raise ArtifactError(
                f"{MODEL_NAME} has the special ids {ids}, where four distinct ids from 0 on are "
                "wanted (-1 means none). Train it with a piece of its own for each of them."
            )


class ByteVocabulary:
    """Four specials, then the 256 bytes of UTF-8."""

    size = len(SPECIALS) + 256
    pad_id = SPECIALS["pad"]
    bos_id = SPECIALS["bos"]
    eos_id = SPECIALS["eos"]
    unk_id = SPECIALS["unk"]

    def encode_batch(self, lines: Sequence[str]) -> list[list[int]]:
        """Return the ids of each line's bytes."""
        return [[byte + len(SPECIALS) for byte in line.encode()] for line in lines]

    def places_batch(self, lines: Sequence[str]) -> list[Integers]:
        """Return the character that each byte belongs to."""
        return [_characters_of_bytes(line) for line in lines]

    def decode(self, ids: list[int]) -> Decoded:
        """Return the text; invalid UTF-8 is dropped."""
        return decode_bytes(bytes(index - len(SPECIALS) for index in ids))

    def piece(self, index: int) -> str | None:
        """Return a byte as SentencePiece spells it."""
        return f"<0x{index - len(SPECIALS):02X}>" if len(SPECIALS) <= index < self.size else None


class ByteLevelVocabulary:
    """SentencePiece model over UTF-8 bytes, each written as one character.

    Every text has pieces, no text is unknown, and encoded text decodes exactly, spaces included.
    The characters come from GPT-2's byte-level BPE (Radford et al., 2019), except that a space
    stays a space for SentencePiece.
    """

    def __init__(self, model: bytes, *, name: str = MODEL_NAME) -> None:
        self._pieces = SentencePieceVocabulary(model, is_text=False, name=name)
        self.size = self._pieces.size
        self.pad_id, self.bos_id, self.eos_id, self.unk_id = _specials(self._pieces)
        spelled = filter(None, map(self._pieces.piece, range(self.size)))
        others = set().union(*spelled) - {*_READ, SPACE}
        if others or self.decode(self.encode_batch(["  a "])[0]).text != "  a ":
            raise _damaged(
                f"{name} has pieces of text, and {DESCRIPTION_NAME} says that they are of "
                "bytes (byte_bpe)"
            )

    def encode_batch(self, lines: Sequence[str]) -> list[list[int]]:
        """Return the ids of each line's bytes."""
        return self._pieces.encode_batch([write_bytes(line) for line in lines])

    def places_batch(self, lines: Sequence[str]) -> list[Integers]:
        """Return the character that each id begins at."""
        byte_places = self._pieces.places_batch([write_bytes(line) for line in lines])
        return [
            _characters_of_bytes(line)[places]
            for line, places in zip(lines, byte_places, strict=True)
        ]

    def decode(self, ids: list[int]) -> Decoded:
        """Return the text; invalid UTF-8 is dropped."""
        return decode_bytes(_read_bytes(self._pieces.decode(ids).text))

    def piece(self, index: int) -> str | None:
        """Return the piece as text if its bytes are whole characters, else as bytes."""
        written = self._pieces.piece(index)
        if written is None:
            return None
        found = _read_bytes(written.replace(SPACE, " "))
        text, dropped = decode_bytes(found)
        if dropped or SPACE in text:
            return "".join(f"<0x{byte:02X}>" for byte in found)
        return text.replace(" ", SPACE)


class SourceAndTargetVocabulary:
    """Two vocabularies as one: the target's specials and pieces, then the source's pieces.

    Both instances of a tokenizer have the same ids; ``encodes`` chooses the pieces that text
    becomes.

    Raises:
        ArtifactError: A vocabulary does not have the specials of new vocabularies.
    """

    def __init__(
        self, source: Vocabulary, target: Vocabulary, *, encodes: Literal["source", "target"]
    ) -> None:
        for one in (source, target):
            if _specials(one) != tuple(SPECIALS.values()):
                raise _damaged(
                    f"{MODEL_NAME} and {TARGET_MODEL_NAME} do not have the specials {SPECIALS}"
                )
        self._source, self._target = source, target
        self._shift = target.size - len(SPECIALS)
        self._encoder, self._offset = (target, 0) if encodes == "target" else (source, self._shift)
        self.size = source.size + self._shift
        self.pad_id, self.bos_id, self.eos_id, self.unk_id = _specials(target)

    def encode_batch(self, lines: Sequence[str]) -> list[list[int]]:
        """Return the ids of each line."""
        encoded, offset = self._encoder.encode_batch(lines), self._offset
        if not offset:
            return encoded
        specials = len(SPECIALS)
        return [[own if own < specials else own + offset for own in ids] for ids in encoded]

    def places_batch(self, lines: Sequence[str]) -> list[Integers]:
        """Return the character that each id begins at."""
        return self._encoder.places_batch(lines)

    def decode(self, ids: list[int]) -> Decoded:
        """Return the text, with a space where ids of the two vocabularies meet."""
        found = [
            self._source.decode([index - self._shift for index in run])
            if is_source
            else self._target.decode(list(run))
            for is_source, run in groupby(ids, lambda index: index >= self._target.size)
        ]
        return Decoded(" ".join(one.text for one in found), sum(one.dropped for one in found))

    def piece(self, index: int) -> str | None:
        """Return the piece of an id in its vocabulary."""
        if index < self._target.size:
            return self._target.piece(index)
        return self._source.piece(index - self._shift)


class RenumberedVocabulary:
    """Vocabulary with the ids of a numbering; ArtifactError if it has another number of pieces."""

    def __init__(self, vocabulary: Vocabulary, numbering: Numbering) -> None:
        if len(numbering.pieces) != vocabulary.size:
            raise _damaged(
                f"{DESCRIPTION_NAME} numbers {len(numbering.pieces):,} pieces, and the vocabulary "
                f"has {vocabulary.size:,}"
            )
        self._vocabulary = vocabulary
        self._ids = [numbering.unk if index is None else index for index in numbering.pieces]
        self._pieces = {
            index: piece for piece, index in enumerate(numbering.pieces) if index is not None
        }
        self.size = numbering.size
        self.pad_id, self.bos_id = numbering.pad, numbering.bos
        self.eos_id, self.unk_id = numbering.eos, numbering.unk

    def encode_batch(self, lines: Sequence[str]) -> list[list[int]]:
        """Return the ids of each line."""
        encoded = self._vocabulary.encode_batch(lines)
        return [[self._ids[piece] for piece in pieces] for pieces in encoded]

    def places_batch(self, lines: Sequence[str]) -> list[Integers]:
        """Return the character that each id begins at."""
        return self._vocabulary.places_batch(lines)

    def decode(self, ids: list[int]) -> Decoded:
        """Return the text; ids without a piece are dropped."""
        return self._vocabulary.decode([self._pieces[i] for i in ids if i in self._pieces])

    def piece(self, index: int) -> str | None:
        """Return the piece of an id; None for ids without one."""
        own = self._pieces.get(index)
        return None if own is None else self._vocabulary.piece(own)


def _damaged(problem: str) -> ArtifactError:
    return ArtifactError(f"{problem}. Restore the tokenizer's files from one copy.")


def _specials(vocabulary: Vocabulary) -> tuple[int, int, int, int]:
    return vocabulary.pad_id, vocabulary.bos_id, vocabulary.eos_id, vocabulary.unk_id


def decode_bytes(content: bytes) -> Decoded:
    """Decode UTF-8, dropping and counting invalid sequences."""
    text = content.decode(errors="ignore")
    if len(text.encode()) == len(content):
        return Decoded(text)
    # The text may also contain replacement characters of its own.
    marked = content.decode(errors="replace").count("\ufffd")
    return Decoded(text, dropped=marked - text.count("\ufffd"))


def _characters_of_bytes(text: str) -> Integers:
    """Return the character number of each UTF-8 byte of a text."""
    byte_N = np.frombuffer(text.encode(), dtype=np.uint8)
    return np.cumsum((byte_N & 0xC0) != 0x80, dtype=np.int64) - 1


def _visible_bytes() -> dict[int, str]:
    """Return byte → character: printable Latin 1 as is, the others from U+0100 on."""
    characters = {ord(" "): " "}
    for byte in range(256):
        is_visible = chr(byte).isprintable() and byte != 0xA0
        characters.setdefault(byte, chr(byte) if is_visible else "")
    others = iter(range(0x100, 0x200))
    return {byte: written or chr(next(others)) for byte, written in sorted(characters.items())}


_WRITTEN = _visible_bytes()
_READ = {written: byte for byte, written in _WRITTEN.items()}
BYTE_LINE = " ".join(_READ)
"""Text with every byte once, of which a trainer makes a piece each."""


def write_bytes(text: str) -> str:
    """Write the UTF-8 bytes of a text, one character per byte."""
    return text.encode().decode("latin-1").translate(_WRITTEN)


def _read_bytes(written: str) -> bytes:
    """Return the bytes that characters of ``write_bytes`` stand for."""
    return bytes(map(_READ.__getitem__, written))


def _byte_pieces(processor: SentencePieceProcessor) -> dict[int, int]:
    """Return id → byte for the pieces of the byte fallback, if the model has them."""
    pieces = {byte: processor.piece_to_id(f"<0x{byte:02X}>") for byte in range(256)}
    return {index: byte for byte, index in pieces.items() if processor.is_byte(index)}


SPACE = "▁"
"""SentencePiece's spelling of a space."""


def text_pieces(processor: SentencePieceProcessor) -> list[int]:
    """Return the indices of a model's pieces of text, without specials and bytes."""
    return [
        index
        for index in range(processor.get_piece_size())
        if not (
            processor.is_control(index)
            or processor.is_unknown(index)
            or processor.is_byte(index)
            or processor.is_unused(index)
        )
    ]


def has_nbest(processor: SentencePieceProcessor) -> bool:
    """Return whether a model has n best segmentations, as only unigram models have."""
    try:
        processor.nbest_encode_as_ids("a", 2)
    except RuntimeError:
        return False
    return True


_CONTROL_TYPE = b"\x18\x03"
"""Field 3 of a piece, its type: control. Without the field, a piece is an ordinary one."""


def piece_field(piece: str, *, score: float = 0.0, control: bool = False) -> bytes:
    """Return a piece as field 1 of a SentencePiece model (``sentencepiece_model.proto``)."""
    text = piece.encode()
    body = message_field(b"\x0a", text) + b"\x15" + struct.pack("<f", score)
    return message_field(b"\x0a", body + _CONTROL_TYPE * control)
