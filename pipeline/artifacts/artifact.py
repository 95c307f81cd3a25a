"""Write, open and verify artifacts, the directories that stages read and make.

An artifact is a directory with a ``manifest.json`` that is written last (``manifest``). It is built
in a hidden sibling directory (``places``), synced to disk and renamed into place: a killed
stage leaves nothing that looks finished. :meth:`Artifact.file` compares a file with its digest in
the manifest before it returns the path, once per process.

:class:`Lineage` follows the recorded inputs of an artifact back to their artifacts.
"""

import errno
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path, PurePath
from shlex import quote
from typing import Any, TypeAlias

from pipeline.artifacts.locks import held_lock, lock_path, refuse_if_lost
from pipeline.artifacts.manifest import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    FileRecord,
    InputRecord,
    Kind,
    Manifest,
    RunRecord,
    are_intact,
    describe_names,
    digest_of_part,
    file_records,
    how_to_restore,
    json_digest,
    part_of,
    raw_digest,
    read_manifest,
    to_json,
)
from pipeline.artifacts.places import (
    discard_working,
    files_below,
    link_or_copy,
    make_working,
    refuse_inputs,
    refuse_to_overwrite,
    replace_directory,
    replaced_dir,
    restore,
    sync,
    unfinished_dir,
    unfinished_dirs,
)
from pipeline.config.documents import read_json
from pipeline.distributed import process
from pipeline.distributed.world import from_rank_zero, gather_objects, own_rank, rank, world_size
from pipeline.errors import AlreadyDone, ArtifactError, to_write, unreadable
from pipeline.terminal import an_artifact

__all__ = [
    "FORMAT_VERSION",
    "MANIFEST_NAME",
    "UNWRITABLE",
    "Artifact",
    "ArtifactWriter",
    "FileRecord",
    "InputRecord",
    "Kind",
    "Manifest",
    "RunRecord",
    "json_digest",
    "new_artifact",
    "open_artifact",
    "raw_digest",
    "read_manifest",
    "refuse_changed",
    "refuse_to_overwrite",
    "seal_artifact",
    "settle_files",
    "stage_key",
    "to_json",
]

UNWRITABLE = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ELOOP, errno.ENAMETOOLONG),
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENOTEMPTY, errno.EEXIST),
    errno.EISDIR,
)
"""Error numbers of failed writes that the user can fix: a full disk, permissions, a name."""


_Intact: TypeAlias = tuple[FileRecord, int, int]
_INTACT: dict[Path, _Intact] = {}
"""File that this process found intact → its record, modification time and inode."""

RECENT_NANOSECONDS = 50_000_000
"""Age up to which a changed file is not remembered: another change might leave the same time."""

SHOWN_LATE_SECONDS = 60.0
"""Time in which NFS may deny a new file to other nodes (acdirmax)."""


@dataclass(frozen=True)
class Artifact:
    """Finished artifact: its directory and manifest."""

    directory: Path
    manifest: Manifest
    splits: tuple[str, ...] = ()
    """Splits that this part of a corpus is limited to; empty for the whole artifact."""
    whole: Manifest | None = None
    """The stored manifest, if ``manifest`` describes a part."""

    @cached_property
    def digest(self) -> str:
        """Return the digest of the whole artifact."""
        return (self.whole or self.manifest).digest

    def digest_of(self, splits: Sequence[str]) -> str:
        """Return the digest of some splits of a corpus, or of the whole artifact without any."""
        return digest_of_part(self.whole or self.manifest, splits) if splits else self.digest

    def part(self, splits: Sequence[str]) -> "Artifact":
        """Return the corpus limited to these splits, or the artifact itself without any."""
        if not splits:
            return self
        manifest = part_of(self.manifest, splits)
        return Artifact(self.directory, manifest, splits=tuple(splits), whole=self.manifest)

    @property
    def statistics(self) -> dict[str, Any]:
        """Return the statistics of the manifest."""
        return self.manifest.statistics

    @property
    def as_input(self) -> InputRecord:
        """Return the record of this artifact for the manifest of one that is made from it."""
        path = str(self.directory.absolute())
        return InputRecord(
            kind=self.manifest.kind,
            path=path,
            digest=self.digest_of(self.splits),
            splits=self.splits,
        )

    def file(self, name: str) -> Path:
        """Return the path of a file after checking it against the manifest.

        Raises:
            ArtifactError: The artifact has no such file, or it is missing, damaged or a link.
        """
        self.check([name])
        return self.directory / name

    def unchecked_file(self, name: str) -> Path:
        """Return the path of a file of the recorded size without reading it."""
        self._status(name, self.record(name))
        return self.directory / name

    def check(self, names: Iterable[str] | None = None) -> None:
        """Compare all files, or those named, with their digests, once per process."""
        unknown = self._unknown(self.manifest.files if names is None else names)
        self._compare(unknown)
        self._remember(unknown)

    def _unknown(self, names: Iterable[str]) -> dict[str, _Intact]:
        """Return the files that this process has not found intact, with entries to remember."""
        unknown: dict[str, _Intact] = {}
        for name in sorted(names):
            record = self.record(name)
            status = self._status(name, record)
            entry = (record, status.st_mtime_ns, status.st_ino)
            if _INTACT.get(self.directory / name) != entry:
                unknown[name] = entry
        return unknown

    def _status(self, name: str, record: FileRecord) -> os.stat_result:
        path = self.directory
        for part in name.split("/"):
            path = path / part
            if path.is_symlink():
                raise self._damaged(path, "is a link, which an artifact never contains")
        if not path.is_file():
            raise self._damaged(path, "is missing, although its manifest lists it")
        status = path.stat()
        if status.st_size != record.size:
            size = f"has {status.st_size} bytes, its manifest says {record.size}"
            raise self._damaged(path, size)
        return status

    def refusal(self, problem: str) -> ArtifactError:
        """Return the error about contents that its stage does not write."""
        return ArtifactError(
            f"{problem}. Restore {self.directory} from a copy, or move it away and run stage "
            f"{self.manifest.stage!r} again."
        )

    def _damaged(self, path: Path | str, problem: str) -> ArtifactError:
        return ArtifactError(f"{path} {problem}. {how_to_restore(self.directory)}.")

    def _compare(self, names: Collection[str]) -> None:
        """Hash files; raise ArtifactError for the first that differs."""
        try:
            intact = are_intact([(self.directory / name, self.record(name)) for name in names])
        except OSError as error:
            what, fix = error.filename or self.directory, f"{how_to_restore(self.directory)}."
            raise ArtifactError(unreadable(what, error, fix)) from error
        for name, is_intact in zip(names, intact, strict=True):
            if not is_intact:
                problem = "is damaged: its digest differs from the manifest"
                raise self._damaged(self.directory / name, problem)

    def _remember(self, intact: Mapping[str, _Intact]) -> None:
        latest = time.time_ns() - RECENT_NANOSECONDS
        for name, (record, changed, inode) in intact.items():
            if changed < latest:
                _INTACT[self.directory / name] = (record, changed, inode)

    def record(self, name: str) -> FileRecord:
        """Return the record of a file; ArtifactError if the manifest lists none."""
        if name not in self.manifest.files:
            raise self.refusal(f"{self.directory} has no file {name!r}")
        return self.manifest.files[name]

    def has(self, name: str) -> bool:
        """Return whether the manifest lists a file of this name."""
        return name in self.manifest.files

    def names(self, prefix: str = "") -> list[str]:
        """Return the names of the files that start with ``prefix``, sorted."""
        return sorted(name for name in self.manifest.files if name.startswith(prefix))

    def read_json(self, name: str) -> Any:
        """Return the contents of a JSON file."""
        return read_json(self.file(name))


@dataclass
class ArtifactWriter:
    """Artifact under construction: files below ``directory``, figures in ``statistics``.

    ``summary`` takes one to five lines: lines read, kept, dropped by each rule and set aside. The
    command line prints them when the stage is done, and reports repeat them.
    """

    directory: Path
    statistics: dict[str, Any] = field(default_factory=dict)
    summary: list[str] = field(default_factory=list)
    settled: dict[Path, FileRecord] = field(default_factory=dict)
    """Files that are on disk and hashed already, with their records."""
    notes: set[str] = field(default_factory=set)
    """Names of files that tell of the run, its time and place: no part of the identity."""

    def path(self, name: str) -> Path:
        """Return the path for a new file and make its parent folders below the working folder.

        Raises:
            ArtifactError: The name leads out of the artifact, or is one that none can have.
            FileNotFoundError: The working folder is gone: another process makes the artifact now.
        """
        _refuse_names([name])
        path = self.directory / name
        if not path.parent.is_dir():
            for parent in reversed([*PurePath(name).parents][:-1]):
                (self.directory / parent).mkdir(exist_ok=True)
        return path

    def write_json(self, name: str, value: Any) -> None:
        """Write a value as a JSON file of the artifact."""
        self.path(name).write_text(to_json(value), encoding="utf-8")

    def take_over(self, name: str, source: Artifact) -> None:
        """Link a file of another artifact under ``name``, or copy it where links are not possible.

        A linked file keeps its recorded digest, so it is not read again. A copy is hashed like a
        new file.
        """
        target = self.path(name)
        if link_or_copy(source.file(name), target):
            self.settled[target] = source.manifest.files[name]
        process.advance()


def _refuse_names(names: Iterable[str]) -> None:
    problem = describe_names(names)
    if problem is not None:
        raise ArtifactError(
            f"An artifact would hold a file {problem}. Look at the names of its inputs and in them."
        )


def stage_key(
    *, stage: str, kind: Kind, config: Mapping[str, Any], inputs: Mapping[str, str]
) -> str:
    """Return the digest of the settings and inputs that decide whether a stage must run again."""
    return json_digest(
        {
            "stage": stage,
            "kind": kind,
            "format_version": FORMAT_VERSION[kind],
            "config": dict(config),
            "inputs": dict(inputs),
        }
    )


def finished_manifest(path: Path, *, wanted: str = "artifact") -> Manifest:
    """Return the manifest of a finished artifact; ``wanted`` is its kind, for the ArtifactError."""
    may_be_foreign = wanted in ("artifact", "checkpoint", "tokenizer")
    try:
        if path.is_dir() and (manifest := read_manifest(path)):
            return manifest
    except ArtifactError:  # other software has manifests, too
        if may_be_foreign:
            refuse_foreign(path, wanted=wanted)
        raise
    if may_be_foreign:
        refuse_foreign(path, wanted=wanted)
    if not path.exists():
        raise ArtifactError(f"{path} does not exist. Run the stage that makes the {wanted} first.")
    raise ArtifactError(
        f"{path} has no {MANIFEST_NAME}, so it is not a finished {wanted}. Name the folder of a "
        "finished one, or run its stage again."
    )


def refuse_foreign(path: Path, *, wanted: str = "artifact") -> None:
    """Refuse a model of other software; the ArtifactError names the commands that convert it."""
    is_file = path.is_file() and path.suffix == ".pt"
    if is_file or (path / "config.json").is_file():
        out = f"runs/{path.resolve().name.removesuffix('.pt')}"
        options = " --dictionary dict.txt --sentencepiece FILE" if is_file else ""
        command = "mmnmt checkpoint import"
        commands = f"`{command} {quote(str(path))}{options} --out {quote(out)}`"
        if wanted == "tokenizer":  # the import makes a checkpoint, which contains it
            command, out = _tokenizer_command(out)
            commands += f" and {command}"
        raise ArtifactError(f"{path} is a model of other software. Run {commands}, and name {out}.")


def _tokenizer_command(model: str) -> tuple[str, str]:
    """Return the command that extracts the tokenizer of a checkpoint, and the folder it makes."""
    out = f"{model}-tokenizer"
    return f"`mmnmt checkpoint import {quote(model)} --tokenizer --out {quote(out)}`", out


def open_artifact(path: Path, *, kind: Kind) -> Artifact:
    """Open a finished artifact of the given kind.

    Raises:
        ArtifactError: Missing, unfinished, of another kind or of another format version.
    """
    give_up = time.monotonic() + SHOWN_LATE_SECONDS
    # Rank 0 refuses a missing artifact at once, which ends the other ranks.
    while not (path / MANIFEST_NAME).exists() and own_rank():
        if time.monotonic() > give_up:
            break
        time.sleep(0.1)
    manifest = finished_manifest(path, wanted=kind)
    if manifest.kind != kind:
        advice = f"Name the folder of {an_artifact(kind)}"
        if (manifest.kind, kind) == ("checkpoint", "tokenizer"):
            advice = "Run {}, and name {}".format(*_tokenizer_command(str(path)))
        raise ArtifactError(
            f"{path} is {an_artifact(manifest.kind)} where {an_artifact(kind)} is wanted. {advice}."
        )
    artifact = Artifact(directory=path, manifest=manifest)
    if manifest.format_version != FORMAT_VERSION[kind]:
        raise ArtifactError(
            f"{path} has format version {manifest.format_version}, this version of mmnmt reads "
            f"{FORMAT_VERSION[kind]}. Run stage {manifest.stage!r} again."
        )
    return artifact


def refuse_changed(directory: Path) -> None:
    """Refuse a finished artifact that has changed since its stage made it: a user's edits stay."""
    manifest = read_manifest(directory)
    if manifest is not None:
        Artifact(directory, manifest).check(changed_files(directory, manifest))


def changed_files(directory: Path, manifest: Manifest) -> dict[str, str]:
    """Return file → what seems to have happened to it since the artifact was made.

    Nothing is read: a file counts as changed if it has another size or is newer than the manifest,
    which is written last.
    """
    sealed = (directory / MANIFEST_NAME).stat().st_mtime_ns
    changes: dict[str, str] = {}
    for name, record in manifest.files.items():
        path = directory / name
        if not path.is_file():
            changes[name] = "is missing"
        elif path.is_symlink():
            changes[name] = "is a link now"
        elif path.stat().st_size != record.size or path.stat().st_mtime_ns > sealed:
            changes[name] = "changed since it was made"
    return changes


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
    """Build an artifact that appears at ``out_dir`` when the block ends without an error.

    The statistics must be JSON. Files are hashed and synced before the manifest is written. If this
    process held the output's lock and lost it, nothing appears there.

    The work began at ``clock``, a value of ``time.monotonic()`` (None: now), and took
    ``wall_seconds``, if no clock of this process tells it.

    Raises:
        AlreadyDone: the artifact is there, with the same settings and inputs.
        ArtifactError: something else is there and may not be replaced, or nothing can be written.
    """
    restore(out_dir)
    try:
        refuse_to_overwrite(out_dir, overwrite=overwrite, kind=kind)
    except ArtifactError as error:
        digests = {name: record.digest for name, record in inputs.items()}
        key = stage_key(stage=stage, kind=kind, config=config, inputs=digests)
        if overwrite or key_of(out_dir) != key:
            raise
        refuse_changed(out_dir)
        raise AlreadyDone(str(error)) from error
    paths = {name: Path(record.path) for name, record in inputs.items()}
    refuse_inputs(out_dir, inputs=paths, run_folder=False)
    clock = time.monotonic() if clock is None else clock
    started = datetime.now(UTC) - timedelta(seconds=time.monotonic() - clock)
    lock = held_lock(lock_path(out_dir))
    writer = ArtifactWriter(unfinished_dir(out_dir, token=lock.owner.token if lock else ""))
    try:
        if lock is not None:  # earlier makers that run on fail at their next file
            for abandoned in unfinished_dirs(out_dir):
                discard_working(abandoned)
        make_working(writer.directory)
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
        refuse_if_lost(lock_path(out_dir))
        replace_directory(writer.directory, out_dir)
    except OSError as error:
        discard_working(writer.directory)
        refuse_if_lost(lock_path(out_dir))  # whoever holds it now has removed the working folder
        place = Path(error.filename if isinstance(error.filename, str) else "").absolute()
        of_input = any(place.is_relative_to(path.absolute()) for path in paths.values())
        is_full = to_write(error) == "make room"  # may name what is read or renamed
        if (of_input and not is_full) or error.errno not in UNWRITABLE:
            raise
        is_rest = place == replaced_dir(out_dir).absolute() and not is_full
        failed = f"{place} could not be removed" if is_rest else f"{out_dir} could not be written"
        raise ArtifactError(
            f"{failed} ({error.strerror or error}), nothing was changed: "
            f"{to_write(error)}, or choose another --out, and run again."
        ) from error
    except BaseException:
        discard_working(writer.directory)
        raise


def key_of(directory: Path) -> str | None:
    """Return the key (:func:`stage_key`) of a finished artifact; None if there is none."""
    try:
        manifest = read_manifest(directory)
    except ArtifactError:
        return None
    return manifest.key if manifest else None


def seal_artifact(
    writer: ArtifactWriter,
    *,
    kind: Kind,
    stage: str,
    config: Mapping[str, Any],
    inputs: Mapping[str, InputRecord],
    run: RunRecord,
    files: Mapping[str, FileRecord] | None = None,
) -> None:
    """Write the manifest of a directory under construction, after all other files.

    ``files`` are the records of all files where these are hashed and on disk already; otherwise
    that is done here.
    """
    if files is None:
        files = settle_files(writer, files_below(writer.directory))
    _refuse_names(files)
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
        files={
            name: record.model_copy(update={"is_note": True}) if name in writer.notes else record
            for name, record in sorted(files.items())
        },
        statistics=writer.statistics,
        run=run,
        summary=tuple(writer.summary),
    )
    manifest_path = writer.directory / MANIFEST_NAME
    manifest_path.write_text(to_json(manifest.model_dump()), encoding="utf-8")
    sync(manifest_path)
    # Syncing a folder keeps the names in it, but not those in the folders below.
    folders = {PurePath(), *(parent for name in files for parent in PurePath(name).parents)}
    for folder in sorted(folders):
        sync(writer.directory / folder)


def settle_files(writer: ArtifactWriter, paths: Iterable[Path]) -> dict[str, FileRecord]:
    """Hash and sync the files that are not yet settled, and return all records by name."""
    known = {path: writer.settled.get(path) for path in paths}
    records = file_records([path for path, record in known.items() if record is None])
    for path in records:
        sync(path)
    return {
        path.relative_to(writer.directory).as_posix(): record or records[path]
        for path, record in known.items()
    }


Follow = Callable[[InputRecord], bool]


@dataclass
class Lineage:
    """Artifacts by path, each after its inputs, and the inputs that could not be found.

    An input counts only if it still has the recorded digest (:func:`open_recorded`).
    """

    found: dict[Path, Artifact] = field(default_factory=dict)
    missing: set[str] = field(default_factory=set)
    """Names of input folders that are gone or have changed."""

    def add(self, artifact: Artifact, *, follow: Follow) -> None:
        """Add an artifact after the inputs that ``follow`` accepts."""
        path = artifact.directory.resolve()
        if path in self.found:
            return
        for record in filter(follow, artifact.manifest.inputs.values()):
            parent = open_recorded(record, of=artifact)
            if parent is None:
                self.missing.add(Path(record.path).name)
            else:
                self.add(parent, follow=follow)
        self.found[path] = artifact


def open_recorded(record: InputRecord, *, of: Artifact) -> Artifact | None:
    """Open the artifact that the manifest ``of`` another records; None if it is gone or changed.

    If their folder was moved or copied since, it lies next to the other one.
    """
    recorded = Path(record.path)
    for path in (recorded, of.directory.absolute().parent / recorded.name):
        with suppress(ArtifactError, ValueError):  # ValueError: a NUL in the path
            manifest = read_manifest(path)
            if manifest is not None and digest_of_part(manifest, record.splits) == record.digest:
                return Artifact(directory=path, manifest=manifest)
    return None


def check_together(*artifacts: Artifact) -> None:
    """Check all files like :meth:`Artifact.check`, sharing the work among all ranks.

    All ranks call this.

    Raises:
        ArtifactError: A file is missing or damaged; the same error on all ranks.
    """
    unknown: list[dict[str, _Intact]] = []
    _raise_first(
        lambda: unknown.extend(artifact._unknown(artifact.names()) for artifact in artifacts)
    )
    # Ranks may have checked different files before.
    dealt: list[list[str]] = from_rank_zero([sorted(names) for names in unknown])

    def compare() -> None:
        for artifact, names in zip(artifacts, dealt, strict=True):
            artifact._compare(names[rank() :: world_size()])

    _raise_first(compare)
    for artifact, own in zip(artifacts, unknown, strict=True):
        artifact._remember(own)


def _raise_first(action: Callable[[], None]) -> None:
    """Act on all ranks, and raise the first error of any rank on all of them."""
    problem: str | None = None
    try:
        action()
    except ArtifactError as error:
        problem = str(error)
    problem = next(filter(None, gather_objects(problem)), None)
    if problem is not None:
        raise ArtifactError(problem)
