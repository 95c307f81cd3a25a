"""Read questions in SQuAD v1.1's JSON (XQuAD, MLQA, TyDiQA-GoldP), find answers, and score them.

Files hold ``data[].paragraphs[].{context, qas[].{id, question, answers[].{text, answer_start}}}``;
``answer_start`` counts characters.

A model's input is ``<s> question </s></s> passage </s>``. A longer passage is cut into windows that
overlap, as in Hugging Face's ``run_qa.py``.

Exact match and F1 use SQuAD v1.1's normalizer for every language, as TyDiQA-GoldP and XQuAD do
(Clark et al. 2020, §6.1; Artetxe et al. 2020): lower case, without ASCII punctuation and English
articles.

Legend: T window length, C tokens of a passage in a window.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor

from pipeline.batching.batch import Integers, Labelled, collate_spans
from pipeline.checkpoints.foreign.files import Described
from pipeline.config.settings import Route, shown
from pipeline.errors import ArtifactError
from pipeline.extensions.tasks import TasksConfig
from pipeline.extensions.tasks.token_classifier import (
    Predictions,
    Scores,
    TaskFiles,
    TaskKind,
    TaskModel,
    TaskSpec,
    read_text,
)
from pipeline.extensions.tasks.xlmr import BOS, EOS, Located, Pieces

QUESTION_SPECIALS = 4
LONGEST_ANSWER = 30
"""Most tokens of a predicted answer."""
NO_ANSWER = 0
"""Position of ``<s>``, the label of a window without the answer."""
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


class _Answer(Described):
    text: str
    answer_start: int


class _Question(Described):
    id: str
    question: str
    answers: tuple[_Answer, ...]


class _Paragraph(Described):
    context: str
    qas: tuple[_Question, ...]


class _Article(Described):
    paragraphs: tuple[_Paragraph, ...]


class _Document(Described):
    data: tuple[_Article, ...]


@dataclass(frozen=True)
class Answer:
    """A part of a context: its characters [start, stop)."""

    text: str
    start: int

    @property
    def stop(self) -> int:
        """Character behind the answer's last one."""
        return self.start + len(self.text)


@dataclass(frozen=True)
class Question:
    """A question about a context, and its right answers, one or more."""

    id: str
    question: str
    context: str
    answers: tuple[Answer, ...]


def read_questions(path: Path, language: str = "") -> list[Question]:  # noqa: ARG001
    """Read all questions of a file; ArtifactError if it is malformed or an answer misplaced."""
    try:
        document = _Document.model_validate_json(read_text(path), strict=False)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ArtifactError(
            f"{path} is not a file of questions in SQuAD's format ({where}: {first['msg']}). "
            "Restore the file from where it was published."
        ) from error
    questions: dict[str, Question] = {}
    for paragraph in (paragraph for article in document.data for paragraph in article.paragraphs):
        for asked in paragraph.qas:
            if asked.id in questions or not asked.answers:
                problem = "occurs twice" if asked.answers else "has no answer"
                raise ArtifactError(
                    f"{path}: question {shown(asked.id)!r} {problem}, which SQuAD v1.1 does not "
                    "allow. Leave it out."
                )
            answers = tuple(
                _checked(one, asked.id, paragraph.context, path) for one in asked.answers
            )
            questions[asked.id] = Question(asked.id, asked.question, paragraph.context, answers)
    if not questions:
        raise ArtifactError(f"{path} has no question. Name a file of questions.")
    return list(questions.values())


def _checked(answer: _Answer, question: str, context: str, path: Path) -> Answer:
    text = answer.text.strip()
    stop = answer.answer_start + len(answer.text)
    if not text or answer.answer_start < 0 or context[answer.answer_start : stop] != answer.text:
        raise ArtifactError(
            f"{path}: question {shown(question)!r} has the answer {shown(answer.text)!r}, which "
            f"is not at character {answer.answer_start} of its context. Correct answer_start, or "
            "leave the question out."
        )
    return Answer(text, answer.answer_start + answer.text.index(text))


# ---------------------------------------------------------------- windows


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
    """Character of the context behind each of the part's tokens."""

    def characters(self, first: int, last: int) -> tuple[int, int]:
        """Return the characters [start, stop) of the context from one input position to another."""
        return int(self.begin[first - self.first]), int(self.end[last - self.first])


def windows_of(
    questions: Sequence[Question], pieces: Pieces, config: TasksConfig, *, with_answers: bool = True
) -> list[tuple[int, Window]]:
    """Cut all questions into windows; the first of several right answers becomes the label.

    Returns:
        Pairs (index of the question, window), in the order of the questions.
    """
    located: dict[str, Located] = {}  # most contexts have several questions
    found = []
    for number, question in enumerate(questions):
        if question.context not in located:
            located[question.context] = pieces.locate(question.context)
        answer = question.answers[0] if with_answers else None
        asked = pieces.encode(question.question)
        windows = cut_passage(asked, located[question.context], answer, config)
        found += [(number, window) for window in windows]
    return found


def cut_passage(
    question: Integers, context: Located, answer: Answer | None, config: TasksConfig
) -> list[Window]:
    """Cut a context into windows, each behind the first tokens of the question.

    A question has at most a sixth of a window, and windows share a third of their length, as the
    defaults 384, 64 and 128 of BERT's SQuAD script do. Windows that hold all of ``answer`` are
    labeled with its tokens, others with ``NO_ANSWER``.
    """
    question = question[: config.max_tokens // 6]
    room = config.max_tokens - len(question) - QUESTION_SPECIALS
    first = len(question) + 3
    span = None if answer is None else token_span(context, answer)
    windows = []
    start = 0
    while True:
        stop = min(start + room, len(context.ids))
        ids = np.concatenate([[BOS], question, [EOS, EOS], context.ids[start:stop], [EOS]])
        labels = np.full(2, NO_ANSWER, dtype=np.int64)
        if span is not None and start <= span[0] and span[1] < stop:
            labels = np.array(span, dtype=np.int64) - start + first
        part = slice(start, stop)
        labelled = Labelled(ids.astype(np.int64), np.zeros(0, dtype=np.int64), labels)
        windows.append(Window(labelled, first, context.begin[part], context.end[part]))
        if stop == len(context.ids):
            return windows
        start += room - config.max_tokens // 3


def token_span(context: Located, answer: Answer) -> tuple[int, int] | None:
    """Return the first and last token that have a character of an answer; None if none has."""
    has_some = (context.begin < answer.stop) & (context.end > answer.start)
    places = np.flatnonzero(has_some & (context.begin < context.end))
    return (int(places[0]), int(places[-1])) if len(places) else None


# ---------------------------------------------------------------- answers


def answer_questions(
    model: TaskModel, questions: Sequence[Question], *, language: str, route: Route = "specific"
) -> list[str]:
    """Predict the answer to every question: a part of its context, empty only if that is."""
    config = model.spec.tasks
    windows = windows_of(questions, model.pieces, config, with_answers=False)
    best: dict[int, tuple[float, int, str]] = {}  # the earlier window wins at equal scores
    inputs = [window.labelled for _, window in windows]
    for lines, logits in model.logits(inputs, language=language, route=route):
        starts, ends = logits.float().cpu().chunk(2)
        for line, start_T, end_T in zip(lines, starts, ends, strict=True):
            number, window = windows[line]
            span = best_span(start_T, end_T, window, longest=LONGEST_ANSWER)
            if span is None:
                continue
            score, first, last = span
            start, stop = window.characters(first, last)
            candidate = score, -line, questions[number].context[start:stop]
            best[number] = max(best.get(number, candidate), candidate)
    return [best.get(number, (0.0, 0, ""))[2] for number in range(len(questions))]


def best_span(
    start_T: Tensor, end_T: Tensor, window: Window, *, longest: int
) -> tuple[float, int, int] | None:
    """Return score, first and last token of the passage's likeliest span; None if it has none."""
    place = slice(window.first, window.first + len(window.begin))
    has_text = torch.from_numpy(window.begin < window.end)
    start_C = start_T[place].masked_fill(~has_text, -torch.inf)
    end_C = end_T[place].masked_fill(~has_text, -torch.inf)
    score_CC = start_C[:, None] + end_C[None, :]
    is_span = torch.ones_like(score_CC, dtype=torch.bool).triu().tril(longest - 1)
    score_CC = score_CC.masked_fill(~is_span, -torch.inf)
    if not score_CC.numel() or not (score_CC > -torch.inf).any():
        return None
    score, index = score_CC.flatten().max(0)
    first, last = divmod(int(index), score_CC.shape[1])
    return float(score), window.first + first, window.first + last


# ---------------------------------------------------------------- scores


def normalized(answer: str) -> list[str]:
    """Return the words of an answer that are compared."""
    return _ARTICLES.sub(" ", answer.lower().translate(_WITHOUT_PUNCTUATION)).split()


def exact_match(answer: str, right: Sequence[str]) -> float:
    """Return 1 if an answer equals a right answer, else 0."""
    words = normalized(answer)
    return float(any(normalized(one) == words for one in right))


def word_f1(answer: str, right: Sequence[str]) -> float:
    """Return the F1 of an answer's words against the closest right answer's."""
    words = normalized(answer)
    return max(_f1(words, normalized(one)) for one in right)


def _f1(words: Sequence[str], right: Sequence[str]) -> float:
    common = sum((Counter(words) & Counter(right)).values())
    if not common:
        return 0.0
    precision, recall = common / len(words), common / len(right)
    return 2 * precision * recall / (precision + recall)


def reader_inputs(questions: Sequence[Question], spec: TaskSpec, pieces: Pieces) -> list[Labelled]:
    """Return the windows that a reader reads, with the places of answers."""
    return [window.labelled for _, window in windows_of(questions, pieces, spec.tasks)]


def _predict(
    model: TaskModel, questions: Sequence[Question], language: str, route: Route
) -> tuple[Scores, Predictions]:
    answers = answer_questions(model, questions, language=language, route=route)
    pairs = list(zip(questions, answers, strict=True))
    scores = {
        name: 100 * fmean(score(answer, [right.text for right in q.answers]) for q, answer in pairs)
        for name, score in (("f1", word_f1), ("exact_match", exact_match))
    }
    return scores, [{"id": question.id, "answer": answer} for question, answer in pairs]


QUESTIONS = TaskKind(
    head="reader",
    title="Question answering",
    unit="questions",
    training_unit="windows",
    titles={"f1": "F1", "exact_match": "exact match"},
    find=TaskFiles.questions,
    read=read_questions,
    inputs=reader_inputs,
    collate=collate_spans,
    predict=_predict,
)
