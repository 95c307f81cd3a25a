"""A test in several languages: files, what a model says of them, and what that is worth."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Protocol

from pipeline.config import Route
from pipeline.errors import ConfigError
from pipeline.tasks.answer_scores import exact_match, word_f1
from pipeline.tasks.asking import answer_questions, tag_sentences
from pipeline.tasks.entities import Sentence, read_entities
from pipeline.tasks.entity_scores import count_entities
from pipeline.tasks.files import Found, entity_files, question_files, with_split
from pipeline.tasks.questions import Question, read_questions
from pipeline.tasks.task_model import TaskModel


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
