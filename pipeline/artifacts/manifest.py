"""The manifest of an artifact: its contents, the digests of its files, and their names.

Raw input is known by a digest, too. Several threads hash, because hashing and reading release the
interpreter.

``manifest.json`` is written last. It records the kind, the resolved settings, the inputs with their
digests, and the size and SHA-256 of every file. File names are relative, use ``/`` and stay within
the artifact.
"""

import hashlib
import json
import os
import re
import unicodedata
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, Literal, Self, TypeVar, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from pipeline.config.documents import read_bytes
from pipeline.distributed import process
from pipeline.errors import ArtifactError, unreadable
from pipeline.terminal import counted

T = TypeVar("T")
R = TypeVar("R")

MANIFEST_NAME = "manifest.json"

MARKER_NAME = ".made-by-mmnmt"
"""Empty file that marks a working folder as made by a stage, from its creation on."""

LONGEST_PART = 255
"""Most bytes of one part of a path on the file systems of Linux."""

STATE_NAME = re.compile(r"update-(\d+)")
"""Name of the folder of a training state."""

Kind = Literal[
    "corpus",
    "tokenizer",
    "shards",
    "mixture",
    "groups",
    "checkpoint",
    "training_state",
    "translations",
    "translated_text",
    "evaluation",
    "task_model",
    "task_evaluation",
    "export",
    "analysis",
]

FORMAT_VERSION: dict[Kind, int] = dict.fromkeys(get_args(Kind), 1)
"""Version of each kind's format; raise it when the files of the kind change."""


def run_dir(out_dir: Path) -> Path:
    """Return the run folder of an output."""
    return out_dir.parent / f"{out_dir.name}.run"


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class FileRecord(_Frozen):
    """Size in bytes and SHA-256 of a file; earlier versions wrote one for each 64 MiB of it."""

    size: int
    sha256: str = ""
    chunks: tuple[str, ...] | None = None
    is_note: bool = False
    """Whether the file tells of the run, its time and place, and is no part of the identity."""

    @model_validator(mode="after")
    def _has_one_form(self) -> Self:
        if (self.chunks is None) != bool(self.sha256):
            raise ValueError("Give sha256")
        return self

    @model_serializer(mode="wrap")
    def _as_read(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return the form that was read: digests of artifacts stay as they are."""
        left_out = {"chunks" if self.chunks is None else "sha256"}
        left_out |= set() if self.is_note else {"is_note"}
        return {name: value for name, value in handler(self).items() if name not in left_out}


class InputRecord(_Frozen):
    """Artifact or raw input that a stage read."""

    kind: str
    path: str
    digest: str
    splits: tuple[str, ...] = ()
    """Splits of a corpus that the digest covers; empty for the whole artifact."""


class RunRecord(_Frozen):
    """Start and duration of the stage; not part of the artifact's identity."""

    started: str
    wall_seconds: float


class Manifest(_Frozen):
    """Contents of ``manifest.json``."""

    kind: Kind
    format_version: int
    stage: str
    key: str
    config: dict[str, Any]
    inputs: dict[str, InputRecord]
    files: dict[str, FileRecord]
    statistics: dict[str, Any]
    run: RunRecord
    summary: tuple[str, ...] = ()
    """One to five lines for people: lines read, kept, dropped and set aside."""

    @property
    def digest(self) -> str:
        """Return the SHA-256 of the artifact's identity, which leaves out time and place.

        Files that earlier versions did not mark as notes count: the digests of their runs stay.
        """
        identity = {
            "kind": self.kind,
            "format_version": self.format_version,
            "config": self.config,
            "inputs": {name: record.digest for name, record in self.inputs.items()},
            "files": {
                name: record.model_dump()
                for name, record in self.files.items()
                if not record.is_note
            },
        }
        return json_digest(identity)


def to_json(value: Any) -> str:
    """Return JSON as every artifact stores it: sorted keys, indented, text unescaped."""
    return json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def json_digest(value: Any) -> str:
    """Return the SHA-256 of a JSON value, independent of key order."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def how_to_restore(directory: Path) -> str:
    """Return advice about a damaged artifact; of a training state, it names the state before."""
    if directory.name == "best" and directory.parent.suffix == ".run":
        directory = directory.parent  # no state of the run makes these weights again
    move = f"Restore it from a copy, or move the folder {directory} away"
    if not STATE_NAME.fullmatch(directory.name):
        return f"{move} and run its stage again"
    there = (one for one in directory.parent.iterdir() if STATE_NAME.fullmatch(one.name))
    updates = {updates_of_name(one.name) for one in there if _has_manifest(one)}
    earlier = [update for update in updates if update < updates_of_name(directory.name)]
    if not earlier:
        return f"{move}; its stage then begins anew, since no earlier state is there"
    return f"{move}; its stage then resumes after update {max(earlier):,}"


def updates_of_name(name: str) -> int:
    """Return the number in a state's name, for example 100 of ``update-0000100``."""
    found = STATE_NAME.fullmatch(name)
    assert found is not None, "a state is known by its name"
    return int(found[1])


def _has_manifest(directory: Path) -> bool:
    try:
        Manifest.model_validate_json(read_bytes(directory / MANIFEST_NAME))
    except (ValidationError, OSError, ArtifactError):
        return False
    return True


@lru_cache(maxsize=256)
def _parsed(content: bytes) -> tuple[Manifest, str | None]:
    """Return a manifest and the fault of a name in it; a plan reads all before every stage."""
    manifest = Manifest.model_validate_json(content)
    return manifest, describe_names(manifest.files)


def read_manifest(directory: Path) -> Manifest | None:
    """Return the manifest of a finished artifact; None if there is none.

    Raises:
        ArtifactError: There is a manifest, but it cannot be read, or it names a file that cannot
            be within an artifact.
    """
    path = directory / MANIFEST_NAME
    try:
        if path.is_symlink():
            fix = "Copy the file" if path.exists() else how_to_restore(directory)
            raise ArtifactError(f"{path} is a link, which an artifact never contains. {fix}.")
        if not path.is_file():
            return None
        manifest, problem = _parsed(read_bytes(path))
    except ArtifactError:
        if os.path.lexists(path):  # else it has been removed since
            raise
        return None
    except ValidationError as error:
        raise ArtifactError(
            f"{path} is not a manifest of this version "
            f"({counted(error.error_count(), 'problem')}). {how_to_restore(directory)}."
        ) from error
    except OSError as error:  # of a folder that may not be entered
        raise ArtifactError(unreadable(path, error, "Make it readable.")) from error
    if problem is not None:
        raise ArtifactError(
            f"{path} lists a file {problem}. No stage writes this: do not use the folder, and run "
            "its stage again."
        )
    return manifest


# ---------------------------------------------------------------- names of files


_UNPRINTABLE = re.compile("[\\\\\x00-\x1f\x7f-\x9f\ud800-\udfff]")
"""Backslash, and the characters of the Unicode categories Cc and Cs."""


def is_text(name: str) -> bool:
    """Return whether a name is UTF-8; Python represents other bytes as lone surrogates."""
    return not any("\ud800" <= character <= "\udfff" for character in name)


def as_text(path: Path) -> str:
    """Return a path in printable form, with bytes that are not UTF-8 escaped."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def describe_names(names: Iterable[str]) -> str | None:
    """Return the first name that an artifact cannot hold, with the reason; None if all fit."""
    seen: dict[str, str] = {}
    for name in names:
        if problem := describe_name(name):
            return f"{name!r}, which {problem}"
        if (other := seen.setdefault(fold_name(name), name)) != name:
            return f"{name!r} and {other!r}, which are the same where names ignore case"
    return None


def describe_name(name: str) -> str | None:
    """Return why an artifact cannot hold a file of this name, to follow "which"; else None."""
    parts = name.split("/")
    if ".." in parts:
        return "leads out of the folder with '..'"
    if "" in parts or "." in parts:
        return "is absolute, or has an empty part or '.'"
    if _UNPRINTABLE.search(name):
        return "has a backslash or a control character"
    if max(len(part.encode()) for part in parts) > LONGEST_PART:
        return f"has a part of more than {LONGEST_PART} bytes"
    if fold_name(name) in (MANIFEST_NAME, MARKER_NAME):
        return "is a name that no file of a stage has"
    return None


def fold_name(name: str) -> str:
    """Return a key that names share if some file system takes them for one file."""
    if name.isascii():  # as all names of most artifacts, of which there are tens of thousands
        return name.lower()
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())


# ---------------------------------------------------------------- digests of files


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


# ---------------------------------------------------------------- parts of a corpus


OTHER_LANGUAGES = "other_languages"
"""Statistic of a part: languages of the corpus without lines in the part."""

_KEPT_STATISTICS = ("emptied", "imported")
"""Statistics of a corpus that describe its training lines."""


def part_of(manifest: Manifest, splits: Sequence[str]) -> Manifest:
    """Return the manifest of a corpus, limited to the files and statistics of some splits."""
    folders = tuple(f"{split}/" for split in splits)
    files = {name: record for name, record in manifest.files.items() if name.startswith(folders)}
    statistics = _statistics_of(manifest.statistics, splits)
    return manifest.model_copy(update={"files": files, "statistics": statistics})


def digest_of_part(manifest: Manifest, splits: Sequence[str]) -> str:
    """Return the SHA-256 of all that a stage can read of these splits, or of the artifact."""
    if not splits:
        return manifest.digest
    part = part_of(manifest, splits)
    return json_digest(
        {
            "kind": part.kind,
            "format_version": part.format_version,
            "files": {name: record.model_dump() for name, record in part.files.items()},
            "statistics": part.statistics,
        }
    )


def _statistics_of(statistics: Mapping[str, Any], splits: Sequence[str]) -> dict[str, Any]:
    """Return the statistics of these splits; malformed statistics stay, for readers to refuse."""
    pairs = statistics.get("pairs")
    if not isinstance(pairs, dict) or not all(
        isinstance(counted, dict) for counted in pairs.values()
    ):
        return dict(statistics)
    counts = {
        pair: {split: by_split[split] for split in splits if by_split.get(split)}
        for pair, by_split in pairs.items()
    }
    counts = {pair: by_split for pair, by_split in counts.items() if by_split}
    names = _KEPT_STATISTICS if "train" in splits else ()
    kept = {name: statistics[name] for name in names if name in statistics}
    return {**kept, "pairs": counts, OTHER_LANGUAGES: sorted(_codes(pairs) - _codes(counts))}


def _codes(pairs: Mapping[str, object]) -> set[str]:
    return {code for pair in pairs for code in pair.split("-")}


# ---------------------------------------------------------------- raw input


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

    Raises:
        ArtifactError: A folder cannot be listed, and its text would be lost; unless it is hidden.
    """

    def refuse(error: OSError) -> None:
        parts = Path(error.filename).relative_to(root).parts
        is_missing = not parts and isinstance(error, FileNotFoundError)  # it has no entries
        if not (is_missing or any(part.startswith(".") for part in parts)):
            raise ArtifactError(unreadable(error.filename, error, "Restore it.")) from error

    seen: set[tuple[int, int]] = set()
    starts = deque([root])
    while starts:  # links come after all folders of the walk that found them
        for folder, folder_names, names in os.walk(starts.popleft(), onerror=refuse):
            status = Path(folder).stat()
            if (status.st_dev, status.st_ino) in seen:
                folder_names.clear()
                continue
            seen.add((status.st_dev, status.st_ino))
            folder_names[:] = sorted(name for name in folder_names if hidden or name[0] != ".")
            below = [Path(folder) / name for name in folder_names]
            starts.extend(path for path in below if path.is_symlink())
            yield from (Path(folder) / name for name in names if hidden or name[0] != ".")
