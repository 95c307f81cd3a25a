"""The page of ``mmnmt report``: scores, losses, budgets, experts and analyses.

An argument is a checkpoint, translations, an evaluation, an analysis, or a folder of such
artifacts, for example the folder of a plan. A run has the name that the argument or the evaluation
gives it, else the name of its folder; ``moe@1`` is a run of ``moe``.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from pipeline.artifacts.artifact import Artifact, open_artifact, open_recorded, refuse_foreign
from pipeline.artifacts.manifest import MANIFEST_NAME, read_manifest
from pipeline.errors import ArtifactError, ConfigError, UserError
from pipeline.evaluation.averages import RUN_MARK, group_runs
from pipeline.evaluation.history import (
    TRAINING_STAGES,
    History,
    budgets_section,
    checkpoint_of,
    curves_section,
    losses_section,
    read_metrics,
    trace_history,
)
from pipeline.evaluation.report import averages_section, baseline_section, verdict
from pipeline.evaluation.scores import Evaluation
from pipeline.evaluation.tables import (
    Cell,
    Report,
    ReportSection,
    Row,
    Table,
    headings,
    row,
    section_of_notes,
)
from pipeline.model.moe.routing_statistics import ROUTING_FILE, RoutingStatistics
from pipeline.stage import named_path, split_named_path
from pipeline.terminal import an_artifact, counted

DEAD, OVERLOADED = 0.1, 2.0
"""Load of an expert, relative to an even one, below which it is dead and above it overloaded."""
SYSTEMS = "systems/"
"""Beginning of the names under which the manifest of an evaluation lists its systems."""


@dataclass
class ComparedRuns:
    """Runs, evaluations and analyses that a report shows."""

    runs: dict[str, Artifact] = field(default_factory=dict)  # run → checkpoint or translations
    evaluations: dict[str, Artifact] = field(default_factory=dict)
    analyses: dict[str, Artifact] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    """Parts that cannot be shown, each with the reason."""

    def add(self, name: str, path: Path) -> None:
        """Add the artifact at a path, or the artifacts in a folder by names that begin with it."""
        manifest = read_manifest(path)
        if manifest is None:
            refuse_foreign(path)
            self._add_folder(name, path)
        elif manifest.kind in ("checkpoint", "translations"):
            self._add_run(name or path.name, open_artifact(path, kind=manifest.kind))
        elif manifest.kind == "evaluation":
            self._add_evaluation(name, path)
        elif manifest.kind == "analysis":
            title = name or path.name
            title = str(path) if title in self.analyses else title
            self.analyses[title] = open_artifact(path, kind="analysis")
        else:
            raise ArtifactError(
                f"{path} is {an_artifact(manifest.kind)}, which report does not show. Name a "
                "checkpoint, translations, an evaluation, an analysis or the folder of a plan."
            )

    def _add_run(self, name: str, artifact: Artifact, *, otherwise: str = "") -> None:
        """Add a run, by the other name if another run has the first."""
        origin, (system, mark, _) = _origin(artifact), name.partition(RUN_MARK)
        others = {run.partition(RUN_MARK)[:2] for run in self.runs}
        # A system has either runs with seeds or one run without.
        is_mixed = (system, "" if mark else RUN_MARK) in others
        if otherwise and (is_mixed or _origin(self.runs.get(name, artifact)) != origin):
            name = otherwise
        other = self.runs.setdefault(name, artifact)
        if _origin(other) != origin:
            raise ConfigError(
                f"Two runs are named {name!r}: {other.directory} and {artifact.directory}. Give "
                f"each its own name, for example {named_path(f'{name}-2', artifact.directory)}."
            )

    def _add_evaluation(self, name: str, path: Path) -> None:
        evaluation, prefix = open_artifact(path, kind="evaluation"), f"{name}/" if name else ""
        title = f"{prefix}{path.name}"
        title = str(path) if title in self.evaluations else title
        self.evaluations[title] = evaluation
        inputs = evaluation.manifest.inputs
        for key in (key for key in inputs if key.startswith(SYSTEMS)):
            run = key.removeprefix(SYSTEMS)
            translations = open_recorded(inputs[key], of=evaluation)
            if translations is None:
                self.left_out.append(f"{prefix}{run} (its translations have moved or changed)")
                continue
            self._add_run(f"{prefix}{run}", translations, otherwise=f"{title}/{run}")

    def _add_folder(self, name: str, path: Path) -> None:
        """Add evaluations, analyses and the checkpoints that no evaluation has shown."""
        prefix, trained, is_shown = f"{name}/" if name else "", list[Path](), False
        for entry in sorted(one for one in path.iterdir() if one.is_dir()):
            try:
                manifest = read_manifest(entry)
            except ArtifactError:
                self.left_out.append(f"{entry.name} (it has no manifest that can be read)")
                continue
            if entry.name.startswith("."):
                continue
            if manifest is None:
                is_plan = entry.suffix != ".run" and any(entry.glob(f"*/{MANIFEST_NAME}"))
                self.left_out += [f"{entry.name} (a folder of artifacts: name it, too)"] * is_plan
                continue
            if manifest.stage in TRAINING_STAGES:
                trained.append(entry)
            elif manifest.kind in ("evaluation", "analysis"):
                is_shown = True
                is_analysis = manifest.kind == "analysis"
                self.add(f"{prefix}{entry.name}" if is_analysis else name, entry)
        known = {_origin(run) for run in self.runs.values()}
        for entry in trained:
            checkpoint = open_artifact(entry, kind="checkpoint")
            if checkpoint.digest not in known:
                other = f"{path.name}/{entry.name}"
                self._add_run(f"{prefix}{entry.name}", checkpoint, otherwise=other)
        if not (is_shown or trained):
            raise ArtifactError(
                f"{path} holds no run: it has no {MANIFEST_NAME}, and no folder in it is a trained "
                "checkpoint, an evaluation or an analysis. Name the folder of a plan that has "
                "finished one, or a run as NAME=DIR."
            )


def open_runs(given: Sequence[str]) -> ComparedRuns:
    """Open runs from texts of the form ``DIR``, ``NAME=DIR`` or ``NAME@SEED=DIR``.

    Raises:
        ArtifactError: A folder is not there, or holds nothing that a report can show.
        ConfigError: Two runs have one name, or a system is named with and without a seed.
    """
    found = ComparedRuns()
    for text in given:
        name, path = split_named_path(text)
        if not path or Path(text).exists():
            name, path = "", text
        if not path or not Path(path).is_dir():
            raise ArtifactError(
                f"{path} is not a folder. Name the folder of a run, as DIR or NAME=DIR."
            )
        found.add(name, Path(path).resolve())
    group_runs(found.runs)
    return found


def _origin(run: Artifact) -> str:
    """Return the digest of the weights of a run, or of its translations if these have none."""
    return (checkpoint_of(run) or run).digest


def runs_report(
    compared: ComparedRuns, *, made: str, analyses: Sequence[ReportSection] = ()
) -> Report:
    """Return the report of any number of runs."""
    history, systems = trace_history(compared.runs), group_runs(compared.runs)
    places = {run: place for place, runs in enumerate(systems.values()) for run in runs}
    sections = (
        *(
            section
            for name, one in compared.evaluations.items()
            for section in _scores_sections(name, one, history, compared.left_out)
        ),
        losses_section(history.curves),
        curves_section(history.curves, places),
        budgets_section(history),
        _loads_section(compared.runs, compared.left_out),
        section_of_notes("Alarms of training", _alarms(compared.runs)),
        *analyses,
        section_of_notes("Notes", _notes(compared, history)),
    )
    facts = (counted(len(systems), "system"), counted(len(compared.runs), "run"))
    title = f"Comparison of {facts[0]}" if places else "Analyses"
    return Report(title, f"Report on runs, {made}", facts, sections, generator="report")


def _scores_sections(
    name: str, artifact: Artifact, history: History, left_out: list[str]
) -> Iterator[ReportSection]:
    """Yield the average scores of an evaluation and their comparison."""
    try:
        document = artifact.read_json("scores.json")
        evaluation = TypeAdapter(Evaluation).validate_python(document)
    except (UserError, ValidationError):
        left_out.append(f"the scores of {name} (damaged or of another version)")
        return
    covers = f"Covers the evaluation {artifact.directory}."
    yield section_of_notes(f"Verdict of {name}", (*verdict(evaluation), covers))
    yield replace(averages_section(evaluation, history), title=f"Scores of {name}")
    baseline = baseline_section(evaluation)
    yield replace(baseline, title=f"{name}: {baseline.title}")


def _loads_section(runs: Mapping[str, Artifact], left_out: list[str]) -> ReportSection:
    """Return the dead and overloaded experts of every layer of every run."""
    rows = list[Row]()
    for name, run in runs.items():
        checkpoint = checkpoint_of(run)
        if checkpoint is None or not checkpoint.has(ROUTING_FILE):
            continue
        try:
            statistics = RoutingStatistics.from_json(checkpoint.read_json(ROUTING_FILE))
        except (UserError, ValueError):
            left_out.append(f"the routing statistics of {name} (damaged or of another version)")
            continue
        summary = statistics.summary()
        for layer, routed_GE in zip(statistics.layers, statistics.routed_LGE, strict=True):
            routed_E = routed_GE.sum(0)
            if not routed_E.any():
                continue
            load_E, figures = routed_E / routed_E.mean(), summary[layer]
            numbers = (len(load_E), int((load_E < DEAD).sum()), int((load_E > OVERLOADED).sum()))
            formats = {"max_load": ".2f", "dropped": ".1%", "entropy": ".2f"}
            cells = (Cell(figures[key], spec) for key, spec in formats.items())
            rows.append(row(name, layer, *numbers, *cells))
    titles = ("Run", "layer", "experts", "dead", "overloaded", "largest load", "dropped", "entropy")
    return ReportSection(
        "Load of experts",
        "Counted on the validation text of the last training. The load of an expert is its number "
        f"of tokens relative to an even distribution: dead experts have less than {DEAD:g}, "
        f"overloaded ones more than {OVERLOADED:g}. Dropped is the share of routes beyond the "
        "capacity of an expert; entropy is the entropy of the router's probabilities, in nats.",
        tables=(Table("", headings(*titles, words=["layer"]), tuple(rows)),) if rows else (),
    )


def _alarms(runs: Mapping[str, Artifact]) -> Iterator[str]:
    """Yield what training said of losses, dropped routes and dead experts, with its update."""
    for name, run in runs.items():
        checkpoint = checkpoint_of(run)
        for line in read_metrics(checkpoint) if checkpoint is not None else ():
            if line.get("kind") == "alarm":
                yield f"{name}, update {line['update']}: {line.get('text')}"


def _notes(compared: ComparedRuns, history: History) -> Iterator[str]:
    drawn = {curve.system for curve in history.curves}
    if bare := [run for run in compared.runs if run not in drawn]:
        yield f"No losses are recorded for {', '.join(bare)}."
    for names in group_runs(compared.runs).values():
        first: dict[str, str] = {}
        for run in names:
            other = first.setdefault(_origin(compared.runs[run]), run)
            if other != run:
                yield f"{other} and {run} are the same run: ranges over seeds are too narrow."
    if compared.left_out:
        yield f"Left out: {', '.join(compared.left_out)}."
