"""The runs that ``mmnmt report`` compares, opened from what the command line names.

An argument is a checkpoint, translations, an evaluation, an analysis, or a folder of such
artifacts, such as that of a plan. A run has the name that the argument or the evaluation gives it,
else that of its folder; ``moe@1`` is a run of ``moe``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.artifacts.artifact import Artifact, InputRecord, open_artifact, open_recorded
from pipeline.artifacts.manifest import MANIFEST_NAME, Manifest, read_manifest
from pipeline.errors import ArtifactError, ConfigError
from pipeline.evaluation.history import TRAINING_STAGES, checkpoint_of
from pipeline.evaluation.repeated_runs import RUN_MARK, group_runs
from pipeline.terminal import with_article

SYSTEMS = "systems/"
"""Beginning of the names under which the manifest of an evaluation lists its systems."""


@dataclass
class Translated:
    """A corpus and the translations of its test lines."""

    corpus: InputRecord
    training: InputRecord | None
    """Corpus that the systems were trained on, where an evaluation names another one."""
    runs: dict[str, Artifact] = field(default_factory=dict)
    """Run → translations."""


@dataclass
class ComparedRuns:
    """Runs, evaluations, analyses and translations that a report shows."""

    runs: dict[str, Artifact] = field(default_factory=dict)
    """Run → checkpoint or translations."""
    evaluations: dict[str, Artifact] = field(default_factory=dict)
    analyses: dict[str, Artifact] = field(default_factory=dict)
    translated: dict[str, Translated] = field(default_factory=dict)
    """Digest of a corpus → its translations."""
    missing: list[str] = field(default_factory=list)
    """Runs of evaluations whose translations are gone or have changed."""
    unreadable: list[str] = field(default_factory=list)
    """Folders with a manifest that is not of this version."""

    @property
    def systems(self) -> dict[str, tuple[str, ...]]:
        """Return the runs of every system."""
        return group_runs(self.runs)

    def add(self, name: str, path: Path) -> None:
        """Add what lies at a path; of several runs there, the name comes before theirs."""
        manifest = read_manifest(path)
        if manifest is None:
            self._add_folder(name, path)
        elif manifest.kind in ("checkpoint", "translations"):
            self._add_run(name or path.name, open_artifact(path, kind=manifest.kind))
        elif manifest.kind == "evaluation":
            self._add_evaluation(name, path)
        elif manifest.kind == "analysis":
            self._add_analysis(name or path.name, path)
        else:
            raise ArtifactError(
                f"{path} is {with_article(manifest.kind)}, which report does not show. Name a "
                "checkpoint, translations, an evaluation, an analysis or the folder of a plan."
            )

    def _add_run(
        self,
        name: str,
        artifact: Artifact,
        *,
        otherwise: str = "",
        training: InputRecord | None = None,
    ) -> None:
        """Add a run, by the other name where the first belongs to another run or system."""
        origin, (system, mark, _) = _origin(artifact), name.partition(RUN_MARK)
        is_taken = name in self.runs and _origin(self.runs[name]) != origin
        # A system has either runs with seeds or one without.
        is_mixed = (
            system in self.runs
            if mark
            else any(run.startswith(f"{name}{RUN_MARK}") for run in self.runs)
        )
        if otherwise and (is_taken or is_mixed):
            name = otherwise
        other = self.runs.setdefault(name, artifact)
        if _origin(other) != origin:
            raise ConfigError(
                f"Two runs are named {name!r}: {other.directory} and {artifact.directory}. Give "
                f"each its own name, for example {name}-2={artifact.directory}."
            )
        record = artifact.manifest.inputs.get("corpus")
        if artifact.manifest.kind == "translations" and record is not None:
            found = self.translated.setdefault(record.digest, Translated(record, training))
            found.runs.setdefault(name, artifact)

    def _add_analysis(self, name: str, path: Path) -> None:
        title = str(path) if name in self.analyses else name
        self.analyses[title] = open_artifact(path, kind="analysis")

    def _add_evaluation(self, name: str, path: Path) -> None:
        evaluation = open_artifact(path, kind="evaluation")
        inputs, prefix = evaluation.manifest.inputs, f"{name}/" if name else ""
        title = f"{prefix}{path.name}"
        title = str(path) if title in self.evaluations else title
        self.evaluations[title] = evaluation
        for key, record in inputs.items():
            if not key.startswith(SYSTEMS):
                continue
            run, translations = key.removeprefix(SYSTEMS), open_recorded(record)
            if translations is None:
                self.missing.append(f"{prefix}{run}")
            else:
                self._add_run(
                    f"{prefix}{run}",
                    translations,
                    otherwise=f"{title}/{run}",
                    training=inputs.get("training"),
                )

    def _add_folder(self, name: str, path: Path) -> None:
        """Add a folder: evaluations, analyses, further checkpoints, and translations by these."""
        found, prefix = self._manifests_in(path), f"{name}/" if name else ""
        shown = len(self.evaluations) + len(self.analyses)
        of_others = {run.partition(RUN_MARK)[0] for run in self.runs}
        for directory, manifest in found.items():
            if manifest.kind == "evaluation":
                self._add_evaluation(name, directory)
            elif manifest.kind == "analysis":
                self._add_analysis(f"{prefix}{directory.name}", directory)
        has_shown = len(self.evaluations) + len(self.analyses) > shown
        known = {_origin(run) for run in self.runs.values()}
        trained = [one for one, manifest in found.items() if manifest.stage in TRAINING_STAGES]
        stems = {directory.name for directory in trained}
        for directory in trained:
            checkpoint = open_artifact(directory, kind="checkpoint")
            if _origin(checkpoint) not in known:
                run = prefix + _name_with_seed(directory.name, found[directory], taken=stems)
                if run.partition(RUN_MARK)[0] in of_others:
                    run = f"{path.name}/{run}"
                self._add_run(run, checkpoint, otherwise=f"{path.name}/{directory.name}")
        names: dict[str, list[str]] = {}
        for run, artifact in self.runs.items():
            names.setdefault(_origin(artifact), []).append(run)
        for directory, manifest in found.items():
            if manifest.kind == "translations":
                translations = open_artifact(directory, kind="translations")
                runs = names.get(_origin(translations), [])
                if len(runs) == 1:  # of several, only an evaluation says which one it is
                    self._add_run(runs[0], translations)
                    has_shown = True
        if not (has_shown or trained):
            raise ArtifactError(
                f"{path} holds no run: it has no {MANIFEST_NAME}, and no folder in it is a trained "
                "checkpoint, an evaluation or an analysis. Name the folder of a plan that has "
                "finished one, or a run as NAME=DIR."
            )

    def _manifests_in(self, path: Path) -> Mapping[Path, Manifest]:
        """Return the finished artifacts directly in a folder, by name."""
        found = {}
        for entry in sorted(path.iterdir()):
            if entry.is_dir() and not entry.name.startswith("."):
                try:
                    manifest = read_manifest(entry)
                except ArtifactError:
                    self.unreadable.append(entry.name)
                    continue
                if manifest is not None:
                    found[entry] = manifest
        return found


def open_runs(given: Sequence[str]) -> ComparedRuns:
    """Open runs from texts of the form ``DIR``, ``NAME=DIR`` or ``NAME@SEED=DIR``.

    Raises:
        ArtifactError: A folder is not there, or holds nothing that a report can show.
        ConfigError: Two runs have one name, or a system is named with and without a seed.
    """
    found = ComparedRuns()
    for text in given:
        name, separator, path = text.partition("=")
        if not separator or Path(text).exists():
            name, path = "", text
        if not path or not Path(path).is_dir():
            raise ArtifactError(
                f"{path or text} is not a folder. Name the folder of a run, as DIR or NAME=DIR."
            )
        found.add(name, Path(path).resolve())
    group_runs(found.runs)
    return found


def _origin(run: Artifact) -> str:
    """Return the digest of the weights of a run, or of its translations if these have none."""
    return (checkpoint_of(run) or run).digest


def _name_with_seed(name: str, manifest: Manifest, *, taken: set[str]) -> str:
    """Return ``dense@1`` for a folder ``dense_1`` whose training has seed 1, else the name."""
    training: Any = manifest.config.get("training")
    seed = training.get("seed") if isinstance(training, dict) else None
    for separator in "_-":
        stem = name.removesuffix(f"{separator}{seed}")
        if stem not in ("", name) and stem not in taken:
            return f"{stem}{RUN_MARK}{seed}"
    return name
