"""The run folder of training that is done: what of it is removed, and what says so beforehand.

A note in the folder announces the removal before the model is published. So, whatever is killed in
between, the next start that finds both the model and the note finishes the removal. What training
did not write stays, and is named.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from pipeline.artifacts.locks import exclusive
from pipeline.artifacts.manifest import MARKER_NAME, read_manifest
from pipeline.artifacts.places import (
    entries,
    remove_artifact,
    remove_files,
    remove_working,
    replaced_dir,
    run_dir,
    sole_writer,
    unfinished_dir,
)
from pipeline.artifacts.training_states import STATE_NAME, states_dir
from pipeline.errors import ArtifactError, UserError

LOCK_NAME = "lock"
NOTE_NAME = "removed-when-done"
"""Holds the key (``artifact.stage_key``) of the model with which the folder is of no more use."""

_FILES = ("metrics.jsonl", ".metrics.jsonl.unfinished")


def announce_removal(run_folder: Path, *, key: str) -> None:
    """Say that the folder is to be removed as soon as the model of that key is published."""
    (run_folder / NOTE_NAME).write_text(key, encoding="utf-8")


def withdraw_removal(run_folder: Path) -> None:
    """Of training that goes on, or begins anew."""
    (run_folder / NOTE_NAME).unlink(missing_ok=True)


def finish_removal(out_dir: Path) -> str | None:
    """Remove the run folder of a finished model where a kill kept its training from doing so.

    Returns a sentence where something of it stays: not ours, or not to be removed by this user.
    """
    folder = run_dir(out_dir)
    if not _is_due(out_dir):
        return None
    try:
        with sole_writer(out_dir), exclusive(folder / LOCK_NAME, what=str(folder)):
            remove_contents(folder)
        return remove_emptied(folder)
    except (UserError, OSError) as error:
        return f"{folder} is of no more use, and could not be removed: {error}"


def _is_due(out_dir: Path) -> bool:
    try:
        key = (run_dir(out_dir) / NOTE_NAME).read_text(encoding="utf-8", errors="replace")
        manifest = read_manifest(out_dir)
    except (ArtifactError, OSError):
        return False
    return manifest is not None and manifest.key == key


def remove_contents(run_folder: Path) -> None:
    """Remove states, best weights and curves; the caller holds the folder's lock."""
    for place in _artifacts(run_folder):
        with suppress(ArtifactError):  # something of the user's is in it: it is named at the end
            remove_artifact(place)
        for leftover in (unfinished_dir(place), replaced_dir(place)):
            with suppress(ArtifactError):
                remove_working(leftover)
    with suppress(OSError):  # not empty, or there was no state
        states_dir(run_folder).rmdir()
    for name in _FILES:
        (run_folder / name).unlink(missing_ok=True)


def _artifacts(run_folder: Path) -> Iterator[Path]:
    """Where states, the best weights and the mean lie, or lay when a removal was cut short."""
    states = states_dir(run_folder)
    names = {path.name.lstrip(".").partition(".")[0] for path in states.glob("*update-*")}
    yield from (states / name for name in sorted(names) if STATE_NAME.fullmatch(name))
    yield run_folder / "best"
    yield run_folder / "mean"


def remove_emptied(run_folder: Path) -> str | None:
    """Remove the note, and the folder where nothing else is left; else say what is, and stays."""
    remove_files(run_folder, (NOTE_NAME,))
    if not run_folder.exists():
        return None
    others = [name for name in entries(run_folder) if name not in (MARKER_NAME, LOCK_NAME)]
    if not others:
        return None
    more = f" and {len(others) - 1} more" if len(others) > 1 else ""
    return (
        f"{run_folder} is removed but for {others[0]}{more}, which training did not write: "
        "move it away."
    )
