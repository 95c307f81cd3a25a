"""Files of named entities, as WikiANN and Universal NER write them.

WikiANN: one token and its tag per line, separated by a tab; an empty line behind every sentence.
Its tokens may begin with the language, ``de:Bonn``. Universal NER: a number, the token, its tag and
more columns; comments begin with ``#``. Tags are IOB2.

F1 of named entities as seqeval and conlleval count them.

An entity is a kind and the tokens it covers; it is right if both are. A ``B-`` begins one, as does
an ``I-`` behind ``O`` or behind another kind. Precision, recall and F1 are over all entities of a
language ("micro"), in percent; where nothing is found, or nothing is there, they are 0.

Named entities: files to labelled sentences, and logits to tags.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from pipeline.batching.labelled import Labelled, collate_tags
from pipeline.config.recipe import Recipe
from pipeline.config.settings import shown
from pipeline.errors import ArtifactError
from pipeline.extensions.tasks.data import LabelledData
from pipeline.extensions.tasks.files import Found, read_text
from pipeline.extensions.tasks.settings import TasksConfig
from pipeline.extensions.tasks.training import chosen_files
from pipeline.extensions.tasks.windows import cut_sentence
from pipeline.extensions.tasks.xlmr import Pieces

OUTSIDE = "O"
_TAG = re.compile(r"O|[BI]-[^\s]{1,40}")


@dataclass(frozen=True)
class Sentence:
    """Tokens and as many tags."""

    tokens: tuple[str, ...]
    tags: tuple[str, ...]


def read_entities(path: Path, *, language: str) -> list[Sentence]:
    """All sentences of a file.

    Raises:
        ArtifactError: a line is none of the format; says which and why.
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
        raise ArtifactError(f"{path} has no sentence: name a file of named entities.")
    return sentences


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
    """Token and tag of a line."""
    columns = line.split("\t")
    if len(columns) >= 3 and columns[0].isdecimal():
        columns = columns[1:3]
    if len(columns) != 2 or not columns[0].strip():
        raise ArtifactError(
            f"{where} is {shown(line)!r} where a token, a tab and its tag are wanted: correct it."
        )
    if not _TAG.fullmatch(columns[1]):
        raise ArtifactError(
            f"{where} has the tag {shown(columns[1])!r}, which is not O, B-KIND or I-KIND: "
            "correct it."
        )
    return columns[0], columns[1]


class Entity(NamedTuple):
    """Tokens [start, stop) of a sentence."""

    kind: str
    start: int
    stop: int


def entities(tags: Sequence[str]) -> Iterator[Entity]:
    """The entities of a sentence's tags, from left to right."""
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
    """Of a language: entities that are right, found, and there."""

    right: int
    found: int
    there: int

    def scores(self) -> dict[str, float]:
        """``f1``, ``precision`` and ``recall`` in percent."""
        precision = self.right / self.found if self.found else 0.0
        recall = self.right / self.there if self.there else 0.0
        both = precision + recall
        f1 = 2 * precision * recall / both if both else 0.0
        return {"f1": 100 * f1, "precision": 100 * precision, "recall": 100 * recall}


def count_entities(
    references: Sequence[Sequence[str]], predictions: Sequence[Sequence[str]]
) -> EntityCounts:
    """Of sentences' tags; both have the same sentences of the same lengths."""
    right = found = there = 0
    for reference, prediction in zip(references, predictions, strict=True):
        assert len(reference) == len(prediction)
        wanted, given = set(entities(reference)), set(entities(prediction))
        right += len(wanted & given)
        found += len(given)
        there += len(wanted)
    return EntityCounts(right, found, there)


def read_training(
    files: Found, languages: tuple[str, ...]
) -> tuple[dict[str, list[Sentence]], dict[str, list[Sentence]], tuple[str, ...]]:
    """Sentences to train on, to validate on, and the tags of the former.

    Raises:
        ArtifactError: a file is broken, or has a tag that no training file has.
    """
    train = {code: read_entities(files[code]["train"], language=code) for code in languages}
    dev = chosen_files(files, languages, "dev")
    valid = {code: read_entities(splits["dev"], language=code) for code, splits in dev.items()}
    tags = tags_of(train)
    for code, sentences in valid.items():
        unknown = {tag for one in sentences for tag in one.tags} - set(tags)
        if unknown:
            raise ArtifactError(
                f"{dev[code]['dev']} has the tag {shown(min(unknown))!r}, which no training file "
                "has: correct it, or train on text that has it."
            )
    return train, valid, tags


def tags_of(sentences: Mapping[str, Sequence[Sentence]]) -> tuple[str, ...]:
    """All tags, ``O`` first."""
    found = {tag for group in sentences.values() for one in group for tag in one.tags}
    return (OUTSIDE, *sorted(found - {OUTSIDE}))


def tagging_data(
    train: Mapping[str, Sequence[Sentence]],
    valid: Mapping[str, Sequence[Sentence]],
    tags: tuple[str, ...],
    *,
    pieces: Pieces,
    recipe: Recipe,
    languages: Sequence[str],
) -> LabelledData:
    """What a tagger is trained on."""
    limit = recipe.section_of(TasksConfig).max_tokens

    def labelled(groups: Mapping[str, Sequence[Sentence]]) -> dict[str, list[Labelled]]:
        return {
            code: [part for one in group for part in label(one, tags, pieces, max_tokens=limit)]
            for code, group in groups.items()
        }

    return LabelledData(
        labelled(train), labelled(valid), recipe, languages=languages, collate=collate_tags
    )


def label(
    sentence: Sentence, tags: Sequence[str], pieces: Pieces, *, max_tokens: int
) -> list[Labelled]:
    """A sentence as a tagger is given it, in one part or several.

    Tags that the model does not know count as ``O``: they are what it is to be scored on, not what
    it is given.
    """
    number = {tag: index for index, tag in enumerate(tags)}
    numbers = [number.get(tag, 0) for tag in sentence.tags]
    return cut_sentence(sentence.tokens, numbers, pieces, max_tokens=max_tokens)
