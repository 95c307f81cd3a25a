"""Assign the ids of a vocabulary that is exported for other software.

Hugging Face's M2M-100 counts positions from the id of padding + 1, ours count from 2 as fairseq's
do. Padding must therefore be 1, and the rows of the embedding are put into fairseq's order:

- ``M2M100Tokenizer``: specials, pieces, the hundred languages of M2M-100 in its order,
  spare rows. Rows of languages that a model lacks are zeros.
- ``NllbTokenizer``, where language tokens are free: specials, pieces, the model's own languages,
  spare rows. An imported model keeps its tokens; others get NLLB's codes (``nllb_token``).

Spare rows are ids of ours without a token, which imported models can have. They take part in the
softmax.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from sentencepiece import SentencePieceProcessor
from torch import Tensor

from pipeline.artifacts.tokenizer import TokenizerFiles
from pipeline.checkpoints.foreign.hugging_face_tokenizer import (
    M2M100_LANGUAGES,
    NLLB_LANGUAGES,
    SPECIALS,
    model_codes,
)
from pipeline.errors import CheckpointError
from pipeline.languages import (
    UNKNOWN_SCRIPT,
    distinct_codes,
    iso_639_3,
    parse_tag,
    written_script,
)

_NLLB_OF_FAIRSEQ = re.compile(r"__([a-z]{3}_[A-Z][a-z]{3})__")
"""fairseq's spelling of NLLB's tokens: ``__eng_Latn__`` for ``eng_Latn`` of transformers."""


@dataclass(frozen=True)
class Entries:
    """The meaning of each id of a tokenizer of ours.

    Attributes:
        specials: Ids of bos, pad, eos and unk, in the order of SPECIALS.
        pieces: Piece → id without specials, in the order of ids.
        unknown_pieces: Number of pieces of the SentencePiece model that have no id.
        languages: Code of a language → id, in the order of ids.
        tokens: Code of a language → its token.
        spare: Ids without a token.
        origin: The checkpoint that an error names.
        given: Languages with tokens that were imported with the model.
    """

    specials: tuple[int, ...]
    pieces: dict[str, int]
    unknown_pieces: int
    languages: dict[str, int]
    tokens: dict[str, str]
    spare: list[int]
    origin: Path
    given: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Layout:
    """The ids of an exported vocabulary: specials, pieces, languages, spare rows.

    Attributes:
        pieces: Pieces, from id 4 on.
        language_tokens: Language tokens, after the pieces.
        token_of: Code of a language of the model → its token.
        rows: Our id for each exported id; None: the model has none, and the row is zeros.
        num_spare: Number of rows after the languages.
        of_hundred: True: ``M2M100Tokenizer``; False: ``NllbTokenizer``.
    """

    pieces: tuple[str, ...]
    language_tokens: tuple[str, ...]
    token_of: Mapping[str, str]
    rows: tuple[int | None, ...]
    num_spare: int
    of_hundred: bool

    @property
    def absent(self) -> list[int]:
        """Return the ids that the model must never predict."""
        return [index for index, row in enumerate(self.rows) if row is None]

    def rearranged(self, weight_VD: Tensor) -> Tensor:
        """Return our embedding with its rows in this order."""
        index = torch.tensor([0 if row is None else row for row in self.rows])
        arranged_VD = weight_VD[index]
        arranged_VD[self.absent] = 0
        return arranged_VD


def entries_of(files: TokenizerFiles, origin: Path) -> Entries:
    """Return the meaning of each id of a tokenizer.

    Raises:
        CheckpointError: Its vocabulary is no single SentencePiece model, or a piece is spelled like
            a special or a language token.
    """
    is_single = files.target_model is None
    if files.model is None or files.description.kind == "byte_bpe" or not is_single:
        kind = "vocabulary of bytes (tokenizer.kind)" if is_single else "vocabulary per side"
        raise CheckpointError(
            f"{origin} has a {kind}, which no format can express. Name a checkpoint with a single "
            "SentencePiece vocabulary."
        )
    tokenizer, description = files.build(), files.description
    processor = SentencePieceProcessor(model_proto=files.model)
    numbering = description.numbering
    ids = list(range(processor.get_piece_size())) if numbering is None else numbering.pieces
    specials = (tokenizer.bos_id, tokenizer.pad_id, tokenizer.eos_id, tokenizer.unk_id)
    known = sorted(
        (own, processor.id_to_piece(index))
        for index, own in enumerate(ids)
        if own is not None and own not in specials
    )
    languages = sorted(description.languages, key=tokenizer.language_token_id)
    tokens = {code: description.language_token(code) for code in languages}
    language_ids = {code: tokenizer.language_token_id(code) for code in languages}
    used = {*specials, *language_ids.values(), *(own for own, _ in known)}
    pieces = {piece: own for own, piece in known}
    _refuse_clash(origin, pieces, [*SPECIALS.values(), *tokens.values()])
    lacking = (index for index, own in enumerate(ids) if own is None)
    return Entries(
        specials=specials,
        pieces=pieces,
        unknown_pieces=sum(
            not (processor.is_control(i) or processor.is_unknown(i)) for i in lacking
        ),
        languages=language_ids,
        tokens=tokens,
        spare=[index for index in range(tokenizer.size) if index not in used],
        origin=origin,
        given=frozenset(description.token_spellings),
    )


def chosen_layout(entries: Entries) -> Layout:
    """Return M2M-100's layout if it has all languages with the same tokens, else NLLB's.

    Raises:
        CheckpointError: A token is also a piece, or belongs to another language, too.
    """
    hundred = {
        code: f"__{spelling}__" for spelling, code in distinct_codes(M2M100_LANGUAGES).items()
    }
    of_hundred = set(entries.languages) <= set(hundred) and all(
        entries.tokens[code] == hundred[code] for code in entries.given
    )
    language_rows: list[int | None]
    if of_hundred:
        tokens = hundred
        language_rows = [entries.languages.get(code) for code in tokens]
    else:
        tokens = nllb_layout_tokens(entries)
        language_rows = [*entries.languages.values()]
    _refuse_clash(entries.origin, entries.pieces, tokens.values())
    return Layout(
        pieces=tuple(entries.pieces),
        language_tokens=tuple(tokens.values()),
        token_of={code: tokens[code] for code in entries.languages},
        rows=(*entries.specials, *entries.pieces.values(), *language_rows, *entries.spare),
        num_spare=len(entries.spare),
        of_hundred=of_hundred,
    )


def nllb_layout_tokens(entries: Entries) -> dict[str, str]:
    """Return code → token of ``NllbTokenizer``: imported tokens, else NLLB's codes.

    A language that was added to an imported model follows the style of the model's tokens.

    Raises:
        CheckpointError: Two languages have one token.
    """
    known = {code: _NLLB_OF_FAIRSEQ.sub(r"\1", entries.tokens[code]) for code in entries.given}
    in_nllb_form = not known or not set(NLLB_LANGUAGES).isdisjoint(known.values())
    tokens: dict[str, str] = {}
    for code in entries.languages:
        own = nllb_token(code) if in_nllb_form else entries.tokens[code]
        token = known.get(code, own)
        if token in tokens.values():
            other = next(one for one, used in tokens.items() if used == token)
            raise CheckpointError(
                f"{entries.origin} has the languages {other!r} and {code!r}, which would share the "
                f"token {token!r}. Export it --to ctranslate2."
            )
        tokens[code] = token
    return tokens


def nllb_token(code: str) -> str:
    """Return NLLB's code of a language: ISO 639-3 and script, ``eng_Latn``.

    The 202 languages of NLLB-200 have their published codes. Others have the ISO 639-3 code if the
    registry knows it, the script that the code names or CLDR gives (``Zzzz`` if neither does), and
    the region if the code has one: ``cos_Latn``, ``srp_Latn``, ``por_Latn_BR``.
    """
    published = _nllb_spellings()
    if code in published:
        return published[code]
    tag = parse_tag(code)
    usual = published.get(tag.language) or iso_639_3(tag.language)
    parts = (usual.partition("_")[0], written_script(code) or UNKNOWN_SCRIPT, tag.region)
    return "_".join(filter(None, parts))


@cache
def _nllb_spellings() -> Mapping[str, str]:
    """Return our code → NLLB's."""
    return {code: spelling for spelling, code in model_codes(NLLB_LANGUAGES).items()}


def _refuse_clash(origin: Path, pieces: Iterable[str], reserved: Iterable[str]) -> None:
    clashing = sorted(set(pieces) & set(reserved))
    if clashing:
        raise CheckpointError(
            f"The vocabulary of {origin} has a piece {clashing[0]!r}, which other software takes "
            "for a special or a language token. Name a checkpoint without such a piece."
        )
