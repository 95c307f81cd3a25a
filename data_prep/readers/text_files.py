"""Text files of unknown origin, plain and gzip: one line of each side per newline.

Whatever they hold, memory is bounded by the longest line wanted and one block: a longer line is
skipped to its end, a compressed file is unpacked block by block.
"""

import gzip
import zlib
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import BinaryIO

from data_prep.readers.section import RawLine, Source
from pipeline.errors import DataError

BLOCK_BYTES = 2**18
"""Read at a time; a block of nothing but line ends is a list of as many empty lines."""


def source_of(path: Path, root: Path) -> Source:
    """A file below a folder."""
    return Source(name=path.relative_to(root).as_posix(), place=str(path))


def iterate_raw_lines(path: Path, *, max_line_bytes: int) -> Iterator[bytes]:
    """Lines of a plain or gzip file without their ``\\n``; no other byte ends a line.

    Of a line that is longer than ``max_line_bytes`` come its first ``max_line_bytes + 1`` bytes:
    its length tells that it is one of these. Its rest is read over and not held.

    Raises:
        DataError: the file is cut off, damaged, or no gzip file.
    """
    try:
        with _open_bytes(path) as stream:
            yield from _lines_of(stream, longest=max_line_bytes + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{path} is no complete gzip file ({error}): fetch it again, or unpack it and remove "
            "the .gz from its name."
        ) from error
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): make it readable.") from error


def in_step(paths: Sequence[Path], *, max_line_bytes: int) -> Iterator[RawLine]:
    """Lines of all files; DataError with the counts of two of them where one is longer."""
    sides = [iterate_raw_lines(path, max_line_bytes=max_line_bytes) for path in paths]
    for number, raws in enumerate(zip_longest(*sides), start=1):
        if None in raws:
            short = raws.index(None)
            long = next(side for side, raw in enumerate(raws) if raw is not None)
            found = {short: number - 1, long: number + sum(1 for _ in sides[long])}
            first, second = sorted(found)
            raise DataError(
                f"{paths[first]} has {found[first]} lines and {paths[second]} has "
                f"{found[second]}: line n of one must translate line n of the other, so fetch or "
                "align them again."
            )
        yield RawLine(number, raws)


def _open_bytes(path: Path) -> BinaryIO | gzip.GzipFile:
    if path.suffix == ".gz":
        return gzip.GzipFile(path, "rb")
    return path.open("rb")


def _lines_of(stream: BinaryIO | gzip.GzipFile, *, longest: int) -> Iterator[bytes]:
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
