"""Training that running a stage again would throw away: how much, and what makes it useless.

A training stage goes on from its newest state where that is a state of the same training
(``artifacts/training_states.py``), to more updates too. Where it is not, or where a finished model
was trained otherwise, days may be lost: ``mmnmt run`` refuses until it is told to train anew, and
a stage by itself until it is told to overwrite. What was trained is then set aside.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from pipeline.artifacts.artifact import Manifest, read_manifest
from pipeline.artifacts.places import free_place_aside, run_dir
from pipeline.artifacts.training_states import newest_state, updates_done, why_not_to_go_on
from pipeline.jobs.freshness import changes_since, listed_changes
from pipeline.jobs.plan import Task
from pipeline.stages import Stage
from pipeline.summary import counted
from pipeline.terminal import JsonLines


class Placed(Protocol):
    """A stage with its settings and its place: of a plan, or of a command line."""

    @property
    def stage(self) -> Stage: ...
    @property
    def out_dir(self) -> Path: ...
    @property
    def config(self) -> Mapping[str, Any]: ...


def training_done(task: Placed) -> str | None:
    """How much a training stage has trained, finished or not: ``12,000 updates (3.4 hours) of
    training``; None where it has saved nothing."""
    if not task.stage.trains:
        return None
    finished, state = _finished(task), newest_state(run_dir(task.out_dir))
    if finished is not None:
        updates, seconds = finished.statistics.get("updates", 0), finished.run.wall_seconds
    elif state is not None:
        updates, seconds = updates_done(state), _seconds(run_dir(task.out_dir) / "metrics.jsonl")
    else:
        return None
    return f"{counted(updates, 'update')} ({seconds / 3600:.1f} hours) of training"


def why_lost(task: Placed, *, digests: Mapping[str, str] | None = None) -> str | None:
    """What makes all that a stage has trained useless; None if nothing does, or it did nothing.

    Args:
        digests: of its inputs; None: taken as they were.

    Raises:
        ArtifactError: what is there cannot be read.
    """
    if not task.stage.trains:
        return None
    finished, state = _finished(task), newest_state(run_dir(task.out_dir))
    problem = why_not_to_go_on(state, config=task.config, digests=digests) if state else None
    if finished is None:
        return problem
    changes = _changes(finished, task, config=task.config, digests=digests)
    if changes and _is_longer(finished, task, digests=digests):
        if state and problem is None:
            return None
        changes.append(problem or _no_state(run_dir(task.out_dir)))
    return listed_changes(changes) or None


def why_anew(task: Placed, *, digests: Mapping[str, str]) -> str | None:
    """Why a training stage that is told to overwrite begins anew; None if nothing is lost by it.

    Raises:
        ArtifactError: what is there cannot be read.
    """
    cause = why_lost(task, digests=digests)
    if cause is None and task.stage.trains and newest_state(run_dir(task.out_dir)) is None:
        return "it is trained again" if _finished(task) is not None else None
    return cause


def _no_state(run_folder: Path) -> str:
    return (
        f"{run_folder} has no training state to go on from, which is kept of a finished training "
        'only where its recipe has saving.keep_states = "last" or "all"'
    )


def _finished(task: Placed) -> Manifest | None:
    """Of a finished model; what another kind of stage left in its place is no training."""
    manifest = read_manifest(task.out_dir)
    return manifest if manifest is not None and manifest.kind == task.stage.makes else None


def _seconds(metrics_path: Path) -> float:
    """Of training, as the curves of a run say; 0 where there are none yet."""
    records = JsonLines(metrics_path).read() if metrics_path.is_file() else iter(())
    return max((float(record.get("seconds") or 0) for record in records), default=0.0)


def _changes(
    finished: Manifest,
    task: Placed,
    *,
    config: Mapping[str, Any],
    digests: Mapping[str, str] | None,
) -> list[str]:
    if digests is None:
        digests = {name: record.digest for name, record in finished.inputs.items()}
    return changes_since(finished, stage=task.stage, config=config, digests=digests)


def _is_longer(finished: Manifest, task: Placed, *, digests: Mapping[str, str] | None) -> bool:
    """Whether all that is wanted of a finished training is more updates."""
    noted, wanted = finished.config.get("training"), task.config["training"]
    before = noted.get("updates") if isinstance(noted, Mapping) else None
    if not isinstance(before, int) or wanted["updates"] <= before:
        return False
    config = {**task.config, "training": {**wanted, "updates": before}}
    return not _changes(finished, task, config=config, digests=digests)


def going_on(task: Task) -> str | None:
    """From where a stage would go on, in a few words; None where it would begin."""
    state = newest_state(run_dir(task.out_dir))
    return f"training goes on after update {updates_done(state):,}" if state else None


def refusal(task: Task, cause: str) -> str:
    """The sentence for a run that was not told to train a stage anew."""
    return (
        f"Stage {task.name} would throw away {training_done(task)} in {task.out_dir} ({cause}): "
        f"undo that change, or pass --rebuild {task.name}, which sets what is there aside as "
        f"{free_place_aside(task.out_dir)} and trains anew."
    )
