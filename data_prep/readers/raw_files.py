"""Find raw text files by what their names say, and read several in step.

A word in the name of a file, or of a folder below the named one, says the split
(``all_talks_train.tsv``); without one, the text is training text. The pair is a part of the name
between dots (``newstest2014.de-en.tsv.gz``), or the name of a folder.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path, PurePosixPath

from data_prep.readers.section import (
    FILES_IGNORED,
    SPLIT_NAMES,
    LeftOut,
    RawLine,
    Source,
    is_pair_name,
    spellings_of,
)
from pipeline.artifacts.corpus import Split
from pipeline.artifacts.raw_input import (
    HubDataset,
    RawInput,
    iterate_raw_lines,
    named_files,
    plain_name,
)
from pipeline.errors import ConfigError, DataError
from pipeline.terminal import counted, listed

PACKED = r"(?:\.gz|\.zst)?"
"""Pattern of the endings of packed files."""


def source_of(path: Path, root: Path) -> Source:
    """Return a file below a folder as a source."""
    return Source(name=path.relative_to(root).as_posix(), place=str(path))


@dataclass(frozen=True)
class FilesInStep:
    """Lines of several files side by side.

    Nothing is opened before iteration, so that another process can iterate.

    Raises:
        DataError: On iteration, if one file has more lines than another.
    """

    paths: tuple[Path, ...]
    max_line_bytes: int

    def __iter__(self) -> Iterator[RawLine]:
        sides = [iterate_raw_lines(path, max_line_bytes=self.max_line_bytes) for path in self.paths]
        for number, raws in enumerate(zip_longest(*sides), start=1):
            if None in raws:
                short = raws.index(None)
                long = next(side for side, raw in enumerate(raws) if raw is not None)
                found = {short: number - 1, long: number + sum(1 for _ in sides[long])}
                first, second = sorted(found)
                raise DataError(
                    f"{self.paths[first]} has {counted(found[first], 'line')} and "
                    f"{self.paths[second]} has {found[second]}. Line n of one must translate "
                    "line n of the other: fetch or align them again."
                )
            yield RawLine(number, raws)


_SPLIT_WORD = re.compile(
    r"(?<![a-z])(?:news)?(train|valid(?:ation)?|dev(?:test)?|test)(?:ing)?(?:set|s)?(?![a-z])",
    re.IGNORECASE,
)
_SPLITS = {**SPLIT_NAMES, "devtest": SPLIT_NAMES["test"]}


@dataclass(frozen=True)
class RawFile:
    """File below a raw folder, or named itself."""

    path: Path
    name: str
    """Name that does not depend on where the raw folder lies; with several raw folders it begins
    with the folder's number."""

    @property
    def ending(self) -> str:
        """Return the lower-case ending that says the form of the file: ``tmx``."""
        return PurePosixPath(plain_name(self.name)).suffix.lower().removeprefix(".")

    def split(self) -> Split:
        """Return the split that its name says; ``train`` if it says none.

        Raises:
            DataError: Its name says several.
        """
        found = {_SPLITS[word.lower()] for word in _SPLIT_WORD.findall(self.name)}
        if len(found) > 1:
            raise DataError(
                f"{self.path} is named as {' and '.join(sorted(found))} text. Rename it so that "
                "one of them is left."
            )
        return found.pop() if found else "train"

    def pair(self) -> tuple[str, str] | None:
        """Return the pair that its name says, in its spelling and order; None if it says none.

        Raises:
            DataError: Its name says several.
        """
        *folders, name = PurePosixPath(plain_name(self.name)).parts
        found = list(filter(is_pair_name, name.split("."))) or list(filter(is_pair_name, folders))
        if len({entry.lower() for entry in found}) > 1:
            raise DataError(
                f"{self.path} is named as text of {' and '.join(found)}. Rename it so that one of "
                "them is left."
            )
        return spellings_of(found[0]) if found else None

    def source(self, side: str = "") -> Source:
        """Return the source of its lines, or of one of its sides."""
        return Source(name=self.name, place=f"{self.path} ({side})" if side else str(self.path))


def find_files(
    raw: RawInput | None, *, source: str, endings: Sequence[str]
) -> tuple[list[RawFile], LeftOut]:
    """Return the files with one of the endings, by name, and count the others as ignored.

    Hidden files and folders are neither read nor counted.

    Raises:
        ConfigError: No paths are given.
        DataError: A path does not exist, or there is no such file.
    """
    found = list_files(raw, source=source)
    chosen = [file for file in found if file.ending in endings]
    if not chosen:
        places = listed(raw.values) if raw else ""
        names = ", ".join(f".{ending}" for ending in endings)
        raise DataError(
            f"{places} holds no file that ends in {names} (plain, .gz or .zst), which "
            f"corpus.source = {source!r} reads. Name another folder or source."
        )
    left_out = LeftOut()
    left_out.ignore(FILES_IGNORED, [file.name for file in found if file.ending not in endings])
    return chosen, left_out


def list_files(raw: RawInput | None, *, source: str) -> list[RawFile]:
    """Return all files that are not hidden, by name.

    Raises:
        ConfigError: No paths are given.
        DataError: A path does not exist.
    """
    paths = raw_paths(raw, source=source)
    return [RawFile(path, name) for name, path in named_files(paths)]


def raw_paths(raw: RawInput | None, *, source: str) -> tuple[Path, ...]:
    """Return the paths of a raw input.

    Raises:
        ConfigError: No paths are given.
    """
    if raw is None:
        raise ConfigError(
            f"corpus.source is {source!r}, but no raw text was given. Pass --raw DIR."
        )
    if isinstance(raw, HubDataset):
        raise ConfigError(
            f"corpus.source is {source!r}, but {raw} is a data set of the hub. Set corpus.source "
            "to 'hub', or pass --raw DIR."
        )
    return raw.paths
