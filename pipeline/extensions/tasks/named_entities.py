"""Read, cut and score sentences with named entities, in the format of WikiANN.

It has one token and its tag per line, separated by a tab, and an empty line behind every sentence.
Tokens may begin with the language, ``de:Bonn``. Tags are IOB2. A model's input is
``<s> pieces </s>``; a longer sentence is cut between words.

F1 counts entities as seqeval and conlleval do: an entity is a kind and the tokens it covers, and
is right if both are. An entity begins at ``B-``, and at ``I-`` behind ``O`` or another kind.
Precision, recall and F1 are over all entities of a language ("micro"), in percent; without entities
they are 0.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pipeline.batching.batch import Integers, Labelled, collate_tags
from pipeline.config.settings import Route, shown
from pipeline.errors import ArtifactError
from pipeline.extensions.tasks.token_classifier import (
    Predictions,
    Scores,
    TaskFiles,
    TaskKind,
    TaskModel,
    TaskSpec,
    read_text,
)
from pipeline.extensions.tasks.xlmr import BOS, EOS, UNKNOWN, Pieces
from pipeline.languages import meant_code

OUTSIDE = "O"
_TAG = re.compile(r"O|[BI]-[^\s]{1,40}")


class Sentence(NamedTuple):
    """Tokens and as many tags."""

    tokens: tuple[str, ...]
    tags: tuple[str, ...]


def read_entities(path: Path, language: str) -> list[Sentence]:
    """Read all sentences of a file; ArtifactError without any, or if a line is malformed."""
    sentences = list(_sentences(read_text(path), path))
    if not sentences:
        raise ArtifactError(f"{path} has no sentence. Name a file of named entities.")
    spelling = sentences[0].tokens[0].partition(":")[0]
    prefix = f"{spelling}:"
    if meant_code(spelling, [language]) == language and all(
        token.startswith(prefix) for sentence in sentences for token in sentence.tokens
    ):
        sentences = [
            Sentence(tuple(token.removeprefix(prefix) for token in tokens), tags)
            for tokens, tags in sentences
        ]
    return sentences


def training_tags(
    files: TaskFiles,
    train: Mapping[str, Sequence[Sentence]],
    valid: Mapping[str, Sequence[Sentence]],
) -> tuple[str, ...]:
    """Return all tags of training sentences, ``O`` first; ArtifactError if a dev file has more."""
    tags = _tags_of(train.values())
    for code, sentences in valid.items():
        if unknown := _tags_of([sentences]) - tags:
            raise ArtifactError(
                f"{files.path(code, 'dev')} has the tag {shown(min(unknown))!r}, which no training "
                "file has. Correct it, or train on text that has it."
            )
    return (OUTSIDE, *sorted(tags - {OUTSIDE}))


def _tags_of(groups: Iterable[Sequence[Sentence]]) -> set[str]:
    return {tag for sentences in groups for sentence in sentences for tag in sentence.tags}


def tagger_inputs(sentences: Sequence[Sentence], spec: TaskSpec, pieces: Pieces) -> list[Labelled]:
    """Return the parts of sentences that a tagger reads."""
    limit = spec.tasks.max_tokens
    return [part for one in sentences for part in label(one, spec.tags, pieces, max_tokens=limit)]


def label(
    sentence: Sentence, tags: Sequence[str], pieces: Pieces, *, max_tokens: int
) -> list[Labelled]:
    """Cut a sentence into parts of at most ``max_tokens``; label each word at its first piece.

    A word without pieces (for example a lone joiner) becomes an unknown one; a word longer than a
    part is truncated. Tags that the model does not know, as in test sentences, become ``O``.
    """
    number = {tag: index for index, tag in enumerate(tags)}
    words = [_pieces_of(token, pieces)[: max_tokens - 2] for token in sentence.tokens]
    parts: list[Labelled] = []
    start = 0
    while start < len(words):
        stop, size = start, 2
        while stop < len(words) and size + len(words[stop]) <= max_tokens:
            size += len(words[stop])
            stop += 1
        part = words[start:stop]
        ids = np.concatenate([[BOS], *part, [EOS]]).astype(np.int64)
        numbers = [number.get(tag, 0) for tag in sentence.tags[start:stop]]
        rows = np.cumsum([1, *map(len, part[:-1])])
        parts.append(Labelled(ids, rows, np.array(numbers, dtype=np.int64)))
        start = stop
    return parts


def tag_sentences(
    model: TaskModel, sentences: Sequence[Sentence], *, language: str, route: Route = "specific"
) -> list[tuple[str, ...]]:
    """Predict a tag for every token of every sentence."""
    spec = model.spec
    limit = spec.tasks.max_tokens
    cut = [
        (number, part)
        for number, sentence in enumerate(sentences)
        for part in label(sentence, spec.tags, model.pieces, max_tokens=limit)
    ]
    parts = [part for _, part in cut]
    tags_of_part: dict[int, list[int]] = {}
    for lines, logits in model.logits(parts, language=language, route=route):
        numbers = iter(logits.argmax(-1).tolist())
        for line in lines:
            tags_of_part[line] = [next(numbers) for _ in parts[line].rows]
    tags: list[tuple[str, ...]] = [()] * len(sentences)
    for part, (number, _) in enumerate(cut):
        tags[number] += tuple(spec.tags[index] for index in tags_of_part[part])
    return tags


def entities(tags: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """Yield the entities of a sentence's tags from left to right, as (kind, start, stop)."""
    start, kind = 0, ""
    for place, tag in enumerate((*tags, OUTSIDE)):
        if tag.startswith("B-") or tag[2:] != kind:
            if kind:
                yield kind, start, place
            start, kind = place, tag[2:]


def entity_scores(
    references: Sequence[Sequence[str]], predictions: Sequence[Sequence[str]]
) -> dict[str, float]:
    """Return ``f1``, ``precision`` and ``recall`` of predicted tags, in percent."""
    wanted, given = (
        {(line, *entity) for line, tags in enumerate(side) for entity in entities(tags)}
        for side in (references, predictions)
    )
    correct = len(wanted & given)
    precision, recall = (correct / max(len(found), 1) for found in (given, wanted))
    f1 = 2 * precision * recall / (precision + recall) if correct else 0.0
    return {"f1": 100 * f1, "precision": 100 * precision, "recall": 100 * recall}


def _sentences(text: str, path: Path) -> Iterator[Sentence]:
    lines = enumerate((line.removesuffix("\r") for line in text.split("\n")), start=1)
    for has_text, group in groupby(lines, key=lambda numbered: bool(numbered[1].strip())):
        if has_text:
            pairs = (_token(line, f"Line {number} of {path}") for number, line in group)
            yield Sentence(*zip(*pairs, strict=True))


def _token(line: str, where: str) -> tuple[str, str]:
    """Return the token and the tag of a line."""
    columns = line.split("\t")
    if len(columns) != 2 or not columns[0].strip():
        raise ArtifactError(
            f"{where} is {shown(line)!r} where a token, a tab and its tag are wanted. Correct it."
        )
    if not _TAG.fullmatch(columns[1]):
        raise ArtifactError(
            f"{where} has the tag {shown(columns[1])!r}, which is not O, B-KIND or I-KIND. "
            "Correct it."
        )
    return columns[0], columns[1]


def _pieces_of(token: str, pieces: Pieces) -> Integers:
    ids = pieces.encode(token)
    return ids if len(ids) else np.array([UNKNOWN])


def _predict(
    model: TaskModel, sentences: Sequence[Sentence], language: str, route: Route
) -> tuple[Scores, Predictions]:
    predicted = tag_sentences(model, sentences, language=language, route=route)
    scores = entity_scores([sentence.tags for sentence in sentences], predicted)
    pairs = zip(sentences, predicted, strict=True)
    return scores, [{"tokens": sentence.tokens, "tags": tags} for sentence, tags in pairs]


NAMED_ENTITIES = TaskKind(
    head="tagger",
    title="Named entities",
    unit="sentences",
    training_unit="sentences, long ones in parts,",
    titles={"f1": "F1"},
    find=TaskFiles.entities,
    read=read_entities,
    inputs=tagger_inputs,
    collate=collate_tags,
    predict=_predict,
)
