"""The training states of a run, and whether training of other settings goes on from them.

They lie in ``OUT.run/states`` as ``update-0000100``; what else is there, ``training/run_directory``
says. A run goes on from its newest state where the settings and inputs that decide an update are
those of the state.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.artifacts.artifact import Artifact, open_artifact
from pipeline.artifacts.manifest import read_manifest
from pipeline.artifacts.settings_diff import (
    DECIDE_NOTHING,
    DECIDE_WHICH_WEIGHTS,
    STATES_SAVED,
    describe_change,
    undeciding,
    with_defaults,
    without_settings,
)

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
