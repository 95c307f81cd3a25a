"""Compute and compare the digests of files, of artifacts and of raw text.

Several threads hash, because hashing and reading release the interpreter.
"""

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, TypeVar

from pipeline.artifacts.manifest import FileRecord, as_text, is_text, json_digest
from pipeline.distributed import process
from pipeline.errors import ArtifactError

T = TypeVar("T")
R = TypeVar("R")
READ_BYTES = 2**20
"""Bytes that a hashing thread holds in memory."""
CHUNK_BYTES = 2**26
"""Bytes of a chunk, which has a digest of its own in manifests of earlier versions."""
SYNC_BYTES = 2**26
"""Bytes between two syncs of a file that is written."""
MAX_THREADS = 4


def file_records(paths: Sequence[Path]) -> dict[Path, FileRecord]:
    """Return size and digest of files, each read once."""
    sizes = [path.stat().st_size for path in paths]
    records = zip(paths, sizes, _by_threads(_file_digest, paths), strict=True)
    return {path: FileRecord(size=size, sha256=digest) for path, size, digest in records}


def are_intact(files: Sequence[tuple[Path, FileRecord]]) -> list[bool]:
    """Return for each file whether its content has the recorded digest."""
    return _by_threads(_is_intact, files)


def _by_threads(function: Callable[[T], R], items: Sequence[T]) -> list[R]:
    threads = min(MAX_THREADS, os.cpu_count() or 1, len(items))
    if threads <= 1:
        return [function(item) for item in items]
    with ThreadPoolExecutor(threads, thread_name_prefix="hash") as pool:
        return list(pool.map(function, items))


def _is_intact(file: tuple[Path, FileRecord]) -> bool:
    path, record = file
    if record.chunks is None:
        return _file_digest(path) == record.sha256
    return _in_chunks(path) == record


def _in_chunks(path: Path) -> FileRecord:
    """Return the record of a file with a digest for each chunk, as earlier versions made it."""
    size = path.stat().st_size
    with path.open("rb", buffering=0) as stream:
        chunks = tuple(_digest(stream, CHUNK_BYTES) for _ in range(0, size, CHUNK_BYTES))
    return FileRecord(size=size, chunks=chunks)


def _file_digest(path: Path) -> str:
    with path.open("rb", buffering=0) as stream:
        return _digest(stream, path.stat().st_size)


def _digest(stream: BinaryIO, size: int) -> str:
    """Return the digest of the next ``size`` bytes, or of those that are left."""
    digest = hashlib.sha256()
    while content := stream.read(min(size, READ_BYTES)):
        digest.update(content)
        size -= len(content)
        process.advance()
    return digest.hexdigest()


def write_hashed(path: Path, pieces: Iterable[memoryview]) -> FileRecord:
    """Write the pieces as a file that is on disk when this returns, and return its record.

    A thread hashes and syncs while the next bytes are written. The file is at most twice
    ``SYNC_BYTES`` ahead of the disk, and a slow disk shows its progress to the watchdog.

    Raises:
        OSError: The file cannot be written; the error names it.
    """
    digest, size, synced = hashlib.sha256(), 0, 0
    waiting: list[Future[None]] = []

    def settle(part: memoryview, is_sync_due: bool) -> None:
        digest.update(part)
        if is_sync_due:
            os.fsync(stream.fileno())
            process.advance()

    try:
        with path.open("wb") as stream, ThreadPoolExecutor(1, "hash") as pool:
            for piece in pieces:
                for start in range(0, piece.nbytes, SYNC_BYTES):
                    part = piece[start : start + SYNC_BYTES]
                    size += stream.write(part)
                    is_sync_due = size - synced >= SYNC_BYTES
                    if is_sync_due:
                        _raise_error_of(waiting)
                        stream.flush()
                        synced = size
                    waiting.append(pool.submit(settle, part, is_sync_due))
            stream.flush()
            waiting.append(pool.submit(settle, memoryview(b""), is_sync_due=True))
            _raise_error_of(waiting)
    except OSError as error:
        raise OSError(error.errno, os.strerror(error.errno or 0), str(path)) from error
    return FileRecord(size=size, sha256=digest.hexdigest())


def _raise_error_of(waiting: list[Future[None]]) -> None:
    """Wait for all, and raise the first error."""
    while waiting:
        waiting.pop(0).result()


def raw_digest(path: Path) -> str:
    """Return the digest of a file, or of every file below a folder by name and content.

    Folders that are linked in count as folders, once each. The digest has the form of earlier
    versions: the inputs of their runs have not changed.
    """
    if problem := why_no_data(path):
        raise ArtifactError(problem)
    if path.is_file():
        return json_digest(_in_chunks(path).model_dump())
    files = sorted(filter(Path.is_file, entries_below(path)))
    for entry in files:
        if not is_text(str(entry)):
            raise ArtifactError(
                f"{as_text(entry)} has a name that is not UTF-8. Rename it, or move it away."
            )
    records = zip(files, _by_threads(_in_chunks, files), strict=True)
    return json_digest(
        {str(entry.relative_to(path)): record.model_dump() for entry, record in records}
    )


def why_no_data(path: Path) -> str:
    """Return the problem of a path that is neither a file nor a folder; empty for any other."""
    if path.is_file() or path.is_dir():
        return ""
    problem = "is a pipe or a device" if path.exists() else "does not exist"
    return f"{path} {problem}. Name an existing file or folder."


def entries_below(root: Path, *, hidden: bool = True) -> Iterator[Path]:
    """Yield what is in a folder and its subfolders and is no folder.

    Folders that are linked in count as folders, once each: by their own name if they are below the
    root without a link, else by the first link. ``hidden`` also yields what is hidden.
    """
    seen: set[tuple[int, int]] = set()
    starts = deque([root])
    while starts:  # links come after all folders of the walk that found them
        for folder, folder_names, names in os.walk(starts.popleft()):
            status = Path(folder).stat()
            if (status.st_dev, status.st_ino) in seen:
                folder_names.clear()
                continue
            seen.add((status.st_dev, status.st_ino))
            folder_names[:] = sorted(name for name in folder_names if hidden or name[0] != ".")
            below = [Path(folder) / name for name in folder_names]
            starts.extend(path for path in below if path.is_symlink())
            yield from (Path(folder) / name for name in names if hidden or name[0] != ".")
