"""Which id everything has in a vocabulary as it is written for other software.

Hugging Face's M2M-100 counts positions from the id of padding + 1, and ours count from 2 as
fairseq's do: so padding must be 1, and the rows of the embedding are put into fairseq's order.

- ``M2M100Tokenizer``: specials, pieces, the hundred languages of M2M-100 in its order,
  spare rows. Rows of languages that a model lacks are zeros.
- ``NllbTokenizer``, whose language tokens can be any: specials, pieces, the model's own languages
  as NLLB would write them (``chr_Cher``), spare rows.

Ids of ours that nothing has (models from elsewhere have some) take part in the softmax, and are
kept as spare rows.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from sentencepiece import SentencePieceProcessor
from torch import Tensor

from pipeline.artifacts.tokenizer import TokenizerFiles, language_token
from pipeline.checkpoints.foreign.vocabularies import M2M100_LANGUAGES, M2M100_SPECIALS
from pipeline.errors import CheckpointError
from pipeline.languages import UNKNOWN_SCRIPT, distinct_codes, usual_script


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
    tokens = {code: language_token(code, description.language_token_scheme) for code in languages}
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
    )


def chosen_layout(entries: Entries) -> Layout:
    """That of M2M-100 where it has all languages, else the one with languages of one's own."""
    spelling_of = {code: spelling for spelling, code in distinct_codes(M2M100_LANGUAGES).items()}
    of_hundred = set(entries.languages) <= set(spelling_of)
    language_rows: list[int | None]
    if of_hundred:
        tokens = {code: f"__{spelling}__" for code, spelling in spelling_of.items()}
        language_rows = [entries.languages.get(code) for code in tokens]
    else:
        tokens = {code: token_with_script(code) for code in entries.languages}
        language_rows = [*entries.languages.values()]
    return Layout(
        pieces=tuple(entries.pieces),
        language_tokens=tuple(tokens.values()),
        token_of={code: tokens[code] for code in entries.languages},
        rows=(*entries.specials, *entries.pieces.values(), *language_rows, *entries.spare),
        of_hundred=of_hundred,
    )


def token_with_script(code: str) -> str:
    """How NLLB writes languages: ``chr_Cher``; of no known script ``Zzzz``."""
    return code if "_" in code else f"{code}_{usual_script(code) or UNKNOWN_SCRIPT}"


def _refuse_clash(origin: Path, pieces: Iterable[str], reserved: Iterable[str]) -> None:
    clashing = sorted(set(pieces) & set(reserved))
    if clashing:
        raise CheckpointError(
            f"The vocabulary of {origin} has a piece {clashing[0]!r}, which other software takes "
            "for a special or a language: it cannot be exported with tokenizer files."
        )
