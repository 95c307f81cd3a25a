"""Find raw text files, and read them in bounded memory: plain, gzip or Zstandard.

A word in the name of a file, or of a folder below the named one, says the split
(``all_talks_train.tsv``); without one, the text is training text. The pair is a part of the name
between dots (``newstest2014.de-en.tsv.gz``), or the name of a folder.

Memory holds the longest wanted line and one block: longer lines are skipped to their end, and
packed files are unpacked block by block.
"""

import gzip
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Protocol

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
from pipeline.artifacts.raw_input import HubDataset, RawInput
from pipeline.errors import ConfigError, DataError
from pipeline.terminal import counted, listed

BLOCK_BYTES = 2**18
"""Bytes read at a time; a block of line ends alone becomes as many empty lines."""

PACKED = r"(?:\.gz|\.zst)?"
"""Pattern of the endings of packed files."""

ZSTD_WINDOW_BYTES = 2**27
"""Largest window of a Zstandard file (``--long=27``); larger ones are refused."""


_ZSTD_FED_BYTES = 2**10
"""Packed bytes unpacked at once: at most 256 blocks of 128 KiB, if all is repetition."""


class ByteStream(Protocol):
    """Stream to read bytes from."""

    def read(self, size: int, /) -> bytes:
        """Return about this many bytes, fewer at the end, and none after it."""


def source_of(path: Path, root: Path) -> Source:
    """Return a file below a folder as a source."""
    return Source(name=path.relative_to(root).as_posix(), place=str(path))


def plain_name(name: str) -> str:
    """Return the name of a file without the ending of its compression."""
    return name.removesuffix(".gz").removesuffix(".zst")


def iterate_raw_lines(path: Path, *, max_line_bytes: int) -> Iterator[bytes]:
    """Yield the lines of a file without their newline; no other byte ends a line.

    A line longer than ``max_line_bytes`` is cut to ``max_line_bytes + 1`` bytes, which tells that
    it is too long. The rest is skipped and not held in memory.

    Raises:
        ConfigError: The package for Zstandard is missing.
        DataError: The file is cut off, damaged, or not packed as its name says.
    """
    with open_bytes(path) as stream:
        yield from _lines_of(stream, longest=max_line_bytes + 1)


def iterate_blocks(path: Path) -> Iterator[bytes]:
    """Yield the bytes of a file, at most ``BLOCK_BYTES`` at a time.

    Raises:
        ConfigError, DataError: As ``iterate_raw_lines``.
    """
    with open_bytes(path) as stream:
        while block := stream.read(BLOCK_BYTES):
            yield block


@contextmanager
def open_bytes(path: Path) -> Iterator[ByteStream]:
    """Open a plain or packed file, translating its errors within the block.

    Raises:
        ConfigError, DataError: As ``iterate_raw_lines``.
    """
    try:
        if path.suffix == ".zst":
            with _open_zstd(path) as stream:
                yield stream
        elif path.suffix == ".gz":
            with gzip.GzipFile(path, "rb") as packed:
                yield packed
        else:
            with path.open("rb") as plain:
                yield plain
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{path} is not a complete gzip file ({error}). Fetch it again, or unpack it and "
            "remove the .gz from its name."
        ) from error
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}). Make it readable.") from error


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


class _Frame(Protocol):
    """Zstandard frame while it is unpacked."""

    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, /) -> bytes: ...


class _ZstdFrames:
    """Bytes of all frames of a file; zstandard's own reader accepts a cut-off file."""

    def __init__(self, packed: BinaryIO, new_frame: Callable[[], _Frame]) -> None:
        self._packed, self._new_frame = packed, new_frame
        self._frame = new_frame()
        self._fed, self._is_within = b"", False

    def read(self, size: int, /) -> bytes:
        """Read like ``ByteStream``; raise EOFError if the last frame is cut off."""
        parts, number = [], 0
        while number < size and (part := self._unpack()) is not None:
            parts.append(part)
            number += len(part)
        return b"".join(parts)

    def _unpack(self) -> bytes | None:
        """Unpack the next few packed bytes; return None at the end of the file."""
        fed = self._fed or self._packed.read(_ZSTD_FED_BYTES)
        if not fed:
            if self._is_within:
                raise EOFError("it ends within a frame")
            return None
        part = self._frame.decompress(fed)
        self._fed, self._is_within = self._frame.unused_data, not self._frame.eof
        if self._frame.eof:
            self._frame = self._new_frame()
        return part


@contextmanager
def _open_zstd(path: Path) -> Iterator[ByteStream]:
    try:
        import zstandard
    except ImportError as error:
        raise ConfigError(
            f"{path} is a Zstandard file, which needs the package zstandard. Run "
            "pip install 'mmnmt[zstd]', or unpack it."
        ) from error
    unpacker = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW_BYTES)
    try:
        with path.open("rb") as packed:
            yield _ZstdFrames(packed, unpacker.decompressobj)
    except (EOFError, zstandard.ZstdError) as error:
        raise DataError(
            f"{path} is not a complete Zstandard file ({error}). Fetch it again, or unpack it and "
            "remove the .zst from its name."
        ) from error


def _lines_of(stream: ByteStream, *, longest: int) -> Iterator[bytes]:
    """Yield the lines of a stream, each cut to ``longest`` bytes."""
    begun = b""
    while block := stream.read(BLOCK_BYTES):
        first, *others = block.split(b"\n")
        begun += first[: longest - len(begun)]
        if others:
            yield begun
            *whole, begun = others
            begun = begun[:longest]
            if len(block) <= longest:
                yield from whole
            else:
                yield from (line[:longest] for line in whole)
    if begun:
        yield begun


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
    if len(paths) == 1:
        return _files_at(paths[0])
    return [
        RawFile(file.path, f"{number}/{file.name}")
        for number, path in enumerate(paths, start=1)
        for file in _files_at(path)
    ]


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


def _files_at(path: Path) -> list[RawFile]:
    if path.is_file():
        return [RawFile(path, path.name)]
    if not path.is_dir():
        raise DataError(f"{path} does not exist. Name an existing file or folder.")
    found: list[RawFile] = []
    for folder, below, names in os.walk(path):
        below[:] = [name for name in below if not name.startswith(".")]
        places = [Path(folder) / name for name in names if not name.startswith(".")]
        found += [
            RawFile(place, place.relative_to(path).as_posix())
            for place in places
            if place.is_file()
        ]
    return sorted(found, key=lambda file: file.name)
