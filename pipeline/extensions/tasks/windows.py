"""TODO: docstring."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.batching.labelled import Labelled
from pipeline.errors import ConfigError
from pipeline.extensions.tasks.data import Integers
from pipeline.extensions.tasks.questions import Answer
from pipeline.extensions.tasks.settings import TasksConfig
from pipeline.extensions.tasks.xlmr import BOS, EOS, UNKNOWN, Located, Pieces

QUESTION_SPECIALS = 4
NO_ANSWER = 0
"""Where a window without the answer points: to ``<s>``."""
_NOTHING = np.zeros(0, dtype=np.int64)


def cut_sentence(
    tokens: Sequence[str], tags: Sequence[int], pieces: Pieces, *, max_tokens: int
) -> list[Labelled]:
    """A sentence in parts of at most ``max_tokens``; every word is labelled at its first piece.

    A word of which no piece is left (such as a lone joiner) is an unknown one; of a word longer
    than a part its beginning is taken.
    """
    words = [_pieces_of(token, pieces)[: max_tokens - 2] for token in tokens]
    parts: list[Labelled] = []
    start = 0
    while start < len(words):
        stop, size = start, 2
        while stop < len(words) and size + len(words[stop]) <= max_tokens:
            size += len(words[stop])
            stop += 1
        parts.append(_sentence(words[start:stop], tags[start:stop]))
        start = stop
    return parts


def _pieces_of(token: str, pieces: Pieces) -> Integers:
    ids = pieces.encode(token)
    return ids if len(ids) else np.array([UNKNOWN])


def _sentence(words: Sequence[Integers], tags: Sequence[int]) -> Labelled:
    ids = np.concatenate([[BOS], *words, [EOS]]).astype(np.int64)
    rows = np.cumsum([1, *map(len, words[:-1])])
    return Labelled(ids, rows, np.array(tags, dtype=np.int64))


@dataclass(frozen=True)
class Window:
    """Part of a passage behind its question.

    Attributes:
        labelled: what a model is given.
        first: position in it of the passage's first token here.
        begin, end: of each token of the passage here, its characters [begin, end) in the context.
    """

    labelled: Labelled
    first: int
    begin: Integers
    end: Integers

    def characters(self, first: int, last: int) -> tuple[int, int]:
        """The characters [start, stop) of the context from one token of the model's to another."""
        return int(self.begin[first - self.first]), int(self.end[last - self.first])


def check_windows(config: TasksConfig) -> None:
    """Raises ConfigError where the windows of a passage would not move on."""
    room = config.max_tokens - config.max_question_tokens - QUESTION_SPECIALS
    if config.stride >= room:
        raise ConfigError(
            f"tasks.stride {config.stride} leaves no step from window to window: behind a question "
            f"of tasks.max_question_tokens {config.max_question_tokens} there are {max(room, 0)} "
            f"of tasks.max_tokens {config.max_tokens} for the passage; lower it, or raise "
            "tasks.max_tokens."
        )


def cut_passage(
    question: Integers, context: Located, answer: Answer | None, config: TasksConfig
) -> list[Window]:
    """Windows over a context, each with its question before it.

    ``answer`` is where a window that holds all of it points to.
    """
    question = question[: config.max_question_tokens]
    room = config.max_tokens - len(question) - QUESTION_SPECIALS
    first = len(question) + 3
    span = None if answer is None else token_span(context, answer)
    windows = []
    start = 0
    while True:
        stop = min(start + room, len(context.ids))
        ids = np.concatenate([[BOS], question, [EOS, EOS], context.ids[start:stop], [EOS]])
        is_inside = span is not None and start <= span[0] and span[1] < stop
        labels = np.full(2, NO_ANSWER, dtype=np.int64)
        if span is not None and is_inside:
            labels = np.array(span, dtype=np.int64) - start + first
        part = slice(start, stop)
        labelled = Labelled(ids.astype(np.int64), _NOTHING, labels)
        windows.append(Window(labelled, first, context.begin[part], context.end[part]))
        if stop == len(context.ids):
            return windows
        start += room - config.stride


def token_span(context: Located, answer: Answer) -> tuple[int, int] | None:
    """First and last token that have a character of an answer; None where none has."""
    has_some = (context.begin < answer.stop) & (context.end > answer.start)
    places = np.flatnonzero(has_some & (context.begin < context.end))
    return (int(places[0]), int(places[-1])) if len(places) else None
