"""Run folders: ownership, the training states in them, and their removal when training is done.

``OUT.run`` keeps the work of a stage that can be resumed. Training states lie in ``OUT.run/states``
as ``update-0000100``; ``training/run_directory`` describes the rest. Training resumes from its
newest state if the state has the same settings and inputs, as far as they decide an update.
:class:`Position` is all that resuming needs but tensors.

Before a model, shards or translations are published, a note in the run folder announces the
removal. If a kill comes in between, the next start finds both the output and the note and finishes
the removal. Files that the stage did not write stay and are named.
"""

import math
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from pipeline.artifacts.artifact import Artifact, open_artifact
from pipeline.artifacts.locks import Lock, is_abandoned, lock_path, sole_writer
from pipeline.artifacts.manifest import (
    MANIFEST_NAME,
    MARKER_NAME,
    STATE_NAME,
    Kind,
    how_to_restore,
    read_manifest,
    run_dir,
    updates_of_name,
)
from pipeline.artifacts.places import (
    clear_replaced,
    discard_working,
    entries,
    free_place_aside,
    is_plain,
    refuse_to_overwrite,
    remove_artifact,
    replaced_dir,
    sync,
    unfinished_dir,
    unfinished_dirs,
)
from pipeline.config.recipe import (
    DECIDE_NOTHING,
    DECIDE_WHICH_WEIGHTS,
    STATES_SAVED,
    describe_change,
    undeciding,
    with_defaults,
    without_settings,
)
from pipeline.errors import ArtifactError, CheckpointError, UserError

Work = Literal["training", "translation", "sharding"]
"""Kind of stage that owns a run folder."""

IDENTITY_FILE, PAIR_FOLDER = "sharding.json", "pair."
"""File with the key of the shards that a run folder belongs to, and beginning of the names of its
folders of finished pairs."""

RUN_CONTENTS: dict[Work, tuple[str, ...]] = {
    "training": ("states", "best", "metrics.jsonl"),
    "translation": ("identity.json",),
    "sharding": (IDENTITY_FILE,),
}
"""Kind of work → entries that only its run folder has."""
_MAY_DIFFER = (*DECIDE_NOTHING, *DECIDE_WHICH_WEIGHTS, "training.updates")


def refuse_run_folder(directory: Path, *, work: Work) -> None:
    """Refuse a ``NAME.run`` that a stage of this kind did not make.

    Raises:
        ArtifactError: A link, a folder of the user's, or the run folder of another kind of stage.
    """
    if not os.path.lexists(directory):
        return
    others = [name for kind in RUN_CONTENTS if kind != work for name in RUN_CONTENTS[kind]]
    other = next((name for name in others if (directory / name).exists()), None)
    if directory.is_symlink() or not _is_marked(directory):
        problem = "was not made by a stage"
    elif other is not None:
        problem = f"holds {other} of another kind of stage"
    else:
        return
    if not os.path.lexists(directory):
        return  # rank 0 of this stage has just set it aside
    raise ArtifactError(
        f"The stage needs {directory} as its run folder, but it {problem}. Name another --out, or "
        "move the folder away."
    )


def claim_run_folder(directory: Path, *, work: Work) -> None:
    """Make a run folder, or mark an existing folder of this work."""
    refuse_run_folder(directory, work=work)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / MARKER_NAME).touch()


def remove_files(directory: Path, patterns: Sequence[str]) -> None:
    """Remove a stage's own files from its run folder, and the folder if it is then empty."""
    for path in stacks_dir(directory).glob("rank-*.txt"):
        path.unlink()
    with suppress(OSError):  # there is none, or it is not empty
        stacks_dir(directory).rmdir()
    # The note, which lets the next start finish this, is in the last pattern.
    for path in chain.from_iterable(map(directory.glob, patterns)):
        path.unlink()
    if {path.name for path in directory.iterdir()} <= {MARKER_NAME}:
        (directory / MARKER_NAME).unlink(missing_ok=True)
        directory.rmdir()


def _is_marked(directory: Path) -> bool:
    """Return whether a folder has the marker, or nothing but what a watchdog wrote."""
    if not directory.is_dir():
        return False
    names = {path.name for path in directory.iterdir()}
    return MARKER_NAME in names or names <= {stacks_dir(directory).name}


def place_aside(out_dir: Path) -> Path:
    """Return where :func:`set_aside` keeps an output, or its run folder if that is all there is."""
    place = free_place_aside(out_dir)
    return place if out_dir.exists() else run_dir(place)


def set_aside(out_dir: Path) -> Path:
    """Rename a training stage's output and run folder to a free place; return where it is kept."""
    run_folder, place, kept = run_dir(out_dir), free_place_aside(out_dir), place_aside(out_dir)
    refuse_run_folder(run_folder, work="training")
    if os.path.lexists(out_dir):
        refuse_to_overwrite(out_dir, overwrite=True)
    if run_folder.exists():
        run_folder.rename(run_dir(place))
    if out_dir.exists():
        out_dir.rename(place)
    sync(out_dir.parent)
    return kept


def stacks_dir(run_folder: Path) -> Path:
    """Return the folder of the stacks of ranks that hang; a watchdog may write it first."""
    return run_folder / "stacks"


def run_lock_path(run_folder: Path) -> Path:
    """Return the lock of the output that a run folder belongs to."""
    return lock_path(run_folder.with_name(run_folder.name.removesuffix(".run")))


def states_dir(run_folder: Path) -> Path:
    """Return the folder of the training states."""
    return run_folder / "states"


def state_names(run_folder: Path) -> list[str]:
    """Return the names of the complete states, oldest first."""
    try:
        paths = [*states_dir(run_folder).iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = [path for path in paths if STATE_NAME.fullmatch(path.name)]
    return sorted(path.name for path in found if read_manifest(path) is not None)


_WORK_FILES = (
    f"states/update-*/{MANIFEST_NAME}",
    "rank-*.jsonl",
    "chunk-*.jsonl",
    f"{PAIR_FOLDER}*/finished.json",
)
"""Files of a run folder from which a stage resumes: complete training states, translated lines,
finished pairs of shards."""


def saved_work(out_dir: Path) -> set[str]:
    """Return what a later start of an output's stage would resume from.

    A log that grew or a file that is half written is no progress.
    """
    folder = run_dir(out_dir)
    found = [path for pattern in _WORK_FILES for path in folder.glob(pattern) if is_plain(path)]
    return {f"{path.relative_to(folder)}, {path.stat().st_size} bytes" for path in found}


def newest_state(run_folder: Path) -> Artifact | None:
    """Return the complete state of the highest update; None if there is none."""
    for name in reversed(state_names(run_folder)):
        place = states_dir(run_folder) / name
        try:
            return open_artifact(place, kind="training_state")
        except ArtifactError:
            if (place / MANIFEST_NAME).exists():  # else training has removed it since
                raise
    return None


def updates_done(state: Artifact) -> int:
    """Return the update after which a state was saved, as its name says."""
    return updates_of_name(state.directory.name)


def why_not_to_go_on(
    state: Artifact, *, config: Mapping[str, Any], digests: Mapping[str, str] | None
) -> str | None:
    """Return the first difference that prevents training from resuming at a state; None if none.

    The machine, and the intervals of states and validation, may differ. The number of updates may
    be any that is not below the updates done. ``digests`` of the inputs are None if unchanged.
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
    """Return the settings that decide each update, which leave out the ds_config."""
    kept = {name: section for name, section in config.items() if name != "ds_config"}
    return without_settings(kept, [*undeciding(_MAY_DIFFER, config), STATES_SAVED])


def change_of_total(state: Artifact, *, config: Mapping[str, Any]) -> dict[str, int] | None:
    """Return ``after`` which update the number of updates changes ``from`` and ``to``, or None."""
    noted, wanted = (with_defaults(one, sections=config) for one in (state.manifest.config, config))
    totals = [one["training"]["updates"] for one in (noted, wanted) if "training" in one]
    if len(set(totals)) < 2:
        return None
    return {"after": updates_done(state), "from": totals[0], "to": totals[1]}


def replanned(state: Artifact, *, config: Mapping[str, Any]) -> list[dict[str, int]]:
    """Return all changes of the number of updates: those in the state, and the present one."""
    change = change_of_total(state, config=config)
    return [*state.statistics.get("replanned", []), *([change] if change else [])]


NOTE_NAME = "removed-when-done"
"""File with the key (``artifact.stage_key``) of the output that makes the folder obsolete."""

TRANSLATION_FILES = (
    *("identity.json", "seconds.json", ".seconds.json.unfinished"),
    *("rank-*.jsonl", ".rank-*.jsonl.unfinished"),
    *("chunk-*.jsonl", ".chunk-*.jsonl.unfinished"),
)
"""Files that stages which translate write into their run folders."""

_LEFTOVER_NAME = re.compile(r"\.(update-\d+|best|mean)(\.[0-9a-f]{8})?\.(unfinished|replaced)")
_FILES = ("metrics.jsonl", ".metrics.jsonl.unfinished", IDENTITY_FILE)


def announce_removal(run_folder: Path, *, key: str) -> None:
    """Announce that the folder is obsolete once the output of this key is published."""
    (run_folder / NOTE_NAME).write_text(key, encoding="utf-8")


def withdraw_removal(run_folder: Path) -> None:
    """Withdraw the announcement, because training goes on or begins anew."""
    (run_folder / NOTE_NAME).unlink(missing_ok=True)


def finish_removal(out_dir: Path) -> str | None:
    """Remove what a kill left next to a finished output: its lock, what it replaced, a run folder.

    Return a sentence if something stays: foreign files, or files that this user cannot remove.
    """
    if not (out_dir / MANIFEST_NAME).is_file():  # the replaced output may be the only one
        return None
    folder, kind = run_dir(out_dir), _kind_if_due(out_dir)
    has_rest = is_abandoned(lock_path(out_dir)) or os.path.lexists(replaced_dir(out_dir))
    if kind is None and not has_rest:
        return None
    try:
        with sole_writer(out_dir):
            clear_replaced(out_dir)
            for leftover in unfinished_dirs(out_dir):
                discard_working(leftover)
            if kind in ("translations", "translated_text"):
                remove_files(folder, TRANSLATION_FILES)
            elif kind is not None:
                remove_contents(folder)
            is_empty = folder.is_dir() and {*entries(folder)} <= {MARKER_NAME}
            return remove_emptied(folder) if kind is not None or is_empty else None
    except (UserError, OSError) as error:
        what = folder if kind is not None else f"What was left next to {out_dir}"
        return f"{what} is of no more use, and could not be removed: {error}"


def _kind_if_due(out_dir: Path) -> Kind | None:
    try:
        key = (run_dir(out_dir) / NOTE_NAME).read_text(encoding="utf-8", errors="replace")
        manifest = read_manifest(out_dir)
    except (ArtifactError, OSError):
        return None
    return manifest.kind if manifest is not None and manifest.key == key else None


def remove_contents(run_folder: Path) -> None:
    """Remove states, best weights, curves and pairs; the caller holds the output's lock."""
    artifacts = [*states_dir(run_folder).glob("update-*"), run_folder / "best", run_folder / "mean"]
    for place in artifacts:
        with suppress(ArtifactError):  # it has a user's files, which are named at the end
            remove_artifact(place)
    for leftover in leftovers(run_folder):
        discard_working(leftover)
    remove_pairs(run_folder)
    with suppress(OSError):  # not empty, or there was no state
        states_dir(run_folder).rmdir()
    for name in _FILES:
        (run_folder / name).unlink(missing_ok=True)


def remove_pairs(run_folder: Path) -> None:
    """Remove the finished pairs of shards; the caller holds the output's lock."""
    for folder in run_folder.glob(f"{PAIR_FOLDER}*"):
        if folder.is_dir() and not folder.is_symlink():
            shutil.rmtree(folder)


def working_dir(out_dir: Path, lock: Lock | None) -> Path:
    """Return the folder in which the holder of an output's lock builds an artifact of its run.

    Its name has the token of the lock: a rank of an earlier attempt that writes on, or cleans up,
    does not touch the folder of the present attempt.
    """
    return unfinished_dir(out_dir, token=lock.owner.token if lock else "")


def leftovers(run_folder: Path) -> list[Path]:
    """Return the folders that killed writes and removals of states and weights left."""
    hidden = (*run_folder.glob(".*"), *states_dir(run_folder).glob(".*"))
    found = [path for path in hidden if _LEFTOVER_NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found)


def remove_emptied(run_folder: Path) -> str | None:
    """Remove the note and the folder; return a sentence if foreign files stay."""
    remove_files(run_folder, (NOTE_NAME,))
    if not run_folder.exists():
        return None
    others = [name for name in entries(run_folder) if name != MARKER_NAME]
    if not others:
        return None
    more = f" and {len(others) - 1} more" if len(others) > 1 else ""
    return (
        f"{run_folder} is removed but for {others[0]}{more}, which the stage did not write: "
        "move it away."
    )


# ---------------------------------------------------------------- position of a run

PROGRESS_FILE = "progress.json"

Whole = Annotated[int, Field(ge=0, lt=2**63)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Sum = Annotated[float, Field(allow_inf_nan=False)]


@dataclass(frozen=True)
class LossScale:
    """The state of fp16's dynamic loss scale, by DeepSpeed's counters."""

    scale: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    steps: Whole
    """Attempted updates so far, including skipped ones."""
    last_overflow: Annotated[int, Field(ge=-1, lt=2**63)]
    """Number of attempts before the last overflow; -1: there was none."""
    hysteresis: Annotated[int, Field(ge=1, lt=2**63)]
    """Number of further overflows after which the scale is reduced."""


@dataclass(frozen=True)
class Position:
    """The progress of a training run: everything but tensors that resuming needs."""

    update: Whole = 0
    cursor: Annotated[tuple[Whole, ...], Field(min_length=2)] = (0, 0)
    """Next step of the batch plan: window and step within it, then the ends of earlier phases."""
    validated: Whole = 0
    """Last update that was validated."""
    best_perplexity: Sum | None = None
    best_update: Whole | None = None
    validations_since_best: Whole = 0
    """Consecutive validations without a lower perplexity."""
    seconds: Seconds = 0.0
    interval: Annotated[tuple[Sum, ...], Field(min_length=4)] = (0.0,) * 5
    """Sums over all ranks since the last line of metrics (``training/metrics.py``). Earlier
    versions have four, without source tokens, or five, without the routes to experts."""
    overflows: Whole = 0
    """Attempted updates that overflowed fp16 and were repeated at a smaller loss scale."""
    loss_scale: LossScale | None = None
    """None: the run has no dynamic loss scale."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON; a best perplexity that is not a number is null."""
        fields = asdict(self)
        if self.best_perplexity is not None and math.isnan(self.best_perplexity):
            fields["best_perplexity"] = None
        return fields


def read_position(state: Artifact) -> Position:
    """Return the position of a training state; raise CheckpointError if its file is invalid."""
    path = state.file(PROGRESS_FILE)
    try:
        position = TypeAdapter(Position).validate_python(state.read_json(PROGRESS_FILE))
    except ValidationError as error:
        raise CheckpointError(
            f"{path} describes no progress of a run. {how_to_restore(state.directory)}."
        ) from error
    if position.best_update is not None and position.best_perplexity is None:
        return replace(position, best_perplexity=math.nan)
    return position
