"""A file that says line by line which phrases the translations of other lines must have."""

from collections.abc import Iterator
from pathlib import Path

from pipeline.errors import ConfigError


def read_phrases(path: Path) -> Iterator[tuple[str, ...]]:
    """Of every line in order, what stands between its tabs; an empty line asks for nothing.

    Raises:
        ConfigError: the file cannot be read, or is not UTF-8; before anything is given out where it
            cannot be opened.
    """
    try:
        file = path.open(encoding="utf-8-sig", newline="\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): name a file.") from error
    return _phrases_of(file, path)


def _phrases_of(file: Iterator[str], path: Path) -> Iterator[tuple[str, ...]]:
    try:
        for line in file:
            yield tuple(phrase for phrase in map(str.strip, line.split("\t")) if phrase)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} cannot be read as UTF-8 ({error}): write one line of phrases, tabs between "
            "them, for every line to translate."
        ) from error
