"""The manifest of an artifact: what it records, which names it may hold, how it is read.

``manifest.json`` is written last. It records the kind, the resolved settings, the inputs with
their digests, and the size and SHA-256 of every 64 MiB chunk of every file. The names of files are
relative, with ``/``, and stay within the artifact.
"""

import hashlib
import json
import os
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
)

from pipeline.documents import read_bytes
from pipeline.errors import ArtifactError

MANIFEST_NAME = "manifest.json"

MARKER_NAME = ".made-by-mmnmt"
"""An empty file in every working folder, from its making on: what says that it is ours."""

LONGEST_PART = 255
"""Bytes of a file's name on the file systems of Linux."""

Kind = Literal[
    "corpus",
    "tokenizer",
    "shards",
    "mixture",
    "groups",
    "checkpoint",
    "training_state",
    "translations",
    "evaluation",
    "task_model",
    "task_evaluation",
    "export",
    "analysis",
]

FORMAT_VERSION: dict[Kind, int] = {
    "corpus": 1,
    "tokenizer": 1,
    "shards": 1,
    "mixture": 1,
    "groups": 1,
    "checkpoint": 1,
    "training_state": 1,
    "translations": 1,
    "evaluation": 1,
    "task_model": 1,
    "task_evaluation": 1,
    "export": 1,
    "analysis": 1,
}

FILES: dict[Kind, dict[str, str]] = {
    "corpus": {
        "SPLIT/PAIR/LANGUAGE.txt": "one sentence per line, UTF-8; SPLIT is train, valid or test",
        "quarantine.jsonl": "lines that could not be imported",
        "dropped_samples.jsonl": "at most ten lines that each rule of `clean` dropped",
        "held_out_leaks.json": "number of training lines that repeat held-out lines, by pair",
    },
    "tokenizer": {
        "tokenizer.json": "kind, languages, and how their tokens are spelled and numbered",
        "sentencepiece.model": "the pieces, except for bytes",
        "sentencepiece.target.model": "the pieces of `tokenizer.target_languages`",
    },
    "shards": {
        "SPLIT/PAIR/LANGUAGE.tokens": "ids of all sentences, little-endian uint16 or uint32",
        "SPLIT/PAIR/LANGUAGE.offsets.npy": "where each sentence begins, int64",
        "SPLIT/PAIR/LANGUAGE.begins": "1 where a word begins, for languages with a segmenter",
        "tokenizer/FILE": "a copy of the tokenizer",
    },
    "mixture": {"mixture.json": "training lines and sampling probability of every pair, by phase"},
    "groups": {"groups.json": "the language groups, and how they were made"},
    "checkpoint": {
        "model.json": "shape of the model",
        "weights/NAME.safetensors": "the weights, one tensor per global expert",
        "tokenizer/FILE": "a copy of the tokenizer",
        "metrics.jsonl": "training and validation curves",
        "routing.json": "routing statistics, for a model with experts",
        "receipt.json": "source of every tensor of an assembled model",
        "quarantine.jsonl": "micro-batches that training left out",
    },
    "training_state": {
        "optimizer/NAME.safetensors": "master weights and moments",
        "progress.json": "position in training",
    },
    "translations": {
        "hypotheses/DIRECTION.jsonl": "one translation per test line, with its score",
        "details/DIRECTION.jsonl": "alternatives, words and alignments, if asked for",
    },
    "evaluation": {
        "scores.json": "all scores and comparisons",
        "history.json": "the runs behind the systems: stages, wall times, curves",
        "report.md": "the report as Markdown",
        "report.html": "the report as one HTML file with charts",
        "sentences/SYSTEM/DIRECTION.npz": "statistics per test line, for the bootstrap",
    },
    "task_model": {
        "task.json": "task, tags, and shape of the encoder",
        "sentencepiece.bpe.model": "the pieces of the pretrained model",
        "weights/NAME.safetensors": "the weights",
        "metrics.jsonl": "training and validation curves",
        "quarantine.jsonl": "micro-batches that training left out",
    },
    "task_evaluation": {
        "scores.json": "scores by language",
        "report.md": "the report as Markdown",
        "predictions/SYSTEM/LANGUAGE.jsonl": "one prediction per example",
    },
    "export": {
        "README.md": "a model card",
        "FILE": "what `from_pretrained` of transformers, or CTranslate2, loads",
    },
    "analysis": {
        "NAME.json": "the figures: `scales`, `vectors` or `lengths`",
        "NAME.svg": "charts",
    },
}
"""Kind → file → its content; words in capitals stand for names."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class FileRecord(_Frozen):
    """Size in bytes and one SHA-256 per 64 MiB chunk, in order."""

    size: int
    chunks: tuple[str, ...]


class InputRecord(_Frozen):
    """One artifact (or ``raw`` folder) a stage read."""

    kind: str
    path: str
    digest: str
    splits: tuple[str, ...] = ()
    """Of a corpus, what the digest is of (``parts``); none: of all of it."""

    @model_serializer(mode="wrap")
    def _without_empty_splits(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in handler(self).items() if name != "splits" or value}


class RunRecord(_Frozen):
    """How the artifact came about; not part of its identity."""

    started: str
    wall_seconds: float


class Manifest(_Frozen):
    """The contents of ``manifest.json``."""

    kind: Kind
    format_version: int
    stage: str
    key: str
    config: dict[str, Any]
    inputs: dict[str, InputRecord]
    files: dict[str, FileRecord]
    statistics: dict[str, Any]
    run: RunRecord
    summary: tuple[str, ...] = ()
    """What the stage read, kept, dropped and set aside, in one to five lines for people."""

    @property
    def digest(self) -> str:
        """SHA-256 of all that makes the artifact what it is; where and when do not count."""
        identity = {
            "kind": self.kind,
            "format_version": self.format_version,
            "config": self.config,
            "inputs": {name: record.digest for name, record in self.inputs.items()},
            "files": {name: record.model_dump() for name, record in self.files.items()},
        }
        return json_digest(identity)


def with_article(kind: Kind) -> str:
    """``a checkpoint``, ``an export``."""
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


def to_json(value: Any) -> str:
    """JSON as every artifact stores it: sorted keys, indented, text unescaped."""
    return json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def json_digest(value: Any) -> str:
    """SHA-256 of a JSON value, independent of key order."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def read_manifest(directory: Path) -> Manifest | None:
    """The manifest of a finished artifact, or None where there is none.

    Raises:
        ArtifactError: there is a manifest, but it cannot be read, or it names a file that cannot
            be within an artifact.
    """
    path = directory / MANIFEST_NAME
    try:
        if path.is_symlink():
            raise ArtifactError(f"{path} is a link, and no part of an artifact is one: copy it.")
        if not path.is_file():
            return None
        manifest = Manifest.model_validate_json(read_bytes(path))
    except ValidationError as error:
        raise ArtifactError(
            f"{path} is not a manifest of this version ({error.error_count()} problems): remove "
            f"the folder {directory} and run its stage again."
        ) from error
    except OSError as error:
        raise ArtifactError(
            f"{path} cannot be read ({error.strerror or error}): see to it that it can."
        ) from error
    problem = describe_names(manifest.files)
    if problem is not None:
        raise ArtifactError(
            f"{path} lists a file {problem}: this is not as a stage writes it; do not use the "
            "folder, and have its stage make it again."
        )
    return manifest


# ---------------------------------------------------------------- names of files


def is_text(name: str) -> bool:
    """Whether a name is UTF-8: Python holds other bytes in half surrogate pairs."""
    return not any(unicodedata.category(character) == "Cs" for character in name)


def as_text(path: Path) -> str:
    """A path as it can be printed, bytes that are not UTF-8 as escapes."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def describe_names(names: Iterable[str]) -> str | None:
    """The first name that an artifact cannot hold, and why, to be put behind "a file"."""
    seen: dict[str, str] = {}
    for name in names:
        problem = describe_name(name)
        if problem is not None:
            return f"{name!r}, which {problem}"
        folded = fold_name(name)
        if folded in seen:
            return f"{name!r} beside {seen[folded]!r}, which are one where case is not told apart"
        seen[folded] = name
    return None


def describe_name(name: str) -> str | None:
    """Why an artifact cannot hold a file of this name, to be put behind "which"; None if it can."""
    parts = name.split("/")
    if name.startswith("/"):
        return "is absolute"
    if ".." in parts:
        return "leads out of the folder with '..'"
    if "" in parts or "." in parts:
        return "has an empty part or '.'"
    if "\\" in name or any(unicodedata.category(character) in ("Cc", "Cs") for character in name):
        return "has a backslash or a control character"
    if max(len(part.encode()) for part in parts) > LONGEST_PART:
        return f"has a part of more than {LONGEST_PART} bytes"
    if fold_name(name) in (MANIFEST_NAME, MARKER_NAME):
        return "is a name that no file of a stage has"
    return None


def fold_name(name: str) -> str:
    """What two names must share to be one file on some file system."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())
