"""Turn questions about passages into windows that point to their answers.

A question about a passage is ``<s> question </s></s> passage </s>``. A longer passage is cut into
windows that overlap, as in Hugging Face's ``run_qa.py``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.batching.labelled import Labelled, collate_spans
from pipeline.config.recipe import Recipe
from pipeline.errors import ConfigError
from pipeline.extensions.tasks.data import Integers, LabelledData
from pipeline.extensions.tasks.files import Found, chosen_files
from pipeline.extensions.tasks.questions import Answer, Question, read_questions
from pipeline.extensions.tasks.settings import TasksConfig
from pipeline.extensions.tasks.xlmr import BOS, EOS, Located, Pieces

QUESTION_SPECIALS = 4
NO_ANSWER = 0
"""Position of ``<s>``, the label of a window without the answer."""
_NOTHING = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True)
class Window:
    """Part of a passage behind its question."""

    labelled: Labelled
    """Input and label of the model."""
    first: int
    """Position in the input of this part's first token."""
    begin: Integers
    """First character of each of the part's tokens in the context."""
    end: Integers
    """Character behind the last one of each of the part's tokens in the context."""

    def characters(self, first: int, last: int) -> tuple[int, int]:
        """Return the characters [start, stop) of the context from one input position to another."""
        return int(self.begin[first - self.first]), int(self.end[last - self.first])


def reading_data(
    files: Found, *, pieces: Pieces, recipe: Recipe, languages: tuple[str, ...]
) -> LabelledData:
    """Read the training and validation data of a reader.

    Raises:
        ConfigError: the settings leave no room for windows, or have label smoothing.
        ArtifactError: a file is broken.
    """
    tasks = recipe.section_of(TasksConfig)
    check_windows(tasks)
    if recipe.loss.label_smoothing:
        raise ConfigError(
            f"loss.label_smoothing is {recipe.loss.label_smoothing}, which has no meaning for a "
            "reader: its labels are positions in a passage. Set it to 0."
        )
    train = {code: read_questions(files[code]["train"]) for code in languages}
    dev = chosen_files(files, languages, "dev")
    valid = {code: read_questions(splits["dev"]) for code, splits in dev.items()}

    def labelled(groups: Mapping[str, Sequence[Question]]) -> dict[str, list[Labelled]]:
        return {
            code: [window.labelled for _, window in windows_of(group, pieces, tasks)]
            for code, group in groups.items()
        }

    return LabelledData(
        labelled(train), labelled(valid), recipe, languages=languages, collate=collate_spans
    )


def windows_of(
    questions: Sequence[Question],
    pieces: Pieces,
    config: TasksConfig,
    *,
    with_answers: bool = True,
) -> list[tuple[int, Window]]:
    """Cut all questions into windows; the first of several right answers becomes the label.

    Returns:
        Pairs (index of the question, window), in the order of the questions.
    """
    located: dict[str, Located] = {}  # most contexts have several questions
    found = []
    for number, one in enumerate(questions):
        if one.context not in located:
            located[one.context] = pieces.locate(one.context)
        answer = one.answers[0] if with_answers else None
        asked = pieces.encode(one.question)
        windows = cut_passage(asked, located[one.context], answer, config)
        found += [(number, window) for window in windows]
    return found


def check_windows(config: TasksConfig) -> None:
    """Raise ConfigError if the windows of a passage would not advance."""
    room = config.max_tokens - config.max_question_tokens - QUESTION_SPECIALS
    if config.stride >= room:
        raise ConfigError(
            f"tasks.stride {config.stride} leaves no step from window to window: behind a question "
            f"of tasks.max_question_tokens {config.max_question_tokens} there are {max(room, 0)} "
            f"of tasks.max_tokens {config.max_tokens} for the passage. Lower the stride, or raise "
            "tasks.max_tokens."
        )


def cut_passage(
    question: Integers, context: Located, answer: Answer | None, config: TasksConfig
) -> list[Window]:
    """Cut a context into windows, each behind the question.

    Windows that hold all of ``answer`` are labeled with its tokens, others with ``NO_ANSWER``.
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
    """Return the first and last token that have a character of an answer; None if none has."""
    has_some = (context.begin < answer.stop) & (context.end > answer.start)
    places = np.flatnonzero(has_some & (context.begin < context.end))
    return (int(places[0]), int(places[-1])) if len(places) else None
