"""Run a trained tagger or reader on test files, and score its predictions.

Legend: T window length, C tokens of a passage in a window, L labels, V values of a label.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from torch import Tensor

from pipeline.batching.global_step import evaluation_batches
from pipeline.batching.labelled import Labelled, collate_spans, collate_tags
from pipeline.config.settings import Route
from pipeline.errors import ConfigError
from pipeline.extensions.tasks.files import Found, entity_files, question_files, with_split
from pipeline.extensions.tasks.named_entities import Sentence, count_entities, label, read_entities
from pipeline.extensions.tasks.question_answering import Window, windows_of
from pipeline.extensions.tasks.questions import Question, exact_match, read_questions, word_f1
from pipeline.extensions.tasks.task_model import Head, TaskModel

TOKENS = 4096
"""Most tokens of a batch, padding included."""


def tag_sentences(
    asked: TaskModel, sentences: Sequence[Sentence], *, language: str, route: Route = "specific"
) -> list[tuple[str, ...]]:
    """Predict a tag for every token of every sentence."""
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
    """Predict the answer to every question: a part of its context, empty only if that is."""
    config = asked.spec.tasks
    windows = windows_of(questions, asked.pieces, config, with_answers=False)
    best: dict[int, tuple[float, int, str]] = {}  # the earlier window wins at equal scores
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
    """Return score, first and last token of the passage's likeliest span; None if it has none."""
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
    """Run a model on sentences or windows; yield indices in ``given`` and their logits, by batch.

    Text in a language without a module takes the shared route.
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
    """Predictions of a model for a language."""

    scores: dict[str, float]
    """Score → percent."""
    lines: list[str]
    """Predictions as JSON lines."""


@dataclass(frozen=True)
class Examination:
    """Test files of a task."""

    num_examples: Mapping[str, int]
    """Language → sentences or questions of its test file."""
    examine: Callable[[TaskModel, str, Route], Predicted]
    """Run a model on the test file of a language by a route, and score it."""

    @property
    def languages(self) -> list[str]:
        """Languages of the test files, sorted."""
        return sorted(self.num_examples)


def examination(head: Head, folder: Path) -> Examination:
    """Read the test files below a folder.

    Raises:
        ConfigError: there is no test file.
        ArtifactError: a file is broken.
    """
    if head == "tagger":
        found = _tests(entity_files(folder), folder)
        sentences = {code: read_entities(path, language=code) for code, path in found.items()}
        return Examination(_counts(sentences), partial(_examine_tagger, sentences))
    found = _tests(question_files(folder), folder)
    questions = {code: read_questions(path) for code, path in found.items()}
    return Examination(_counts(questions), partial(_examine_reader, questions))


def _counts(examples: Mapping[str, Sized]) -> dict[str, int]:
    return {code: len(of_language) for code, of_language in examples.items()}


def _examine_tagger(
    sentences: Mapping[str, Sequence[Sentence]], asked: TaskModel, language: str, route: Route
) -> Predicted:
    """Score F1, precision and recall of entities."""
    of_language = sentences[language]
    found = tag_sentences(asked, of_language, language=language, route=route)
    counts = count_entities([one.tags for one in of_language], found)
    lines = [
        _json(tokens=one.tokens, tags=tags) for one, tags in zip(of_language, found, strict=True)
    ]
    return Predicted(counts.scores(), lines)


def _examine_reader(
    questions: Mapping[str, Sequence[Question]], asked: TaskModel, language: str, route: Route
) -> Predicted:
    """Score F1 and exact match, means over questions."""
    of_language = questions[language]
    found = answer_questions(asked, of_language, language=language, route=route)
    rights = [[answer.text for answer in one.answers] for one in of_language]
    pairs = list(zip(found, rights, strict=True))
    scores = {
        "f1": 100 * fmean(word_f1(one, right) for one, right in pairs),
        "exact_match": 100 * fmean(exact_match(one, right) for one, right in pairs),
    }
    lines = [
        _json(id=one.id, answer=answer) for one, answer in zip(of_language, found, strict=True)
    ]
    return Predicted(scores, lines)


def _tests(files: Found, folder: Path) -> dict[str, Path]:
    languages = with_split(files, "test")
    if not languages:
        raise ConfigError(f"{folder} has no test file of any language. Add one.")
    return {code: files[code]["test"] for code in languages}


def _json(**values: object) -> str:
    return json.dumps(values, ensure_ascii=False)
