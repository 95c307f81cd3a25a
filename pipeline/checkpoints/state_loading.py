"""Load a training state while its files are compared with their digests, from one read.

A thread reads a mebibyte, hashes it, and copies its values into the tensors that want them, while
it is in the core's cache. Values are thus in place before the digest of their chunk is known:
:meth:`CheckedState.fill` raises before anything computes with damaged ones.
"""

import hashlib
import math
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from io import RawIOBase
from pathlib import Path

import torch
from torch import Tensor

from pipeline.artifacts import digests
from pipeline.artifacts.artifact import Artifact, check_together
from pipeline.checkpoints.training_state import Target, incomplete, split_key
from pipeline.checkpoints.weights import (
    TensorHeader,
    dtype_of,
    is_finite,
    not_finite,
    tensor_headers,
    value_offsets,
)
from pipeline.distributed import progress
from pipeline.distributed.collectives import gather_objects
from pipeline.errors import CheckpointError, UserError

_Place = tuple[Path, int]
"""A file and the number of a chunk of it."""


class CheckedState:
    """A training state that fills tensors and is compared with its digests meanwhile."""

    def __init__(self, state: Artifact) -> None:
        self._state = state

    def fill(self, targets: Sequence[Target]) -> None:
        """Fill all targets from the pieces of any topology; all ranks call this.

        Each rank hashes a share of the chunks. What an earlier process found intact is not hashed.

        Raises:
            ArtifactError: A file is missing or damaged; the same error on all ranks.
            CheckpointError: A value is missing or not finite; the same error on all ranks.
        """
        loading, problem = _Loading(), None
        try:
            loading.plan(self._state, targets)
        except (UserError, OSError) as error:  # unless a file is damaged, which explains it
            loading, problem = _Loading(), str(error)
        check_together(self._state, self._state.names(), hashing=loading.hash)
        problems = gather_objects(problem or loading.problem)
        problem = next(filter(None, problems), None)
        if problem is not None:
            raise CheckpointError(problem)


@dataclass
class _Stored:
    """A piece in a file, and who wants which of its values."""

    key: str
    begin: int
    """Offset of the first byte in the file."""
    dtype: torch.dtype
    count: int
    wanted: list[tuple[int, Tensor]] = field(default_factory=list)
    """Index of a value of the piece, and the memory for the values from there on."""

    @property
    def end(self) -> int:
        return self.begin + self.count * self.dtype.itemsize

    def copy(self, buffer: bytearray, position: int, length: int) -> bool:
        """Copy the values in a buffer, read at a position; return whether they are finite."""
        size = self.dtype.itemsize
        low, high = max(self.begin, position), min(self.end, position + length)
        count = (high - low) // size
        if count <= 0:
            return True
        values = torch.frombuffer(buffer, dtype=self.dtype, count=count, offset=low - position)
        first = (low - self.begin) // size
        for start, target in self.wanted:
            begin, end = max(start, first), min(start + len(target), first + count)
            if begin < end:
                target[begin - start : end - start].copy_(values[begin - first : end - first])
        return is_finite(values)


class _Loading:
    """Reads the chunks of a state once, for their digests and for all targets."""

    def __init__(self) -> None:
        self.problem: str | None = None
        self._parts: dict[_Place, list[_Stored]] = {}
        self._directory = Path()

    def plan(self, state: Artifact, targets: Sequence[Target]) -> None:
        """Find the places of all wanted values.

        Raises:
            UserError: A file cannot be read, or a value is missing.
        """
        self._directory = state.directory
        pieces: dict[tuple[str, str], list[tuple[int, _Stored]]] = {}
        paths: dict[str, Path] = {}
        offsets: dict[str, dict[str, int]] = {}
        files: list[tuple[Path, _Stored]] = []
        for header in tensor_headers(state, "optimizer/"):
            if header.file not in paths:
                paths[header.file] = state.unchecked_file(header.file)
                offsets[header.file] = value_offsets(paths[header.file])
            what, tensor, start = split_key(header.name, state)
            stored = _stored(header, offsets[header.file][header.name], paths[header.file])
            pieces.setdefault((what, tensor), []).append((start, stored))
            files.append((paths[header.file], stored))
        for target in targets:
            filled = 0
            for start, stored in pieces.get((target.what, target.tensor), []):
                low = max(start, target.start)
                high = min(start + stored.count, target.start + len(target.values))
                if low < high:
                    share = target.values[low - target.start : high - target.start]
                    stored.wanted.append((low - start, share))
                    filled += high - low
            if filled != len(target.values):
                raise incomplete(state, target, filled=filled)
        for path, stored in files:
            if stored.wanted:
                last = (stored.end - 1) // digests.CHUNK_BYTES
                for number in range(stored.begin // digests.CHUNK_BYTES, last + 1):
                    self._parts.setdefault((path, number), []).append(stored)

    def hash(self, chunks: Sequence[_Place]) -> Iterable[str]:
        """Return the digests of chunks, in their order, and load these and all other chunks."""
        others = sorted(self._parts.keys() - set(chunks))
        is_hashed = [True] * len(chunks) + [False] * len(others)
        threads = max(1, digests.hashing_threads(len(is_hashed)))
        with ThreadPoolExecutor(
            threads, "load", initializer=torch.set_num_threads, initargs=(1,)
        ) as pool:
            return list(pool.map(self._load, [*chunks, *others], is_hashed))[: len(chunks)]

    def _load(self, chunk: _Place, is_hashed: bool) -> str:
        (path, number), digest = chunk, hashlib.sha256()
        buffer = bytearray(min(digests.READ_BYTES, digests.CHUNK_BYTES))
        view, parts = memoryview(buffer), self._parts.get(chunk, [])
        position = number * digests.CHUNK_BYTES
        end = position + digests.CHUNK_BYTES
        with path.open("rb", buffering=0) as stream:
            while position < end:
                length = min(end - position, len(buffer))
                here = [s for s in parts if s.begin < position + length and s.end > position]
                if is_hashed or here:
                    stream.seek(position)
                    length = _read(stream, view[:length])
                if length == 0:
                    break
                if is_hashed:
                    digest.update(view[:length])
                for stored in here:
                    if not stored.copy(buffer, position, length):
                        problem = not_finite(self._directory, stored.key)
                        self.problem = min(filter(None, (self.problem, problem)))
                position += length
                progress.advance()
        return digest.hexdigest()


def _read(stream: RawIOBase, view: memoryview) -> int:
    """Fill a buffer, unless the file ends first; return the number of bytes."""
    count = 0
    while count < len(view) and (more := stream.readinto(view[count:])):
        count += more
    return count


def _stored(header: TensorHeader, begin: int, path: Path) -> _Stored:
    dtype = dtype_of(header)
    if dtype is None or begin % dtype.itemsize:
        raise CheckpointError(
            f"{path}: Tensor {header.name} has the type {header.dtype}, not an aligned "
            "floating-point type. Resume from an earlier state."
        )
    return _Stored(header.name, begin, dtype, math.prod(header.shape))
