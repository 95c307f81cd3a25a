"""Read and check plans, graphs of stages, and resolve the settings and directory of every stage.

A plan is a TOML file. ``[inputs]`` names the raw data that it wants. ``[stages]`` says which stage
to run with which recipe on what. The output of stage NAME lies in ``OUT/NAME``::

    [inputs]
    corpus = "a tree of pair folders"

    [defaults]                        # of every stage that takes such a setting
    recipe = "dense_opus100"
    processes = 8
    [defaults.translate]              # of every stage that runs translate
    inputs = { corpus = "clean" }

    [matrix.systems.rows]
    plain = { label = "no modules" }
    lms_64 = { recipe = "+lms", set = { model.language_modules.rank = 64 }, label = "d = 64" }

    [stages]
    corpus = { run = "import_corpus", inputs = { raw = "$corpus" } }
    clean = { run = "clean", inputs = { corpus = "corpus" } }
    # … tokenizer, shards, mixture
    [stages."{row}"]                  # becomes the stages plain and lms_64
    matrix = "systems"
    run = "pretrain"
    inputs = { shards = "shards", mixture = "mixture" }
    [stages."translate_{row}"]
    matrix = "systems"
    run = "translate"
    inputs = { checkpoint = "{row}" }
    [stages.evaluation]               # one stage, with one system per row
    matrix = "systems"
    run = "evaluate"
    inputs = { corpus = "clean", systems = { "{label}" = "translate_{row}" } }

- ``[defaults]`` holds ``recipe``, ``set``, ``processes``, ``threads``, ``ds_config`` and ``job``.
  Each applies to the stages that take it. ``[defaults.KIND]`` is laid over it, and may hold
  ``inputs``, too. What a stage itself says is laid over both: ``set``, ``inputs`` and ``job`` entry
  by entry. A recipe that begins with ``+`` adds overlays to the default.
- ``set`` has the structure of a recipe and is laid over it, after its overlays. ``--with`` and
  ``--set`` of a command are laid over ``set``.
- ``[matrix.NAME.rows]`` holds rows of values, ``[matrix.NAME]`` the ``values`` of rows that do not
  have their own. In a stage with ``matrix = "NAME"``, ``{row}`` stands for the name of a row and
  ``{key}`` for its value of that key. A text that is nothing but a placeholder becomes the value,
  of any type.
- A stage with a placeholder in its name is repeated per row. What the stage says is laid over
  ``recipe``, ``set``, ``processes``, ``threads``, ``ds_config`` and ``job`` of the row, as over
  defaults. In a stage without a placeholder in its name, entries of ``inputs`` with one in theirs
  are repeated.
- Consecutive repeated stages of one matrix come stage by stage: the first with all rows, then the
  next. With ``order = "rows"`` in ``[matrix.NAME]`` they come row by row.
- ``times = "seeds"`` in ``[matrix.systems]`` multiplies its rows by the rows of ``[matrix.seeds]``:
  row ``lms`` becomes ``lms_1``, ``lms_2`` and so on, with the values of both. ``{systems}`` and
  ``{seeds}`` stand for the two names.

``pipeline/jobs/plan_expansion.py`` expands all of this. ``mmnmt run PLAN --dry-run`` lists the
stages that result.
"""

import graphlib
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationError, WrapValidator

from pipeline.artifacts.artifact import MANIFEST_NAME, Manifest, open_artifact, read_manifest
from pipeline.artifacts.manifest import describe_name, describe_names
from pipeline.artifacts.places import refuse_inputs
from pipeline.artifacts.raw_input import RawInput
from pipeline.config.documents import beside, merge, read_toml, shipped, toml_path
from pipeline.config.ds_config import AUTO
from pipeline.config.recipe import (
    TABLES,
    load_recipe,
    read_overlay,
    recipe_layers,
    without_other_kinds,
    without_stated,
)
from pipeline.config.settings import Settings, describe_validation, whole
from pipeline.errors import ArtifactError, ConfigError, hint, nearest_names, no_such
from pipeline.jobs.launch import MAX_PROCESSES
from pipeline.jobs.plan_expansion import expand
from pipeline.registry import STAGES
from pipeline.stage import Input, Stage, problem_of_name, stage_config
from pipeline.terminal import an_artifact

MAX_NODES = 10**5
MAX_CPUS = 4096


_UNITS = {"": 2**20, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
"""Suffix of a size as sbatch reads it → bytes; without one it counts MiB."""
_SIZE = re.compile(r"(\d{1,9})([KMGT]?)B?", re.IGNORECASE | re.ASCII)
_TIME = re.compile(r"(?:(\d{1,6})-)?(\d{1,8})(?::(\d{1,8}))?(?::(\d{1,8}))?", re.ASCII)


def num_bytes(size: str | None) -> int | None:
    """Return the bytes of a size, for example ``512G``; without a unit, MiB, as for sbatch."""
    if size is None:
        return None
    if (match := _SIZE.fullmatch(size.strip())) is None:
        raise ValueError("Write a size of memory, for example 64G")
    return int(match[1]) * _UNITS[match[2].upper()]


def seconds_of(time: str | None) -> int | None:
    """Return the seconds of a time limit, for example ``90`` (minutes), ``1:30:00`` or ``2-12``."""
    if time is None:
        return None
    match = _TIME.fullmatch(time.strip())
    parts = [int(part) for part in match.groups()[1:] if part is not None] if match else []
    if not match or max(parts[1:], default=0) > 59 or (match[1] and parts[0] > 23):
        raise ValueError("Write a time limit, for example 24:00:00")
    units = [3600, 60, 1] if match[1] or len(parts) == 3 else [60, 1]
    clock = sum(part * unit for part, unit in zip(parts, units, strict=False))
    if not (seconds := int(match[1] or 0) * 86400 + clock):
        raise ValueError("sbatch takes 0 as no limit. Write a time limit, for example 24:00:00")
    return seconds


def _as_written(read: Callable[[str | None], int | None]) -> AfterValidator:
    """Return a check that a text can be read, which keeps the text without spaces around it."""
    return AfterValidator(lambda text: text.strip() if read(text) is not None else None)


MemorySize = Annotated[str, _as_written(num_bytes)]
TimeLimit = Annotated[str, _as_written(seconds_of)]


class StageJob(Settings):
    """The table ``[stages.NAME.job]`` of a plan: resources of the stage as a job of a cluster.

    ``processes`` and ``threads`` of the stage decide the rest. ``mmnmt run`` ignores the table.
    """

    nodes: Annotated[int, whole(1, MAX_NODES)] | None = None
    """Number of nodes; not set: the fewest of the site's nodes that hold the processes. More than
    one spreads a data stage over ranks of MPI."""
    gpus_per_process: Annotated[int, whole(0, 1)] | None = None
    """GPUs of each process; not set: 1 for training and translation if the site's nodes have GPUs,
    else 0."""
    cpus_per_process: Annotated[int, whole(1, MAX_CPUS)] | None = None
    """CPU cores of each process; not set: ``threads``."""
    memory: MemorySize | None = None
    """Memory per node as sbatch's ``--mem`` takes it, for example ``64G``; not set: the cluster's
    default."""
    time: TimeLimit | None = None
    """Time limit as sbatch's ``--time`` takes it, for example ``1-12:00:00``; not set: the
    site's."""


def _one_refusal(value: object, check: Callable[[object], object]) -> object:
    """Check an input of a stage; pydantic would refuse it once per type, under names of its own."""
    try:
        return check(value)
    except ValidationError as error:
        raise ValueError("Write the name of a stage, or a table of names") from error


class PlanStage(Settings):
    """The table ``[stages.NAME]`` of a plan."""

    run: str
    """Name of the stage to run, for example ``pretrain``."""
    recipe: str = ""
    """Recipe, for example ``bible24_moe+smoke``; empty for stages that read no settings."""
    set: dict[str, Any] = Field(default_factory=dict)
    """Settings laid over recipe and overlays, for example ``{ training = { updates = 400 } }``."""
    inputs: dict[str, Annotated[str | dict[str, str], WrapValidator(_one_refusal)]] = Field(
        default_factory=dict
    )
    """Input → stage name, or ``$`` and an input of the plan, for example ``{ raw = "$corpus" }``;
    for inputs that take several artifacts, a table of name → stage name."""
    processes: Annotated[int, whole(1, MAX_PROCESSES)] = 1
    """Number of processes."""
    threads: Annotated[int, whole(1, MAX_PROCESSES)] = 1
    """OMP_NUM_THREADS of each process."""
    ds_config: str = AUTO
    """The ds_config of stages that train."""
    job: StageJob = StageJob()
    """Resources as a job of a cluster."""

    def sources(self) -> dict[str, str]:
        """Return input, or ``input/name`` for several artifacts, → stage name or ``$name``."""
        flat: dict[str, str] = {}
        for name, source in self.inputs.items():
            if isinstance(source, str):
                flat[name] = source
            else:
                flat |= {f"{name}/{entry}": value for entry, value in source.items()}
        return flat

    def dependencies(self) -> list[str]:
        """Return the names of the stages it reads from."""
        return [source for source in self.sources().values() if not source.startswith("$")]


class Plan(Settings):
    """A graph of stages."""

    name: str
    description: str = ""
    inputs: dict[str, str] = Field(default_factory=dict)
    """Data from outside: name → description; given as ``--input NAME=PATH``."""
    stages: dict[str, PlanStage] = Field(min_length=1)


# ---------------------------------------------------------------- reading a plan


def plan_names() -> list[str]:
    """Return the names of the plans that ship with the package."""
    return [*shipped("plans")]


def load_plan(name_or_path: str) -> Plan:
    """Read and check a plan: ``NAME`` (one that ships) or ``PATH.toml``.

    Raises:
        ConfigError: no such plan, or the graph does not fit together.
    """
    path = toml_path(name_or_path, folder="plans", what="plan")
    where = f"Plan {name_or_path!r}"
    written, known = read_toml(path), (*Plan.model_fields, "defaults", "matrix")
    for name in written:
        if name not in known:  # before the tables that are there seem to lack stages
            raise no_such(f"{where}: there is no setting", name, known)
    document = expand(written, where=where)
    try:
        plan = Plan.model_validate({"name": path.stem, **document})
    except ValidationError as error:
        said = describe_validation(error, Plan, also=("defaults", "matrix"))
        raise ConfigError(f"{where}: {said}") from error
    if problem := describe_name(plan.name):
        raise ConfigError(
            f"{where}: its name {plan.name!r} {problem}, and it names a folder. Write another."
        )
    for name, stage in plan.stages.items():
        layers = recipe_layers(stage.recipe, folder=path.parent)
        recipe = "+".join(beside(layer, path) for layer in layers)
        places = {"recipe": recipe, "ds_config": beside(stage.ds_config, path)}
        plan.stages[name] = stage.model_copy(update=places)
        _check_stage(plan, name)
    stage_order(plan)
    return plan


def stage_order(plan: Plan) -> list[str]:
    """Sort the stages into an order in which they can run, as written where possible.

    Raises:
        ConfigError: the stages form a circle.
    """
    needs = {name: set(stage.dependencies()) for name, stage in plan.stages.items()}
    try:
        graphlib.TopologicalSorter(needs).prepare()
    except graphlib.CycleError as error:
        raise ConfigError(
            f"Plan {plan.name!r}: stages {' → '.join(error.args[1])} form a circle. "
            "Remove an input that closes it."
        ) from error
    order: list[str] = []
    while len(order) < len(needs):
        order.append(
            next(name for name in needs if name not in order and needs[name] <= set(order))
        )
    return order


def _check_stage(plan: Plan, name: str) -> None:
    where, planned = f"Plan {plan.name!r}, stage {name!r}", plan.stages[name]
    run, stage = planned.run, STAGES.get(planned.run)
    if not name.replace("_", "").replace("-", "").isalnum():
        raise ConfigError(f"{where}: it names a folder. Use letters, digits, - and _ only.")
    if stage is None:
        raise no_such(f"{where}: there is no stage", run, [*STAGES])
    if planned.set and not stage.sections:
        raise ConfigError(f"{where}: {run} reads no settings. Leave out set.")
    if stage.sections and stage.needs_recipe and not planned.recipe:
        raise ConfigError(f'{where}: {run} reads settings. Add recipe = "...".')
    for key, wanted in stage.inputs.items():
        if wanted.required and not planned.inputs.get(key):
            raise ConfigError(f"{where}: {run} needs input {key!r}. Add it to inputs.")
    for key, source in planned.inputs.items():
        if key not in stage.inputs:
            raise no_such(f"{where}: {run} has no input", key, [*stage.inputs])
        if stage.inputs[key].many != isinstance(source, dict):
            form = '{name = "stage", ...}' if stage.inputs[key].many else "one stage name"
            raise ConfigError(f"{where}, {key}: this input takes {form}.")
        for entry in source if isinstance(source, dict) else ():
            if problem := problem_of_name(entry):
                raise ConfigError(f"{where}, {key}: {problem}")
        if isinstance(source, dict) and (problem := describe_names(source)):
            raise ConfigError(f"{where}, {key} names {problem}. Rename one.")
        for entry in source.values() if isinstance(source, dict) else (source,):
            if problem := _problem_of_source(plan, entry, wanted=stage.inputs[key]):
                raise ConfigError(f"{where}, {key}: {problem}")


def _problem_of_source(plan: Plan, source: str, *, wanted: Input) -> str:
    """Return why an input cannot come from a source; empty if it can."""
    if source.startswith("$"):
        if source[1:] in plan.inputs:
            return ""
        near = nearest_names(source[1:], plan.inputs)
        fix = f"Did you mean '${near[0]}'?" if near else "Add it under [inputs]."
        return f"{source!r} is not declared. {fix}"
    if wanted.kind == "raw":
        return 'raw data comes from outside. Name an input as "$name".'
    if source not in plan.stages:
        return f"the plan has no stage {source!r}{hint(source, [*plan.stages])}"
    made_by = STAGES.get(plan.stages[source].run)
    if made_by is None or made_by.makes == wanted.kind:
        return ""
    return (
        f"{source!r} makes {an_artifact(made_by.makes)} where "
        f"{an_artifact(wanted.kind)} is wanted. Name another stage."
    )


# ---------------------------------------------------------------- resolving settings


@dataclass(frozen=True)
class Task:
    """One stage of a plan with its settings resolved and its place on disk."""

    name: str
    stage: Stage
    planned: PlanStage
    recipe: str
    out_dir: Path
    config: Mapping[str, Any]
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Settings laid over the recipe: ``set`` of the plan and of the command."""

    @property
    def is_made(self) -> bool:
        """Whether its artifact exists, with any settings and inputs."""
        return (self.out_dir / MANIFEST_NAME).is_file()


@dataclass
class ResolvedPlan:
    """A plan with resolved settings, the directory of its outputs, and the data it is given."""

    plan: Plan
    out_dir: Path
    given: Mapping[str, RawInput]
    """Plan input → data from outside."""
    tasks: list[Task]
    """The stages to be run or looked at: all of the plan, or those chosen."""
    others: list[Task] = field(default_factory=list)
    """The stages that are left out: their artifacts are read as they are."""
    _raw_digests: dict[tuple[str, str], dict[str, str]] = field(default_factory=dict)

    def path(self, source: str) -> Path:
        """Return the path of a source (``stage`` or ``$name``)."""
        if source.startswith("$"):
            return self.given[source[1:]].only_path()
        return self.out_dir / source

    def values(self, source: str) -> tuple[str, ...]:
        """Return a source as the command line of a stage names it."""
        if source.startswith("$"):
            return self.given[source[1:]].values
        return (str(self.path(source)),)

    def chosen(self, *, only: Collection[str] = (), until: Collection[str] = ()) -> "ResolvedPlan":
        """Return the plan with some of its stages, or with all if none is named.

        Args:
            only: these, whatever they read from.
            until: these and all that they read from, near or far.

        Raises:
            ConfigError: the plan has no such stage.
        """
        for option, names in (("--only", only), ("--until", until)):
            for name in names:
                self.require_stage(name, option)
        if not only and not until:
            return self
        wanted, left = {*only}, [*until]
        while left:
            name = left.pop()
            wanted.add(name)
            left += self.plan.stages[name].dependencies()
        return replace(
            self,
            tasks=[task for task in self.tasks if task.name in wanted],
            others=[task for task in self.tasks if task.name not in wanted],
        )

    def require_stage(self, name: str, option: str) -> None:
        """Raise ConfigError if the plan has no stage that an option names."""
        if name not in self.plan.stages:
            what = f"{option}: plan {self.plan.name!r} has no stage"
            raise no_such(what, name, [*self.plan.stages])

    def left_out(self, task: Task) -> list[Task]:
        """Return the stages that a task reads from and that are left out."""
        needed = task.planned.dependencies()
        return [other for other in self.others if other.name in needed]

    def require_inputs(self) -> None:
        """Raise ConfigError if an input of the plan, or of the chosen stages, is missing."""
        sources = {source for task in self.tasks for source in task.planned.sources().values()}
        for name, meaning in self.plan.inputs.items():
            if name not in self.given and (not self.others or f"${name}" in sources):
                raise ConfigError(
                    f"Plan {self.plan.name!r} wants {meaning}. Pass --input {name}=PATH."
                )

    def digests(self, task: Task) -> dict[str, str]:
        """Return input → current digest; raw data that is not given counts as unchanged."""
        digests: dict[str, str] = {}
        for key, source in task.planned.sources().items():
            wanted = task.stage.inputs[key.partition("/")[0]]
            if source.startswith("$") and source[1:] not in self.given:
                digests |= _recorded_digests(task.out_dir, key)
            elif wanted.kind == "raw":  # several digests if it is raw text of several paths
                if (source, key) not in self._raw_digests:
                    records = self.given[source[1:]].records(key)
                    by_name = {name: record.digest for name, record in records.items()}
                    self._raw_digests[source, key] = by_name
                digests |= self._raw_digests[source, key]
            else:
                splits = splits_to_compare(manifest_of(task.out_dir), key, wanted.splits)
                artifact = open_artifact(self.path(source), kind=wanted.kind)
                digests[key] = artifact.digest_of(splits)
        return digests


def manifest_of(out_dir: Path) -> Manifest | None:
    """Return the manifest of an artifact; None if there is none that can be read."""
    try:
        return read_manifest(out_dir)
    except ArtifactError:
        return None


def splits_to_compare(
    manifest: Manifest | None, name: str, splits: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the splits of an input to compare with a manifest.

    An artifact of an earlier version has the digest of the whole corpus: then there are none.
    """
    record = manifest.inputs.get(name) if manifest else None
    return () if record is not None and not record.splits else splits


def _recorded_digests(out_dir: Path, key: str) -> dict[str, str]:
    manifest = manifest_of(out_dir)
    records = manifest.inputs if manifest else {}
    names = [name for name in records if name == key or name.startswith(f"{key}/")]
    return {name: records[name].digest for name in names} or {key: ""}


def default_dir(plan: Plan) -> Path:
    """Return the directory of a plan's stages where none is named."""
    return Path("runs") / plan.name


def resolve_plan(
    plan: Plan,
    *,
    out_dir: Path | None = None,
    overlay: str = "",
    overrides: Mapping[str, Any] | None = None,
    given: Mapping[str, RawInput] | None = None,
    processes: int | None = None,
    auto: str = AUTO,
) -> ResolvedPlan:
    """Resolve every stage's settings.

    Args:
        plan: the checked plan.
        out_dir: folder of all stages; ``runs/<plan>`` unless given.
        overlay: laid over every recipe, and over ``set`` of the plan.
        overrides: laid over all of that, as ``--set`` states them.
        given: plan input → data from outside.
        processes: overrules the plan's where a stage can use several.
        auto: ds_config that ``auto`` stands for, if stages run on other machines than this one;
            for stages that ask for no GPU it is ``cpu_fp32``.

    Raises:
        ConfigError: a recipe or ds_config does not resolve, a given input is not the plan's, or
            an output would be, hold or lie within one.
    """
    given, asked = given or {}, overrides or {}
    unknown = [name for name in given if name not in plan.inputs]
    if unknown:
        raise no_such(f"Plan {plan.name!r} has no input", unknown[0], [*plan.inputs])
    place = out_dir or default_dir(plan)
    paths = {key: path for name in given for key, path in given[name].named(name).items()}
    refuse_inputs(place, inputs=paths, run_folder=False, what="The plan's folder")
    nearest = next(path for path in (place, *place.absolute().parents) if os.path.lexists(path))
    if not nearest.is_dir():
        raise ConfigError(f"--out {place}: {nearest} is no folder. Name another.")
    laid_over: dict[str, Any] = {}
    for layer in recipe_layers(overlay) if overlay else ():
        laid_over = merge(laid_over, read_overlay(layer, base=plan.name), values=TABLES)
    tasks = []
    for name in stage_order(plan):
        planned, stage = plan.stages[name], STAGES[plan.stages[name].run]
        if processes and stage.parallel != "no":
            planned = planned.model_copy(update={"processes": processes})
        if planned.ds_config == AUTO:
            on_cpu = auto != AUTO and planned.job.gpus_per_process == 0
            planned = planned.model_copy(update={"ds_config": "cpu_fp32" if on_cpu else auto})
        recipe = f"{planned.recipe}+{overlay}" if planned.recipe and overlay else planned.recipe
        stated = laid_over if planned.recipe else {}
        own = without_stated(without_other_kinds(planned.set, stated), stated, values=TABLES)
        changes = merge(without_other_kinds(own, asked), asked, values=TABLES)
        changes = changes if stage.sections else {}
        settings = load_recipe(recipe or None, changes)
        config = stage_config(stage, recipe=settings, ds_config=planned.ds_config)
        tasks.append(Task(name, stage, planned, recipe, place / name, config, changes))
        refuse_inputs(
            place / name,
            inputs=paths,
            run_folder=stage.work is not None,
            what=f"Stage {name}'s folder",
        )
    return ResolvedPlan(plan=plan, out_dir=place, given=given, tasks=tasks)
