"""The training states of a run, and whether training of other settings goes on from them.

They lie in ``OUT.run/states`` as ``update-0000100``; what else is there, ``training/run_directory``
says. A run goes on from its newest state where the settings and inputs that decide an update are
those of the state.

The run folder of training that is done: what of it is removed, and what says so beforehand.

A note in the folder announces the removal before the model is published. So, whatever is killed in
between, the next start that finds both the model and the note finishes the removal. What training
did not write stays, and is named.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline.artifacts.artifact import Artifact, open_artifact
from pipeline.artifacts.locks import exclusive
from pipeline.artifacts.manifest import (
    DECIDE_NOTHING,
    DECIDE_WHICH_WEIGHTS,
    MARKER_NAME,
    STATES_SAVED,
    describe_change,
    read_manifest,
    undeciding,
    with_defaults,
    without_settings,
)
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
from pipeline.errors import ArtifactError, UserError

STATE_NAME = re.compile(r"update-(\d+)")

_MAY_DIFFER = (*DECIDE_NOTHING, *DECIDE_WHICH_WEIGHTS, "training.updates")


def states_dir(run_folder: Path) -> Path:
    return run_folder / "states"


def state_names(run_folder: Path) -> list[str]:
    """Names of the complete states, oldest first."""
    folder = states_dir(run_folder)
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if STATE_NAME.fullmatch(path.name)]
    return sorted(path.name for path in found if read_manifest(path) is not None)


def newest_state(run_folder: Path) -> Artifact | None:
    """The highest complete state of a run's folder, or None."""
    names = state_names(run_folder)
    return (
        open_artifact(states_dir(run_folder) / names[-1], kind="training_state") if names else None
    )


def updates_done(state: Artifact) -> int:
    """After which update a state was saved, as its name says."""
    return updates_of_name(state.directory.name)


def updates_of_name(name: str) -> int:
    """``update-0000100`` → 100."""
    found = STATE_NAME.fullmatch(name)
    assert found is not None, "a state is known by its name"
    return int(found[1])


def why_not_to_go_on(
    state: Artifact, *, config: Mapping[str, Any], digests: Mapping[str, str] | None
) -> str | None:
    """The first difference that makes training from a state another training, or None.

    The machine may be another one, states and validation may come at other intervals, and the
    number of updates may be any that is not below what is done.

    Args:
        config: the settings of the training that is to go on.
        digests: of its inputs; None: they are as they were.
    """
    noted, wanted = (with_defaults(one, sections=config) for one in (state.manifest.config, config))
    change = describe_change(_of_every_update(noted), _of_every_update(wanted))
    if change is not None:
        return change
    done, change_of_number = updates_done(state), change_of_total(state, config=config)
    if change_of_number is not None and change_of_number["to"] < done:
        planned, total = change_of_number["from"], change_of_number["to"]
        return f"training.updates: {planned} → {total}, where {done} are done"
    before = {name: record.digest for name, record in state.manifest.inputs.items()}
    return None if digests is None else describe_change(before, digests)


def _of_every_update(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that decide each update; on which ranks and ZeRO stage it is made, does not."""
    kept = {name: section for name, section in config.items() if name != "ds_config"}
    return without_settings(kept, [*undeciding(_MAY_DIFFER, config), STATES_SAVED])


def change_of_total(state: Artifact, *, config: Mapping[str, Any]) -> dict[str, int] | None:
    """``after`` which update the number of updates changes ``from`` what ``to`` what; or None."""
    noted, wanted = (with_defaults(one, sections=config) for one in (state.manifest.config, config))
    totals = [one["training"]["updates"] for one in (noted, wanted) if "training" in one]
    if len(set(totals)) < 2:
        return None
    return {"after": updates_done(state), "from": totals[0], "to": totals[1]}


def replanned(state: Artifact, *, config: Mapping[str, Any]) -> list[dict[str, int]]:
    """All changes of the number of updates: those the state notes, and that of going on now."""
    change = change_of_total(state, config=config)
    return [*state.statistics.get("replanned", []), *([change] if change else [])]


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
