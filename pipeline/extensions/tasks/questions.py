"""TODO: docstring."""

import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from pipeline.checkpoints.foreign.model_folder import Described
from pipeline.config.documents import parse_json
from pipeline.config.settings import shown
from pipeline.errors import ArtifactError
from pipeline.extensions.tasks.files import read_text

FIX = "restore the file from where it was published"


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
        return self.start + len(self.text)


@dataclass(frozen=True)
class Question:
    """A question about a context, and its right answers, one or more."""

    id: str
    question: str
    context: str
    answers: tuple[Answer, ...]


def read_questions(path: Path) -> list[Question]:
    """All questions of a file.

    Raises:
        ArtifactError: the file is none of the format, or an answer is not in its context.
    """
    content = read_text(path).encode()
    values = parse_json(content, what=str(path), error=ArtifactError, fix=FIX)
    try:
        document = _Document.model_validate(values, strict=False)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ArtifactError(
            f"{path} is no file of questions as SQuAD has them ({where}: {first['msg']}): {FIX}."
        ) from error
    found = [
        Question(
            id=one.id,
            question=one.question,
            context=paragraph.context,
            answers=tuple(_checked(answer, one, paragraph.context, path) for answer in one.answers),
        )
        for article in document.data
        for paragraph in article.paragraphs
        for one in paragraph.qas
    ]
    _check(found, path)
    return found


def _checked(answer: _Answer, question: _Question, context: str, path: Path) -> Answer:
    stop = answer.answer_start + len(answer.text)
    is_there = answer.answer_start >= 0 and context[answer.answer_start : stop] == answer.text
    if not is_there or not answer.text.strip():
        raise ArtifactError(
            f"{path}: question {shown(question.id)!r} has the answer {shown(answer.text)!r}, which "
            f"is not at character {answer.answer_start} of its context: correct answer_start, or "
            "leave the question out."
        )
    text = answer.text.strip()
    return Answer(text, answer.answer_start + answer.text.index(text))


def _check(questions: list[Question], path: Path) -> None:
    if not questions:
        raise ArtifactError(f"{path} has no question: name a file of questions.")
    seen: set[str] = set()
    for one in questions:
        if not one.answers:
            raise ArtifactError(
                f"{path}: question {shown(one.id)!r} has no answer, and SQuAD v1.1 has none of "
                "that kind: leave it out."
            )
        if one.id in seen:
            raise ArtifactError(
                f"{path} has two questions with the id {shown(one.id)!r}: give each its own."
            )
        seen.add(one.id)


ARTICLES = re.compile(r"\b(a|an|the)\b")
WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalized(answer: str) -> list[str]:
    """Return the words of an answer that are compared."""
    return ARTICLES.sub(" ", answer.lower().translate(WITHOUT_PUNCTUATION)).split()


def exact_match(answer: str, right: Sequence[str]) -> float:
    """1 where an answer is one of the right ones, else 0."""
    words = normalized(answer)
    return float(any(normalized(one) == words for one in right))


def word_f1(answer: str, right: Sequence[str]) -> float:
    """F1 of an answer's words against those of the right answer that it is closest to."""
    words = normalized(answer)
    return max(_f1(words, normalized(one)) for one in right)


def _f1(words: Sequence[str], right: Sequence[str]) -> float:
    common = sum((Counter(words) & Counter(right)).values())
    if not common:
        return 0.0
    precision, recall = common / len(words), common / len(right)
    return 2 * precision * recall / (precision + recall)
