"""Find the files of a folder by language and split, and read their text, plain or gzip."""

import gzip
import re
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

from pipeline.errors import ArtifactError, ConfigError

Split = Literal["train", "dev", "test"]
MAX_BYTES = 2**31
"""Largest text of a file; the largest of TyDiQA-GoldP has 60 MB."""

_LANGUAGE = r"[a-z]{2,3}(?:_[A-Za-z]{2,8})?"
_ENTITIES = re.compile(r"(?:.*[-_.])?(?P<split>train|dev|test)(?:\.[A-Za-z0-9]+)?(?:\.gz)?")
_QUESTIONS = re.compile(
    rf"(?:.*\.)?(?P<language>{_LANGUAGE})\.(?P<split>train|dev|test)\.json(?:\.gz)?"
)

Found = dict[str, dict[Split, Path]]
"""Language → split → file."""


def entity_files(folder: Path) -> Found:
    """Find files in a folder per language: ``de/train.tsv``, ``de/dev.iob2.gz``.

    Raises:
        ConfigError: there is no file, or two files are the same split.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder. Name one with a folder per language.")
    places = [
        (entry.name, path, match)
        for entry in sorted(folder.iterdir())
        if entry.is_dir() and re.fullmatch(_LANGUAGE, entry.name)
        for path in sorted(entry.iterdir())
        if path.is_file() and (match := _ENTITIES.fullmatch(path.name))
    ]
    found = _by_split((code, path, match["split"]) for code, path, match in places)
    if not found:
        raise ConfigError(
            f"{folder} has no files of named entities. Name them LANGUAGE/train, dev and test, "
            "with any ending, plain or .gz."
        )
    return found


def question_files(folder: Path) -> Found:
    """Find files with names like ``xquad.de.train.json``.

    Raises:
        ConfigError: there is no file, or two files are the same split.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"{folder} is not a folder. Name one with files NAME.LANGUAGE.SPLIT.json."
        )
    matches = [
        (path, match)
        for path in sorted(folder.rglob("*.json*"))
        if path.is_file() and (match := _QUESTIONS.fullmatch(path.name))
    ]
    found = _by_split((match["language"], path, match["split"]) for path, match in matches)
    if not found:
        raise ConfigError(
            f"{folder} has no files of questions. Name them NAME.LANGUAGE.train.json, dev and "
            "test, plain or .gz."
        )
    return found


def with_split(files: Mapping[str, Mapping[Split, Path]], split: Split) -> list[str]:
    """Return the languages that have a split, sorted."""
    return sorted(code for code, splits in files.items() if split in splits)


def trained_languages(files: Found, wanted: tuple[str, ...]) -> tuple[str, ...]:
    """Return the languages to train on, sorted: ``wanted``, or all that have training text.

    Raises:
        ConfigError: a wanted language, or every language, has no training text.
    """
    there = with_split(files, "train")
    missing = [code for code in wanted if code not in there]
    if missing or not there:
        raise ConfigError(
            f"The data has no training file for {', '.join(missing) or 'any language'}; it has "
            f"some for {', '.join(there) or 'none'}. Change tasks.languages, or add the file."
        )
    return tuple(sorted(wanted or there))


def chosen_files(files: Found, languages: tuple[str, ...], split: Split) -> Found:
    """Select the files of those languages that have the split."""
    return {code: files[code] for code in languages if split in files[code]}


def read_text(path: Path) -> str:
    """Read a whole file as UTF-8.

    Raises:
        ArtifactError: the file cannot be read, exceeds ``MAX_BYTES``, or is not UTF-8.
    """
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ArtifactError(f"{path} cannot be read ({error}). Name a complete file.") from error
    if len(content) > MAX_BYTES:
        raise ArtifactError(f"{path} holds more than {MAX_BYTES:,} bytes. Name a smaller file.")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ArtifactError(f"Line {line} of {path} is not UTF-8. Convert the file.") from error


def _by_split(places: Iterable[tuple[str, Path, str]]) -> Found:
    found: Found = {}
    for code, path, name in places:
        splits = found.setdefault(code, {})
        split: Split = "train" if name == "train" else "dev" if name == "dev" else "test"
        if split in splits:
            raise ConfigError(
                f"{splits[split]} and {path} are both {split} of {code}. Remove one of them."
            )
        splits[split] = path
    return found
