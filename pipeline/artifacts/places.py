"""S"""

import contextlib
import fcntl
import itertools
import os
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from pipeline.artifacts.manifest import (
    LONGEST_PART,
    MANIFEST_NAME,
    MARKER_NAME,
    Kind,
    Manifest,
    as_text,
    is_text,
    read_manifest,
    with_article,
)
from pipeline.config.documents import unfinished_path
from pipeline.errors import ArtifactError, ConfigError, to_write

# ---------------------------------------------------------------- names


def refuse_path(path: Path, *, is_output: bool = False) -> None:
    """Refuse a path that a manifest or the file system cannot hold, before any work is done.

    Args:
        path: as the user gave it.
        is_output: whether a stage writes there, and so beside it, under longer names.

    Raises:
        ConfigError: the path, or a folder above it, is not UTF-8; or a part of it is too long.
    """
    absolute = path.absolute()
    if not is_text(str(absolute)):
        raise ConfigError(
            f"The path {as_text(absolute)} is not UTF-8, and what is made records paths as text: "
            "rename it, or name another."
        )
    *folders, last = map(_num_bytes, absolute.parts)
    most = LONGEST_PART - (_longest_addition() if is_output else 0)
    if last > most or max(folders, default=0) > LONGEST_PART:
        raise ConfigError(
            f"The path {path} has a name of {max(last, *folders)} bytes, where at most "
            f"{most if last > most else LONGEST_PART} fit: choose a shorter one."
        )


def _num_bytes(name: str) -> int:
    return len(os.fsencode(name))


def _longest_addition() -> int:
    """Bytes that the names of what lies beside an output have more than its own."""
    out_dir = Path("x")
    beside = [of(out_dir) for of in (unfinished_dir, replaced_dir, lock_path, verified_path)]
    beside.append(run_dir(out_dir.with_name(f"{out_dir.name}.before-100")))
    return max(_num_bytes(place.name) for place in beside) - 1


def link_or_copy(source: Path, target: Path) -> bool:
    """A hard link where the file system has them, a copy otherwise; whether it is a link."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
        return False
    return True


def unfinished_dir(out_dir: Path) -> Path:
    return unfinished_path(out_dir)


def replaced_dir(out_dir: Path) -> Path:
    return out_dir.parent / f".{out_dir.name}.replaced"


def run_dir(out_dir: Path) -> Path:
    return out_dir.parent / f"{out_dir.name}.run"


def lock_path(out_dir: Path) -> Path:
    return out_dir.parent / f".{out_dir.name}.lock"


def verified_path(directory: Path) -> Path:
    return directory.parent / f".{directory.name}.verified.jsonl"


def plan_lock_path(plan_dir: Path) -> Path:
    return plan_dir / ".lock"


# ---------------------------------------------------------------- locks

SIGNATURE = "process "
"""How the contents of every lock file begin, which say who holds it."""


@dataclass(frozen=True)
class Lock:
    """A lock file that was signed by this process."""

    path: Path
    signature: str
    what: str

    def refuse_if_lost(self) -> None:
        """Raises ArtifactError where the file is gone, or another process has signed it since."""
        try:
            found = self.path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            found = ""
        if found != self.signature:
            raise ArtifactError(
                f"{self.what} is being written by {found or 'nobody any more: its lock is gone'}: "
                "this run stops, since two would spoil each other's files."
            )


@contextmanager
def exclusive(path: Path, *, what: str, patience_seconds: float = 0.0) -> Iterator[Lock]:
    """Hold the lock file ``path``; its parent folders are made.

    ``patience_seconds``: how long to wait for a holder that may be about to end.

    Raises:
        ArtifactError: another process holds it, the message says which; or it cannot be made.
    """
    descriptor: int | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _locked(path, what=what, give_up=time.monotonic() + patience_seconds)
        signature = _sign(descriptor)
    except OSError as error:
        if descriptor is not None:
            _release(path, descriptor)
        raise ArtifactError(
            f"{what} cannot be written ({error.strerror or error}): {to_write(error)}, or choose "
            "another folder."
        ) from error
    try:
        yield Lock(path, signature, what)
    finally:
        _release(path, descriptor)


def _locked(path: Path, *, what: str, give_up: float) -> int:
    """Descriptor of the locked file that lies at ``path``, not of one just removed from there."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        text = os.pread(descriptor, 200, 0).decode(errors="replace")
        if text and not text.startswith(SIGNATURE):
            os.close(descriptor)
            raise ArtifactError(
                f"{path} is where {what} is locked, but it is another file: move it away."
            )
        if not _lock(descriptor):
            os.close(descriptor)
            if time.monotonic() < give_up:
                time.sleep(0.1)
                continue
            raise ArtifactError(
                f"{what} is being written by {text.strip() or 'another process'}: wait for it or "
                "stop it, then run again."
            )
        if path.exists() and os.fstat(descriptor).st_ino == path.stat().st_ino:
            return descriptor
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sign(descriptor: int) -> str:
    """Say who holds the lock; with a token, since numbers of processes come again."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    host, token = socket.gethostname(), secrets.token_hex(4)
    signature = f"{SIGNATURE}{os.getpid()} on {host} since {now} (run {token})"
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, signature.encode(), 0)
    return signature


def _release(path: Path, descriptor: int) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
    os.close(descriptor)


def sole_writer(out_dir: Path) -> AbstractContextManager[Lock]:
    """Hold the lock of an output folder: no other process makes it meanwhile."""
    return exclusive(lock_path(out_dir), what=str(out_dir))


# ---------------------------------------------------------------- what is ours


def why_not_ours(directory: Path) -> str | None:
    """What keeps a folder from being removed, to be put behind its name; None if it is ours.

    It is ours if it holds no file at all, or a manifest and nothing but the files that lists.
    """
    if directory.is_symlink():
        return "is a link"
    if not directory.is_dir():
        return "is not a folder"
    try:
        found = list(entries(directory))
        if not found:
            return None
        manifest = read_manifest(directory)
    except OSError as error:
        return f"cannot be looked into ({error.strerror or error})"
    except ArtifactError:
        return f"has a {MANIFEST_NAME} that cannot be used"
    if manifest is None:
        return f"holds {found[0]} and no {MANIFEST_NAME}, so it is not an artifact"
    ours = {*manifest.files, MANIFEST_NAME}
    for name in found:
        if name not in ours:
            return f"holds {name}, which its {MANIFEST_NAME} does not list"
        if not is_plain(directory / name):
            return f"holds {name}, which is not a plain file"
    return None


def entries(directory: Path) -> Iterator[str]:
    """Everything below a folder that is not itself a folder, by name, in order."""
    for folder, folder_names, names in os.walk(directory, onerror=_raise):
        folder_names.sort()
        links = [name for name in folder_names if (Path(folder) / name).is_symlink()]
        for name in sorted([*names, *links]):
            yield (Path(folder) / name).relative_to(directory).as_posix()


def _raise(error: OSError) -> None:
    raise error


def is_plain(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def is_working(directory: Path) -> bool:
    """Whether a folder is a working folder: one with our marker, or one without any file."""
    if directory.is_symlink() or not directory.is_dir():
        return False
    return is_plain(directory / MARKER_NAME) or not any(entries(directory))


def refuse_other_kind(out_dir: Path, *, kind: Kind) -> None:
    """Refuse an output where a finished artifact of another kind lies, which is never replaced.

    Raises:
        ArtifactError: names both kinds.
    """
    try:
        manifest = read_manifest(out_dir)
    except ArtifactError:
        return  # not a finished artifact: why_not_ours has a sentence for it
    if manifest is not None and manifest.kind != kind:
        raise ArtifactError(
            f"{out_dir} holds {with_article(manifest.kind)} made by {manifest.stage}, which "
            f"{with_article(kind)} never replaces: name another --out, or move it away."
        )


def refuse_to_overwrite(out_dir: Path, *, overwrite: bool, kind: Kind | None = None) -> None:
    """Refuse an output where something lies that is not ours, or was not asked to be replaced.

    Args:
        kind: of the new artifact; None: whatever lies there is of the right kind.

    Raises:
        ArtifactError: ``out_dir``, or a working folder beside it, holds what would be lost.
    """
    if out_dir.name in ("", ".."):
        raise ArtifactError(
            f"{out_dir} does not end in a name: give the new folder one of its own."
        )
    for working in (unfinished_dir(out_dir), replaced_dir(out_dir)):
        if os.path.lexists(working):
            _refuse_foreign(working)
    if not os.path.lexists(out_dir):
        return
    if kind is not None:
        refuse_other_kind(out_dir, kind=kind)
    reason = why_not_ours(out_dir)
    if not os.path.lexists(out_dir):
        return  # rank 0 of this stage has just set it aside
    if reason is not None:
        raise ArtifactError(
            f"{out_dir} exists already and {reason}: it is never replaced; name another --out, or "
            "move away what is yours."
        )
    if not overwrite and any(out_dir.iterdir()):
        raise ArtifactError(
            f"{out_dir} exists already: name another --out, or pass --overwrite to replace it."
        )


def _refuse_foreign(working: Path) -> None:
    reason = None if is_working(working) else why_not_ours(working)
    if reason is not None:
        raise ArtifactError(
            f"{working} is where a stage would work, but it {reason}: nothing there is touched; "
            "name another --out, or move the folder away."
        )


# ---------------------------------------------------------------- removing and replacing


def remove_artifact(directory: Path) -> None:
    """Remove an artifact file by file, its manifest last; what is not there needs no removing.

    Raises:
        ArtifactError: something in it is not ours; nothing is removed.
    """
    if not os.path.lexists(directory):
        return
    reason = why_not_ours(directory)
    if reason is not None:
        raise ArtifactError(f"{directory} {reason}: it is not removed; move it away.")
    manifest = read_manifest(directory)
    # First the file beside it: a later start that finds the directory gone looks for nothing else.
    with contextlib.suppress(OSError):
        if is_verified_file(verified_path(directory)):
            verified_path(directory).unlink()
    for name in manifest.files if manifest else ():
        (directory / name).unlink(missing_ok=True)
    _remove_empty_folders(directory)
    (directory / MANIFEST_NAME).unlink(missing_ok=True)
    directory.rmdir()


def _remove_empty_folders(directory: Path) -> None:
    for folder, names, _ in os.walk(directory, topdown=False):
        for name in names:
            (Path(folder) / name).rmdir()


def remove_working(directory: Path) -> None:
    """Remove a working folder, its marker last; what is not there needs no removing.

    Raises:
        ArtifactError: the folder is not ours; nothing is removed.
    """
    if not os.path.lexists(directory):
        return
    if not is_working(directory):
        remove_artifact(directory)  # sealed, but not yet in its place
        return
    for entry in directory.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name != MARKER_NAME:
            entry.unlink()
    (directory / MARKER_NAME).unlink(missing_ok=True)
    directory.rmdir()


def discard_working(directory: Path) -> None:
    """Remove a working folder as far as that is possible, after an error."""
    with contextlib.suppress(OSError, ArtifactError):
        remove_working(directory)


def make_working(directory: Path) -> None:
    """Make a working folder anew, with our marker in it; its parents are made.

    Raises:
        ArtifactError: something that is not ours is in the way.
    """
    if os.path.lexists(directory):
        _refuse_foreign(directory)
        remove_working(directory)
    directory.mkdir(parents=True)
    (directory / MARKER_NAME).touch()


def files_below(directory: Path) -> Iterator[Path]:
    """All files of a working folder but the marker."""
    for path in directory.rglob("*"):
        if path.is_file() and path.name != MARKER_NAME:
            yield path


def restore(out_dir: Path) -> None:
    """Put back what lay at ``out_dir``, where a killed :func:`replace_directory` left it aside."""
    aside = replaced_dir(out_dir)
    if not os.path.lexists(out_dir) and aside.is_dir() and why_not_ours(aside) is None:
        aside.rename(out_dir)


def replace_directory(new_dir: Path, out_dir: Path) -> None:
    """Rename ``new_dir`` to ``out_dir``; what was there is set aside first and removed after.

    A trained model that something else than training replaces stays where it is set aside.

    Raises:
        ArtifactError: what is there, or set aside already, is not ours, or of another kind.
    """
    restore(out_dir)
    new = read_manifest(new_dir)
    refuse_to_overwrite(out_dir, overwrite=True, kind=new.kind if new else None)
    _clear_replaced(out_dir)
    aside = replaced_dir(out_dir)
    if out_dir.exists():
        out_dir.rename(aside)
    try:
        (new_dir / MARKER_NAME).unlink(missing_ok=True)
        new_dir.rename(out_dir)
        sync(out_dir.parent)
    except OSError:
        if not new_dir.exists():
            out_dir.rename(new_dir)
        if aside.exists():
            aside.rename(out_dir)
        raise
    with contextlib.suppress(OSError):  # what is left of it is removed by the next stage here
        _clear_replaced(out_dir)


def _clear_replaced(out_dir: Path) -> None:
    """Remove what ``out_dir`` replaced; keep a trained model that something untrained replaced.

    It is kept only once the new artifact is in its place, so that :func:`restore` finds it where a
    kill comes before.
    """
    aside = replaced_dir(out_dir)
    if not os.path.lexists(aside):
        return
    if is_trained(read_manifest(aside)) and not is_trained(read_manifest(out_dir)):
        place = free_place_aside(out_dir)
        aside.rename(place)
        print(f"{out_dir}: the model trained before is kept as {place}", file=sys.stderr)
    else:
        remove_artifact(aside)


def sync(path: Path) -> None:
    """Force a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---------------------------------------------------------------- setting aside


def is_trained(manifest: Manifest | None) -> bool:
    """Whether an artifact is a model that a training stage made, and not one made of others."""
    return (
        manifest is not None
        and manifest.kind in ("checkpoint", "task_model")
        and "ds_config" in manifest.config
    )


def free_place_aside(out_dir: Path) -> Path:
    """The first ``NAME.before-1``, ``-2``, … where nothing lies, nor beside it a run folder."""
    places = (out_dir.parent / f"{out_dir.name}.before-{n}" for n in itertools.count(1))
    return next(
        place
        for place in places
        if not os.path.lexists(place) and not os.path.lexists(run_dir(place))
    )


def begins_with(path: Path, expected: bytes) -> bool:
    if not is_plain(path):
        return False
    with path.open("rb") as stream:
        return stream.read(len(expected)) == expected


def is_verified_file(path: Path) -> bool:
    """Whether a file is one of remembered digests (``digests``), or nothing yet."""
    if not os.path.lexists(path):
        return True
    return is_plain(path) and (path.stat().st_size == 0 or begins_with(path, b'["'))


# ---------------------------------------------------------------- outputs and inputs


def refuse_inputs(
    out_dir: Path, *, inputs: Mapping[str, Path], run_folder: bool, what: str = "--out"
) -> None:
    """Refuse an output that is, holds or lies within an input, links resolved.

    The same holds for the folders a stage works in; ``run_folder``: ``NAME.run`` is one of them.

    Raises:
        ConfigError: names both paths.
    """
    working = [unfinished_dir(out_dir), replaced_dir(out_dir)]
    working += [run_dir(out_dir)] if run_folder else []
    for name, path in inputs.items():
        relation = _relation(out_dir, path)
        if relation is not None:
            raise ConfigError(
                f"{what} {out_dir} {relation} the input {name} ({path}), which must stay as it "
                "is: choose another folder for the output."
            )
        for folder in working:
            relation = _relation(folder, path)
            if relation is not None:
                raise ConfigError(
                    f"{what} {out_dir} needs {folder} to work in, which {relation} the input "
                    f"{name} ({path}): choose another folder for the output."
                )


def _relation(place: Path, given: Path) -> str | None:
    """How a place stands to an input, to be put between the two; None if they are apart."""
    place_and_above, given_and_above = _identities(place), _identities(given)
    if place_and_above[0] == given_and_above[0]:
        return "is"
    if given_and_above[0] in place_and_above:
        return "lies within"
    if place_and_above[0] in given_and_above:
        return "holds"
    return None


def _identities(path: Path) -> Sequence[tuple[int, int] | str]:
    """A path and all folders above it, links resolved: by inode, by name where there is none yet.

    So two spellings are told to be one where the file system takes them for one.
    """
    resolved = Path(os.path.realpath(path))
    return [_identity(entry) for entry in (resolved, *resolved.parents)]


def _identity(path: Path) -> tuple[int, int] | str:
    try:
        status = path.stat()
    except OSError:
        return str(path)
    return status.st_dev, status.st_ino
