"""Forced prefixes, banned texts and required phrases of translations.

Required phrases use dynamic beam allocation (Post and Vilar 2018, §3). A hypothesis belongs to the
bank of as many tokens as it has of its phrases: the tokens of complete phrases and of the phrase
it has begun. Besides the likeliest extensions, every step considers the likeliest extension of
each beam and those that continue or begin a phrase. Banks take turns in filling the beam, the
fullest first, so that no bank starves however unlikely its phrases are; other banks fill the
places of a bank without candidates. Only hypotheses with all phrases may end.

No constraint changes a score: it stays the model's own log-probability.

Legend: B unfinished sentences, J rows of each, R = B · J rows, V vocabulary, C candidates, T tokens
so far.
"""

import codecs
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from pathlib import Path
from typing import TextIO

import torch
from torch import Tensor

from pipeline.artifacts.spelling import is_blank
from pipeline.errors import ConfigError, unreadable

Phrase = tuple[int, ...]


class BannedTexts:
    """Phrases that no translation may contain, in whatever pieces it is written.

    A token is forbidden if the text with it would contain a phrase. Text counts as the tokenizer
    decodes it: bytes that are not UTF-8 are dropped.

    Args:
        phrases: the phrases, none of them empty.
        pieces: UTF-8 of every id that a translation may consist of; empty for ids without text.
    """

    def __init__(self, phrases: Sequence[str], pieces: Sequence[bytes]) -> None:
        self.phrases, self._pieces = tuple(phrases), pieces
        self._beginning: dict[str, frozenset[int]] = {}
        """End of a phrase → ids of which the text begins with it."""

    def found_in(self, text: str) -> bool:
        """Return whether a text contains a phrase."""
        return any(phrase in text for phrase in self.phrases)

    def forbid(self, log_p_JV: Tensor, pasts: Sequence[Sequence[int]]) -> None:
        """Set the choices that would complete a phrase to -inf, in place; each row has its past."""
        # These complete a phrase whatever comes before; the others only behind its beginning.
        log_p_JV[:, self._within.to(log_p_JV.device)] = -torch.inf
        for log_p_V, past in zip(log_p_JV, pasts, strict=True):
            if found := self._completing(past):
                log_p_V[[*found]] = -torch.inf

    def _completing(self, tokens: Sequence[int]) -> set[int]:
        """Return the ids that end a phrase that the text so far begins."""
        text, begun = _decoded(b"".join(map(self._pieces.__getitem__, tokens)))
        found: set[int] = set()
        for phrase in self.phrases:
            for length in range(1, len(phrase)):
                if text.endswith(phrase[:length]):
                    found |= self._beginning_with(phrase[length:])
        if begun:  # a character, which a piece may end
            text = text[-max(map(len, self.phrases)) :]
            found -= self._fragments.keys()
            found |= {
                index
                for index, piece in self._fragments.items()
                if self.found_in(text + _decoded(begun + piece)[0])
            }
        return found

    def _beginning_with(self, text: str) -> frozenset[int]:
        if text not in self._beginning:
            named = enumerate(self._texts)
            self._beginning[text] = frozenset(index for index, of in named if of.startswith(text))
        return self._beginning[text]

    @cached_property
    def _texts(self) -> list[str]:
        return [_decoded(piece)[0] for piece in self._pieces]

    @cached_property
    def _within(self) -> Tensor:
        """The ids of which the text contains a phrase."""
        found = [index for index, text in enumerate(self._texts) if self.found_in(text)]
        return torch.tensor(found, dtype=torch.int64, device="cpu")

    @cached_property
    def _fragments(self) -> dict[int, bytes]:
        """The ids and bytes of pieces that are not whole characters."""
        pairs = enumerate(zip(self._pieces, self._texts, strict=True))
        return {index: piece for index, (piece, text) in pairs if text.encode() != piece}


def _decoded(content: bytes) -> tuple[str, bytes]:
    """Return the text of bytes, and the bytes of a character that is not complete at the end."""
    decoder = codecs.getincrementaldecoder("utf-8")("ignore")
    text = decoder.decode(content)
    return text, decoder.getstate()[0]


@dataclass(frozen=True)
class Restrictions:
    """Forced prefixes and banned texts of the sentences of a batch."""

    prefixes: tuple[Phrase, ...]
    """Prefix of each sentence; empty if it has none."""
    banned: tuple[BannedTexts | None, ...]
    """Banned texts of each sentence."""

    @classmethod
    def of(
        cls, prefixes: Iterable[Phrase], banned: Iterable[BannedTexts | None]
    ) -> "Restrictions | None":
        """Return the restrictions of a batch; None if no sentence has any."""
        found = cls(tuple(prefixes), tuple(banned))
        return found if any(found.prefixes) or any(found.banned) else None

    def apply(
        self, log_p_RV: Tensor, tokens_BJT: Tensor, *, active: Sequence[int], length: int
    ) -> None:
        """Set the forbidden choices of the ``length``-th token to -inf, in place.

        The log-probabilities of allowed tokens stay as they are. ``active`` has the sentence of
        every row b.
        """
        log_p_BJV = log_p_RV.view(len(active), -1, log_p_RV.shape[1])
        pasts = tokens_BJT.tolist() if any(self.banned) else []
        for row, index in enumerate(active):
            if banned := self.banned[index]:
                banned.forbid(log_p_BJV[row], pasts[row])
            if length <= len(self.prefixes[index]):
                token = self.prefixes[index][length - 1]
                forced_J = log_p_BJV[row, :, token].clone()
                log_p_BJV[row] = -torch.inf
                log_p_BJV[row, :, token] = forced_J


def force_end(logits_RV: Tensor, is_forced_B: Sequence[bool], *, eos_id: int) -> None:
    """Allow only end-of-sentence to all rows of the given sentences, in place."""
    if not any(is_forced_B):
        return
    is_forced = torch.tensor(is_forced_B, device=logits_RV.device)
    is_forced_R = is_forced.repeat_interleave(len(logits_RV) // len(is_forced_B))
    is_other_V = torch.arange(logits_RV.shape[1], device=logits_RV.device) != eos_id
    logits_RV.masked_fill_(is_forced_R[:, None] & is_other_V, -torch.inf)


@dataclass(frozen=True)
class Progress:
    """The share of its required phrases that a hypothesis has."""

    tokens: int
    """Tokens of the complete phrases and of the phrase it has begun."""
    missing: int
    """Remaining tokens; 0 if the hypothesis has all phrases."""
    next_tokens: frozenset[int]
    """Tokens that continue the begun phrase or begin another one."""


def progress_of(tokens: Phrase, phrases: Sequence[Phrase]) -> Progress:
    """Measure the progress of a hypothesis; phrases may share its tokens."""
    missing = [phrase for phrase in phrases if not has_sequence(tokens, phrase)]
    begun = [_begun(tokens, phrase) for phrase in missing]
    wanted = {phrase[length] for phrase, length in zip(missing, begun, strict=True)}
    total = sum(map(len, phrases))
    left = sum(map(len, missing)) - max(begun, default=0)
    return Progress(total - left, left, frozenset(wanted | {phrase[0] for phrase in missing}))


@dataclass(frozen=True)
class Candidates:
    """Extensions of the beams of every sentence, (B, C) each."""

    score_BC: Tensor
    beam_BC: Tensor
    token_BC: Tensor


class Constraints:
    """Required phrases of the sentences of a batch."""

    def __init__(self, phrases: Sequence[tuple[Phrase, ...]], *, eos_id: int) -> None:
        self.phrases, self.eos_id = phrases, eos_id

    @classmethod
    def of(cls, phrases: Iterable[tuple[Phrase, ...]], *, eos_id: int) -> "Constraints | None":
        """Collect the required phrases of a batch; None if no sentence has any."""
        distinct = [tuple(dict.fromkeys(of_sentence)) for of_sentence in phrases]
        return cls(distinct, eos_id=eos_id) if any(distinct) else None

    def bar_ends(self, logits_RV: Tensor, tokens_BJT: Tensor, *, active: Sequence[int]) -> None:
        """Forbid end-of-sentence to every hypothesis that lacks a phrase, in place."""
        logits_BJV = logits_RV.view(*tokens_BJT.shape[:2], -1)
        for row, index in enumerate(active):
            for beam, tokens in enumerate(self._tokens(tokens_BJT, row, index)):
                if progress_of(tokens, self.phrases[index]).missing:
                    logits_BJV[row, beam, self.eos_id] = -torch.inf

    def allocate(
        self,
        found: Candidates,
        total_RV: Tensor,
        tokens_BJT: Tensor,
        *,
        active: Sequence[int],
        is_last: Sequence[bool],
    ) -> Candidates:
        """Add the candidates that phrases need, and order all by their turn to get a place.

        Args:
            found: the likeliest candidates.
            total_RV: scores of all extensions.
            tokens_BJT: tokens of the beams so far.
            active: index of the sentence of each row b.
            is_last: whether hypotheses of a sentence are taken with or without an end. Those that
                lack a phrase are left out.
        """
        total_BJV = total_RV.view(*tokens_BJT.shape[:2], -1)
        rows: list[list[tuple[float, int, int]]] = []
        for row, index in enumerate(active):
            of_row = zip(
                found.score_BC[row].tolist(),
                found.beam_BC[row].tolist(),
                found.token_BC[row].tolist(),
                strict=True,
            )
            candidates = list(of_row)
            if self.phrases[index]:
                pasts = self._tokens(tokens_BJT, row, index)
                candidates = self._dealt(
                    candidates, total_BJV[row], pasts, self.phrases[index], is_last=is_last[row]
                )
            rows.append(candidates)
        width = max(1, *map(len, rows))
        filled = [row + [(-torch.inf, 0, 0)] * (width - len(row)) for row in rows]
        score, beam, token = (
            torch.tensor([[entry[part] for entry in row] for row in filled], device=total_RV.device)
            for part in range(3)
        )
        return Candidates(score, beam, token)

    def _tokens(self, tokens_BJT: Tensor, row: int, index: int) -> list[Phrase]:
        """Return the tokens of a sentence's beams; [] if it has no phrases."""
        if not self.phrases[index]:
            return []
        return [tuple(tokens) for tokens in tokens_BJT[row].tolist()]

    def _dealt(
        self,
        candidates: Sequence[tuple[float, int, int]],
        total_JV: Tensor,
        pasts: Sequence[Phrase],
        phrases: Sequence[Phrase],
        *,
        is_last: bool,
    ) -> list[tuple[float, int, int]]:
        """Take one candidate of each bank in turn: fullest bank first, likeliest of it first."""
        chosen = {(beam, token): score for score, beam, token in candidates if isfinite(score)}
        # Of every beam also the likeliest extension, and those towards phrases, however unlikely:
        # otherwise banks without any of the likeliest candidates of the sentence would be empty.
        best_J = total_JV.argmax(1).tolist()
        for beam, past in enumerate(pasts):
            for token in (best_J[beam], *progress_of(past, phrases).next_tokens):
                chosen[beam, token] = float(total_JV[beam, token])
        banks: dict[int, list[tuple[float, int, int]]] = {}
        for (beam, token), score in chosen.items():
            after = pasts[beam] if token == self.eos_id else (*pasts[beam], token)
            progress = progress_of(after, phrases)
            is_out = not isfinite(score) or (is_last and progress.missing)
            if not is_out:
                banks.setdefault(progress.tokens, []).append((score, beam, token))
        ordered = [sorted(banks[number], reverse=True) for number in sorted(banks, reverse=True)]
        turns = range(max(map(len, ordered), default=0))
        return [bank[turn] for turn in turns for bank in ordered if turn < len(bank)]


def no_room_for_phrases() -> ConfigError:
    """Return the error for a sentence none of whose hypotheses has all required phrases."""
    return ConfigError(
        "No translation was found that has all the phrases it must have: they do not fit beside "
        "a forced prefix or banned phrases, or the model's scores are not numbers. Require fewer "
        "phrases."
    )


def has_sequence(tokens: Phrase, sequence: Phrase) -> bool:
    """Return whether the tokens contain the sequence, unbroken."""
    starts = range(len(tokens) - len(sequence) + 1)
    return any(tokens[start : start + len(sequence)] == sequence for start in starts)


LONGEST_LINE = 2**20
"""Most characters of a line of phrases."""


def read_phrases(path: Path) -> Iterator[tuple[str, ...]]:
    """Read the tab-separated phrases of every line; an empty line has none.

    The file is opened at once and read line by line.

    Raises:
        ConfigError: the file cannot be read, or is not UTF-8.
    """
    try:
        file = path.open(encoding="utf-8-sig", newline="\n")
    except OSError as error:
        raise ConfigError(unreadable(path, error, "Name a file.")) from error
    return _phrases_of(file, path)


def _phrases_of(file: TextIO, path: Path) -> Iterator[tuple[str, ...]]:
    try:
        while line := file.readline(LONGEST_LINE + 1):  # a device has no end
            if len(line) > LONGEST_LINE:
                raise ConfigError(
                    f"{path} has a line of more than {LONGEST_LINE:,} characters. Name a file of "
                    "phrases."
                )
            yield tuple(phrase.strip() for phrase in line.split("\t") if not is_blank(phrase))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} cannot be read as UTF-8 ({error}). Write one line of phrases, separated by "
            "tabs, for every line to translate."
        ) from error


def _begun(tokens: Phrase, phrase: Phrase) -> int:
    """Return how many first tokens of an incomplete phrase the hypothesis ends with."""
    longest = min(len(phrase) - 1, len(tokens))
    return next(n for n in range(longest, -1, -1) if tokens[len(tokens) - n :] == phrase[:n])
