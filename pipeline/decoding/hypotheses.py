"""Sources and translations of a search, and the rules for their lengths and for stopping.

To add a stopping rule, write a class like :class:`FairseqRule`, add its name to
``DecodingConfig.stopping`` and a case to :func:`stopping_rule`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from pipeline.decoding.constraints import BannedTexts
from pipeline.decoding.settings import DecodingConfig
from pipeline.errors import CheckpointError, ConfigError
from pipeline.terminal import counted

Number = TypeVar("Number", int, Tensor)
"""A length, or the lengths of several sentences."""


@dataclass(frozen=True)
class Source:
    """One sentence to translate, tags and end-of-sentence included."""

    tokens: Sequence[int]
    prompt: tuple[int, ...]
    """Forced decoder input; ends with the target tag where the tag scheme has one."""
    source_language: int
    """Index into the tokenizer's languages."""
    target_language: int
    """Index into the tokenizer's languages."""
    prefix: tuple[int, ...] = ()
    """Tokens that every hypothesis begins with; they count in the result and in its score."""
    banned: BannedTexts | None = None
    """Texts that no hypothesis may contain."""
    required: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens that every hypothesis must contain."""
    begins: tuple[bool, ...] = ()
    """Whether each token begins a word of the segmenter; empty if the language has no segmenter."""


@dataclass(frozen=True)
class Translation:
    """A hypothesis: its tokens without prompt and end-of-sentence, and its score."""

    tokens: tuple[int, ...]
    score: float


class StoppingRule(Protocol):
    """Decide when a sentence is done and which length divides a score."""

    forces_end_at_limit: bool
    """Whether a hypothesis must end at the length limit; otherwise it is taken unfinished."""

    def counted_length(self, length: Number, *, prompt_length: int) -> Number:
        """Return the length that divides the score of a hypothesis.

        Args:
            length: tokens of the hypothesis, end-of-sentence included.
            prompt_length: tokens of the forced prompt, the decoder's start token included.
        """

    def is_done(self, *, worst_ended: Tensor, best_running: Tensor) -> Tensor | bool:
        """Return whether each sentence with ``beam_size`` ended hypotheses is done.

        Args:
            worst_ended: score of the worst ended hypothesis, (B,).
            best_running: score of the best unfinished hypothesis if it ended now, (B,).
        """


class FairseqRule:
    """Stop as soon as ``beam_size`` hypotheses have ended; the prompt does not count.

    Matches fairseq's ``sequence_generator.py``.
    """

    forces_end_at_limit = True

    def counted_length(self, length: Number, *, prompt_length: int) -> Number:  # noqa: ARG002
        """Return the length without the prompt."""
        return length

    def is_done(self, *, worst_ended: Tensor, best_running: Tensor) -> bool:  # noqa: ARG002
        """Return True: ``beam_size`` hypotheses are enough."""
        return True


class HuggingFaceRule:
    """Stop when no running hypothesis can overtake the worst ended one.

    The forced tag counts as generated. Matches the beam search of transformers with
    ``early_stopping = False`` (``generation/utils.py``).
    """

    forces_end_at_limit = False

    def counted_length(self, length: Number, *, prompt_length: int) -> Number:
        """Return the length with the prompt, the decoder's start token excluded."""
        return length + prompt_length - 1

    def is_done(self, *, worst_ended: Tensor, best_running: Tensor) -> Tensor:
        """Return whether the worst ended hypothesis scores at least the best running one."""
        # With a penalty above 0, a longer one may still overtake it: transformers compares so, too.
        return worst_ended >= best_running


def stopping_rule(config: DecodingConfig) -> StoppingRule:
    """Return the stopping rule of a recipe."""
    match config.stopping:
        case "fairseq":
            return FairseqRule()
        case "huggingface":
            return HuggingFaceRule()


def max_target_length(source_tokens: int, config: DecodingConfig, *, positions: int) -> int:
    """Return the most tokens of a hypothesis, end-of-sentence included, for a source's length."""
    wanted = int(config.max_length_ratio * source_tokens) + config.max_extra_length
    return max(1, min(wanted, positions))


def length_limit(source: Source, config: DecodingConfig, *, positions: int) -> int:
    """Return :func:`max_target_length`, raised where the forced tokens need more.

    Raises:
        ConfigError: the forced tokens and end-of-sentence exceed the model's positions.
    """
    forced = len(source.prefix) + sum(map(len, set(source.required)))
    needed = forced + 1  # end-of-sentence
    if forced and needed > positions:
        raise ConfigError(
            f"The prefix and required phrases of a translation have {counted(forced, 'token')}, "
            f"and the model has positions for {positions - 1:,}. Shorten them."
        )
    return max(max_target_length(len(source.tokens), config, positions=positions), needed)


def source_begins(sources: Sequence[Source], device: torch.device) -> Tensor | None:
    """Return whether each source token begins a word of a segmenter; None without segmenters.

    Returns:
        Shape (N,), the tokens of all sources one after the other.
    """
    if not any(source.begins for source in sources):
        return None
    flags = [source.begins or (False,) * len(source.tokens) for source in sources]
    return torch.tensor([flag for of_source in flags for flag in of_source]).to(device)


def not_numbers() -> CheckpointError:
    """Return the error for a model that gives no hypothesis a finite score."""
    return CheckpointError(
        "The model cannot translate: its scores are not numbers, because its weights are finite "
        "but too large. Name another checkpoint."
    )
