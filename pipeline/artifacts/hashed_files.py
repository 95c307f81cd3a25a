"""Files that are hashed while they are written, from the same memory: nothing is read back.

Digests are made by threads, since hashing, like writing, leaves the interpreter to others. Another
one sends to disk what is written already, which the system by itself begins to do late.
"""

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from pipeline.artifacts import digests
from pipeline.artifacts.manifest import FileRecord
from pipeline.artifacts.places import sync

WRITE_BYTES = 1024 * 1024
"""Shorter pieces are put together before they are written."""


class HashedFiles:
    """Writes files; when the block ends they are on disk and ``records`` has their digests."""

    def __init__(self) -> None:
        self.records: dict[Path, FileRecord] = {}
        threads = max(1, min(digests.MAX_THREADS, (os.cpu_count() or 1) - 1))  # one core writes
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
        """A file of these bytes, one piece after the other; they are not needed any longer then.

        Pieces that are made as they are asked for need memory for about a chunk of them.

        Raises:
            OSError: the file cannot be written; it is named.
        """
        found: list[Future[str]] = []
        size = 0
        try:
            with path.open("wb", buffering=WRITE_BYTES) as stream:
                for chunk in chunks_of(pieces):
                    found.append(self._hashing.submit(digests.digest_of, chunk))
                    for part in chunk:
                        stream.write(part)
                        size += part.nbytes
                    if not self._synced or self._synced[-1].done():
                        self._send_to_disk(path)
        except OSError as error:
            raise OSError(error.errno, os.strerror(error.errno or 0), str(path)) from error
        self._send_to_disk(path)
        chunk_digests = tuple(digest.result() for digest in found)
        self.records[path] = FileRecord(size=size, chunks=chunk_digests)

    def _send_to_disk(self, path: Path) -> None:
        """What there is of a file, after all that was sent before."""
        self._synced.append(self._syncing.submit(sync, path))


def chunks_of(pieces: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """The pieces cut where the chunks of their file end, a list for each chunk."""
    chunk: list[memoryview] = []
    left = digests.CHUNK_BYTES
    for piece in pieces:
        start = 0
        while start < piece.nbytes:
            part = piece[start : start + left]
            chunk.append(part)
            start, left = start + part.nbytes, left - part.nbytes
            if left == 0:
                yield chunk
                chunk, left = [], digests.CHUNK_BYTES
    if chunk:
        yield chunk
