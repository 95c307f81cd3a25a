"""Why a stage of a plan must run again, or that it need not.

A finished artifact of the same key (see ``artifacts.stage_key``) is up to date. With another key a
stage runs when a setting that decides its result (``Stage.deciding``) or the digest of an input
differs from what the manifest says; a stage that is rebuilt with the same
result leaves what follows alone. Of a corpus, the digest is that of the splits that the stage reads
(``Input.splits``): other test lines leave training alone. A setting that did not exist when the
artifact was made counts as at its default, and one that its stage does not read any more counts no
longer. Another ``shards.max_tokens`` that leaves out the same sentences changes nothing.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.artifacts.artifact import (
    FORMAT_VERSION,
    Artifact,
    Manifest,
    read_manifest,
    stage_key,
)
from pipeline.artifacts.digests import changed_files
from pipeline.artifacts.places import why_not_ours
from pipeline.artifacts.settings_diff import setting_changes, with_defaults
from pipeline.errors import ArtifactError
from pipeline.jobs.plan import PlacedPlan, Task
from pipeline.stages import Stage
from pipeline.summary import with_article

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
