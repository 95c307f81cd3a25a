"""Which id everything has in a vocabulary as it is written for other software.

Hugging Face's M2M-100 counts positions from the id of padding + 1, and ours count from 2 as
fairseq's do: so padding must be 1, and the rows of the embedding are put into fairseq's order.

- ``M2M100Tokenizer``: specials, pieces, the hundred languages of M2M-100 in its order,
  spare rows. Rows of languages that a model lacks are zeros.
- ``NllbTokenizer``, whose language tokens can be any: specials, pieces, the model's own languages,
  spare rows. A model that came with tokens keeps them; others get NLLB's codes (``nllb_token``).

Ids of ours that nothing has (models from elsewhere have some) take part in the softmax, and are
kept as spare rows.
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
from pipeline.checkpoints.foreign.vocabularies import (
    M2M100_LANGUAGES,
    M2M100_SPECIALS,
    NLLB_LANGUAGES,
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
"""fairseq's NLLB writes ``__eng_Latn__`` where transformers' has ``eng_Latn``."""


@dataclass(frozen=True)
class Entries:
    """What the ids of a tokenizer of ours belong to."""

    specials: tuple[int, ...]
    """Of bos, pad, eos and unk: fairseq's order, and that of M2M100_SPECIALS."""
    pieces: dict[str, int]
    """Piece → id, specials left out, in the order of ids."""
    unknown_pieces: int
    """Pieces that texts can have and the model does not know."""
    languages: dict[str, int]
    """Code → id, in the order of ids."""
    tokens: dict[str, str]
    """Code → how its token is written."""
    spare: list[int]
    origin: Path
    given: frozenset[str] = frozenset()
    """Languages whose tokens the model came with."""


@dataclass(frozen=True)
class Layout:
    """Ids of a written vocabulary."""

    pieces: tuple[str, ...]
    """From id 4 on."""
    language_tokens: tuple[str, ...]
    """Behind the pieces."""
    token_of: Mapping[str, str]
    """Code of each language of the model → its token."""
    rows: tuple[int | None, ...]
    """Our id of each of its ids; None: the model has none, the row is zeros."""
    of_hundred: bool

    @property
    def absent(self) -> list[int]:
        """Ids that the model must never choose."""
        return [index for index, row in enumerate(self.rows) if row is None]

    @property
    def num_spare(self) -> int:
        """Rows behind the languages."""
        return len(self.rows) - len(M2M100_SPECIALS) - len(self.pieces) - len(self.language_tokens)

    def rearranged(self, weight_VD: Tensor) -> Tensor:
        """The embedding of ours with its rows in this order."""
        index = torch.tensor([0 if row is None else row for row in self.rows])
        arranged_VD = weight_VD[index]
        arranged_VD[self.absent] = 0
        return arranged_VD


def entries_of(files: TokenizerFiles, origin: Path) -> Entries:
    """What the ids of a tokenizer belong to.

    Raises:
        CheckpointError: its vocabulary is bytes, or a piece is written as a special or a language.
    """
    if files.model is None or files.description.kind == "byte_bpe":
        raise CheckpointError(
            f"{origin} has a vocabulary of bytes (tokenizer.kind), of which no format that "
            "checkpoints are written in knows: only SentencePiece vocabularies are exported."
        )
    if files.target_model is not None:
        raise CheckpointError(
            f"{origin} has one vocabulary for the source and one for the target, of which no "
            "format that checkpoints are written in here knows: only a single one is exported."
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
    _refuse_clash(origin, pieces, [*M2M100_SPECIALS.values(), *tokens.values()])
    return Entries(
        specials=specials,
        pieces=pieces,
        unknown_pieces=sum(
            own is None and not processor.is_control(index) and not processor.is_unknown(index)
            for index, own in enumerate(ids)
        ),
        languages=language_ids,
        tokens=tokens,
        spare=[index for index in range(tokenizer.size) if index not in used],
        origin=origin,
        given=frozenset(description.token_spellings),
    )


def chosen_layout(entries: Entries) -> Layout:
    """Return M2M-100's layout if it has all languages by these tokens, else NLLB's.

    Raises:
        CheckpointError: a token is also a piece, or that of another language.
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
        of_hundred=of_hundred,
    )


def nllb_layout_tokens(entries: Entries) -> dict[str, str]:
    """Return code → token of ``NllbTokenizer``: those a model came with, else NLLB's codes.

    A language that was added to a model with tokens of another style follows that style.

    Raises:
        CheckpointError: two languages have one token.
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
                f"{entries.origin} has the languages {other!r} and {code!r}, whose token would be "
                f"{token!r} for both: export it --to ctranslate2."
            )
        tokens[code] = token
    return tokens


def nllb_token(code: str) -> str:
    """Return how NLLB writes a language: ISO 639-3 and script, ``eng_Latn``.

    Codes of the 202 languages of NLLB-200 are those published. Others have ISO 639-3's code where
    the registry knows it, the script that the code names or CLDR gives (``Zzzz`` if neither does),
    and the region if the code has one: ``cos_Latn``, ``srp_Latn``, ``por_Latn_BR``.
    """
    published = _nllb_spellings()
    if code in published:
        return published[code]
    tag = parse_tag(code)
    usual = published.get(tag.language) or iso_639_3(tag.language)
    parts = [usual.partition("_")[0], written_script(code) or UNKNOWN_SCRIPT, tag.region]
    return "_".join(part for part in parts if part)


@cache
def _nllb_spellings() -> Mapping[str, str]:
    """Return our code → NLLB's."""
    return {code: spelling for spelling, code in model_codes(NLLB_LANGUAGES).items()}


def _refuse_clash(origin: Path, pieces: Iterable[str], reserved: Iterable[str]) -> None:
    clashing = sorted(set(pieces) & set(reserved))
    if clashing:
        raise CheckpointError(
            f"The vocabulary of {origin} has a piece {clashing[0]!r}, which other software takes "
            "for a special or a language: it cannot be exported with tokenizer files."
        )
