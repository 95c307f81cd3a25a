"""Files of named entities, as WikiANN and Universal NER write them.

WikiANN: one token and its tag per line, separated by a tab; an empty line behind every sentence.
Its tokens may begin with the language, ``de:Bonn``. Universal NER: a number, the token, its tag and
more columns; comments begin with ``#``. Tags are IOB2.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import ArtifactError
from pipeline.settings import shown
from pipeline.tasks.files import read_text

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
