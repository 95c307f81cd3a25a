"""What hypotheses must begin with, and what they must not have.

Legend: B unfinished sentences, J beams, R = B · J rows, V vocabulary, T tokens so far.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.decoding.hypotheses import Source
from pipeline.errors import ConfigError


@dataclass(frozen=True)
class Restrictions:
    """Forced prefixes and banned sequences of the sentences of a batch.

    A sequence of k tokens is kept out by forbidding its last token where the k - 1 before it stand.
    """

    prefixes: tuple[tuple[int, ...], ...]
    """Of every sentence."""
    banned: dict[tuple[int, ...], frozenset[int]]
    """Sequence → the sentences that must not have it."""

    @classmethod
    def of(cls, sources: Sequence[Source], *, specials: frozenset[int]) -> "Restrictions | None":
        """None where no sentence has any.

        Raises:
            ConfigError: a prefix or banned sequence that no hypothesis can have, for it is empty or
                has a special (padding, end-of-sentence); a prefix with a banned sequence.
        """
        if not any(source.prefix or source.banned for source in sources):
            return None
        banned: dict[tuple[int, ...], set[int]] = {}
        for index, source in enumerate(sources):
            for sequence in source.banned:
                check_tokens(sequence, specials=specials)
                _check_prefix(source.prefix, sequence)
                banned.setdefault(sequence, set()).add(index)
            if source.prefix:
                check_tokens(source.prefix, specials=specials)
        return cls(
            tuple(source.prefix for source in sources),
            {sequence: frozenset(indices) for sequence, indices in banned.items()},
        )

    def apply(
        self, log_p_RV: Tensor, tokens_BJT: Tensor, *, active: Sequence[int], length: int
    ) -> None:
        """Set to -inf, in place, what must not be the ``length``-th token of a hypothesis.

        ``active`` has the sentence of every row b. What a row may still take keeps its
        log-probability: a score is the model's own.
        """
        log_p_BJV = log_p_RV.view(len(active), -1, log_p_RV.shape[1])
        for sequence, indices in self.banned.items():
            rows = [row for row, index in enumerate(active) if index in indices]
            if rows and length >= len(sequence):
                _forbid(log_p_BJV, tokens_BJT, sequence, rows=rows)
        for row, index in enumerate(active):
            if length <= len(self.prefixes[index]):
                token = self.prefixes[index][length - 1]
                forced_J = log_p_BJV[row, :, token].clone()
                log_p_BJV[row] = -torch.inf
                log_p_BJV[row, :, token] = forced_J


def _forbid(
    log_p_BJV: Tensor, tokens_BJT: Tensor, sequence: tuple[int, ...], *, rows: Sequence[int]
) -> None:
    """No beam of the rows takes the last token of the sequence behind the others."""
    *before, last = sequence
    rows_B = torch.tensor(rows, device=log_p_BJV.device)
    end_BJT = tokens_BJT[rows_B, :, tokens_BJT.shape[2] - len(before) :]
    stands_BJ = (end_BJT == torch.tensor(before, device=end_BJT.device)).all(2)
    column_BJ = log_p_BJV[rows_B, :, last]
    log_p_BJV[rows_B, :, last] = column_BJ.masked_fill(stands_BJ, -torch.inf)


def check_tokens(sequence: tuple[int, ...], *, specials: frozenset[int]) -> None:
    """Raises ConfigError for a sequence that no hypothesis can have."""
    if not sequence or specials.intersection(sequence):
        raise ConfigError(
            f"No hypothesis can have the tokens {list(sequence)}, which are none or have padding "
            "or end-of-sentence among them: give a prefix, banned sequence or phrase without."
        )


def has_sequence(tokens: tuple[int, ...], sequence: tuple[int, ...]) -> bool:
    """Whether the sequence stands somewhere among the tokens, unbroken."""
    starts = range(len(tokens) - len(sequence) + 1)
    return any(tokens[start : start + len(sequence)] == sequence for start in starts)


def _check_prefix(prefix: tuple[int, ...], banned: tuple[int, ...]) -> None:
    if has_sequence(prefix, banned):
        raise ConfigError(
            f"The forced prefix {list(prefix)} has the banned tokens {list(banned)} in it: change "
            "one of them."
        )
