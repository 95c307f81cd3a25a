"""Hash files: one SHA-256 per chunk of 64 MiB, so that damage is named by file and chunk.

Several threads hash, because hashing and reading release the interpreter. :func:`write_hashed`
hashes a file from memory while it is written.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from pipeline.artifacts.manifest import FileRecord, as_text, is_text, json_digest
from pipeline.distributed import progress
from pipeline.errors import ArtifactError

CHUNK_BYTES = 64 * 1024 * 1024
READ_BYTES = 1024 * 1024
"""Bytes that a hashing thread holds in memory."""
MAX_THREADS = 4


def file_record(path: Path) -> FileRecord:
    """Return size and chunk digests of a file, read once."""
    return file_records([path])[path]


def file_records(paths: Sequence[Path]) -> dict[Path, FileRecord]:
    """Return size and chunk digests of files, each read once."""
    sizes = {path: path.stat().st_size for path in paths}
    chunks = [(path, number) for path in paths for number in range(number_of_chunks(sizes[path]))]
    found: dict[Path, list[str]] = {path: [] for path in paths}
    for (path, _), digest in zip(chunks, chunk_digests(chunks), strict=True):
        found[path].append(digest)
    return {path: FileRecord(size=sizes[path], chunks=tuple(found[path])) for path in paths}


def number_of_chunks(size: int) -> int:
    """Return the number of chunks of a file of this many bytes."""
    return -(-size // CHUNK_BYTES)


def chunk_digests(chunks: Sequence[tuple[Path, int]]) -> list[str]:
    """Return the digests of chunks, each a path and a number, in their order."""
    threads = min(MAX_THREADS, os.cpu_count() or 1, len(chunks))
    if threads <= 1:
        return [_chunk_digest(chunk) for chunk in chunks]
    with ThreadPoolExecutor(threads, thread_name_prefix="hash") as pool:
        return list(pool.map(_chunk_digest, chunks))


def _chunk_digest(chunk: tuple[Path, int]) -> str:
    path, number = chunk
    digest, left = hashlib.sha256(), CHUNK_BYTES
    with path.open("rb", buffering=0) as stream:
        stream.seek(number * CHUNK_BYTES)
        while left and (content := stream.read(min(left, READ_BYTES))):
            digest.update(content)
            left -= len(content)
            progress.advance()
    return digest.hexdigest()


def write_hashed(path: Path, pieces: Iterable[memoryview]) -> FileRecord:
    """Write the pieces as a file that is on disk when this returns, and return its record.

    A thread hashes and syncs each chunk while the next one is written. The file is thus at most one
    chunk ahead of the disk, and a slow disk shows its progress to the watchdog. Pieces that a
    generator makes need memory for about two chunks.

    Raises:
        OSError: The file cannot be written; the error names it.
    """
    digests: list[Future[str]] = []
    size = 0
    try:
        with ThreadPoolExecutor(1, "hash") as pool, path.open("wb") as stream:
            for chunk in chunks_of(pieces):
                for piece in chunk:
                    size += stream.write(piece)
                stream.flush()
                if digests:
                    digests[-1].result()
                digests.append(pool.submit(_settle, chunk, stream.fileno()))
                progress.advance()
            found = tuple(digest.result() for digest in digests)
    except OSError as error:
        raise OSError(error.errno, os.strerror(error.errno or 0), str(path)) from error
    return FileRecord(size=size, chunks=found)


def _settle(chunk: Iterable[memoryview], descriptor: int) -> str:
    """Sync what is written of a file, and return the digest of its last chunk."""
    digest = hashlib.sha256()
    for piece in chunk:
        digest.update(piece)
    os.fsync(descriptor)
    return digest.hexdigest()


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
