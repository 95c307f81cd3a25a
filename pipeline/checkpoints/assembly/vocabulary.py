"""Make the embedding of one vocabulary from another embedding, row by row.

A piece, special or language of both vocabularies keeps its row. If source and target have pieces of
their own, a piece is looked up on its own side first; a piece of a shared vocabulary is looked up
on the target side first. A new piece starts from the mean of the rows of its pieces under the old
tokenizer, a new language from the row of a language that is named for it. An id without a meaning
in both vocabularies keeps its row. All other rows are fresh.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.artifacts.spelling import is_blank
from pipeline.artifacts.tokenizer import Tokenizer
from pipeline.artifacts.vocabularies import SPACE, decode_bytes

_BYTES = re.compile("(<0x[0-9A-F]{2}>)+")
"""SentencePiece's spelling of bytes."""
OTHER_SIDE = {"piece": "target piece", "target piece": "piece"}
"""Kind of a piece → the other kind of piece."""


class Meaning(NamedTuple):
    """The meaning of an id."""

    kind: str
    """``piece``, ``special``, ``language``, or ``target piece`` of a separate target vocabulary."""
    name: str


@dataclass(frozen=True)
class RowPlan:
    """The source of each row of a new embedding.

    Attributes:
        sources: New id → old ids with the rows to average; fresh if there is none.
        kept: Number of rows of one old id.
        averaged: Number of rows of several old ids.
        fresh: Number of fresh rows of ids that have a meaning.
        lost: Number of old pieces that the new vocabulary lacks.
    """

    sources: tuple[tuple[int, ...], ...]
    kept: int
    averaged: int
    fresh: int
    lost: int

    def line(self) -> str:
        """Return a summary to print."""
        counts = {
            "kept by piece": self.kept,
            "means of their old pieces": self.averaged,
            "fresh": self.fresh,
        }
        total = max(sum(counts.values()), 1)
        shares = ", ".join(f"{n:,} {what} ({n / total:.1%})" for what, n in counts.items())
        return f"rows of the vocabulary: {shares}; {self.lost:,} old pieces are gone"

    def applied(self, old_VD: Tensor, fresh_VD: Tensor) -> Tensor:
        """Return the new rows: kept, averaged, or from ``fresh_VD``.

        An output embedding has only the first rows if source and target vocabularies are separate.
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
    """Return the meaning of every id; None: it has none, or an earlier id has the same."""
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
    """Plan every row of the new vocabulary.

    ``resembling`` is new language → language of the old tokenizer that gives it a row.

    Raises:
        ConfigError: The old tokenizer lacks a language of ``resembling``.
    """
    old_meanings = meanings(old)
    known = {meaning: index for index, meaning in enumerate(old_meanings) if meaning is not None}
    for (kind, name), index in list(known.items()):
        if kind == "target piece" and new.output_size is None:
            known[Meaning("piece", name)] = index  # prefer the row that was trained as an output
        elif kind in OTHER_SIDE:
            known.setdefault(Meaning(OTHER_SIDE[kind], name), index)
    new_meanings = meanings(new)
    sources: list[tuple[int, ...]] = []
    kept = averaged = fresh = 0
    for index, meaning in enumerate(new_meanings):
        if meaning is None:
            # A spare row of an imported model takes part in every softmax: it keeps its values.
            is_spare = index < len(old_meanings) and old_meanings[index] is None
            sources.append((index,) if is_spare else ())
            continue
        if meaning in known:
            found: tuple[int, ...] = (known[meaning],)
            kept += 1
        elif meaning.kind == "language" and meaning.name in resembling:
            found = (old.language_token_id(resembling[meaning.name]),)
            kept += 1
        else:
            found = _parts(meaning, old, known) if meaning.kind in OTHER_SIDE else ()
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


def _parts(meaning: Meaning, old: Tokenizer, known: Mapping[Meaning, int]) -> tuple[int, ...]:
    """Return the ids of a piece's text under the old tokenizer, without unknown pieces."""
    text = meaning.name.replace(SPACE, " ")
    if _BYTES.fullmatch(text):
        content = bytes.fromhex(text.replace("<0x", "").replace(">", ""))
        text, dropped = decode_bytes(content)
        if dropped:  # bytes of a part of a character, which no text has on their own
            found = (known.get(Meaning(meaning.kind, f"<0x{byte:02X}>")) for byte in content)
            return tuple(index for index in found if index is not None)
    targets = old.target_languages if meaning.kind == "target piece" else ()
    ids = old.encode(text, language=next(iter(targets), "")) if not is_blank(text) else []
    if not meaning.name.startswith(SPACE) and ids and old.piece(ids[0]) == SPACE:
        ids = ids[1:]  # SentencePiece begins every text with a space
    return tuple(index for index in ids if index != old.unk_id)
