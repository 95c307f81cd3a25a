"""Text files of unknown origin, plain, gzip and Zstandard: one line of each side per newline.

Whatever they hold, memory is bounded by the longest line wanted and one block: a longer line is
skipped to its end, a compressed file is unpacked block by block.
"""

import gzip
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import BinaryIO, Protocol

from data_prep.readers.section import RawLine, Source
from pipeline.errors import ConfigError, DataError
from pipeline.terminal import counted

BLOCK_BYTES = 2**18
"""Read at a time; a block of nothing but line ends is a list of as many empty lines."""

PACKED = r"(?:\.gz|\.zst)?"
"""How the name of a file may go on behind the ending that says what it holds."""

ZSTD_WINDOW_BYTES = 2**27
"""Of a Zstandard file that was packed with more (``--long`` beyond 27), reading is refused."""


_ZSTD_FED_BYTES = 2**10
"""Unpacked at once: 256 blocks of 128 KiB, were it nothing but repetitions."""


class ByteStream(Protocol):
    """What bytes are read from, some at a time."""

    def read(self, size: int, /) -> bytes:
        """About so many bytes, fewer at the end, none behind it."""


def source_of(path: Path, root: Path) -> Source:
    """A file below a folder."""
    return Source(name=path.relative_to(root).as_posix(), place=str(path))


def plain_name(name: str) -> str:
    """The name that a file has unpacked."""
    return name.removesuffix(".gz").removesuffix(".zst")


def iterate_raw_lines(path: Path, *, max_line_bytes: int) -> Iterator[bytes]:
    """Lines of a plain or packed file without their ``\\n``; no other byte ends a line.

    Of a line that is longer than ``max_line_bytes`` come its first ``max_line_bytes + 1`` bytes:
    its length tells that it is one of these. Its rest is read over and not held.

    Raises:
        ConfigError: a Zstandard file without the package that unpacks it.
        DataError: the file is cut off, damaged, or not packed as its name says.
    """
    with open_bytes(path) as stream:
        yield from _lines_of(stream, longest=max_line_bytes + 1)


def iterate_blocks(path: Path) -> Iterator[bytes]:
    """The bytes of a plain or packed file, ``BLOCK_BYTES`` or fewer at a time.

    Raises:
        ConfigError, DataError: as ``iterate_raw_lines``.
    """
    with open_bytes(path) as stream:
        while block := stream.read(BLOCK_BYTES):
            yield block


@contextmanager
def open_bytes(path: Path) -> Iterator[ByteStream]:
    """A plain or packed file to read from; what goes wrong meanwhile is told in a sentence.

    Raises:
        ConfigError, DataError: as ``iterate_raw_lines``.
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
            f"{path} is no complete gzip file ({error}): fetch it again, or unpack it and remove "
            "the .gz from its name."
        ) from error
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): make it readable.") from error


@dataclass(frozen=True)
class FilesInStep:
    """Lines of all files; DataError with the counts of two of them where one is longer.

    Nothing is opened until the lines are asked for, so that another process can do it.
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
                    f"{self.paths[second]} has {found[second]}: line n of one must translate "
                    "line n of the other, so fetch or align them again."
                )
            yield RawLine(number, raws)


class _Frame(Protocol):
    """One Zstandard frame while it is unpacked."""

    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, /) -> bytes: ...


class _ZstdFrames:
    """The bytes of all frames of a file; zstandard's own reader takes a cut-off file for whole."""

    def __init__(self, packed: BinaryIO, new_frame: Callable[[], _Frame]) -> None:
        self._packed, self._new_frame = packed, new_frame
        self._frame = new_frame()
        self._fed, self._is_within = b"", False

    def read(self, size: int, /) -> bytes:
        """As ``ByteStream``; EOFError where the last frame is cut off."""
        parts, number = [], 0
        while number < size and (part := self._unpack()) is not None:
            parts.append(part)
            number += len(part)
        return b"".join(parts)

    def _unpack(self) -> bytes | None:
        """What the next few packed bytes hold; None at the end of the file."""
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
            f"{path} is a Zstandard file, which needs the package zstandard: run "
            "pip install 'mmnmt[zstd]', or unpack it."
        ) from error
    unpacker = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW_BYTES)
    try:
        with path.open("rb") as packed:
            yield _ZstdFrames(packed, unpacker.decompressobj)
    except (EOFError, zstandard.ZstdError) as error:
        raise DataError(
            f"{path} is no complete Zstandard file ({error}): fetch it again, or unpack it and "
            "remove the .zst from its name."
        ) from error


def _lines_of(stream: ByteStream, *, longest: int) -> Iterator[bytes]:
    """Lines of a stream, each cut to ``longest`` bytes; holds one such line and one block."""
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
