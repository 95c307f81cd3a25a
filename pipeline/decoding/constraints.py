"""Phrases that a translation must have, by dynamic beam allocation (Post and Vilar 2018, §3).

A hypothesis belongs to the bank of as many tokens as it has of its phrases: those of phrases that
stand in it, unbroken, and those of the phrase it has begun. Beside the likeliest extensions every
step looks at the likeliest one of every beam and at those that go on with a phrase or begin one.
The beam is dealt out to the banks in turn, the fullest first, so that none starves however unlikely
its phrases are; what a bank has no candidates for goes to the others. End-of-sentence is open to
hypotheses with all phrases alone. A score is the model's own.

Legend: B unfinished sentences, J rows of each, R = B · J rows, V vocabulary, C candidates, T tokens
so far.

A file that says line by line which phrases the translations of other lines must have.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

import torch
from torch import Tensor

from pipeline.decoding.hypotheses import Source, check_tokens, has_sequence
from pipeline.errors import ConfigError

Phrase = tuple[int, ...]


@dataclass(frozen=True)
class Progress:
    """How far a hypothesis is with its phrases."""

    tokens: int
    """Those of phrases that it has, and of the one it has begun."""
    missing: int
    """The others; 0 where it has all phrases."""
    next_tokens: frozenset[int]
    """What goes on with a phrase, or begins one."""


def progress_of(tokens: Phrase, phrases: Sequence[Phrase]) -> Progress:
    """Of a hypothesis; phrases may share its tokens."""
    missing = [phrase for phrase in phrases if not has_sequence(tokens, phrase)]
    begun = [_begun(tokens, phrase) for phrase in missing]
    wanted = {phrase[length] for phrase, length in zip(missing, begun, strict=True)}
    total = sum(map(len, phrases))
    left = sum(map(len, missing)) - max(begun, default=0)
    return Progress(total - left, left, frozenset(wanted | {phrase[0] for phrase in missing}))


def _begun(tokens: Phrase, phrase: Phrase) -> int:
    """With how many tokens of a phrase a hypothesis ends, short of all."""
    longest = min(len(phrase) - 1, len(tokens))
    return next(n for n in range(longest, -1, -1) if tokens[len(tokens) - n :] == phrase[:n])


@dataclass(frozen=True)
class Candidates:
    """Extensions of the beams of every sentence, (B, C) each."""

    score_BC: Tensor
    beam_BC: Tensor
    token_BC: Tensor


class Constraints:
    """The phrases of the sentences of a batch."""

    def __init__(self, phrases: Sequence[tuple[Phrase, ...]], *, eos_id: int) -> None:
        self.phrases, self.eos_id = phrases, eos_id

    @classmethod
    def of(
        cls, sources: Sequence[Source], *, specials: frozenset[int], eos_id: int
    ) -> "Constraints | None":
        """None where no sentence has any.

        Raises:
            ConfigError: a phrase that no hypothesis can have: it is empty, or has a special
                (padding, end-of-sentence) or a banned sequence.
        """
        if not any(source.required for source in sources):
            return None
        for source in sources:
            for phrase in source.required:
                check_tokens(phrase, specials=specials)
                if any(has_sequence(phrase, banned) for banned in source.banned):
                    raise ConfigError(
                        f"The phrase {list(phrase)} that a translation must have has a banned one "
                        "in it: change one of them."
                    )
        unlike = [tuple(dict.fromkeys(source.required)) for source in sources]
        return cls(unlike, eos_id=eos_id)

    def bar_ends(self, logits_RV: Tensor, tokens_BJT: Tensor, *, active: Sequence[int]) -> None:
        """No hypothesis ends that lacks a phrase; in place."""
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
        """The candidates found and those that phrases need, in the order they get their places.

        ``total_RV`` are the scores of all extensions. ``is_last`` says which sentences' hypotheses
        are taken as they are, with or without an end: those that lack a phrase are not.
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
        width = max(map(len, rows))
        filled = [row + [(-torch.inf, 0, 0)] * (width - len(row)) for row in rows]
        score, beam, token = (
            [[entry[part] for entry in row] for row in filled] for part in range(3)
        )
        device = total_RV.device
        return Candidates(
            torch.tensor(score, device=device),
            torch.tensor(beam, device=device),
            torch.tensor(token, device=device),
        )

    def _tokens(self, tokens_BJT: Tensor, row: int, index: int) -> list[Phrase]:
        """Of the beams of a sentence that has phrases."""
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
        """One from every bank in turn, the fullest bank first, the likeliest of a bank first."""
        chosen = {(beam, token): score for score, beam, token in candidates if isfinite(score)}
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


def read_phrases(path: Path) -> Iterator[tuple[str, ...]]:
    """Of every line in order, what stands between its tabs; an empty line asks for nothing.

    Raises:
        ConfigError: the file cannot be read, or is not UTF-8; before anything is given out where it
            cannot be opened.
    """
    try:
        file = path.open(encoding="utf-8-sig", newline="\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): name a file.") from error
    return _phrases_of(file, path)


def _phrases_of(file: Iterator[str], path: Path) -> Iterator[tuple[str, ...]]:
    try:
        for line in file:
            yield tuple(phrase for phrase in map(str.strip, line.split("\t")) if phrase)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} cannot be read as UTF-8 ({error}): write one line of phrases, tabs between "
            "them, for every line to translate."
        ) from error
