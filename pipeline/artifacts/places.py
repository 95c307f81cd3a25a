"""Paths of an output and its working files: names, ownership, replacement and removal.

Next to an output ``NAME`` there may be

- ``.NAME.TOKEN.unfinished``: the artifact under construction, with the token of the lock's holder,
  which keeps a process that lost the lock and runs on out of the folder of the next holder; no
  token where the maker holds no lock, or for an artifact that is being removed;
- ``.NAME.replaced``: the previous artifact while the new one takes its place;
- ``NAME.run``: the run folder of a stage that can be resumed (``run_folders``);
- ``NAME.before-1``, ``NAME.before-1.run``, ``-2`` and so on: an earlier trained ``NAME`` and its
  run folder, set aside when training began anew or another artifact took the place. No stage reads
  them, so they can be removed or renamed back;
- ``.NAME.lock``: one writer at a time (``locks``);
- ``.NAME.attempts``: how the jobs that make it started and ended (``jobs/job_endings.py``);
- ``.NAME.probe``: files by which the nodes of a job try whether they share storage.

These hidden names belong to the project. ``NAME`` itself is replaced or removed only if it is empty
or has a manifest and only the files listed there, and only by an artifact of its kind. Links are
never followed.
"""

import contextlib
import itertools
import os
import re
import shutil
import stat
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from pipeline.artifacts.manifest import (
    LONGEST_PART,
    MANIFEST_NAME,
    Kind,
    Manifest,
    as_text,
    is_text,
    read_manifest,
    run_dir,
)
from pipeline.config.documents import unfinished_path
from pipeline.errors import ArtifactError, ConfigError
from pipeline.terminal import an_artifact

# ---------------------------------------------------------------- names

LONGEST_ADDITION = len("..12345678.unfinished")
"""Bytes by which the longest name next to an output is longer than its own."""


def refuse_path(path: Path, *, is_output: bool = False) -> None:
    """Refuse a path that a manifest or the file system cannot hold, before any work is done.

    Raises:
        ConfigError: The path is not UTF-8, or a part of it is too long.
    """
    absolute = path.absolute()
    if not is_text(str(absolute)):
        raise ConfigError(
            f"The path {as_text(absolute)} is not UTF-8, and manifests record paths as text. "
            "Rename it, or name another."
        )
    most = LONGEST_PART - (LONGEST_ADDITION if is_output else 0)  # for longer names next to it
    if len(os.fsencode(absolute.name)) > most:
        raise ConfigError(
            f"The path {path} has a name of {len(os.fsencode(absolute.name))} bytes, where at "
            f"most {most} fit. Choose a shorter one."
        )


def link_or_copy(source: Path, target: Path) -> bool:
    """Make a hard link, or a copy where links are not possible; return whether it is a link."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
        return False
    return True


def unfinished_dir(out_dir: Path, *, token: str = "") -> Path:
    """Return the folder in which a stage builds its output, as the holder of a lock or without."""
    return unfinished_path(out_dir.with_name(f"{out_dir.name}.{token}") if token else out_dir)


def unfinished_dirs(out_dir: Path) -> list[Path]:
    """Return the folders in which an output is being built, or was when its maker ended."""
    of_holder = re.compile(rf"\.{re.escape(out_dir.name)}(\.[0-9a-f]{{8}})?\.unfinished")
    if not out_dir.parent.is_dir():
        return []
    return sorted(path for path in out_dir.parent.iterdir() if of_holder.fullmatch(path.name))


def _beside(out_dir: Path, ending: str) -> Path:
    return out_dir.parent / f".{out_dir.name}.{ending}"


def replaced_dir(out_dir: Path) -> Path:
    """Return the folder that keeps the previous output while it is replaced."""
    return _beside(out_dir, "replaced")


def attempts_dir(out_dir: Path) -> Path:
    """Return the folder that records how the jobs of an output started and ended."""
    return _beside(out_dir, "attempts")


def probe_dir(out_dir: Path) -> Path:
    """Return the folder in which nodes try whether they share the storage of an output."""
    return _beside(out_dir, "probe")


def plan_lock_path(plan_dir: Path) -> Path:
    """Return the lock of the work directory of a plan."""
    return plan_dir / ".lock"


# ---------------------------------------------------------------- ownership


def why_not_ours(directory: Path) -> str | None:
    """Return why a folder may not be removed, to follow its name; None if it may.

    It may be removed if it holds no file at all, or a manifest and only the files listed there.
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
    for name in found:
        if name not in manifest.files and name != MANIFEST_NAME:
            return f"holds {name}, which its {MANIFEST_NAME} does not list"
        if not is_plain(directory / name):
            return f"holds {name}, which is not a plain file"
    return None


def entries(directory: Path) -> Iterator[str]:
    """Yield the relative names of all files and links below a folder, in order."""
    for folder, folder_names, names in os.walk(directory, onerror=_raise):
        folder_names.sort()
        links = [name for name in folder_names if (Path(folder) / name).is_symlink()]
        for name in sorted([*names, *links]):
            yield (Path(folder) / name).relative_to(directory).as_posix()


def _raise(error: OSError) -> None:
    raise error


def is_plain(path: Path) -> bool:
    """Return whether a path is a file and not a link."""
    return path.is_file() and not path.is_symlink()


def refuse_other_kind(out_dir: Path, *, kind: Kind) -> None:
    """Refuse an output where an artifact of another kind lies; the ArtifactError names both."""
    try:
        manifest = read_manifest(out_dir)
    except ArtifactError:
        return  # not a finished artifact: why_not_ours describes it
    if manifest is not None and manifest.kind != kind:
        raise ArtifactError(
            f"{out_dir} holds {an_artifact(manifest.kind)} made by {manifest.stage}, which "
            f"{an_artifact(kind)} never replaces. Name another --out, or move it away."
        )


def refuse_to_overwrite(out_dir: Path, *, overwrite: bool, kind: Kind | None = None) -> None:
    """Refuse an output where something lies that must not or was not asked to be replaced.

    ``kind`` is the kind of the new artifact; None accepts any kind there.
    """
    if out_dir.name in ("", ".."):
        raise ArtifactError(f"{out_dir} does not end in a name. Give the new folder a name.")
    if not os.path.lexists(out_dir):
        return
    if kind is not None:
        refuse_other_kind(out_dir, kind=kind)
    reason = why_not_ours(out_dir)
    if not os.path.lexists(out_dir):
        return  # rank 0 of this stage has just set it aside
    if reason is not None:
        raise ArtifactError(
            f"{out_dir} exists already and {reason}, so it is never replaced. Name another --out, "
            "or move your files away."
        )
    if not overwrite and any(out_dir.iterdir()):
        raise ArtifactError(
            f"{out_dir} exists already. Name another --out, or pass --overwrite to replace it."
        )


# ---------------------------------------------------------------- removing and replacing


def remove_artifact(directory: Path) -> None:
    """Remove an artifact, if there, first its name; ArtifactError if it has a foreign file."""
    if not os.path.lexists(directory):
        return
    reason = why_not_ours(directory)
    if reason is not None:
        raise ArtifactError(f"{directory} {reason}, so it is not removed. Move it away.")
    hidden = unfinished_dir(directory)
    remove_working(hidden)
    directory.rename(hidden)
    remove_working(hidden)


def remove_working(directory: Path) -> None:
    """Remove a working folder, protected or not, or do nothing if it is not there."""
    if directory.is_symlink():
        directory.unlink()
    elif directory.exists():
        _lift_protection(directory)
        try:
            shutil.rmtree(directory)
        except OSError as error:
            error.filename = str(directory)  # rmtree may name a file without its folder
            raise


def _lift_protection(folder: Path) -> None:
    """Let the owner change a folder and the folders in it. Links are not followed."""
    if folder.is_dir() and not folder.is_symlink():
        with contextlib.suppress(OSError):  # another user's
            folder.chmod(folder.stat().st_mode | stat.S_IRWXU)
        with contextlib.suppress(OSError):
            for path in folder.iterdir():
                _lift_protection(path)


def discard_working(directory: Path) -> None:
    """Remove a working folder as far as possible, after an error."""
    shutil.rmtree(directory, ignore_errors=True)


def make_working(directory: Path) -> None:
    """Make an empty working folder, and its parents."""
    remove_working(directory)
    directory.mkdir(parents=True)


def files_below(directory: Path) -> Iterator[Path]:
    """Yield all files of a working folder; OSError if a folder cannot be listed."""
    for folder, _, names in os.walk(directory, onerror=_raise):
        yield from (path for name in names if (path := Path(folder, name)).is_file())


def restore(out_dir: Path) -> None:
    """Put back the previous output if a kill in :func:`replace_directory` left it aside."""
    aside = replaced_dir(out_dir)
    if not os.path.lexists(out_dir) and aside.is_dir() and why_not_ours(aside) is None:
        aside.rename(out_dir)


def replace_directory(new_dir: Path, out_dir: Path) -> None:
    """Rename ``new_dir`` to ``out_dir``, and then remove the previous output.

    A trained model is not removed but kept aside if its replacement was not made by training.
    """
    restore(out_dir)
    new = read_manifest(new_dir)
    refuse_to_overwrite(out_dir, overwrite=True, kind=new.kind if new else None)
    clear_replaced(out_dir)
    aside = replaced_dir(out_dir)
    if out_dir.exists():
        out_dir.rename(aside)
    try:
        new_dir.rename(out_dir)
        sync(out_dir.parent)
    except OSError:
        if not new_dir.exists():
            out_dir.rename(new_dir)
        if aside.exists():
            aside.rename(out_dir)
        raise
    with contextlib.suppress(OSError):  # the next stage here removes the rest
        clear_replaced(out_dir)


def clear_replaced(out_dir: Path) -> None:
    """Remove the replaced output, or keep it if it is trained and its replacement is not.

    It is kept only once the new artifact is in its place: :func:`restore` finds it after an earlier
    kill.
    """
    aside = replaced_dir(out_dir)
    if not os.path.lexists(aside):
        return
    if is_trained(read_manifest(aside)) and not is_trained(read_manifest(out_dir)):
        place = free_place_aside(out_dir)
        aside.rename(place)
        print(f"{out_dir}: the model trained before is kept as {place}", file=sys.stderr)
    else:
        remove_working(aside)


def sync(path: Path) -> None:
    """Force a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---------------------------------------------------------------- setting aside


def is_trained(manifest: Manifest | None) -> bool:
    """Return whether an artifact is a model that a training stage made."""
    return (
        manifest is not None
        and manifest.kind in ("checkpoint", "task_model")
        and "ds_config" in manifest.config
    )


def free_place_aside(out_dir: Path) -> Path:
    """Return the first of ``NAME.before-1``, ``-2``, … without an artifact or run folder."""
    places = (out_dir.parent / f"{out_dir.name}.before-{n}" for n in itertools.count(1))
    return next(
        place
        for place in places
        if not os.path.lexists(place) and not os.path.lexists(run_dir(place))
    )


# ---------------------------------------------------------------- outputs and inputs


def refuse_inputs(
    out_dir: Path, *, inputs: Mapping[str, Path], run_folder: bool, what: str = "--out"
) -> None:
    """Refuse an output that is, contains or lies within an input, with links resolved.

    The same holds for the working folders next to the output.

    ``run_folder`` says that the stage also works in ``NAME.run``; ``what`` is the option that named
    the output.
    """
    for folder in (out_dir, unfinished_dir(out_dir), replaced_dir(out_dir), run_dir(out_dir)):
        if folder == run_dir(out_dir) and not run_folder:
            continue
        needs = "" if folder == out_dir else f" needs {folder} to work in, which"
        for name, path in inputs.items():
            if (relation := _relation(folder, path)) is not None:
                raise ConfigError(
                    f"{what} {out_dir}{needs} {relation} the input {name} ({path}), which must "
                    "stay as it is. Choose another folder for the output."
                )


def _relation(place: Path, given: Path) -> str | None:
    """Return how a path relates to an input ("is", "holds", …); None if they are apart."""
    place, given = Path(os.path.realpath(place)), Path(os.path.realpath(given))  # loops, too
    if place == given:
        return "is"
    if given in place.parents:
        return "lies within"
    return "holds" if place in given.parents else None
