"""Decide whether a stage of a plan must run, and whether that would discard training.

A finished artifact with the same key (see ``artifacts.stage_key``) is up to date. With another key
a stage runs if a setting that decides its result (``Stage.deciding``) or the digest of an input
differs from the manifest; a stage that is rebuilt with the same result affects no later stage.
The digest of a corpus covers the splits that the stage reads (``Input.splits``): other test lines
do not affect training. A setting that did not exist when the artifact was made counts as its
default, and a setting that the stage no longer reads does not count. Another ``shards.max_tokens``
that leaves out the same sentences changes nothing.

A training stage resumes from its newest state if that is a state of the same training
(``artifacts/run_folders.py``), also for more updates. Otherwise, or if a finished model was
trained differently, days of training may be lost: ``mmnmt run`` refuses without ``--rebuild``, and
the command of a stage refuses without ``--overwrite``. Earlier training is then set aside, not
deleted. A plan refuses as soon as the loss is certain (``losses``), before it builds anything in
vain.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.artifacts.artifact import (
    FORMAT_VERSION,
    Artifact,
    Manifest,
    changed_files,
    read_manifest,
    stage_key,
)
from pipeline.artifacts.manifest import run_dir
from pipeline.artifacts.places import why_not_ours
from pipeline.artifacts.run_folders import (
    newest_state,
    place_aside,
    updates_done,
    why_not_to_go_on,
)
from pipeline.artifacts.shards import with_equal_limit
from pipeline.config.documents import JsonLines
from pipeline.config.recipe import setting_changes, with_defaults
from pipeline.errors import ArtifactError
from pipeline.jobs.plan import ResolvedPlan, Task, manifest_of
from pipeline.stage import ORDER, Stage, StageCall
from pipeline.terminal import an_artifact, counted

_SHOWN_CHANGES = 3


def why_not_done(
    out_dir: Path, *, stage: Stage, config: Mapping[str, Any], digests: Mapping[str, str]
) -> str | None:
    """Return why ``out_dir`` does not hold what the stage would make; None if it does."""
    try:
        manifest = read_manifest(out_dir)
    except ArtifactError:
        return "its manifest cannot be read"
    if manifest is None:
        problem = why_not_ours(out_dir) if out_dir.exists() else None
        return f"its folder {problem}" if problem else "missing"
    key = stage_key(stage=stage.name, kind=stage.makes, config=config, inputs=digests)
    if manifest.key == key and not _is_reordered(manifest, digests):
        return None
    if stage.makes == "shards" and "shards" in config:
        limit = config["shards"]["max_tokens"]
        manifest = with_equal_limit(manifest, out_dir, max_tokens=limit)
    changes = changes_since(manifest, stage=stage, config=config, digests=digests)
    return listed_changes(changes) if changes else None


def listed_changes(changes: Sequence[str]) -> str:
    """Join the first few changes, and count the rest."""
    more = len(changes) - _SHOWN_CHANGES
    return "; ".join(changes[:_SHOWN_CHANGES]) + (f"; and {more} more" if more > 0 else "")


def changes_since(
    manifest: Manifest, *, stage: Stage, config: Mapping[str, Any], digests: Mapping[str, str]
) -> list[str]:
    """Return all deciding differences between an artifact and what the stage would make now."""
    if (manifest.stage, manifest.kind) != (stage.name, stage.makes):
        return [f"it holds {an_artifact(manifest.kind)} made by {manifest.stage}"]
    noted = with_defaults(manifest.config, sections=stage.sections)
    changes = setting_changes(stage.deciding(noted), stage.deciding(config))
    for name in sorted({*manifest.inputs, *digests}):
        if name not in manifest.inputs:
            changes.append(f"input {name} is new")
        elif name not in digests:
            changes.append(f"input {name} is gone")
        elif manifest.inputs[name].digest != digests[name]:
            changes.append(f"input {name} changed")
    if not changes and _is_reordered(manifest, digests):
        changes.append("the systems are in another order")
    if manifest.format_version != FORMAT_VERSION[stage.makes]:
        changes.append(f"format version: {manifest.format_version} → {FORMAT_VERSION[stage.makes]}")
    return changes


def _is_reordered(manifest: Manifest, digests: Mapping[str, str]) -> bool:
    """Return whether the systems of an evaluation are in another order, which names its baseline.

    Evaluations of earlier versions noted no order; the inputs of a manifest are sorted.
    """
    names = [name.partition("/")[2] for name in digests if name.startswith("systems/")]
    return bool(names) and manifest.statistics.get(ORDER, names) != names


def reason_to_run(resolved: ResolvedPlan, task: Task) -> str | None:
    """Return why the task must run, or None if its artifact is up to date."""
    return why_not_done(
        task.out_dir, stage=task.stage, config=task.config, digests=resolved.digests(task)
    )


def change_of_files(task: Task) -> str | None:
    """Describe the first file of a finished artifact that was changed; None if there is none.

    Copies have other times: a file that looks changed is compared with its digest.
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


def forecast(resolved: ResolvedPlan) -> dict[str, str | None]:
    """Return stage → why it would run, or None; a stage also runs if one that it reads from will.

    Stages that are left out will not run: their artifacts are read as they are.
    """
    reasons: dict[str, str | None] = {}
    for task in resolved.tasks:
        causes = _that_run(task, reasons)
        missing = [other.name for other in resolved.left_out(task) if not other.is_made]
        if missing:
            reasons[task.name] = f"needs {missing[0]}, which is not made yet"
        elif causes and task.is_made:
            reasons[task.name] = f"because {causes[0]} will run"
        elif causes:
            reasons[task.name] = "missing"
        else:
            reasons[task.name] = reason_to_run(resolved, task)
    return reasons


def _that_run(task: Task, reasons: Mapping[str, str | None]) -> list[str]:
    """Return the stages that a task reads from and that will run."""
    return [name for name in task.planned.dependencies() if reasons.get(name) is not None]


def losses(
    resolved: ResolvedPlan, reasons: Mapping[str, str | None]
) -> dict[str, str | ArtifactError]:
    """Return training stage → why its training is useless, where that is certain by now.

    The digest of an artifact covers its settings and inputs: with others it is another, and so are
    the digests of all that was made from it. Nobody knows before a stage has run whether an
    artifact that is missing, or the lines of a split, will be as they were.

    Training that cannot be read has its error instead, which a run raises.
    """
    changed: dict[str, str] = {}  # stage → the first change that gives it another digest
    lost: dict[str, str | ArtifactError] = {}
    for task in resolved.tasks:
        made, own, cause = manifest_of(task.out_dir), None, None
        records = made.inputs if made else {}
        is_known = not _that_run(task, reasons) and all(o.is_made for o in resolved.left_out(task))
        try:
            if task.stage.trains and not made and (state := newest_state(run_dir(task.out_dir))):
                records = state.manifest.inputs
            digests = {name: record.digest for name, record in records.items()}
            digests = resolved.digests(task) if is_known else digests
            own = why_lost(task, digests=digests)
        except ArtifactError as error:
            lost[task.name] = error
        for key, source in task.planned.sources().items():
            if source in changed and key in records and not records[key].splits:
                read = manifest_of(resolved.path(source))
                if read is not None and read.digest == records[key].digest:
                    cause = changed[source]
        if task.name not in lost and (own or (cause and training_done(task))):
            lost[task.name] = own or cause or ""
        if cause is None and made is not None:
            reason = why_not_done(
                task.out_dir, stage=task.stage, config=task.config, digests=digests
            )
            cause = reason and f"stage {task.name} changes: {reason}"
        if cause:
            changed[task.name] = cause
    return lost


def training_done(task: Task | StageCall) -> str | None:
    """Return how much a training stage has trained; None if it has saved nothing.

    For example ``12,000 updates (3.4 hours) of training``, finished or not.
    """
    if not task.stage.trains:
        return None
    if (finished := _finished(task)) is not None:
        updates, seconds = finished.statistics.get("updates", 0), finished.run.wall_seconds
    elif (state := newest_state(run_dir(task.out_dir))) is not None:
        updates, seconds = updates_done(state), _seconds(run_dir(task.out_dir) / "metrics.jsonl")
    else:
        return None
    return f"{counted(updates, 'update')} ({seconds / 3600:.1f} hours) of training"


def why_lost(task: Task | StageCall, *, digests: Mapping[str, str] | None = None) -> str | None:
    """Return what makes all training of a stage useless; None if nothing does, or there is none.

    Args:
        task: the stage.
        digests: digests of its inputs; None: unchanged.

    Raises:
        ArtifactError: the artifact or its state cannot be read.
    """
    if not task.stage.trains:
        return None
    changes: list[str] = []
    if (finished := _finished(task)) is not None:
        changes = _changes(finished, task, config=task.config, digests=digests)
        if not changes or not _is_longer(finished, task, digests=digests):
            return listed_changes(changes) or None
    state = newest_state(run_dir(task.out_dir))
    problem = why_not_to_go_on(state, config=task.config, digests=digests) if state else None
    if finished is None or (state and problem is None):
        return problem
    changes.append(
        problem
        or f"{run_dir(task.out_dir)} has no training state to go on from, which is kept of a "
        'finished training only where its recipe has saving.keep_states = "last" or "all"'
    )
    return listed_changes(changes)


def why_anew(task: Task | StageCall, *, digests: Mapping[str, str]) -> str | None:
    """Return why a training stage with ``--overwrite`` begins anew; None if nothing is lost.

    Raises:
        ArtifactError: the artifact or its state cannot be read.
    """
    cause = why_lost(task, digests=digests)
    if cause is None and task.stage.trains and newest_state(run_dir(task.out_dir)) is None:
        return "it is trained again" if _finished(task) is not None else None
    return cause


def _finished(task: Task | StageCall) -> Manifest | None:
    """Return the manifest of a finished model; None for another kind of artifact, or none."""
    manifest = read_manifest(task.out_dir)
    return manifest if manifest is not None and manifest.kind == task.stage.makes else None


def _seconds(metrics_path: Path) -> float:
    """Return the seconds of training in a run's metrics; 0 without metrics."""
    records = JsonLines(metrics_path).read() if metrics_path.is_file() else iter(())
    found = (record.get("seconds") for record in records)
    return max((float(one) for one in found if isinstance(one, int | float)), default=0.0)


def _changes(
    finished: Manifest,
    task: Task | StageCall,
    *,
    config: Mapping[str, Any],
    digests: Mapping[str, str] | None,
) -> list[str]:
    if digests is None:
        digests = {name: record.digest for name, record in finished.inputs.items()}
    return changes_since(finished, stage=task.stage, config=config, digests=digests)


def _is_longer(
    finished: Manifest, task: Task | StageCall, *, digests: Mapping[str, str] | None
) -> bool:
    """Return whether the settings differ from a finished training only in more updates."""
    settings: Mapping[str, Any] = task.config
    noted, wanted = finished.config.get("training"), settings["training"]
    before = noted.get("updates") if isinstance(noted, Mapping) else None
    if not isinstance(before, int) or wanted["updates"] <= before:
        return False
    config = {**settings, "training": {**wanted, "updates": before}}
    return not _changes(finished, task, config=config, digests=digests)


def going_on(task: Task) -> str | None:
    """Describe from where a stage would resume; None if it would begin."""
    state = newest_state(run_dir(task.out_dir))
    return f"training goes on after update {updates_done(state):,}" if state else None


def refusal(task: Task, cause: str) -> str:
    """Return the error message for a stage that may not train anew."""
    return (
        f"Stage {task.name} would throw away {training_done(task)} in {task.out_dir} ({cause}). "
        f"Undo that change, or pass --rebuild {task.name}, which trains anew and keeps it as "
        f"{place_aside(task.out_dir)}."
    )
