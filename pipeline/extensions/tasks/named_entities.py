"""Read, cut and score sentences with named entities, in the formats of WikiANN and Universal NER.

WikiANN has one token and its tag per line, separated by a tab, and an empty line behind every
sentence. Its tokens may begin with the language, ``de:Bonn``. Universal NER has a number, the
token, its tag and more columns; comments begin with ``#``. Tags are IOB2. A model's input is
``<s> pieces </s>``; a longer sentence is cut between words.

F1 counts entities as seqeval and conlleval do: an entity is a kind and the tokens it covers, and
is right if both are. An entity begins at ``B-``, and at ``I-`` behind ``O`` or another kind.
Precision, recall and F1 are over all entities of a language ("micro"), in percent; without entities
they are 0.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pipeline.batching.labelled import Labelled, collate_tags
from pipeline.config.recipe import Recipe
from pipeline.config.settings import shown
from pipeline.errors import ArtifactError
from pipeline.extensions.tasks.data import Integers, LabelledData
from pipeline.extensions.tasks.files import Found, chosen_files, read_text
from pipeline.extensions.tasks.settings import TasksConfig
from pipeline.extensions.tasks.xlmr import BOS, EOS, UNKNOWN, Pieces

OUTSIDE = "O"
_TAG = re.compile(r"O|[BI]-[^\s]{1,40}")


@dataclass(frozen=True)
class Sentence:
    """Tokens and as many tags."""

    tokens: tuple[str, ...]
    tags: tuple[str, ...]


def read_entities(path: Path, *, language: str) -> list[Sentence]:
    """Read all sentences of a file.

    Raises:
        ArtifactError: the file has no sentence, or a line that does not have the format.
    """
    text = read_text(path)
    sentences = list(_sentences(text, path))
    prefix = f"{language}:"
    tokens = [token for one in sentences for token in one.tokens]
    if tokens and all(token.startswith(prefix) for token in tokens):
        cut = len(prefix)
        sentences = [
            Sentence(tuple(token[cut:] for token in one.tokens), one.tags) for one in sentences
        ]
    if not sentences:
        raise ArtifactError(f"{path} has no sentence. Name a file of named entities.")
    return sentences


def tagging_data(
    files: Found, *, pieces: Pieces, recipe: Recipe, languages: tuple[str, ...]
) -> tuple[LabelledData, tuple[str, ...]]:
    """Read the training and validation data of a tagger.

    Returns:
        The data, and all tags of the training sentences, ``O`` first.

    Raises:
        ArtifactError: a file is broken, or a dev file has a tag that no training file has.
    """
    train = {code: read_entities(files[code]["train"], language=code) for code in languages}
    dev = chosen_files(files, languages, "dev")
    valid = {code: read_entities(splits["dev"], language=code) for code, splits in dev.items()}
    tags = (OUTSIDE, *sorted(set[str]().union(*map(_tags, train.values())) - {OUTSIDE}))
    for code, sentences in valid.items():
        if unknown := _tags(sentences) - set(tags):
            raise ArtifactError(
                f"{dev[code]['dev']} has the tag {shown(min(unknown))!r}, which no training file "
                "has. Correct it, or train on text that has it."
            )

    def labelled(groups: Mapping[str, Sequence[Sentence]]) -> dict[str, list[Labelled]]:
        limit = recipe.section_of(TasksConfig).max_tokens
        return {
            code: [part for one in group for part in label(one, tags, pieces, max_tokens=limit)]
            for code, group in groups.items()
        }

    data = LabelledData(
        labelled(train), labelled(valid), recipe, languages=languages, collate=collate_tags
    )
    return data, tags


def label(
    sentence: Sentence, tags: Sequence[str], pieces: Pieces, *, max_tokens: int
) -> list[Labelled]:
    """Cut and label a sentence as input of a tagger, in one part or several.

    Tags that the model does not know become ``O``: labels of test sentences are not used.
    """
    number = {tag: index for index, tag in enumerate(tags)}
    numbers = [number.get(tag, 0) for tag in sentence.tags]
    return cut_sentence(sentence.tokens, numbers, pieces, max_tokens=max_tokens)


def cut_sentence(
    tokens: Sequence[str], tags: Sequence[int], pieces: Pieces, *, max_tokens: int
) -> list[Labelled]:
    """Cut a sentence into parts of at most ``max_tokens``; label each word at its first piece.

    A word without pieces (such as a lone joiner) becomes an unknown one; a word longer than a part
    is truncated.
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


class Entity(NamedTuple):
    """Tokens [start, stop) of a sentence, and their kind, such as PER."""

    kind: str
    start: int
    stop: int


def entities(tags: Sequence[str]) -> Iterator[Entity]:
    """Yield the entities of a sentence's tags, from left to right."""
    number, previous = 0, OUTSIDE
    numbered: list[tuple[int, str]] = []
    for tag in tags:
        begins = tag.startswith("B-") or tag[2:] != previous[2:]
        number += begins
        numbered.append((number, tag[2:]))
        previous = tag
    start = 0
    for (_, kind), group in groupby(numbered):
        stop = start + len(list(group))
        if kind:
            yield Entity(kind, start, stop)
        start = stop


@dataclass(frozen=True)
class EntityCounts:
    """Counts of the entities of a language."""

    right: int
    """Predicted entities that the references have."""
    found: int
    """Predicted entities."""
    there: int
    """Entities of the references."""

    def scores(self) -> dict[str, float]:
        """Return ``f1``, ``precision`` and ``recall`` in percent."""
        precision = self.right / self.found if self.found else 0.0
        recall = self.right / self.there if self.there else 0.0
        both = precision + recall
        f1 = 2 * precision * recall / both if both else 0.0
        return {"f1": 100 * f1, "precision": 100 * precision, "recall": 100 * recall}


def count_entities(
    references: Sequence[Sequence[str]], predictions: Sequence[Sequence[str]]
) -> EntityCounts:
    """Count the entities of sentences' tags; both have the same sentences of the same lengths."""
    right = found = there = 0
    for reference, prediction in zip(references, predictions, strict=True):
        assert len(reference) == len(prediction)
        wanted, given = set(entities(reference)), set(entities(prediction))
        right += len(wanted & given)
        found += len(given)
        there += len(wanted)
    return EntityCounts(right, found, there)


def _sentences(text: str, path: Path) -> Iterator[Sentence]:
    tokens: list[str] = []
    tags: list[str] = []
    for number, line in enumerate(text.split("\n"), start=1):
        line = line.removesuffix("\r")
        if not line.strip():
            if tokens:
                yield Sentence(tuple(tokens), tuple(tags))
            tokens, tags = [], []
        elif not (line.startswith("#") and "\t" not in line):
            token, tag = _token(line, f"Line {number} of {path}")
            tokens.append(token)
            tags.append(tag)
    if tokens:
        yield Sentence(tuple(tokens), tuple(tags))


def _token(line: str, where: str) -> tuple[str, str]:
    """Return the token and the tag of a line."""
    columns = line.split("\t")
    if len(columns) >= 3 and columns[0].isdecimal():
        columns = columns[1:3]
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


def _tags(sentences: Sequence[Sentence]) -> set[str]:
    return {tag for one in sentences for tag in one.tags}


def _pieces_of(token: str, pieces: Pieces) -> Integers:
    ids = pieces.encode(token)
    return ids if len(ids) else np.array([UNKNOWN])


def _sentence(words: Sequence[Integers], tags: Sequence[int]) -> Labelled:
    ids = np.concatenate([[BOS], *words, [EOS]]).astype(np.int64)
    rows = np.cumsum([1, *map(len, words[:-1])])
    return Labelled(ids, rows, np.array(tags, dtype=np.int64))
