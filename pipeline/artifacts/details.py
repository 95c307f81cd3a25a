"""What translations hold beside the one hypothesis of every line, where it was asked for.

``details/{source}-{target}.jsonl``: one JSON object per test line, in the corpus's order.
"""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from pipeline.documents import RESTORE, read_json_lines
from pipeline.errors import ArtifactError


@dataclass(frozen=True)
class Alternative:
    """One of several hypotheses of a line; its score is as that of the translation."""

    text: str
    score: float


@dataclass(frozen=True)
class Word:
    """A word of the translation; its score is the log-probability of its tokens, summed."""

    text: str
    score: float


@dataclass(frozen=True)
class Details:
    """Empty where not asked for, and of an empty line."""

    n_best: tuple[Alternative, ...] = ()
    """The translation first."""
    words: tuple[Word, ...] = ()
    """Of the translation, in order."""
    source_words: tuple[str, ...] = ()
    alignment: tuple[tuple[int, int], ...] = ()
    """(source word, word of the translation), both from 0, by word of the translation."""


_DETAILS = TypeAdapter(Details)


def details_name(direction: object) -> str:
    """``direction`` is written as source-target."""
    return f"details/{direction}.jsonl"


def record_of(details: Details) -> dict[str, Any]:
    """The details as JSON has them."""
    return dataclasses.asdict(details)


def write_details(path: Path, lines: Sequence[Details]) -> None:
    """One JSON object per line, in order."""
    with path.open("w", encoding="utf-8", newline="\n") as stream:
        for details in lines:
            stream.write(json.dumps(record_of(details), ensure_ascii=False) + "\n")


def read_details(path: Path) -> list[Details]:
    """What :func:`write_details` wrote.

    Raises:
        ArtifactError: names the line that is none.
    """
    return [
        _details_of(record, what=f"Line {number} of {path}")
        for number, record in enumerate(read_json_lines(path), start=1)
    ]


def _details_of(record: object, *, what: str) -> Details:
    try:
        return _DETAILS.validate_python(record)
    except ValidationError as error:
        message = error.errors(include_url=False)[0]["msg"]
        raise ArtifactError(f"{what} has no details of a line ({message}): {RESTORE}.") from error
