"""Artifacts: how the output of every stage is written, opened, verified and refused.

An artifact is a directory with a ``manifest.json`` that is written last. It is built in a hidden
sibling directory, synced to disk and renamed into place, so that a killed stage leaves nothing
that looks finished. The manifest records the kind, the resolved settings, the inputs with their
digests, and the size and SHA-256 of every 64 MiB chunk of every file.
"""

import errno
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from pipeline.documents import read_bytes, read_json
from pipeline.errors import ArtifactError

MANIFEST_NAME = "manifest.json"
CHUNK_BYTES = 64 * 1024 * 1024

Kind = Literal[
    "corpus",
    "tokenizer",
    "shards",
    "mixture",
    "groups",
    "checkpoint",
    "training_state",
    "translations",
    "evaluation",
]

FORMAT_VERSION: dict[Kind, int] = {
    "corpus": 1,
    "tokenizer": 1,
    "shards": 1,
    "mixture": 1,
    "groups": 1,
    "checkpoint": 1,
    "training_state": 1,
    "translations": 1,
    "evaluation": 1,
}


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FileRecord(_Frozen):
    """Size in bytes and one SHA-256 per 64 MiB chunk, in order."""

    size: int
    chunks: tuple[str, ...]


class InputRecord(_Frozen):
    """One artifact (or ``raw`` folder) a stage read."""

    kind: str
    path: str
    digest: str


class RunRecord(_Frozen):
    """How the artifact came about; not part of its identity."""

    started: str
    wall_seconds: float


class Manifest(_Frozen):
    """The contents of ``manifest.json``."""

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
    """What the stage read, kept, dropped and set aside, in one to five lines for people."""

    @property
    def digest(self) -> str:
        """SHA-256 of all that makes the artifact what it is; where and when do not count."""
        identity = {
            "kind": self.kind,
            "format_version": self.format_version,
            "config": self.config,
            "inputs": {name: record.digest for name, record in self.inputs.items()},
            "files": {name: record.model_dump() for name, record in self.files.items()},
        }
        return json_digest(identity)


@dataclass(frozen=True)
class Artifact:
    """A finished artifact: its directory and manifest."""

    directory: Path
    manifest: Manifest

    @property
    def digest(self) -> str:
        return self.manifest.digest

    @property
    def statistics(self) -> dict[str, Any]:
        return self.manifest.statistics

    @property
    def as_input(self) -> InputRecord:
        """What the manifest of an artifact made from this one says of it."""
        path = str(self.directory.absolute())
        return InputRecord(kind=self.manifest.kind, path=path, digest=self.digest)

    def file(self, name: str) -> Path:
        """Path of a file the manifest lists.

        Raises:
            ArtifactError: the artifact has no such file.
        """
        if name not in self.manifest.files:
            raise ArtifactError(
                f"{self.directory} has no file {name!r}; it was written by stage "
                f"{self.manifest.stage!r}: run that stage again."
            )
        return self.directory / name

    def has(self, name: str) -> bool:
        return name in self.manifest.files

    def names(self, prefix: str = "") -> list[str]:
        """Names of the files that start with ``prefix``, sorted."""
        return sorted(name for name in self.manifest.files if name.startswith(prefix))

    def read_json(self, name: str) -> Any:
        """What a JSON file holds; ArtifactError where it is broken, too large or too deep."""
        return read_json(self.file(name))

    def verify(self, names: list[str] | None = None) -> None:
        """Compare files with their digests (all of them, or those named).

        Raises:
            ArtifactError: names the file and the chunk that differ.
        """
        for name in self.names() if names is None else names:
            verify_file(self.file(name), self.manifest.files[name])


@dataclass
class ArtifactWriter:
    """An artifact under construction: files go below ``directory``, figures into ``statistics``.

    ``summary`` takes one to five lines: what was read, kept, dropped by which rule, set aside
    where. The command line prints them when the stage is done, reports repeat them.
    """

    directory: Path
    statistics: dict[str, Any] = field(default_factory=dict)
    summary: list[str] = field(default_factory=list)

    def path(self, name: str) -> Path:
        """Path for a new file; its parent folders are made."""
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def write_json(self, name: str, value: Any) -> None:
        self.path(name).write_text(to_json(value), encoding="utf-8")


def to_json(value: Any) -> str:
    """JSON as every artifact stores it: sorted keys, indented, text unescaped."""
    return json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def json_digest(value: Any) -> str:
    """SHA-256 of a JSON value, independent of key order."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def file_record(path: Path) -> FileRecord:
    """Size and chunk digests of a file, read once."""
    chunks = []
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            chunks.append(hashlib.sha256(chunk).hexdigest())
    return FileRecord(size=path.stat().st_size, chunks=tuple(chunks))


def verify_file(path: Path, record: FileRecord) -> None:
    """Raises ArtifactError that names the first difference between a file and its record."""
    remedy = "restore it from a copy or run its stage again"
    if not path.is_file():
        raise ArtifactError(f"{path} is missing though its manifest lists it: {remedy}.")
    if path.stat().st_size != record.size:
        raise ArtifactError(
            f"{path} has {path.stat().st_size} bytes, its manifest says {record.size}: {remedy}."
        )
    for index, (found, expected) in enumerate(
        zip(file_record(path).chunks, record.chunks, strict=True)
    ):
        if found != expected:
            raise ArtifactError(
                f"{path} is damaged in chunk {index} (64 MiB each): its digest differs from the "
                f"manifest's: {remedy}."
            )


def raw_digest(path: Path) -> str:
    """Digest of a raw input: a file, or every file below a folder by name and content."""
    if path.is_file():
        return json_digest(file_record(path).model_dump())
    if not path.is_dir():
        raise ArtifactError(f"{path} does not exist: name an existing file or folder.")
    files = sorted(entry for entry in path.rglob("*") if entry.is_file())
    return json_digest(
        {str(entry.relative_to(path)): file_record(entry).model_dump() for entry in files}
    )


def stage_key(
    *, stage: str, kind: Kind, config: Mapping[str, Any], inputs: Mapping[str, str]
) -> str:
    """What decides whether a stage must run again: its settings and the digests of its inputs."""
    return json_digest(
        {
            "stage": stage,
            "kind": kind,
            "format_version": FORMAT_VERSION[kind],
            "config": dict(config),
            "inputs": dict(inputs),
        }
    )


def read_manifest(directory: Path) -> Manifest | None:
    """The manifest of a finished artifact, or None where there is none.

    Raises:
        ArtifactError: there is a manifest, but it cannot be read.
    """
    path = directory / MANIFEST_NAME
    if not path.is_file():
        return None
    try:
        return Manifest.model_validate_json(read_bytes(path))
    except ValidationError as error:
        raise ArtifactError(
            f"{path} is not a manifest of this version ({error.error_count()} problems): remove "
            f"the folder {directory} and run its stage again."
        ) from error


def open_artifact(path: Path, *, kind: Kind) -> Artifact:
    """Open a finished artifact of the given kind.

    Raises:
        ArtifactError: missing, unfinished, of another kind or of another format version.
    """
    if not path.is_dir():
        raise ArtifactError(f"{path} does not exist: run the stage that makes the {kind} first.")
    manifest = read_manifest(path)
    if manifest is None:
        raise ArtifactError(
            f"{path} has no {MANIFEST_NAME}, so it is not a finished {kind}: run its stage again."
        )
    if manifest.kind != kind:
        raise ArtifactError(
            f"{path} is a {manifest.kind} where a {kind} is wanted: name the folder of a {kind}."
        )
    if manifest.format_version != FORMAT_VERSION[kind]:
        raise ArtifactError(
            f"{path} has format version {manifest.format_version}, this version of mmnmt reads "
            f"{FORMAT_VERSION[kind]}: run stage {manifest.stage!r} again."
        )
    return Artifact(directory=path, manifest=manifest)


def refuse_to_overwrite(out_dir: Path, *, overwrite: bool) -> None:
    """Raises ArtifactError where ``out_dir`` holds something that was not asked to be replaced."""
    if not out_dir.exists() or overwrite:
        return
    if not out_dir.is_dir() or any(out_dir.iterdir()):
        raise ArtifactError(
            f"{out_dir} exists already: name another --out, or pass --overwrite to replace it."
        )


@contextmanager
def new_artifact(
    out_dir: Path,
    *,
    kind: Kind,
    stage: str,
    config: Mapping[str, Any],
    inputs: Mapping[str, InputRecord],
    overwrite: bool = False,
    clock: float | None = None,
    wall_seconds: float | None = None,
) -> Iterator[ArtifactWriter]:
    """Build an artifact; it appears at ``out_dir`` when the block ends without an error.

    The statistics must be JSON; files are hashed and synced before the manifest is written.

    Args:
        clock: ``time.monotonic()`` when the work began; None: when the block is entered.
        wall_seconds: how long the work took, where a clock of this process cannot tell.
    """
    refuse_to_overwrite(out_dir, overwrite=overwrite)
    temporary_dir = out_dir.parent / f".{out_dir.name}.unfinished"
    shutil.rmtree(temporary_dir, ignore_errors=True)
    temporary_dir.mkdir(parents=True)
    clock = time.monotonic() if clock is None else clock
    started = datetime.now(UTC) - timedelta(seconds=time.monotonic() - clock)
    writer = ArtifactWriter(temporary_dir)
    try:
        yield writer
        seal_artifact(
            writer,
            kind=kind,
            stage=stage,
            config=config,
            inputs=inputs,
            run=RunRecord(
                started=started.isoformat(timespec="seconds"),
                wall_seconds=wall_seconds or round(time.monotonic() - clock, 3),
            ),
        )
        replace_directory(temporary_dir, out_dir)
    except OSError as error:
        shutil.rmtree(temporary_dir, ignore_errors=True)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
            raise
        raise ArtifactError(
            f"{out_dir} could not be written ({error.strerror or error}): nothing was changed; "
            "make room or choose another --out and run again."
        ) from error
    except BaseException:
        shutil.rmtree(temporary_dir, ignore_errors=True)
        raise


def seal_artifact(
    writer: ArtifactWriter,
    *,
    kind: Kind,
    stage: str,
    config: Mapping[str, Any],
    inputs: Mapping[str, InputRecord],
    run: RunRecord,
    files: Mapping[str, FileRecord] | None = None,
) -> Manifest:
    """Write the manifest of a directory under construction, last of all.

    ``files`` are the records of all files where these are hashed and on disk already; otherwise
    that is done here.
    """
    if files is None:
        files = settle_files(
            writer.directory, (path for path in writer.directory.rglob("*") if path.is_file())
        )
    manifest = Manifest(
        kind=kind,
        format_version=FORMAT_VERSION[kind],
        stage=stage,
        key=stage_key(
            stage=stage,
            kind=kind,
            config=config,
            inputs={name: record.digest for name, record in inputs.items()},
        ),
        config=dict(config),
        inputs=dict(inputs),
        files=dict(sorted(files.items())),
        statistics=writer.statistics,
        run=run,
        summary=tuple(writer.summary),
    )
    manifest_path = writer.directory / MANIFEST_NAME
    manifest_path.write_text(to_json(manifest.model_dump()), encoding="utf-8")
    _sync(manifest_path)
    _sync(writer.directory)
    return manifest


def settle_files(directory: Path, paths: Iterable[Path]) -> dict[str, FileRecord]:
    """Hash files and force them to disk; records by name relative to ``directory``."""
    records = {}
    for path in paths:
        records[path.relative_to(directory).as_posix()] = file_record(path)
        _sync(path)
    return records


def replace_directory(new_dir: Path, out_dir: Path) -> None:
    """Rename ``new_dir`` to ``out_dir``; what was there is set aside first and removed after."""
    old_dir = out_dir.parent / f".{out_dir.name}.replaced"
    shutil.rmtree(old_dir, ignore_errors=True)
    if out_dir.exists():
        out_dir.rename(old_dir)
    new_dir.rename(out_dir)
    _sync(out_dir.parent)
    shutil.rmtree(old_dir, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
