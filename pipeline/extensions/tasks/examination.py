"""What a trained tagger or reader says of text.

Legend: B windows, T window length, C tokens of a passage in a window.

A test in several languages: files, what a model says of them, and what that is worth.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pipeline.batching.global_step import evaluation_batches
from pipeline.batching.labelled import Labelled, collate_spans, collate_tags
from pipeline.config.settings import Route
from pipeline.errors import ConfigError
from pipeline.extensions.tasks.files import Found, entity_files, question_files, with_split
from pipeline.extensions.tasks.named_entities import Sentence, count_entities, label, read_entities
from pipeline.extensions.tasks.question_answering import windows_of
from pipeline.extensions.tasks.questions import Question, exact_match, read_questions, word_f1
from pipeline.extensions.tasks.task_model import TaskModel
from pipeline.extensions.tasks.windows import Window

Integers = npt.NDArray[np.int64]

TOKENS = 4096
"""Of a batch, padding included."""


def tag_sentences(
    asked: TaskModel, sentences: Sequence[Sentence], *, language: str, route: Route = "specific"
) -> list[tuple[str, ...]]:
    """A tag for every token of every sentence."""
    spec = asked.spec
    parts = [
        (number, part)
        for number, one in enumerate(sentences)
        for part in label(one, spec.tags, asked.pieces, max_tokens=spec.tasks.max_tokens)
    ]
    found: list[list[tuple[str, ...]]] = [[] for _ in parts]
    given = [part for _, part in parts]
    for lines, logits in _logits(asked, given, language=language, route=route):
        numbers = logits.argmax(-1).tolist()
        start = 0
        for line in lines:
            stop = start + len(parts[line][1].rows)
            found[line].append(tuple(spec.tags[index] for index in numbers[start:stop]))
            start = stop
    tags: list[tuple[str, ...]] = [()] * len(sentences)
    for (number, _), (piece,) in zip(parts, found, strict=True):
        tags[number] += piece
    return tags


def answer_questions(
    asked: TaskModel, questions: Sequence[Question], *, language: str, route: Route = "specific"
) -> list[str]:
    """The answer to every question: a part of its context, never empty where that is not."""
    config = asked.spec.tasks
    windows = windows_of(questions, asked.pieces, config, with_answers=False)
    best: dict[int, tuple[float, int, str]] = {}  # of equal scores the earlier window's
    given = [window.labelled for _, window in windows]
    for lines, logits in _logits(asked, given, language=language, route=route):
        starts, ends = logits.float().cpu().chunk(2)
        for line, start_T, end_T in zip(lines, starts, ends, strict=True):
            number, window = windows[line]
            found = best_span(start_T, end_T, window, longest=config.max_answer_tokens)
            if found is None:
                continue
            score, first, last = found
            start, stop = window.characters(first, last)
            candidate = score, -line, questions[number].context[start:stop]
            best[number] = max(best.get(number, candidate), candidate)
    return [best.get(number, (0.0, 0, ""))[2] for number in range(len(questions))]


def best_span(
    start_T: Tensor, end_T: Tensor, window: Window, *, longest: int
) -> tuple[float, int, int] | None:
    """Score, first and last token of the likeliest span of the passage; None where it has none."""
    place = slice(window.first, window.first + len(window.begin))
    has_text = torch.from_numpy(window.begin < window.end)
    start_C = start_T[place].masked_fill(~has_text, -torch.inf)
    end_C = end_T[place].masked_fill(~has_text, -torch.inf)
    score_CC = (start_C[:, None] + end_C[None, :]).triu()
    is_span = torch.ones_like(score_CC, dtype=torch.bool).triu().tril(longest - 1)
    score_CC = score_CC.masked_fill(~is_span, -torch.inf)
    if not score_CC.numel() or not (score_CC > -torch.inf).any():
        return None
    score, index = score_CC.flatten().max(0)
    first, last = divmod(int(index), score_CC.shape[1])
    return float(score), window.first + first, window.first + last


def _logits(
    asked: TaskModel, given: Sequence[Labelled], *, language: str, route: Route
) -> Iterator[tuple[list[int], Tensor]]:
    """What a model says of sentences or windows: places in ``given``, and their logits.

    Text in a language without a module takes the route that all languages share.
    """
    lengths = np.array([len(one.ids) for one in given], dtype=np.int64)
    collate = collate_tags if asked.spec.head == "tagger" else collate_spans
    languages = asked.spec.encoder.languages
    index = languages.index(language) if language in languages else 0
    known = asked.spec.specific_languages()
    if known is not None and language not in known:
        assert asked.spec.has_two_routes
        route = "shared"
    with torch.no_grad():
        for lines in evaluation_batches(lengths, lengths, budget=TOKENS):
            batch = collate([given[line] for line in lines], [index] * len(lines))
            yield lines.tolist(), asked.model(batch.to(asked.device), route=route).logits_LV


@dataclass(frozen=True)
class Predicted:
    """What a model said of a language: its scores in percent, and JSON lines for people."""

    scores: dict[str, float]
    lines: list[str]


class Examination(Protocol):
    """The test files of a task."""

    @property
    def languages(self) -> list[str]: ...

    def num_examples(self, language: str) -> int:
        """Sentences or questions."""

    def examine(self, asked: TaskModel, language: str, *, route: Route) -> Predicted:
        """Ask a model about all of them."""


@dataclass(frozen=True)
class EntityExamination:
    """Sentences to tag, by language."""

    sentences: dict[str, list[Sentence]]

    @property
    def languages(self) -> list[str]:
        return sorted(self.sentences)

    def num_examples(self, language: str) -> int:
        return len(self.sentences[language])

    def examine(self, asked: TaskModel, language: str, *, route: Route) -> Predicted:
        """F1, precision and recall."""
        sentences = self.sentences[language]
        found = tag_sentences(asked, sentences, language=language, route=route)
        counts = count_entities([one.tags for one in sentences], found)
        lines = [
            _json(tokens=one.tokens, tags=tags) for one, tags in zip(sentences, found, strict=True)
        ]
        return Predicted(counts.scores(), lines)


@dataclass(frozen=True)
class QuestionExamination:
    """Questions to answer, by language."""

    questions: dict[str, list[Question]]

    @property
    def languages(self) -> list[str]:
        return sorted(self.questions)

    def num_examples(self, language: str) -> int:
        return len(self.questions[language])

    def examine(self, asked: TaskModel, language: str, *, route: Route) -> Predicted:
        """F1 and exact match, means over questions."""
        questions = self.questions[language]
        found = answer_questions(asked, questions, language=language, route=route)
        pairs = list(zip(found, [_right(one) for one in questions], strict=True))
        scores = {
            "f1": 100 * fmean(word_f1(one, right) for one, right in pairs),
            "exact_match": 100 * fmean(exact_match(one, right) for one, right in pairs),
        }
        lines = [
            _json(id=one.id, answer=answer) for one, answer in zip(questions, found, strict=True)
        ]
        return Predicted(scores, lines)


def _right(question: Question) -> Sequence[str]:
    return [answer.text for answer in question.answers]


def _json(**values: object) -> str:
    return json.dumps(values, ensure_ascii=False)


def examination(head: str, folder: Path) -> Examination:
    """The test files below a folder, read whole.

    Raises:
        ConfigError or ArtifactError: there is none, or one is broken.
    """
    if head == "tagger":
        found = _tests(entity_files(folder), folder)
        return EntityExamination(
            {code: read_entities(path, language=code) for code, path in found.items()}
        )
    found = _tests(question_files(folder), folder)
    return QuestionExamination({code: read_questions(path) for code, path in found.items()})


def _tests(files: Found, folder: Path) -> dict[str, Path]:
    languages = with_split(files, "test")
    if not languages:
        raise ConfigError(f"{folder} has no test file of any language: add one.")
    return {code: files[code]["test"] for code in languages}
