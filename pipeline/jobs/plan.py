"""Plans: a graph of stages, what of it is up to date, and running the rest on this machine.

A plan is a TOML file: ``[inputs]`` names the raw data it wants, ``[stages.NAME]`` says which stage
to run with which recipe on what. The output of stage NAME lies in ``OUT/NAME``. A stage runs when
its key (settings and digests of its inputs, see ``artifacts.stage_key``) differs from that of the
finished artifact; a stage that is rebuilt with the same result leaves what follows alone.
"""

import graphlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Protocol

from pydantic import Field, ValidationError

from pipeline.artifacts.artifact import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    Manifest,
    open_artifact,
    read_manifest,
    refuse_changed,
    stage_key,
)
from pipeline.artifacts.digests import changed_files
from pipeline.artifacts.locks import exclusive
from pipeline.artifacts.places import (
    files_below,
    plan_lock_path,
    refuse_inputs,
    restore,
    run_dir,
    unfinished_dir,
    why_not_ours,
)
from pipeline.artifacts.raw_input import RawInput
from pipeline.artifacts.settings_diff import setting_changes
from pipeline.config import Recipe, load_recipe
from pipeline.documents import read_toml
from pipeline.ds_config import load_ds_config
from pipeline.errors import EXIT_RUN_AGAIN, ArtifactError, ConfigError
from pipeline.hints import hint
from pipeline.jobs.launch import MAX_PROCESSES, StopRequests, describe_exit, launch
from pipeline.settings import Settings, describe_validation, whole
from pipeline.stages import STAGES, Input, Stage
from pipeline.terminal import text_table

MAX_RERUNS = 3
"""How often a stage that asks to be run again is, while each run saves something new."""

EXIT_FAILED = 1
"""The stage did not say so itself, but running it again as it is would not help."""

_SHOWN_CHANGES = 3


class PlanStage(Settings):
    """``[stages.NAME]``."""

    run: str
    """Verb of the command line, ``pretrain``."""
    recipe: str = ""
    """Not for stages that read no settings."""
    inputs: dict[str, str | dict[str, str]] = Field(default_factory=dict)
    """Input → stage name, or ``$`` and the name of one of the plan's inputs; where the stage takes
    many, a table of name → stage name."""
    processes: Annotated[int, whole(1, MAX_PROCESSES)] = 1
    threads: Annotated[int, whole(1, MAX_PROCESSES)] = 1
    """OMP_NUM_THREADS of each process."""
    ds_config: str = "cpu_fp32"
    """For stages that train."""

    def sources(self) -> dict[str, str]:
        """Input, or ``input/name`` where there are many, → stage name or ``$name``."""
        flat: dict[str, str] = {}
        for name, source in self.inputs.items():
            if isinstance(source, str):
                flat[name] = source
            else:
                flat |= {f"{name}/{entry}": value for entry, value in source.items()}
        return flat

    def dependencies(self) -> list[str]:
        """Names of the stages it reads from."""
        return [source for source in self.sources().values() if not source.startswith("$")]


class Plan(Settings):
    """A graph of stages."""

    name: str
    description: str = ""
    inputs: dict[str, str] = Field(default_factory=dict)
    """Data from outside, name → what it should be; given as ``--input NAME=PATH``."""
    stages: dict[str, PlanStage]


# ---------------------------------------------------------------- reading a plan


def plan_names() -> list[str]:
    """Names of the plans that ship with the package."""
    folder = resources.files("pipeline") / "plans"
    return sorted(entry.name[:-5] for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load_plan(name_or_path: str, *, table: Mapping[str, Stage] = STAGES) -> Plan:
    """Read and check a plan: ``NAME`` (one that ships) or ``PATH.toml``.

    Raises:
        ConfigError: no such plan, or the graph does not fit together.
    """
    if name_or_path.endswith(".toml"):
        path = Path(name_or_path)
    else:
        path = Path(str(resources.files("pipeline") / "plans" / f"{name_or_path}.toml"))
        if name_or_path not in plan_names():
            raise ConfigError(
                f"There is no plan {name_or_path!r}: choose one of {', '.join(plan_names())}, "
                "or give the path of a .toml file."
            )
    try:
        plan = Plan.model_validate({"name": path.stem, **read_toml(path)})
    except ValidationError as error:
        raise ConfigError(f"Plan {name_or_path!r}: {describe_validation(error, Plan)}") from error
    for name in plan.stages:
        _check_stage(plan, name, table=table)
    stage_order(plan)
    return plan


def stage_order(plan: Plan) -> list[str]:
    """Stages in an order in which they can run: as written, as far as the graph allows.

    Raises:
        ConfigError: the stages form a circle.
    """
    needs = {name: set(stage.dependencies()) for name, stage in plan.stages.items()}
    try:
        graphlib.TopologicalSorter(needs).prepare()
    except graphlib.CycleError as error:
        raise ConfigError(
            f"Plan {plan.name!r}: stages {' → '.join(error.args[1])} form a circle: "
            "remove one of these inputs."
        ) from error
    order: list[str] = []
    while len(order) < len(needs):
        order.append(
            next(name for name in needs if name not in order and needs[name] <= set(order))
        )
    return order


def _check_stage(plan: Plan, name: str, *, table: Mapping[str, Stage]) -> None:
    where, planned = f"Plan {plan.name!r}, stage {name!r}", plan.stages[name]
    if not name.replace("_", "").replace("-", "").isalnum():
        raise ConfigError(f"{where}: it names a folder, so use letters, digits, - and _ only.")
    if planned.run not in table:
        raise ConfigError(
            f"{where}: there is no stage {planned.run!r}{hint(planned.run, [*table])}"
        )
    stage = table[planned.run]
    if stage.sections and stage.needs_recipe and not planned.recipe:
        raise ConfigError(f'{where}: {planned.run} reads settings: add recipe = "...".')
    missing = [
        key
        for key, wanted in stage.inputs.items()
        if wanted.required and not planned.inputs.get(key)
    ]
    if missing:
        raise ConfigError(f"{where}: {planned.run} needs input {missing[0]!r}: add it to inputs.")
    for key, source in planned.inputs.items():
        if key not in stage.inputs:
            raise ConfigError(
                f"{where}: {planned.run} has no input {key!r}{hint(key, [*stage.inputs])}"
            )
        _check_input(plan, source, wanted=stage.inputs[key], where=f"{where}, {key}", table=table)


def _check_input(
    plan: Plan,
    source: str | dict[str, str],
    *,
    wanted: Input,
    where: str,
    table: Mapping[str, Stage],
) -> None:
    if wanted.many != isinstance(source, dict):
        form = '{name = "stage", ...}' if wanted.many else "one stage name"
        raise ConfigError(f"{where}: this input takes {form}.")
    for entry in source.values() if isinstance(source, dict) else (source,):
        if entry.startswith("$"):
            if entry[1:] not in plan.inputs:
                raise ConfigError(f"{where}: {entry!r} is not declared: add it under [inputs].")
        elif wanted.kind == "raw":
            raise ConfigError(f'{where}: raw data comes from outside: name an input as "$name".')
        elif entry not in plan.stages:
            raise ConfigError(f"{where}: the plan has no stage {entry!r}: name one of its stages.")
        else:
            _check_kind(plan.stages[entry].run, entry, wanted=wanted, where=where, table=table)


def _check_kind(
    verb: str, entry: str, *, wanted: Input, where: str, table: Mapping[str, Stage]
) -> None:
    if verb in table and table[verb].makes != wanted.kind:
        raise ConfigError(
            f"{where}: {entry!r} makes a {table[verb].makes} where a {wanted.kind} is wanted: "
            "name another stage."
        )


# ---------------------------------------------------------------- what decides a stage's result


def stage_config(stage: Stage, *, recipe: Recipe, ds_config: str) -> dict[str, Any]:
    """The settings that decide a stage's result, as they stand in its manifest."""
    config = recipe.sections(stage.sections)
    return {**config, "ds_config": load_ds_config(ds_config)} if stage.trains else config


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
    return describe_changes(manifest, stage=stage, config=config, digests=digests)


def describe_changes(
    manifest: Manifest, *, stage: Stage, config: Mapping[str, Any], digests: Mapping[str, str]
) -> str:
    """What differs between an artifact and what the stage would make now."""
    if (manifest.stage, manifest.kind) != (stage.name, stage.makes):
        return f"it holds a {manifest.kind} made by {manifest.stage}"
    changes = setting_changes(manifest.config, config)
    for name in sorted({*manifest.inputs, *digests}):
        if name not in manifest.inputs:
            changes.append(f"input {name} is new")
        elif name not in digests:
            changes.append(f"input {name} is gone")
        elif manifest.inputs[name].digest != digests[name]:
            changes.append(f"input {name} changed")
    if manifest.format_version != FORMAT_VERSION[stage.makes]:
        changes.append(f"format version: {manifest.format_version} → {FORMAT_VERSION[stage.makes]}")
    more = len(changes) - _SHOWN_CHANGES
    shown = "; ".join(changes[:_SHOWN_CHANGES]) or "its key differs"
    return shown + (f"; and {more} more" if more > 0 else "")


# ---------------------------------------------------------------- a plan in a place


@dataclass(frozen=True)
class Task:
    """One stage of a plan with its settings resolved and its place on disk."""

    name: str
    stage: Stage
    planned: PlanStage
    recipe: str
    out_dir: Path
    config: Mapping[str, Any]


@dataclass
class PlacedPlan:
    """A plan, the folder of its outputs and the data it is given."""

    plan: Plan
    out_dir: Path
    given: Mapping[str, RawInput]
    """Plan input → data from outside."""
    tasks: list[Task]
    _raw_digests: dict[tuple[str, str], dict[str, str]] = field(default_factory=dict)

    def path(self, source: str) -> Path:
        """Where a source (``stage`` or ``$name``) lies."""
        if source.startswith("$"):
            return self.given[source[1:]].only_path()
        return self.out_dir / source

    def values(self, source: str) -> tuple[str, ...]:
        """A source as the command line of a stage names it."""
        if source.startswith("$"):
            return self.given[source[1:]].values
        return (str(self.path(source)),)

    def require_inputs(self) -> None:
        """Raises ConfigError where an input of the plan is not given."""
        for name, meaning in self.plan.inputs.items():
            if name not in self.given:
                raise ConfigError(
                    f"Plan {self.plan.name!r} wants {meaning}: pass --input {name}=PATH."
                )

    def digests(self, task: Task) -> dict[str, str]:
        """Input → digest as it is now; raw data is read once, and unchanged where not given."""
        found: dict[str, str] = {}
        for key, source in task.planned.sources().items():
            found |= self._digests(task, key, source)
        return found

    def reason(self, task: Task) -> str | None:
        """Why the task must run, or None if its artifact is up to date."""
        return why_not_done(
            task.out_dir, stage=task.stage, config=task.config, digests=self.digests(task)
        )

    def changed(self, task: Task) -> str | None:
        """Which file of its finished artifact is not as it was made, by its status alone."""
        try:
            manifest = read_manifest(task.out_dir)
            changes = changed_files(task.out_dir, manifest) if manifest else {}
        except (ArtifactError, OSError):  # unreadable, or being replaced at this moment
            return None
        return next((f"its file {name} {change}" for name, change in changes.items()), None)

    def forecast(self) -> dict[str, str | None]:
        """Stage → why it would run, or None; a stage runs too when one it reads from will."""
        reasons: dict[str, str | None] = {}
        for task in self.tasks:
            causes = [name for name in task.planned.dependencies() if reasons[name] is not None]
            absent = not (task.out_dir / MANIFEST_NAME).is_file()
            if causes and not absent:
                reasons[task.name] = f"because {causes[0]} will run"
            elif causes:
                reasons[task.name] = "missing"
            else:
                reasons[task.name] = self.reason(task)
        return reasons

    def _digests(self, task: Task, key: str, source: str) -> dict[str, str]:
        """Of one source: several where it is raw text of several paths."""
        kind = task.stage.inputs[key.partition("/")[0]].kind
        if source.startswith("$") and source[1:] not in self.given:
            return _recorded_digests(task.out_dir, key)
        if kind == "raw":
            if (source, key) not in self._raw_digests:
                records = self.given[source[1:]].records(key)
                digests = {name: record.digest for name, record in records.items()}
                self._raw_digests[source, key] = digests
            return self._raw_digests[source, key]
        return {key: open_artifact(self.path(source), kind=kind).digest}


def _recorded_digests(out_dir: Path, key: str) -> dict[str, str]:
    manifest = read_manifest(out_dir)
    records = manifest.inputs if manifest else {}
    names = [name for name in records if name == key or name.startswith(f"{key}/")]
    return {name: records[name].digest for name in names} or {key: ""}


def place_plan(
    plan: Plan,
    *,
    out_dir: Path | None = None,
    overlay: str = "",
    given: Mapping[str, RawInput] | None = None,
    processes: int | None = None,
    table: Mapping[str, Stage] = STAGES,
) -> PlacedPlan:
    """Resolve every stage's settings.

    ``overlay`` is laid over every recipe; ``processes`` overrules the plan's where a stage can use
    several; the folder is ``runs/<plan>`` unless given.

    Raises:
        ConfigError: a recipe or ds_config does not resolve, a given input is not the plan's, or
            an output would be, hold or lie within one.
    """
    given = given or {}
    unknown = [name for name in given if name not in plan.inputs]
    if unknown:
        raise ConfigError(
            f"Plan {plan.name!r} has no input {unknown[0]!r}{hint(unknown[0], [*plan.inputs])}"
        )
    place = out_dir or Path("runs") / plan.name
    paths = {key: path for name in given for key, path in given[name].named(name).items()}
    refuse_inputs(place, inputs=paths, run_folder=False, what="The plan's folder")
    tasks = []
    for name in stage_order(plan):
        planned, stage = plan.stages[name], table[plan.stages[name].run]
        if processes and stage.parallel != "no":
            planned = planned.model_copy(update={"processes": processes})
        recipe = f"{planned.recipe}+{overlay}" if planned.recipe and overlay else planned.recipe
        settings = load_recipe(recipe) if recipe else Recipe(name="defaults")
        config = stage_config(stage, recipe=settings, ds_config=planned.ds_config)
        tasks.append(Task(name, stage, planned, recipe, place / name, config))
        refuse_inputs(
            place / name, inputs=paths, run_folder=stage.keeps_work, what=f"Stage {name}'s folder"
        )
    return PlacedPlan(plan=plan, out_dir=place, given=given, tasks=tasks)


# ---------------------------------------------------------------- running


class Launcher(Protocol):
    """``launch.launch``, or what stands in for it."""

    def __call__(
        self, arguments: Sequence[str], *, processes: int, threads: int, requests: StopRequests
    ) -> int: ...


@dataclass
class Outcome:
    """What became of one stage, for the summary."""

    name: str
    state: str
    seconds: float = 0.0


def run_plan(
    placed: PlacedPlan,
    *,
    launcher: Launcher = launch,
    program: Sequence[str] = ("-m", "pipeline.cli"),
    say: Callable[[str], None] = print,
) -> int:
    """Run every stage that is not up to date, in order, and print a summary.

    ``program`` is what python runs as the command line.

    Returns:
        0; EXIT_RUN_AGAIN if a signal asked to stop; else the exit code of the stage that failed.

    Raises:
        ConfigError: an input of the plan is not given.
        ArtifactError: another run holds the folder.
    """
    placed.require_inputs()
    lock_path = plan_lock_path(placed.out_dir)
    with exclusive(lock_path, what=str(placed.out_dir)), StopRequests() as requests:
        run = _Run(placed, launcher=launcher, program=program, say=say, requests=requests)
        code = run.all_stages()
    say(text_table(["stage", "", "seconds"], [_row(outcome) for outcome in run.outcomes]))
    return code


def _row(outcome: Outcome) -> list[str]:
    return [outcome.name, outcome.state, f"{outcome.seconds:.1f}" if outcome.seconds else ""]


class _Run:
    """One run of a plan."""

    def __init__(
        self,
        placed: PlacedPlan,
        *,
        launcher: Launcher,
        program: Sequence[str],
        say: Callable[[str], None],
        requests: StopRequests,
    ) -> None:
        self.outcomes: list[Outcome] = []
        self._placed, self._launcher, self._program = placed, launcher, program
        self._say, self._requests = say, requests

    def all_stages(self) -> int:
        for task in self._placed.tasks:
            code = self._up_to_date(task)
            if self._requests.received is not None and code != 0:
                self._say(
                    f"mmnmt run: stopped as asked ({self._requests.received.name}) in {task.name}; "
                    "run the same command again to go on."
                )
                return EXIT_RUN_AGAIN
            if code != 0:
                self._say(
                    f"mmnmt run: stage {task.name} failed ({describe_exit(code)}); no stage after "
                    "it was started: mend the cause and run the same command again."
                )
                return code
        return 0

    def _up_to_date(self, task: Task) -> int:
        """Run the task if it must; 0 when its artifact is there."""
        if self._requests.received is not None:
            return EXIT_RUN_AGAIN
        restore(task.out_dir)
        reason = self._placed.reason(task)
        _refuse_changed(task)
        if reason is None:
            self._say(f"{task.name}: already done")
            self.outcomes.append(Outcome(task.name, "already done"))
            return 0
        self._say(f"{task.name}: running {task.stage.name} ({reason})")
        started = time.monotonic()
        code = self._run_until_done(task)
        state = "done" if code == 0 else "stopped" if code == EXIT_RUN_AGAIN else "failed"
        self.outcomes.append(Outcome(task.name, state, time.monotonic() - started))
        return code

    def _run_until_done(self, task: Task) -> int:
        """Run again while the stage asks for it and saved something new, MAX_RERUNS times."""
        for rerun in range(MAX_RERUNS + 1):
            saved = saved_files(task.out_dir)
            code = self._launch(task)
            if code == 0 and read_manifest(task.out_dir) is None:
                self._say(f"{task.name}: ended without an error but left no finished artifact")
                return EXIT_FAILED
            if code != EXIT_RUN_AGAIN or self._requests.received is not None:
                return code
            if saved_files(task.out_dir) == saved:
                self._say(f"{task.name}: asks to be run again but saved nothing new")
                return EXIT_FAILED
            self._say(f"{task.name}: asks to be run again ({rerun} of {MAX_RERUNS} times so far)")
        return EXIT_FAILED

    def _launch(self, task: Task) -> int:
        as_ranks = task.stage.parallel == "ranks"
        return self._launcher(
            [*self._program, *stage_arguments(self._placed, task)],
            processes=task.planned.processes if as_ranks else 1,
            threads=task.planned.threads,
            requests=self._requests,
        )


def _refuse_changed(task: Task) -> None:
    """Raises ArtifactError where edits of a stage's artifact would be lost or passed on."""
    try:
        read_manifest(task.out_dir)
    except ArtifactError:
        return  # the stage refuses such a folder itself
    refuse_changed(task.out_dir)


def stage_arguments(placed: PlacedPlan, task: Task) -> list[str]:
    """The command line of one stage of a plan: the verb and its options.

    What lies at its output is stale, or is an unfinished run: of the same settings it is resumed,
    of others it is replaced.
    """
    arguments = [task.stage.name]
    if task.stage.sections and task.recipe:
        arguments.append(f"--recipe={task.recipe}")
    for name, source in task.planned.inputs.items():
        option = f"--{name}"
        if isinstance(source, str):
            first, *others = placed.values(source)
            arguments += [option, first, *others] if others else [f"{option}={first}"]
        else:
            named = [f"{entry}={placed.path(value)}" for entry, value in source.items()]
            arguments += [option, *named]
    if task.stage.parallel == "workers":
        arguments.append(f"--processes={task.planned.processes}")
    if task.stage.trains:
        arguments.append(f"--ds-config={task.planned.ds_config}")
    return [*arguments, f"--out={task.out_dir}", "--overwrite"]


def saved_files(out_dir: Path) -> set[str]:
    """Names of the files an unfinished stage keeps beside its output for the next run.

    A log that grew is no progress; a training state or a batch of translations more is.
    """
    folders = (run_dir(out_dir), unfinished_dir(out_dir))
    return {
        str(path.relative_to(out_dir.parent)) for folder in folders for path in files_below(folder)
    }


# ---------------------------------------------------------------- looking


def dry_run(placed: PlacedPlan, *, say: Callable[[str], None] = print) -> None:
    """Print per stage whether it would run, and why; nothing is started."""
    placed.require_inputs()
    reasons = placed.forecast()
    for task in placed.tasks:
        reason, change = reasons[task.name], placed.changed(task)
        if reason is not None:
            say(f"{task.name}: would run ({'; '.join(filter(None, (reason, change)))})")
        else:
            say(f"{task.name}: would be checked ({change})" if change else f"{task.name}: done")


def show_status(placed: PlacedPlan, *, say: Callable[[str], None] = print) -> None:
    """Print a table of the plan's stages; raw data that is not given passes as unchanged."""
    reasons = placed.forecast()
    rows = [
        _status_row(task, reasons[task.name], change=placed.changed(task)) for task in placed.tasks
    ]
    say(text_table(["stage", "state", ""], rows))


def _status_row(task: Task, reason: str | None, *, change: str | None) -> list[str]:
    if change is not None:
        return [task.name, "changed", "; ".join(filter(None, (change, reason)))]
    if reason is None:
        manifest = read_manifest(task.out_dir)
        assert manifest is not None, "a stage without a reason to run has a manifest"
        return [task.name, "done", f"{manifest.run.started}, {manifest.run.wall_seconds:.1f} s"]
    if unfinished_dir(task.out_dir).exists() or run_dir(task.out_dir).exists():
        return [task.name, "in progress", "" if reason == "missing" else reason]
    if reason == "missing":
        return [task.name, reason, ""]
    return [task.name, "stale", reason]
