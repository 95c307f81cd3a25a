"""Read files of questions in SQuAD v1.1's JSON (XQuAD, MLQA, TyDiQA-GoldP), and score answers.

Files hold ``data[].paragraphs[].{context, qas[].{id, question, answers[].{text, answer_start}}}``;
``answer_start`` counts characters.

Exact match and F1 use SQuAD v1.1's normalizer for every language, as TyDiQA-GoldP and XQuAD do
(Clark et al. 2020, §6.1; Artetxe et al. 2020): lower case, without ASCII punctuation and English
articles.
"""

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

_FIX = "restore the file from where it was published"
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


def read_questions(path: Path) -> list[Question]:
    """Read all questions of a file.

    Raises:
        ArtifactError: the file does not have the format, or an answer is not in its context.
    """
    content = read_text(path).encode()
    values = parse_json(content, what=str(path), error=ArtifactError, fix=_FIX)
    try:
        document = _Document.model_validate(values, strict=False)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ArtifactError(
            f"{path} is not a file of questions in SQuAD's format ({where}: {first['msg']}). "
            f"{_FIX.capitalize()}."
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


def normalized(answer: str) -> list[str]:
    """Return the words of an answer that are compared."""
    return _ARTICLES.sub(" ", answer.lower().translate(_WITHOUT_PUNCTUATION)).split()


def exact_match(answer: str, right: Sequence[str]) -> float:
    """Return 1 if an answer equals one of the right ones, else 0."""
    words = normalized(answer)
    return float(any(normalized(one) == words for one in right))


def word_f1(answer: str, right: Sequence[str]) -> float:
    """Return the F1 of an answer's words against the closest right answer's."""
    words = normalized(answer)
    return max(_f1(words, normalized(one)) for one in right)


def _checked(answer: _Answer, question: _Question, context: str, path: Path) -> Answer:
    stop = answer.answer_start + len(answer.text)
    is_there = answer.answer_start >= 0 and context[answer.answer_start : stop] == answer.text
    if not is_there or not answer.text.strip():
        raise ArtifactError(
            f"{path}: question {shown(question.id)!r} has the answer {shown(answer.text)!r}, which "
            f"is not at character {answer.answer_start} of its context. Correct answer_start, or "
            "leave the question out."
        )
    text = answer.text.strip()
    return Answer(text, answer.answer_start + answer.text.index(text))


def _check(questions: list[Question], path: Path) -> None:
    if not questions:
        raise ArtifactError(f"{path} has no question. Name a file of questions.")
    seen: set[str] = set()
    for one in questions:
        if not one.answers:
            raise ArtifactError(
                f"{path}: question {shown(one.id)!r} has no answer, which SQuAD v1.1 does not "
                "allow. Leave it out."
            )
        if one.id in seen:
            raise ArtifactError(
                f"{path} has two questions with the id {shown(one.id)!r}. Give each its own."
            )
        seen.add(one.id)


def _f1(words: Sequence[str], right: Sequence[str]) -> float:
    common = sum((Counter(words) & Counter(right)).values())
    if not common:
        return 0.0
    precision, recall = common / len(words), common / len(right)
    return 2 * precision * recall / (precision + recall)
