"""Tokenizers: text to token ids and back, language tokens, and the tags of a translation.

A tokenizer is a folder with ``tokenizer.json`` and, for SentencePiece, ``sentencepiece.model``;
languages with pieces of their own add ``sentencepiece.target.model``. The same files are part of
tokenizer artifacts, shards and checkpoints. Token ids are the pieces of the vocabulary, specials
included, followed by one token per language in alphabetical order, unless the tokenizer has its own
numbering, as imported vocabularies do. Text never encodes to specials or language tokens: ``</s>``
or ``__de__`` in a sentence is text.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from sentencepiece import SentencePieceProcessor

from data_prep.settings import SEGMENTERS
from pipeline.artifacts.artifact import Artifact, to_json
from pipeline.artifacts.vocabularies import (
    DESCRIPTION_NAME,
    MODEL_NAME,
    SPACE,
    TARGET_MODEL_NAME,
    ByteLevelVocabulary,
    ByteVocabulary,
    Decoded,
    Integers,
    Numbering,
    RenumberedVocabulary,
    SentencePieceVocabulary,
    SourceAndTargetVocabulary,
    Vocabulary,
    piece_field,
    text_pieces,
)
from pipeline.batching.settings import TagScheme
from pipeline.config.documents import MAX_JSON_BYTES, read_bytes
from pipeline.errors import ArtifactError, ConfigError, without_case
from pipeline.languages import nearest_codes
from pipeline.terminal import counted, listed

MAX_MODEL_BYTES = 2**28
"""Largest SentencePiece model; a model of a million pieces has about 25 MB."""

WHITE_SPACE_BYTES = ("<0x09>", "<0x0A>", "<0x0D>", "<0x20>")

_BYTES = re.compile("(<0x[0-9A-F]{2}>)+")

LanguageTokenScheme = Literal["underscores", "angle", "brackets", "lang_tok", "plain"]


class SegmenterRecord(BaseModel):
    """Segmenter of a language (``segmenters.py``)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    """``characters``, ``mecab`` or ``punctuation``, or the name of the user's function."""
    sha256: str | None = None
    """Digest of the file with the user's function."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.sha256 is None and self.name not in SEGMENTERS:
            raise ValueError(f"there is no segmenter {self.name!r}")
        return self


class TokenizerDescription(BaseModel):
    """Contents of ``tokenizer.json``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["sentencepiece", "byte_bpe", "bytes"]
    """Unit of the model's pieces: text (for characters too) or UTF-8 bytes; ``bytes`` has no
    model."""
    languages: tuple[str, ...]
    language_token_scheme: LanguageTokenScheme
    numbering: Numbering | None = None
    """Ids of an imported or extended vocabulary; None: pieces, then languages in order."""
    target_languages: tuple[str, ...] = ()
    """Languages with a vocabulary of their own, the only targets of translation; empty: a
    single vocabulary."""
    segmenters: dict[str, SegmenterRecord] = Field(default_factory=dict)
    """Language written without spaces → segmenter."""
    token_spellings: dict[str, str] = Field(default_factory=dict)
    """Language → spelling of its token in the imported vocabulary, for example NLLB's ``eng_Latn``.
    It affects no id; other languages follow ``language_token_scheme``."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        known, numbering = set(self.languages), self.numbering
        if list(self.languages) != sorted(known):
            raise ValueError("languages must be sorted and differ from each other")
        if not known.issuperset([*self.target_languages, *self.segmenters, *self.token_spellings]):
            raise ValueError("targets, segmenters and spellings must be of these languages")
        if self.target_languages and self.kind == "bytes":
            raise ValueError("bytes are one vocabulary for all languages")
        if numbering is not None and not known <= numbering.language_tokens.keys():
            raise ValueError("numbering.language_tokens must name all languages")
        return self

    def language_token(self, code: str) -> str:
        """Return a language's token as the vocabulary's own software writes it."""
        return self.token_spellings.get(code) or language_token(code, self.language_token_scheme)

    @property
    def model_names(self) -> tuple[str, ...]:
        """Return the names of the files next to the description."""
        if self.kind == "bytes":
            return ()
        return (MODEL_NAME, TARGET_MODEL_NAME) if self.target_languages else (MODEL_NAME,)


class Tokenizer:
    """Vocabulary with language tokens.

    Attributes:
        languages: Codes, sorted.
        size: Number of ids: pieces with specials, and language tokens.
        pad_id, bos_id, eos_id, unk_id: Ids of the specials in the vocabulary.
        fingerprint: Hexadecimal SHA-256 of all that decides ids and words. Tokenizers with equal
            fingerprints are interchangeable.
        target_languages: Languages with pieces of their own, if any.
        output_size: Number of ids, counted from 0, that text of the target languages consists of;
            None without target languages.
        segmenters: Language written without spaces → segmenter.
        has_bytes: Whether the pieces are bytes.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        language_ids: Mapping[str, int],
        size: int,
        fingerprint: str,
        target_languages: tuple[str, ...] = (),
        target_vocabulary: Vocabulary | None = None,
        output_size: int | None = None,
        segmenters: Mapping[str, SegmenterRecord] | None = None,
    ) -> None:
        self.languages = tuple(sorted(language_ids))
        self.size = size
        self.pad_id = vocabulary.pad_id
        self.bos_id = vocabulary.bos_id
        self.eos_id = vocabulary.eos_id
        self.unk_id = vocabulary.unk_id
        self.fingerprint = fingerprint
        self.target_languages = target_languages
        self.output_size = output_size
        self.segmenters = dict(segmenters or {})
        self._vocabulary = vocabulary
        self._target_vocabulary = target_vocabulary or vocabulary
        self._language_ids = dict(language_ids)
        self._languages_by_id = {index: code for code, index in language_ids.items()}
        self.has_bytes = isinstance(vocabulary, ByteVocabulary)
        self._specials = frozenset((self.pad_id, self.bos_id, self.eos_id, self.unk_id))

    def encode(self, text: str, *, language: str | None = None) -> list[int]:
        """Return the ids of a sentence without specials and tags; unknown text is ``unk_id``."""
        return self.encode_batch([text], language=language)[0]

    def encode_batch(self, lines: Sequence[str], *, language: str | None = None) -> list[list[int]]:
        """Return the ids of each sentence, faster than one by one.

        ``language`` is required if languages have different pieces.
        """
        return self._vocabulary_of(language).encode_batch(lines)

    def _vocabulary_of(self, language: str | None) -> Vocabulary:
        if self.target_languages and language is None:
            raise ValueError("languages differ in their pieces: say which one the text is in")
        return self._target_vocabulary if language in self.target_languages else self._vocabulary

    def places_batch(self, lines: Sequence[str], *, language: str | None = None) -> list[Integers]:
        """Return, for each id of each sentence, the character that it begins at."""
        return self._vocabulary_of(language).places_batch(lines)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids, without specials, language tokens and invalid UTF-8."""
        return self.decode_counted(ids).text

    def decode_counted(self, ids: Iterable[int]) -> Decoded:
        """Return the text like ``decode``, and the number of dropped byte sequences."""
        pieces = [int(index) for index in ids]
        return self._vocabulary.decode(
            [
                index
                for index in pieces
                if index not in self._specials and self.language_of_token(index) is None
            ]
        )

    def piece(self, index: int) -> str | None:
        """Return the vocabulary's spelling of an id; None for specials, tags and spare ids."""
        if index in self._specials or index in self._languages_by_id:
            return None
        return self._vocabulary.piece(index)

    def utf8(self, index: int) -> bytes:
        """Return what an id adds to a text, which may be a part of a character."""
        piece = self.piece(index) or ""
        if _BYTES.fullmatch(piece):
            return bytes.fromhex(piece.replace("<0x", "").replace(">", ""))
        return piece.replace(SPACE, " ").encode()

    def white_space_ids(self) -> tuple[int, ...]:
        """Return the ids of white space, and the ids that are not text.

        Raises:
            ConfigError: Pieces hold white space and text at once.
        """
        pieces = {index: self._vocabulary.piece(index) for index in range(self._vocabulary.size)}
        mixed = [
            piece for piece in pieces.values() if piece and SPACE in piece and piece.strip(SPACE)
        ]
        if mixed:
            raise ConfigError(
                f"The vocabulary has pieces of white space and text at once ({mixed[0]!r}), so "
                "that ids do not tell words apart. Use a vocabulary of bytes or characters."
            )
        return tuple(
            index
            for index, piece in pieces.items()
            if piece is None or piece in WHITE_SPACE_BYTES or not piece.replace(SPACE, " ").strip()
        )

    def language_token_id(self, code: str) -> int:
        """Return the id of a language's token; the ConfigError names the nearest codes."""
        if code not in self._language_ids:
            nearest = ", ".join(nearest_codes(code, self.languages)) or "none"
            raise ConfigError(
                f"The tokenizer has no language {code!r}. Its nearest codes are: {nearest}. Name "
                "one it has, or train it on a corpus with that language."
            )
        return self._language_ids[code]

    def writes(self, code: str) -> bool:
        """Return whether it has pieces to translate into a language."""
        return not self.target_languages or code in self.target_languages

    def refuse_to_write(self, code: str) -> None:
        """Refuse a language that it has no pieces to translate into."""
        if not self.writes(code):
            raise ConfigError(
                f"The tokenizer has pieces to translate into {listed(self.target_languages)} "
                f"only, not into {code}. Leave it out (mixture.targets and decoding.targets "
                "choose directions), or train another tokenizer."
            )

    def language_of_token(self, token_id: int) -> str | None:
        """Return the language of a language token; None for every other id."""
        return self._languages_by_id.get(token_id)


@dataclass(frozen=True)
class Tags:
    """Ids that tell the model the languages, around the source and as the start of the target.

    The source itself ends with ``eos_id``, tags or not; the suffix stands behind that.
    """

    source_prefix: tuple[int, ...]
    decoder_prompt: tuple[int, ...]
    source_suffix: tuple[int, ...] = ()


def tags(tokenizer: Tokenizer, scheme: TagScheme, *, source: str, target: str) -> Tags:
    """Return the tags of a direction.

    - ``src-tgt``: ``__src__`` before the source; the decoder starts from end-of-sentence and
      ``__tgt__`` (fairseq's ``--encoder-langtok src --decoder-langtok``).
    - ``tgt``: ``__tgt__`` before the source; the decoder starts from end-of-sentence
      (``--encoder-langtok tgt``).
    - ``src-suffix-tgt``: like ``src-tgt``, with ``__src__`` after the source's end-of-sentence
      (mBART; NLLB in transformers with ``legacy_behaviour``).

    Raises:
        ConfigError: The tokenizer lacks a language.
    """
    source_token = tokenizer.language_token_id(source)
    target_token = tokenizer.language_token_id(target)
    match scheme:
        case "src-tgt":
            return Tags((source_token,), (tokenizer.eos_id, target_token))
        case "tgt":
            return Tags((target_token,), (tokenizer.eos_id,))
        case "src-suffix-tgt":
            return Tags((), (tokenizer.eos_id, target_token), source_suffix=(source_token,))
        case unknown:
            raise without_case("tags", unknown)


def language_token(code: str, scheme: LanguageTokenScheme) -> str:
    """Return the spelling of a language token for people and other software."""
    match scheme:
        case "underscores":
            return f"__{code}__"
        case "angle":
            return f"<2{code}>"
        case "brackets":
            return f"[{code}]"
        case "lang_tok":
            return f"LANG_TOK_{code.upper()}"
        case "plain":
            return code


@dataclass(frozen=True)
class TokenizerFiles:
    """Contents of a tokenizer's files."""

    description: TokenizerDescription
    model: bytes | None = None
    """SentencePiece model; None for bytes."""
    target_model: bytes | None = None
    """Model of the target languages, if they have their own."""

    def build(self) -> Tokenizer:
        """Build the tokenizer of these files."""
        description, numbering = self.description, self.description.numbering
        languages = description.languages
        vocabulary = _vocabulary(description, self.model)
        target: Vocabulary | None = None
        output_size: int | None = None
        if self.target_model is not None:
            source = vocabulary
            own = _vocabulary(description, self.target_model, name=TARGET_MODEL_NAME)
            vocabulary = SourceAndTargetVocabulary(source, own, encodes="source")
            target = SourceAndTargetVocabulary(source, own, encodes="target")
            output_size = own.size
        if numbering is None:
            size = vocabulary.size + len(languages)
            language_ids = dict(zip(languages, range(vocabulary.size, size), strict=True))
        else:
            vocabulary = RenumberedVocabulary(vocabulary, numbering)
            target = RenumberedVocabulary(target, numbering) if target else None
            size = numbering.size
            language_ids = {code: numbering.language_tokens[code] for code in languages}
        # Spellings decide no id: a vocabulary with and without them is interchangeable.
        deciding = description.model_copy(update={"token_spellings": {}})
        content = _description_bytes(deciding) + (self.model or b"") + (self.target_model or b"")
        return Tokenizer(
            vocabulary,
            language_ids=language_ids,
            size=size,
            fingerprint=hashlib.sha256(content).hexdigest(),
            target_languages=description.target_languages if target else (),
            target_vocabulary=target,
            output_size=output_size,
            segmenters=description.segmenters,
        )

    def write(self, directory: Path) -> None:
        """Write the files into a folder, which is made."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / DESCRIPTION_NAME).write_bytes(_description_bytes(self.description))
        for name, content in ((MODEL_NAME, self.model), (TARGET_MODEL_NAME, self.target_model)):
            if content is not None:
                (directory / name).write_bytes(content)


def _vocabulary(
    description: TokenizerDescription, model: bytes | None, *, name: str = MODEL_NAME
) -> Vocabulary:
    """Build the vocabulary of one model."""
    if model is None:
        return ByteVocabulary()
    if description.kind == "byte_bpe":
        return ByteLevelVocabulary(model, name=name)
    return SentencePieceVocabulary(model, has_specials=description.numbering is None, name=name)


def tokenizer_folder(artifact: Artifact) -> Path:
    """Return the folder of the tokenizer's files in a tokenizer or another artifact."""
    folder = "" if artifact.manifest.kind == "tokenizer" else "tokenizer/"
    directory = artifact.file(folder + DESCRIPTION_NAME).parent
    artifact.check([folder + name for name in _read_description(directory).model_names])
    return directory


def load_tokenizer(directory: Path) -> Tokenizer:
    """Read a tokenizer from an artifact's directory or from a copy of its files.

    Raises:
        ArtifactError: A file is missing or damaged, or the vocabulary lacks a special.
    """
    files = read_tokenizer_files(directory)
    try:
        return files.build()
    except ArtifactError as error:
        raise ArtifactError(f"In {directory}, {error}") from error


def read_tokenizer_files(directory: Path) -> TokenizerFiles:
    """Read the contents of a tokenizer's files."""
    description = _read_description(directory)
    models = [_read(directory / name) for name in description.model_names]
    return TokenizerFiles(description, *models)


def copy_tokenizer(source_dir: Path, target_dir: Path) -> None:
    """Copy a tokenizer's files into a folder, which is made."""
    target_dir.mkdir(parents=True, exist_ok=True)
    for name in (DESCRIPTION_NAME, *_read_description(source_dir).model_names):
        (target_dir / name).write_bytes(_read(source_dir / name))


def _description_bytes(description: TokenizerDescription) -> bytes:
    document: dict[str, Any] = description.model_dump(mode="json", exclude_defaults=True)
    return to_json(document).encode()


def _read_description(directory: Path) -> TokenizerDescription:
    path = directory / DESCRIPTION_NAME
    try:
        return TokenizerDescription.model_validate_json(_read(path))
    except ValidationError as error:
        raise ArtifactError(
            f"{path} does not describe a tokenizer ({counted(error.error_count(), 'problem')}). "
            "Restore it from a copy or train the tokenizer again."
        ) from error


def _read(path: Path) -> bytes:
    fix = "a tokenizer needs it; restore it from a copy or train the tokenizer again"
    limit = MAX_JSON_BYTES if path.name == DESCRIPTION_NAME else MAX_MODEL_BYTES
    return read_bytes(path, limit=limit, fix=fix)


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

    New pieces score below all old pieces. BPE merges them last: it splits a text as before and
    then joins some neighbors; a unigram model takes one where the old pieces that it replaces
    have a lower total score.

    Both are SentencePiece models of the same type.
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
