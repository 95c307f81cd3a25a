"""Hash files, by one SHA-256 each.

Several threads hash, because hashing and reading release the interpreter.
"""

import hashlib
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from pipeline.artifacts.manifest import FileRecord, as_text, is_text, json_digest
from pipeline.distributed import progress
from pipeline.errors import ArtifactError

READ_BYTES = 2**20
"""Bytes that a hashing thread holds in memory."""
SYNC_BYTES = 2**26
"""Bytes between two syncs of a file that is written."""
MAX_THREADS = 4


def file_records(paths: Sequence[Path]) -> dict[Path, FileRecord]:
    """Return size and digest of files, each read once."""
    sizes = [path.stat().st_size for path in paths]
    records = zip(paths, sizes, file_digests(paths), strict=True)
    return {path: FileRecord(size=size, sha256=digest) for path, size, digest in records}


def file_digests(paths: Sequence[Path]) -> list[str]:
    """Return the digests of files, in their order."""
    threads = min(MAX_THREADS, os.cpu_count() or 1, len(paths))
    if threads <= 1:
        return [_file_digest(path) for path in paths]
    with ThreadPoolExecutor(threads, thread_name_prefix="hash") as pool:
        return list(pool.map(_file_digest, paths))


def _file_digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as stream:
        while content := stream.read(READ_BYTES):
            digest.update(content)
            progress.advance()
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
            progress.advance()

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

    Folders that are linked in count as folders, once each.
    """
    if path.is_file():
        return json_digest(file_records([path])[path].model_dump())
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
