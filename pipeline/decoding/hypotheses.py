"""What a search is given, and what it finds."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.config import DecodingConfig
from pipeline.errors import CheckpointError, ConfigError
from pipeline.summary import counted


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
