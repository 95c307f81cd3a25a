"""TODO: docstring."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.artifacts.tokenizer import Numbering, Tokenizer, TokenizerFiles
from pipeline.errors import ConfigError

SPACE = "▁"
"""SentencePiece's mark of a space."""


_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
"""How SentencePiece spells a byte."""


OTHER_SIDE = {"piece": "target piece", "target piece": "piece"}
"""Kinds of pieces."""


class Meaning(NamedTuple):
    """What an id stands for."""

    kind: str
    """``piece``, ``target piece`` (where those are others), ``special`` or ``language``."""
    name: str


@dataclass(frozen=True)
class RowPlan:
    """Where each row of a new embedding comes from.

    Attributes:
        sources: new id → old ids whose mean it is; an empty tuple: fresh.
        kept, averaged, fresh: how many rows of each kind stand for something.
        lost: old pieces that the new vocabulary lacks.
    """

    sources: tuple[tuple[int, ...], ...]
    kept: int
    averaged: int
    fresh: int
    lost: int

    def lines(self) -> list[str]:
        """What a person wants to know of it."""
        meaningful = max(self.kept + self.averaged + self.fresh, 1)
        shares = ", ".join(
            f"{count:,} {what} ({count / meaningful:.1%})"
            for count, what in (
                (self.kept, "kept by piece"),
                (self.averaged, "means of their old pieces"),
                (self.fresh, "fresh"),
            )
        )
        return [f"rows of the vocabulary: {shares}; {self.lost:,} old pieces are gone"]

    def applied(self, old_VD: Tensor, fresh_VD: Tensor) -> Tensor:
        """The new rows: kept, averaged, or those of ``fresh_VD``.

        A table of the output has the first rows alone where source and target differ.
        """
        new_VD = fresh_VD.clone()
        sources = [
            tuple(index for index in old if index < len(old_VD))
            for old in self.sources[: len(fresh_VD)]
        ]
        single = [(new, old[0]) for new, old in enumerate(sources) if len(old) == 1]
        if single:
            new_ids, old_ids = (torch.tensor(ids) for ids in zip(*single, strict=True))
            new_VD[new_ids] = old_VD[old_ids].to(new_VD.dtype)
        for new, old in enumerate(sources):
            if len(old) > 1:
                new_VD[new] = old_VD[list(old)].float().mean(0).to(new_VD.dtype)
        return new_VD


def meanings(tokenizer: Tokenizer) -> list[Meaning | None]:
    """What every id stands for; None: nothing, or the same as an earlier id."""
    specials = {
        tokenizer.pad_id: "pad",
        tokenizer.bos_id: "bos",
        tokenizer.eos_id: "eos",
        tokenizer.unk_id: "unk",
    }
    found: list[Meaning | None] = []
    for index in range(tokenizer.size):
        code = tokenizer.language_of_token(index)
        if index in specials:
            found.append(Meaning("special", specials[index]))
        elif code is not None:
            found.append(Meaning("language", code))
        else:
            piece = tokenizer.piece(index)
            kind = "target piece" if index < (tokenizer.output_size or 0) else "piece"
            found.append(None if piece is None else Meaning(kind, piece))
    return found


def plan_rows(old: Tokenizer, new: Tokenizer, *, resembling: Mapping[str, str]) -> RowPlan:
    """A plan for every row of the new vocabulary.

    Args:
        resembling: new language → language of the old tokenizer whose row it starts from.

    Raises:
        ConfigError: a language is to resemble one that the old tokenizer lacks.
    """
    known = {meaning: index for index, meaning in enumerate(meanings(old)) if meaning is not None}
    for (kind, name), index in list(known.items()):
        if kind == "target piece" and new.output_size is None:
            known[Meaning("piece", name)] = index  # the row that has learnt to be written
        elif kind in OTHER_SIDE:
            known.setdefault(Meaning(OTHER_SIDE[kind], name), index)
    new_meanings = meanings(new)
    sources: list[tuple[int, ...]] = []
    kept = averaged = fresh = 0
    for meaning in new_meanings:
        if meaning is None:
            sources.append(())
            continue
        if meaning in known:
            found: tuple[int, ...] = (known[meaning],)
            kept += 1
        elif meaning.kind == "language" and meaning.name in resembling:
            found = (old.language_token_id(resembling[meaning.name]),)
            kept += 1
        else:
            found = _parts(meaning, old) if meaning.kind in OTHER_SIDE else ()
            averaged, fresh = averaged + bool(found), fresh + (not found)
        sources.append(found)
    old_pieces = {meaning.name for meaning in known if meaning.kind in OTHER_SIDE}
    new_pieces = {one.name for one in new_meanings if one is not None and one.kind in OTHER_SIDE}
    return RowPlan(
        sources=tuple(sources),
        kept=kept,
        averaged=averaged,
        fresh=fresh,
        lost=len(old_pieces - new_pieces),
    )


def _parts(meaning: Meaning, old: Tokenizer) -> tuple[int, ...]:
    """The ids of a piece's text under the old tokenizer, without unknown ones."""
    text = _text(meaning.name)
    targets = old.target_languages if meaning.kind == "target piece" else ()
    ids = old.encode(text, language=next(iter(targets), "")) if text.strip() else []
    if not meaning.name.startswith(SPACE) and ids and old.piece(ids[0]) == SPACE:
        ids = ids[1:]  # SentencePiece begins every text with a space
    return tuple(index for index in ids if index != old.unk_id)


def _text(piece: str) -> str:
    """What a piece stands for; nothing for a byte that alone is no character."""
    byte = _BYTE.fullmatch(piece)
    if byte is None:
        return piece.replace(SPACE, " ")
    value = int(byte[1], 16)
    return chr(value) if value < 128 else ""


def with_languages(files: TokenizerFiles, added: Sequence[str]) -> TokenizerFiles:
    """The same vocabulary with more languages, whose tokens are new ids behind all others.

    Raises:
        ConfigError: it has one of them already.
    """
    tokenizer = files.build()
    present = [code for code in added if code in tokenizer.languages]
    if present:
        raise ConfigError(
            f"The tokenizer has the language {present[0]!r} already: leave it out of [languages]."
        )
    description = files.description
    numbering = description.numbering or Numbering(
        size=tokenizer.size,
        pad=tokenizer.pad_id,
        bos=tokenizer.bos_id,
        eos=tokenizer.eos_id,
        unk=tokenizer.unk_id,
        pieces=tuple(range(tokenizer.size - len(tokenizer.languages))),
        language_tokens={code: tokenizer.language_token_id(code) for code in tokenizer.languages},
    )
    tokens = {code: numbering.size + number for number, code in enumerate(added)}
    return TokenizerFiles(
        description.model_copy(
            update={
                "languages": tuple(sorted([*description.languages, *added])),
                "numbering": numbering.model_copy(
                    update={
                        "size": numbering.size + len(added),
                        "language_tokens": {**numbering.language_tokens, **tokens},
                    }
                ),
            }
        ),
        files.model,
        files.target_model,
    )
