"""Why a stage of a plan must run again, or that it need not.

A finished artifact of the same key (see ``artifacts.stage_key``) is up to date. With another key a
stage runs when a setting that decides its result (``Stage.deciding``) or the digest of an input
differs from what the manifest says; a stage that is rebuilt with the same
result leaves what follows alone. Of a corpus, the digest is that of the splits that the stage reads
(``Input.splits``): other test lines leave training alone. A setting that did not exist when the
artifact was made counts as at its default, and one that its stage does not read any more counts no
longer. Another ``shards.max_tokens`` that leaves out the same sentences changes nothing.

Training that running a stage again would throw away: how much, and what makes it useless.

A training stage goes on from its newest state where that is a state of the same training
(``artifacts/training_states.py``), to more updates too. Where it is not, or where a finished model
was trained otherwise, days may be lost: ``mmnmt run`` refuses until it is told to train anew, and
a stage by itself until it is told to overwrite. What was trained is then set aside.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from pipeline.artifacts.artifact import FORMAT_VERSION, Artifact, Manifest, read_manifest, stage_key
from pipeline.artifacts.digests import changed_files
from pipeline.artifacts.manifest import setting_changes, with_defaults
from pipeline.artifacts.places import free_place_aside, run_dir, why_not_ours
from pipeline.artifacts.training_states import newest_state, updates_done, why_not_to_go_on
from pipeline.errors import ArtifactError
from pipeline.jobs.plan import PlacedPlan, Task
from pipeline.stages.stage import Stage
from pipeline.terminal import JsonLines, counted, with_article

_SHOWN_CHANGES = 3


def why_not_done(
    out_dir: Path, *, stage: Stage, config: Mapping[str, Any], digests: Mapping[str, str]
) -> str | None:
    """None if ``out_dir`` holds what the stage would make, else the reason in a few words."""
    try:
        manifest = read_manifest(out_dir)
    except ArtifactError:
        return "its manifest cannot be read"
    if manifest is None:
        problem = why_not_ours(out_dir) if out_dir.exists() else None
        return f"its folder {problem}" if problem else "missing"
    key = stage_key(stage=stage.name, kind=stage.makes, config=config, inputs=digests)
    if manifest.key == key:
        return None
    if stage.makes == "shards" and "shards" in config:
        from pipeline.artifacts.shards import with_equal_limit  # numpy, which is slow to load

        limit = config["shards"]["max_tokens"]
        manifest = with_equal_limit(manifest, out_dir, max_tokens=limit)
    changes = changes_since(manifest, stage=stage, config=config, digests=digests)
    return listed_changes(changes) if changes else None


def listed_changes(changes: Sequence[str]) -> str:
    """The first few changes, and how many more there are."""
    more = len(changes) - _SHOWN_CHANGES
    return "; ".join(changes[:_SHOWN_CHANGES]) + (f"; and {more} more" if more > 0 else "")


def changes_since(
    manifest: Manifest, *, stage: Stage, config: Mapping[str, Any], digests: Mapping[str, str]
) -> list[str]:
    """What differs between an artifact and what the stage would make now, all that decides."""
    if (manifest.stage, manifest.kind) != (stage.name, stage.makes):
        return [f"it holds {with_article(manifest.kind)} artifact made by {manifest.stage}"]
    noted = with_defaults(manifest.config, sections=stage.sections)
    changes = setting_changes(stage.deciding(noted), stage.deciding(config))
    for name in sorted({*manifest.inputs, *digests}):
        if name not in manifest.inputs:
            changes.append(f"input {name} is new")
        elif name not in digests:
            changes.append(f"input {name} is gone")
        elif manifest.inputs[name].digest != digests[name]:
            changes.append(f"input {name} changed")
    if manifest.format_version != FORMAT_VERSION[stage.makes]:
        changes.append(f"format version: {manifest.format_version} → {FORMAT_VERSION[stage.makes]}")
    return changes


def reason_to_run(placed: PlacedPlan, task: Task) -> str | None:
    """Why the task must run, or None if its artifact is up to date."""
    return why_not_done(
        task.out_dir, stage=task.stage, config=task.config, digests=placed.digests(task)
    )


def change_of_files(task: Task) -> str | None:
    """Which file of its finished artifact is not as it was made, and what happened to it.

    A copy has other times and inodes: a file that looks changed is compared with its digest, which
    is then remembered.
    """
    try:
        manifest = read_manifest(task.out_dir)
        if manifest is None:
            return None
        changes = changed_files(task.out_dir, manifest)
    except (ArtifactError, OSError):  # unreadable, or being replaced at this moment
        return None
    for name, change in changes.items():
        try:
            Artifact(task.out_dir, manifest).check([name])
        except ArtifactError:
            return f"its file {name} {change}"
    return None


def forecast(placed: PlacedPlan) -> dict[str, str | None]:
    """Stage → why it would run, or None; a stage runs too when one it reads from will.

    Stages that are left out will not: what they made is taken as it is.
    """
    reasons: dict[str, str | None] = {}
    for task in placed.tasks:
        causes = [name for name in task.planned.dependencies() if reasons.get(name) is not None]
        missing = [other.name for other in placed.left_out(task) if not other.is_made]
        if missing:
            reasons[task.name] = f"needs {missing[0]}, which is not made yet"
        elif causes and task.is_made:
            reasons[task.name] = f"because {causes[0]} will run"
        elif causes:
            reasons[task.name] = "missing"
        else:
            reasons[task.name] = reason_to_run(placed, task)
    return reasons


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
