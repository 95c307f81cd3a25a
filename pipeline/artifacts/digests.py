"""Compute, check and remember SHA-256 digests of files, one per chunk of 64 MiB.

Several threads hash, because hashing and reading release the interpreter. A file that matched its
manifest is remembered by size, modification time and inode, in this process and in
``.NAME.verified.jsonl`` beside the artifact, so that its next use costs one look at its status.
Where that file cannot be written, only this process remembers.

:class:`HashedFiles` hashes files from memory while they are written, and syncs them meanwhile.
"""

import contextlib
import hashlib
import json
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from pipeline.artifacts.manifest import (
    MANIFEST_NAME,
    FileRecord,
    Manifest,
    as_text,
    is_text,
    json_digest,
)
from pipeline.artifacts.places import is_verified_file, sync, verified_path
from pipeline.distributed import progress
from pipeline.errors import ArtifactError

CHUNK_BYTES = 64 * 1024 * 1024
READ_BYTES = 1024 * 1024
"""Bytes that a hashing thread holds in memory."""

MAX_THREADS = 4

MOST_UNSYNCED = 4
"""Chunks that may be written ahead of the disk. A slow disk then shows its progress; training's
watchdog would take one long sync at the end for a hang."""

RECENT_NANOSECONDS = 50_000_000
"""Age up to which a changed file is not remembered: another change might leave the same time."""


class Stamp(NamedTuple):
    """Status of a file that changes whenever the file does."""

    size: int
    mtime_ns: int
    inode: int


class Chunk(NamedTuple):
    """Chunk of a file that is to be hashed."""

    name: str
    number: int


# ---------------------------------------------------------------- hashing


def file_record(path: Path) -> FileRecord:
    """Return size and chunk digests of a file, read once."""
    return file_records([path])[path]


def file_records(paths: Sequence[Path]) -> dict[Path, FileRecord]:
    """Return size and chunk digests of files, each read once."""
    sizes = {path: path.stat().st_size for path in paths}
    chunks = [(path, index) for path in paths for index in range(number_of_chunks(sizes[path]))]
    found: dict[Path, list[str]] = {path: [] for path in paths}
    few = sum(sizes.values()) <= READ_BYTES  # starting threads would take longer than hashing
    digests = map(_chunk_digest, chunks) if few else chunk_digests(chunks)
    for (path, _), digest in zip(chunks, digests, strict=True):
        found[path].append(digest)
    return {path: FileRecord(size=sizes[path], chunks=tuple(found[path])) for path in paths}


def number_of_chunks(size: int) -> int:
    """Return the number of chunks of a file of this many bytes."""
    return -(-size // CHUNK_BYTES)


Hashing = Callable[[Sequence[tuple[Path, int]]], Iterable[str]]
"""Function that returns the digests of chunks, each a path and a number, in their order."""


def chunk_digests(chunks: Sequence[tuple[Path, int]]) -> Iterable[str]:
    """Return the digests of chunks, in their order, computed by several threads."""
    threads = hashing_threads(len(chunks))
    if threads <= 1:
        return [_chunk_digest(chunk) for chunk in chunks]
    with ThreadPoolExecutor(threads, thread_name_prefix="hash") as pool:
        return list(pool.map(_chunk_digest, chunks))


def hashing_threads(chunks: int) -> int:
    """Return the number of threads that hash so many chunks."""
    return min(MAX_THREADS, os.cpu_count() or 1, chunks)


def _chunk_digest(chunk: tuple[Path, int]) -> str:
    path, index = chunk
    digest, left = hashlib.sha256(), CHUNK_BYTES
    buffer = memoryview(bytearray(min(READ_BYTES, CHUNK_BYTES)))
    with path.open("rb", buffering=0) as stream:
        stream.seek(index * CHUNK_BYTES)
        while left and (count := stream.readinto(buffer[: min(left, len(buffer))])):
            digest.update(buffer[:count])
            left -= count
            progress.advance()
    return digest.hexdigest()


def digest_of(chunk: Iterable[memoryview]) -> str:
    """Return the digest of a chunk that is in memory, in pieces."""
    digest = hashlib.sha256()
    for piece in chunk:
        digest.update(piece)
    return digest.hexdigest()


def raw_digest(path: Path) -> str:
    """Return the digest of a file, or of every file below a folder by name and content.

    Folders that are linked in count as folders, once each.
    """
    if path.is_file():
        return json_digest(file_record(path).model_dump())
    if not path.is_dir():
        raise ArtifactError(f"{path} does not exist. Name an existing file or folder.")
    files = sorted(_files_below(path))
    for entry in files:
        if not is_text(str(entry)):
            raise ArtifactError(
                f"{as_text(entry)} has a name that is not UTF-8. Rename it, or move it away."
            )
    records = file_records(files)
    return json_digest(
        {str(entry.relative_to(path)): records[entry].model_dump() for entry in files}
    )


def _files_below(root: Path) -> Iterable[Path]:
    seen: set[tuple[int, int]] = set()
    for folder, folder_names, names in os.walk(root, followlinks=True):
        status = Path(folder).stat()
        if (status.st_dev, status.st_ino) in seen:
            folder_names.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        yield from (path for name in names if (path := Path(folder) / name).is_file())


# ---------------------------------------------------------------- remembering


_MEMORY: dict[tuple[str, str], dict[str, Stamp]] = {}
"""(Folder, digest of the artifact) → intact files and their status at that time."""


def remembered(directory: Path, digest: str) -> dict[str, Stamp]:
    """Return file → status for the files known to match the manifest of this digest."""
    key = (os.path.realpath(directory), digest)
    if key not in _MEMORY:
        _MEMORY[key] = dict(_read_verified(verified_path(directory), digest))
    return _MEMORY[key]


def _read_verified(path: Path, digest: str) -> Iterable[tuple[str, Stamp]]:
    """Yield the entries of one manifest, skipping a line that a killed process cut off."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError):
        return
    for line in lines:
        with contextlib.suppress(ValueError):
            match json.loads(line):
                case [str(of), str(name), int(size), int(mtime_ns), int(inode)] if of == digest:
                    yield name, Stamp(size, mtime_ns, inode)


def remember(
    directory: Path,
    digest: str,
    stamps: Mapping[str, Stamp],
    *,
    anew: bool = False,
    on_disk: bool = True,
) -> None:
    """Record files as intact, except those that changed a moment ago.

    Lines are appended, so that several processes can write at once.

    Args:
        directory: Directory of the artifact.
        digest: Digest of the artifact.
        stamps: File → status.
        anew: Forget all other files.
        on_disk: Tell later processes too.
    """
    latest = time.time_ns() - RECENT_NANOSECONDS
    settled = {name: stamp for name, stamp in stamps.items() if stamp.mtime_ns < latest}
    if anew:
        _MEMORY[os.path.realpath(directory), digest] = {}
    remembered(directory, digest).update(settled)
    lines = [
        json.dumps([digest, name, *stamp], ensure_ascii=False) for name, stamp in settled.items()
    ]
    path = verified_path(directory)
    with contextlib.suppress(OSError):
        if on_disk and is_verified_file(path) and (settled or path.exists()):
            with path.open("w" if anew else "a", encoding="utf-8", newline="\n") as stream:
                stream.write("".join(f"{line}\n" for line in lines))


def remember_artifact(directory: Path, manifest: Manifest) -> None:
    """Record all files of an artifact that was just hashed, written and moved to its place."""
    with contextlib.suppress(OSError):
        stamps = {name: stamp_of(directory / name) for name in manifest.files}
        remember(directory, manifest.digest, stamps, anew=True)


def stamp_of(path: Path) -> Stamp:
    """Return the present status of a file."""
    status = path.lstat()
    return Stamp(status.st_size, status.st_mtime_ns, status.st_ino)


# ---------------------------------------------------------------- checking


@dataclass(frozen=True)
class Check:
    """Files of an artifact to compare with its manifest.

    ``stamps`` is their status before any of them is read.
    """

    directory: Path
    files: Mapping[str, FileRecord]
    stamps: dict[str, Stamp]

    @classmethod
    def of(cls, directory: Path, files: Mapping[str, FileRecord]) -> "Check":
        """Take the status of all files.

        Raises:
            ArtifactError: A file is missing, a link or of another size.
        """
        for folder in {name.rpartition("/")[0] for name in files} - {""}:
            refuse_links(directory, folder)
        stamps = {
            name: _stamp_as_recorded(directory, name, record) for name, record in files.items()
        }
        return cls(directory, files, stamps)

    def without(self, known: Mapping[str, Stamp]) -> "Check":
        """Return the check without the files whose present status is known to be right."""
        files = {
            name: record
            for name, record in self.files.items()
            if known.get(name) != self.stamps[name]
        }
        return Check(self.directory, files, {name: self.stamps[name] for name in files})

    def chunks(self) -> list[Chunk]:
        """Return all chunks to hash, in a fixed order."""
        return [
            Chunk(name, number)
            for name, record in sorted(self.files.items())
            for number in range(len(record.chunks))
        ]

    def problem(self, chunks: Sequence[Chunk], *, hashing: Hashing = chunk_digests) -> str | None:
        """Return a sentence about the first of these chunks that differs; None if none does."""
        paths = [(self.directory / chunk.name, chunk.number) for chunk in chunks]
        try:
            digests = hashing(paths)
        except OSError as error:
            return f"{error.filename or self.directory} cannot be read ({error.strerror or error})."
        for chunk, found in zip(chunks, digests, strict=True):
            if found != self.files[chunk.name].chunks[chunk.number]:
                return (
                    f"{self.directory / chunk.name} is damaged in chunk {chunk.number} (64 MiB "
                    f"each): its digest differs from the manifest. {suggested_fix(self.directory)}."
                )
        return None


def suggested_fix(directory: Path) -> str:
    """Return the suggested fix for a damaged file of an artifact."""
    return f"Restore it from a copy, or remove the folder {directory} and run its stage again"


def refuse_links(directory: Path, name: str) -> None:
    """Refuse a file of an artifact that is a link or lies below one.

    Raises:
        ArtifactError: Names the link.
    """
    path = str(directory)  # paths as text: this runs several times for each of thousands of files
    for part in name.split("/"):
        path = f"{path}/{part}"
        if os.path.islink(path):  # noqa: PTH114
            raise ArtifactError(
                f"{path} is a link, which an artifact never contains. {suggested_fix(directory)}."
            )


def _stamp_as_recorded(directory: Path, name: str, record: FileRecord) -> Stamp:
    """Return the present status of a file, whose folders are no links, if its size is as recorded.

    Raises:
        ArtifactError: It is missing, a link or of another size.
    """
    path = f"{directory}/{name}"
    try:
        status = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        status = None
    if status is not None and stat.S_ISLNK(status.st_mode):
        refuse_links(directory, name)
    if status is None or not stat.S_ISREG(status.st_mode):
        raise ArtifactError(
            f"{path} is missing, although its manifest lists it. {suggested_fix(directory)}."
        )
    size = status.st_size
    if size != record.size or number_of_chunks(size) != len(record.chunks):
        raise ArtifactError(
            f"{path} has {size} bytes, its manifest says {record.size}. {suggested_fix(directory)}."
        )
    return Stamp(size, status.st_mtime_ns, status.st_ino)


def compare_files(directory: Path, files: Mapping[str, FileRecord]) -> Mapping[str, Stamp]:
    """Hash files, remembered or not, and return their status.

    Raises:
        ArtifactError: Names the first file that differs, and where.
    """
    check = Check.of(directory, files)
    problem = check.problem(check.chunks())
    if problem is not None:
        raise ArtifactError(problem)
    return check.stamps


def changed_files(directory: Path, manifest: Manifest) -> dict[str, str]:
    """Return file → what happened to it since the artifact was made, by its status alone.

    A file that is not remembered counts as changed if it is newer than the manifest, which is
    written last.
    """
    known = remembered(directory, manifest.digest)
    sealed = (directory / MANIFEST_NAME).lstat().st_mtime_ns
    changes: dict[str, str] = {}
    for name, record in manifest.files.items():
        try:
            refuse_links(directory, name)
            found = stamp_of(directory / name)
        except OSError:
            changes[name] = "is missing"
            continue
        except ArtifactError:
            changes[name] = "is a link now"
            continue
        as_known = found == known[name] if name in known else found.mtime_ns <= sealed
        if found.size != record.size or not as_known:
            changes[name] = "changed since it was made"
    return changes


WRITE_BYTES = 1024 * 1024
"""Shorter pieces are joined before they are written."""


class HashedFiles:
    """Writer whose files are on disk, with their digests in ``records``, when the block ends."""

    def __init__(self) -> None:
        self.records: dict[Path, FileRecord] = {}
        threads = max(1, min(MAX_THREADS, (os.cpu_count() or 1) - 1))  # one core is for writing
        self._hashing = ThreadPoolExecutor(threads, thread_name_prefix="hash")
        self._syncing = ThreadPoolExecutor(1, thread_name_prefix="sync")
        self._synced: list[Future[None]] = []

    def __enter__(self) -> "HashedFiles":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._hashing.shutdown(cancel_futures=True)
        self._syncing.shutdown(cancel_futures=kind is not None)
        if kind is None:
            for sent in self._synced:
                sent.result()

    def write(self, path: Path, pieces: Iterable[memoryview]) -> None:
        """Write the pieces as a file, one after the other.

        Pieces that a generator makes need memory for about one chunk.

        Raises:
            OSError: The file cannot be written; the error names it.
        """
        found: list[Future[str]] = []
        size = unsynced = 0
        try:
            with path.open("wb", buffering=WRITE_BYTES) as stream:
                for chunk in chunks_of(pieces):
                    found.append(self._hashing.submit(digest_of, chunk))
                    for part in chunk:
                        stream.write(part)
                        size += part.nbytes
                    progress.advance()
                    unsynced += 1
                    if unsynced >= MOST_UNSYNCED and self._synced:
                        self._synced[-1].result()
                    if not self._synced or self._synced[-1].done():
                        self._send_to_disk(path)
                        unsynced = 0
        except OSError as error:
            raise OSError(error.errno, os.strerror(error.errno or 0), str(path)) from error
        self._send_to_disk(path)
        chunk_digests = tuple(digest.result() for digest in found)
        self.records[path] = FileRecord(size=size, chunks=chunk_digests)

    def _send_to_disk(self, path: Path) -> None:
        """Sync the part of a file that is written so far, after all earlier requests."""
        self._synced.append(self._syncing.submit(_sync, path))


def _sync(path: Path) -> None:
    sync(path)
    progress.advance()


def chunks_of(pieces: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """Yield the pieces cut at the chunk borders of their file, one list per chunk."""
    chunk: list[memoryview] = []
    left = CHUNK_BYTES
    for piece in pieces:
        start = 0
        while start < piece.nbytes:
            part = piece[start : start + left]
            chunk.append(part)
            start, left = start + part.nbytes, left - part.nbytes
            if left == 0:
                yield chunk
                chunk, left = [], CHUNK_BYTES
    if chunk:
        yield chunk
