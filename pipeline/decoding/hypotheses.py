"""What a search is given, and what it finds.

When a sentence is done, and what counts as the length of a hypothesis.

A new rule is a class like those below, a name in ``config.DecodingConfig`` and a case of
:func:`stopping_rule`.

What hypotheses must begin with, and what they must not have.

Legend: B unfinished sentences, J beams, R = B · J rows, V vocabulary, T tokens so far.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pipeline.decoding.settings import DecodingConfig
from pipeline.errors import CheckpointError, ConfigError
from pipeline.terminal import counted


@dataclass(frozen=True)
class Source:
    """One sentence to translate, tags and end-of-sentence included."""

    tokens: Sequence[int]
    prompt: tuple[int, ...]
    """Forced decoder input: it ends with the target tag where the scheme has one."""
    source_language: int
    target_language: int
    """Indices into the tokenizer's languages."""
    prefix: tuple[int, ...] = ()
    """What every hypothesis begins with: it is part of the result, and of its score."""
    banned: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens that no hypothesis has."""
    required: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens that every hypothesis has."""
    begins: tuple[bool, ...] = ()
    """Whether each token begins a word that a segmenter found; empty: the language has none."""


@dataclass(frozen=True)
class Translation:
    """A hypothesis: its tokens without prompt and end-of-sentence, and its score."""

    tokens: tuple[int, ...]
    score: float


def source_begins(sources: Sequence[Source], device: torch.device) -> Tensor | None:
    """Of all their tokens, one source after the other, (N,); None where none has a segmenter."""
    if not any(source.begins for source in sources):
        return None
    flags = [source.begins or (False,) * len(source.tokens) for source in sources]
    return torch.tensor([flag for of_source in flags for flag in of_source]).to(device)


def max_target_length(source_tokens: int, config: DecodingConfig, *, positions: int) -> int:
    """Longest hypothesis, end-of-sentence included, for a source of that many tokens."""
    wanted = int(config.max_length_ratio * source_tokens) + config.max_extra_length
    return max(1, min(wanted, positions))


def length_limit(source: Source, config: DecodingConfig, *, positions: int) -> int:
    """As :func:`max_target_length`, and at least what is forced on it and its end-of-sentence.

    Raises:
        ConfigError: that has no room in the model's positions.
    """
    forced = len(source.prefix) + sum(map(len, set(source.required)))
    needed = forced + 1
    if forced and needed > positions:
        what = "A forced prefix has" if not source.required else "What a translation must have is"
        raise ConfigError(
            f"{what} {counted(forced, 'token')}, and the model has positions for "
            f"{positions - 1:,}: shorten it."
        )
    return max(max_target_length(len(source.tokens), config, positions=positions), needed)


def not_numbers() -> CheckpointError:
    """The error of a model none of whose hypotheses has a finite score."""
    return CheckpointError(
        "The model's scores are not numbers, so that it cannot translate: its weights are "
        "finite but too large; name another checkpoint."
    )


def no_room_for_phrases() -> ConfigError:
    """The error of a sentence none of whose hypotheses has all it must have."""
    return ConfigError(
        "No translation was found that has all the phrases it must have: they cannot stand beside "
        "a forced prefix or what is banned, or the model's scores are not numbers; ask for fewer."
    )


class StoppingRule(Protocol):
    """Asked at every step about hypotheses of ``beam_size`` beams."""

    forces_end_at_limit: bool
    """At the longest length allowed a hypothesis must end; otherwise it is taken as it is."""

    def counted_length(self, length: int, *, prompt_length: int) -> int:
        """The length a score is divided by, of ``length`` tokens with end-of-sentence.

        ``prompt_length`` counts the forced prompt, the token that decoders start from included.
        """

    def is_done(self, *, worst_ended: float, best_running: float) -> bool:
        """Whether a sentence with ``beam_size`` ended hypotheses is done.

        ``best_running`` is the score of the best unfinished one, were it to end now.
        """


class FairseqRule:
    """Done as soon as ``beam_size`` hypotheses have ended; the prompt does not count.

    As in fairseq's ``sequence_generator.py``.
    """

    forces_end_at_limit = True

    def counted_length(self, length: int, *, prompt_length: int) -> int:  # noqa: ARG002
        return length

    def is_done(self, *, worst_ended: float, best_running: float) -> bool:  # noqa: ARG002
        return True


class HuggingFaceRule:
    """Done when no running hypothesis can still overtake the worst of those kept.

    The forced tag counts as generated. As in transformers' beam search with
    ``early_stopping = False`` (``generation/utils.py``).
    """

    forces_end_at_limit = False

    def counted_length(self, length: int, *, prompt_length: int) -> int:
        return length + prompt_length - 1

    def is_done(self, *, worst_ended: float, best_running: float) -> bool:
        return worst_ended >= best_running


def stopping_rule(config: DecodingConfig) -> StoppingRule:
    """The rule a recipe names."""
    match config.stopping:
        case "fairseq":
            return FairseqRule()
        case "huggingface":
            return HuggingFaceRule()


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
