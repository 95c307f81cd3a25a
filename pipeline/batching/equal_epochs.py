"""Convert updates of bytes into updates of another vocabulary with equally many epochs.

A batch holds a number of tokens: an update of longer pieces draws more sentence pairs. The
first windows of both vocabularies are planned over the same lines, which gives the number of pairs
that an update draws of each, padding included. The result depends on shards, mixture, recipe and
seed only: every rank and every attempt of a run finds the same number.
"""

import re

import numpy as np
import numpy.typing as npt

from pipeline.artifacts.shards import Shard
from pipeline.artifacts.tokenizer import Tokenizer
from pipeline.artifacts.vocabularies import SPACE
from pipeline.batching.feed import TrainingData
from pipeline.batching.global_step import PairOffsets, Planner
from pipeline.config.recipe import Recipe
from pipeline.errors import ConfigError

Integers = npt.NDArray[np.int64]

WINDOWS = 4
"""Windows planned for each vocabulary: sizes of single windows differ by a percent or two."""
CHUNK_LINES = 2**16
BYTES = re.compile("(?:<0x[0-9A-F]{2}>)+")
"""Spelling of bytes that are no text in pieces."""


def with_resolved_updates(recipe: Recipe, data: TrainingData) -> Recipe:
    """Return the recipe with ``training.updates`` counted in updates of the data's vocabulary.

    Raises:
        ConfigError: the warm-up of a polynomial schedule does not end before the updates do, or a
            line has more bytes than a batch has room for.
    """
    training = recipe.training
    of_bytes = byte_offsets(data)
    longest = max(pair.longest for pair in of_bytes.values())
    if longest + 2 > recipe.batches.tokens:
        raise ConfigError(
            f"The longest training sentence has {longest:,} bytes, training.updates_of is "
            f'"bytes", and batches.tokens is {recipe.batches.tokens:,}. Raise it, or lower '
            "clean.max_bytes."
        )
    seed, mixture = training.seed, data.mixture
    reference = Planner(of_bytes, mixture, recipe.batches, seed=seed)
    share = reference.sentences_per_update(WINDOWS) / data.planner.sentences_per_update(WINDOWS)
    return with_share_of_updates(recipe, share)


def with_share_of_updates(recipe: Recipe, share: float) -> Recipe:
    """Return the recipe with this share of its updates, counted in updates of its own model.

    Raises:
        ConfigError: the warm-up of a polynomial schedule does not end before the updates do.
    """
    training, optimizer = recipe.training, recipe.optimizer
    updates = max(1, round(training.updates * share))
    if optimizer.schedule == "polynomial" and optimizer.warmup_updates >= updates:
        raise ConfigError(
            f"training.updates {training.updates:,} of {training.updates_of} are {updates:,} of "
            f"this model, and optimizer.warmup_updates is {optimizer.warmup_updates:,}. Lower it, "
            "or train longer."
        )
    resolved = training.model_copy(update={"updates": updates, "updates_of": "tokens"})
    return recipe.model_copy(update={"training": resolved})


def byte_offsets(data: TrainingData) -> dict[str, PairOffsets]:
    """Return where the training lines of every pair would begin if tokens were bytes."""
    bytes_V = bytes_of_ids(data.tokenizer)
    starts_V = starts_with_space(data.tokenizer)
    return {
        name: PairOffsets(*(_in_bytes(side, bytes_V, starts_V) for side in sides))
        for name, sides in data.train.sides.items()
    }


def bytes_of_ids(tokenizer: Tokenizer) -> Integers:
    """Return the UTF-8 bytes of every id's text, (V,); 1 where it is unknown."""
    return np.array([_num_bytes(tokenizer.piece(index)) for index in range(tokenizer.size)])


def starts_with_space(tokenizer: Tokenizer) -> Integers:
    """Return 1 for ids of text that begins with a space, else 0, (V,)."""
    pieces = [tokenizer.piece(index) or "" for index in range(tokenizer.size)]
    return np.array([int(piece.startswith(SPACE)) for piece in pieces])


def _num_bytes(piece: str | None) -> int:
    if piece is None:
        return 1
    if BYTES.fullmatch(piece):
        return len(piece) // len("<0x00>")
    return len(piece.replace(SPACE, " ").encode())


def _in_bytes(side: Shard, bytes_V: Integers, starts_V: Integers) -> Integers:
    """Return offsets in bytes of a side's lines; the space put before a line is no text."""
    lengths = np.zeros(len(side) + 1, dtype=np.int64)
    for first in range(0, len(side), CHUNK_LINES):
        offsets = side.offsets[first : first + CHUNK_LINES + 1]
        tokens = side.tokens[offsets[0] : offsets[-1]]
        ends = np.concatenate([[0], np.cumsum(bytes_V[tokens])])
        begins, stops = offsets[:-1] - offsets[0], offsets[1:] - offsets[0]
        leading = np.zeros(len(begins), dtype=np.int64)
        filled = stops > begins
        leading[filled] = starts_V[tokens[begins[filled]]]
        lengths[first + 1 : first + len(begins) + 1] = ends[stops] - ends[begins] - leading
    return np.cumsum(lengths)
