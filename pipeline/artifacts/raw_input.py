"""Raw inputs, which no stage made: files and folders, or a data set of the Hugging Face hub.

A manifest records files by their digest, and a data set by its commit, which identifies the text
without fetching it. Files are text (plain, gzip or Zstandard) or tables (Parquet or Arrow), and are
read in bounded memory, the longest wanted line and one block: longer lines are skipped to their
end, and packed files are unpacked block by block.
"""

import codecs
import gzip
import os
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeAlias

from pipeline.artifacts.manifest import InputRecord, entries_below, json_digest, raw_digest
from pipeline.config.documents import refuse_pipe
from pipeline.errors import (
    ConfigError,
    DataError,
    Interrupted,
    UserError,
    lacks_package,
    unreadable,
)

HUB = "hub:"
"""Prefix of an option's value that names a data set of the hub."""

_DATASET = re.compile(r"hub:(?P<name>[\w.-]+/[\w.-]+)@(?P<revision>[0-9a-f]{40})", re.ASCII)


@dataclass(frozen=True)
class HubDataset:
    """Data set of the Hugging Face hub at one commit."""

    name: str
    """Name of the data set, ``OWNER/NAME``."""
    revision: str
    """Commit, all 40 hexadecimal digits."""

    def __str__(self) -> str:
        return f"{HUB}{self.name}@{self.revision}"


@dataclass(frozen=True)
class RawInput:
    """Folders or files on this machine, in the order given, or a data set of the hub."""

    paths: tuple[Path, ...] = ()
    dataset: HubDataset | None = None

    @property
    def values(self) -> tuple[str, ...]:
        """Return the values of the option that name the paths or the data set."""
        return tuple(map(str, (self.dataset,) if self.dataset else self.paths))

    def named(self, name: str) -> dict[str, Path]:
        """Return the paths by input name: ``name``, or ``name/1``, ``name/2``, … of several.

        Nothing of a data set is on this machine and could be overwritten.
        """
        if len(self.paths) == 1:
            return {name: self.paths[0]}
        return {f"{name}/{number}": path for number, path in enumerate(self.paths, start=1)}

    def records(self, name: str) -> dict[str, InputRecord]:
        """Return the manifest's records by input name, without fetching anything."""
        if self.dataset is not None:
            path = str(self.dataset)
            return {name: InputRecord(kind="raw", path=path, digest=json_digest(path))}
        return {
            key: InputRecord(kind="raw", path=str(path.absolute()), digest=raw_digest(path))
            for key, path in self.named(name).items()
        }

    def only_path(self) -> Path:
        """Return the single path; ConfigError if there are several, or none of a data set."""
        if len(self.paths) != 1:
            raise ConfigError(
                f"{', '.join(self.values)}: a single path is wanted here, and no data set of the "
                "hub. Name one path."
            )
        return self.paths[0]


def raw_input(values: Sequence[str]) -> RawInput:
    """Return the raw input that the values of an option name.

    Raises:
        ConfigError: A data set of the hub that is not pinned or has company, or a path twice.
    """
    datasets = [value for value in values if value.startswith(HUB)]
    if not datasets:
        return _raw_paths(values)
    match = _DATASET.fullmatch(datasets[0])
    if match is None:
        raise ConfigError(
            f"{datasets[0]} does not say which text it is. Write hub:OWNER/NAME@REVISION, where "
            "REVISION is the full commit of 40 digits (branches and tags can move)."
        )
    if len(values) > 1:
        raise ConfigError(
            f"{datasets[0]} is named with {len(values) - 1} more raw inputs. Name only this "
            "data set, or only paths."
        )
    return RawInput(dataset=HubDataset(match["name"], match["revision"]))


def _raw_paths(values: Sequence[str]) -> RawInput:
    paths = tuple(map(Path, values))
    places = [os.path.realpath(path) for path in paths]  # a loop of links raises nothing
    repeated = [
        value for value, place in zip(values, places, strict=True) if places.count(place) > 1
    ]
    if repeated:
        raise ConfigError(f"{repeated[0]} is named twice. Name each path once.")
    return RawInput(paths)


BLOCK_BYTES = 2**18
"""Bytes read at a time; a block of line ends becomes as many empty lines."""

ZSTD_WINDOW_BYTES = 2**27
"""Largest window of a Zstandard file (``--long=27``); larger windows are refused."""


PARQUET, ARROW = ".parquet", ".arrow"
_BATCH_ROWS = 1000
_PARQUET_ROWS = 64
"""Rows of a Parquet file that are read at once, although each may repeat one long text, of which
the file has one copy."""
_LARGE_BYTES = 2**28
_MOST_TIMES = 100
"""Times as large that unpacked text above ``_LARGE_BYTES`` may be; usual text: below 20."""
_BatchesOf: TypeAlias = Callable[[list[str]], Iterable[Any]]
"""Returns batches of rows, of these columns."""

_ZSTD_FED_BYTES = 2**10
"""Packed bytes unpacked at once: at most 256 blocks of 128 KiB, if all is repetition."""


class ByteStream(Protocol):
    """Stream to read bytes from."""

    def read(self, size: int, /) -> bytes:
        """Return about this many bytes, fewer at the end, and none after it."""


def plain_name(name: str) -> str:
    """Return the name of a file without the ending of its compression."""
    return name.removesuffix(".gz").removesuffix(".zst")


def named_files(paths: Sequence[Path]) -> list[tuple[str, Path]]:
    """Return the name and path of all files at these paths that are not hidden, by name.

    A name is relative to the folder it was found in. Of several paths, it begins with the number of
    its path.

    Raises:
        DataError: A path does not exist, or a link leads to nothing.
    """
    if len(paths) == 1:
        return _files_at(paths[0])
    return [
        (f"{number}/{name}", file)
        for number, path in enumerate(paths, start=1)
        for name, file in _files_at(path)
    ]


def _files_at(path: Path) -> list[tuple[str, Path]]:
    refuse_no_file(path)
    if path.is_file():
        return [(path.name, path)]
    if not path.is_dir():
        raise DataError(f"{path} does not exist. Name an existing file or folder.")
    places = [*entries_below(path, hidden=False)]
    for place in places:
        refuse_no_file(place)
    return sorted((p.relative_to(path).as_posix(), p) for p in places if p.is_file())


def several_columns(path: Path, name: str) -> DataError:
    """Return the refusal of a table with several columns of a wanted name: which is meant?"""
    return DataError(f"{path} has several columns {name!r}. Rename those that are not meant.")


def refuse_no_file(path: Path) -> None:
    """Raise DataError if a path that is not hidden is a link to nothing, a pipe or a device."""
    if path.name.startswith("."):
        return
    refuse_pipe(path, error=DataError)
    if path.is_symlink() and not path.exists():
        raise DataError(f"{path} is a link to nothing. Restore its target, or remove the link.")


def iterate_raw_lines(path: Path, *, max_line_bytes: int) -> Iterator[bytes]:
    """Yield the lines of a file without their newline; no other byte ends a line.

    A line longer than ``max_line_bytes`` is cut to ``max_line_bytes + 1`` bytes, which tells that
    it is too long. The rest is skipped and not held in memory.

    Raises:
        ConfigError: The package for Zstandard is missing.
        DataError: The file is cut off, damaged, not packed as its name says, so small for its text
            that it may have been made to fill the disk, is UTF-16, or ends its lines by carriage
            returns only.
    """
    with open_bytes(path) as stream:
        text = _UsualText(path)
        lines = _lines_of(stream, longest=max_line_bytes + 1, note=text.add)
        for first in islice(lines, 1):
            refuse_utf16(str(path), first)
            if not text.unpacked:
                refuse_old_line_ends(str(path), first)
            yield first
        yield from lines


def refuse_utf16(place: str, text: bytes) -> None:
    """Raise DataError if a text begins with the byte order mark of UTF-16 or UTF-32."""
    wide = text.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE))  # LE begins as UTF-16 does
    if wide or text.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        kind = "UTF-32" if wide else "UTF-16"
        raise DataError(f"{place} is {kind}. Convert it to UTF-8 (iconv -f {kind} -t UTF-8).")


def refuse_old_line_ends(place: str, text: bytes) -> None:
    """Raise DataError if a text without line feeds has several carriage returns, one inside it."""
    if text.count(b"\r") > 1 and b"\r" in text.rstrip(b"\r"):
        raise DataError(
            f"{place} ends its lines by carriage returns only. Convert them to line feeds, for "
            "example with tr '\\r' '\\n'."
        )


def iterate_blocks(path: Path) -> Iterator[bytes]:
    """Yield the bytes of a file, at most ``BLOCK_BYTES`` at a time."""
    with open_bytes(path) as stream:
        text = _UsualText(path)
        while block := stream.read(BLOCK_BYTES):
            text.add(block)
            yield block


@contextmanager
def open_bytes(path: Path) -> Iterator[ByteStream]:
    """Open a plain or packed file, translating its errors within the block."""
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
        raise _incomplete(path, "gzip", error) from error
    except OSError as error:
        raise DataError(unreadable(path, error, "Make it readable.")) from error


def _incomplete(path: Path, kind: str, error: Exception) -> DataError:
    reason = str(error).partition("\n")[0] or type(error).__name__
    return DataError(
        f"{path} is not a complete {kind} file ({reason}). Fetch it again, or remove "
        f"{path.suffix} from its name if it is plain text."
    )


class _UsualText:
    """Count of the bytes with lines of a file, of which packed text has not many times more."""

    def __init__(self, path: Path) -> None:
        self._path, self._packed, self.unpacked = path, path.stat().st_size, 0

    def add(self, block: bytes) -> None:
        self.unpacked += len(block)
        _refuse_bomb(self._path, self._packed, self.unpacked, "unpack it yourself")


class _ZstdFrames:
    """Bytes of all frames of a file; zstandard's own reader accepts a cut-off file."""

    def __init__(self, packed: BinaryIO, new_frame: Callable[[], Any]) -> None:
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
        part: bytes = self._frame.decompress(fed)
        self._fed, self._is_within = self._frame.unused_data, not self._frame.eof
        if self._frame.eof:
            self._frame = self._new_frame()
        return part


@contextmanager
def _open_zstd(path: Path) -> Iterator[ByteStream]:
    try:
        import zstandard
    except ImportError as error:
        raise lacks_package(
            str(path), "zstandard", error, extra="zstd", otherwise=", or unpack it"
        ) from error
    unpacker = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW_BYTES)
    try:
        with path.open("rb") as packed:
            yield _ZstdFrames(packed, unpacker.decompressobj)
    except (EOFError, zstandard.ZstdError) as error:
        raise _incomplete(path, "Zstandard", error) from error


def _lines_of(
    stream: ByteStream, *, longest: int, note: Callable[[bytes], object]
) -> Iterator[bytes]:
    """Yield the lines of a stream, each cut to ``longest`` bytes; note blocks that end any."""
    begun = b""
    while block := stream.read(BLOCK_BYTES):
        first, *others = block.split(b"\n")
        begun += first[: longest - len(begun)]
        if others:
            note(block)  # others lie within one line, which is skipped if it is that long
            yield begun
            *whole, begun = others
            begun = begun[:longest]
            if len(block) <= longest:
                yield from whole
            else:
                yield from (line[:longest] for line in whole)
    if begun:
        yield begun


# ---------------------------------------------------------------- tables


def table_rows(path: Path, columns: Collection[str]) -> Iterator[Mapping[str, Any]]:
    """Yield each row of a table, restricted to the requested columns that exist in the file.

    If it has none of them, rows have the names of all columns, without values.
    """
    with _named_errors(path):
        open_table = _open_arrow if path.suffix == ARROW else _open_parquet
        with open_table(path) as (names, batches_of):
            present = [name for name in names if name in columns]
            if several := [name for name in present if present.count(name) > 1]:
                raise several_columns(path, several[0])
            for batch in batches_of(present):
                for start in range(0, batch.num_rows, _BATCH_ROWS):
                    part = batch.slice(start, _BATCH_ROWS)
                    if present:
                        yield from part.to_pylist()
                    else:
                        yield from [dict.fromkeys(names)] * part.num_rows


@contextmanager
def _open_parquet(path: Path) -> Iterator[tuple[list[str], _BatchesOf]]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as table:

        def batches_of(columns: list[str]) -> Iterable[Any]:
            for number in range(table.num_row_groups):
                _refuse_large_group(path, table.metadata.row_group(number), columns)
            yield from table.iter_batches(batch_size=_PARQUET_ROWS, columns=columns)

        yield table.schema_arrow.names, batches_of


def _refuse_large_group(path: Path, group: Any, columns: Collection[str]) -> None:
    """Refuse a row group of which some columns take little space, and much memory."""
    parts = [group.column(number) for number in range(group.num_columns)]
    begins = tuple(f"{name}." for name in columns)
    parts = [part for part in parts if f"{part.path_in_schema}.".startswith(begins)]
    listed = sum(part.num_values - group.num_rows for part in parts)  # in lists, at no cost
    unpacked = sum(part.total_uncompressed_size for part in parts) + 16 * listed
    packed = min(sum(part.total_compressed_size for part in parts), path.stat().st_size)
    _refuse_bomb(path, packed, unpacked, "write it as JSON lines")


def _refuse_bomb(path: Path, packed: int, unpacked: int, otherwise: str) -> None:
    if unpacked > max(_LARGE_BYTES, _MOST_TIMES * packed):
        raise DataError(
            f"{path} unpacks {packed:,} bytes to {unpacked:,}, as usual text does not. Remove it, "
            f"or {otherwise} if you trust it."
        )


@contextmanager
def _open_arrow(path: Path) -> Iterator[tuple[list[str], _BatchesOf]]:
    import pyarrow

    with pyarrow.memory_map(str(path)) as file, pyarrow.ipc.open_stream(file) as table:
        yield table.schema.names, lambda columns: (batch.select(columns) for batch in table)


@contextmanager
def _named_errors(path: Path) -> Iterator[None]:
    """Turn any error of pyarrow into a DataError, because its errors share no class."""
    kind = "Arrow" if path.suffix == ARROW else "Parquet"
    try:
        yield
    except (UserError, Interrupted):
        raise
    except ImportError as error:
        raise lacks_package(str(path), "pyarrow", error, extra="parquet") from error
    except Exception as error:
        raise _incomplete(path, kind, error) from error
