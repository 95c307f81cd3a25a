"""Define a stage, as the table of stages declares it, and the call that runs it.

The code of stage ``clean`` is ``run(call)`` in the module that the table names; it opens the inputs
it is given, and writes exactly one new artifact.
"""

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pipeline.artifacts.artifact import (
    Artifact,
    ArtifactWriter,
    InputRecord,
    Kind,
    check_together,
    new_artifact,
    stage_key,
)
from pipeline.artifacts.corpus import Split
from pipeline.artifacts.manifest import describe_name, run_dir
from pipeline.artifacts.raw_input import RawInput
from pipeline.artifacts.run_folders import Work, stacks_dir
from pipeline.config.ds_config import PER_PASS, UNDECIDING_KEYS, load_ds_config
from pipeline.config.recipe import (
    Recipe,
    chosen_settings,
    setting_changes,
    undeciding,
    without_settings,
)
from pipeline.distributed.world import gather_objects
from pipeline.errors import ConfigError


@dataclass(frozen=True)
class Input:
    """One input of a stage: an artifact of a kind, or raw text."""

    kind: Kind | Literal["raw"]
    help: str
    required: bool = True
    many: bool = False
    """Whether it takes several named artifacts, NAME=DIR each."""
    splits: tuple[Split, ...] = ()
    """Splits of a corpus that the stage reads and that make its result stale; empty: all."""


ORDER = "order"
"""Statistic of an evaluation: its systems in the order given; the first is the baseline."""
EQUALS = "\\="
"""A "=" of a name, as ``NAME=PATH`` has it."""


def problem_of_name(name: str) -> str | None:
    """Return why an artifact among several cannot have a name; None if it can."""
    if "/" not in name:
        fault = describe_name(name)
        return fault and f"the name {name!r} {fault}, and names become directories. Write another."
    dashed = "-".join(filter(None, name.split("/"))) or "name"
    return f"the name {name!r} has a slash, and names become directories. Write {dashed!r}."


def named_path(name: str, path: Path | str) -> str:
    """Return ``NAME=PATH`` as commands take it."""
    return f"{name.replace('=', EQUALS)}={path}"


def split_named_path(text: str) -> tuple[str, str]:
    """Return the name and the path of ``NAME=PATH``; an empty path if there is no "="."""
    name, _, path = text.replace(EQUALS, "\0").partition("=")
    return name.replace("\0", "="), path.replace("\0", EQUALS)


@dataclass(frozen=True)
class Stage:
    """A stage: one command of the command line."""

    name: str
    module: str
    makes: Kind
    help: str
    sections: tuple[str, ...]
    """Sections of the recipe that decide the result, and single settings of other sections
    (``training.resource_thresholds``); the manifest records them."""
    inputs: dict[str, Input] = field(default_factory=dict)
    parallel: Literal["no", "workers", "ranks"] = "no"
    """``workers``: the stage forks its own processes; ``ranks``: a launcher starts it once per
    process."""
    trains: bool = False
    """Whether it trains, and so takes a ds_config."""
    undeciding: tuple[str, ...] = ()
    """Settings of its sections that the manifest records but that do not change the result."""
    needs_recipe: bool = True
    """Whether a recipe must be named for its sections; if not, their defaults apply."""
    command: str = ""
    """Command with the word or option that chooses this stage, for example ``analyze scales``; not
    set: its name."""

    @property
    def called(self) -> str:
        """The words of its command after ``mmnmt``."""
        return self.command or self.name

    @property
    def work(self) -> Work | None:
        """Kind of work that ``OUT.run`` keeps of an interrupted run, if any."""
        if self.name == "make_shards":
            return "sharding"
        if self.parallel == "ranks":
            return "training" if self.trains else "translation"
        return None

    @property
    def spreads_over_mpi(self) -> bool:
        """Whether its tasks can go to ranks of MPI; the tasks of ``upcycle`` write to one disk."""
        return self.parallel == "workers" and self.name != "upcycle"

    def deciding(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Select the settings of a manifest on which the stage's result depends."""
        chosen = chosen_settings(config, (*self.sections, "ds_config"))
        of_machine = (f"ds_config.{key}" for key in UNDECIDING_KEYS)
        return without_settings(chosen, (*undeciding(self.undeciding, config), *of_machine))


def stage_config(stage: Stage, *, recipe: Recipe, ds_config: str) -> dict[str, Any]:
    """Return the settings of a stage as its manifest records them."""
    config = recipe.sections(stage.sections)
    return {**config, "ds_config": load_ds_config(ds_config)} if stage.trains else config


@dataclass(frozen=True)
class StageCall:
    """Everything that a stage is given: settings, opened inputs, where to write."""

    stage: Stage
    recipe: Recipe
    artifacts: Mapping[str, Artifact]
    """Input name → artifact; for inputs that take many, ``input/name`` → artifact."""
    raw: Mapping[str, RawInput]
    """Input name → raw text."""
    out_dir: Path
    records: Mapping[str, InputRecord]
    config: Mapping[str, object]
    """The recipe's sections (and ds_config) as the manifest records them."""
    processes: int = 1
    mpi: bool = False
    """Whether the workers are the ranks of a launcher, for stages with workers."""
    overwrite: bool = False
    profile: tuple[int, int] | None = None
    """First and last update to profile (``--profile``), for stages that train."""
    peak_operations: float | None = field(default=None, compare=False)
    """Operations per second that this rank's device can do, as the stage found; None: unknown."""
    per_pass: int | None = field(default=None, compare=False)
    """Micro-batches that share a pass, as the stage found; None: as the ds_config says."""
    clock: float = field(default_factory=time.monotonic, compare=False)
    """Time at which the stage began, in seconds of the monotonic clock."""

    @property
    def ds_config(self) -> Mapping[str, Any]:
        """The parsed ds_config of a training stage."""
        ds_config = self.config["ds_config"]
        assert isinstance(ds_config, Mapping)
        return ds_config if self.per_pass is None else {**ds_config, PER_PASS: self.per_pass}

    @property
    def stacks_dir(self) -> Path:
        """Folder for the stacks of ranks that hang."""
        return stacks_dir(run_dir(self.out_dir))

    @property
    def key(self) -> str:
        """Key of the stage's output: its settings and the digests of its inputs."""
        return stage_key(
            stage=self.stage.name,
            kind=self.stage.makes,
            config=self.config,
            inputs={name: record.digest for name, record in self.records.items()},
        )

    def open_inputs(self) -> Mapping[str, Artifact]:
        """Compare all files of all inputs with their digests, and return the inputs.

        All ranks call this and share the work. A stage that reads only some files of its inputs
        does without: each file is then compared when it is asked for.

        Raises:
            ConfigError: A rank was given other settings or inputs, as on a node with old files.
        """
        digests = {name: record.digest for name, record in self.records.items()}
        given = gather_objects({**self.config, "inputs": digests})
        for rank, of_rank in enumerate(given):
            if of_rank != given[0]:
                change = setting_changes(given[0], of_rank, every=True)[0]
                raise ConfigError(
                    f"Rank {rank} was given other settings or inputs than rank 0 ({change}). Copy "
                    "the same recipe, ds_config and inputs to all nodes."
                )
        check_together(*self.artifacts.values())
        return self.artifacts

    def new_artifact(
        self, *, wall_seconds: float | None = None
    ) -> AbstractContextManager[ArtifactWriter]:
        """Build the stage's output within the block (``artifacts.artifact.new_artifact``).

        Its wall time counts from the beginning of the call, unless the stage passes the time of all
        attempts.
        """
        return new_artifact(
            self.out_dir,
            kind=self.stage.makes,
            stage=self.stage.name,
            config=self.config,
            inputs=self.records,
            overwrite=self.overwrite,
            clock=self.clock,
            wall_seconds=wall_seconds,
        )

    def many(self, name: str) -> dict[str, Artifact]:
        """Return the artifacts of an input that takes several, by name, in the order given."""
        prefix = f"{name}/"
        return {
            key.removeprefix(prefix): artifact
            for key, artifact in self.artifacts.items()
            if key.startswith(prefix)
        }
