"""Stages: what the table declares of one, and what one is told when it runs.

The code of stage ``clean`` is ``run(call)`` in the module that the table names. It opens the inputs
of the :class:`StageCall` and writes exactly one new artifact.
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
    new_artifact,
    stage_key,
)
from pipeline.artifacts.corpus import Split
from pipeline.artifacts.manifest import undeciding, without_settings
from pipeline.artifacts.places import Work
from pipeline.artifacts.raw_input import RawInput
from pipeline.config.ds_config import UNDECIDING_KEYS, load_ds_config
from pipeline.config.recipe import Recipe, chosen_settings


@dataclass(frozen=True)
class Input:
    """One input of a stage: an artifact of a kind, or raw text."""

    kind: Kind | Literal["raw"]
    help: str
    required: bool = True
    many: bool = False
    """Takes several named artifacts, NAME=DIR each."""
    splits: tuple[Split, ...] = ()
    """Of a corpus, all that the stage is given, and that makes its result stale; none: all."""


def problem_of_name(name: str) -> str:
    """Return why an artifact among several cannot have a name; empty where it can."""
    if "/" not in name:
        return ""
    return f"the name {name!r} has a slash, and names become folders: write {_without(name)!r}."


def _without(name: str) -> str:
    """Return the name with dashes in place of slashes."""
    return "-".join(part for part in name.split("/") if part) or "name"


@dataclass(frozen=True)
class Stage:
    """One verb of the command line."""

    name: str
    module: str
    makes: Kind
    help: str
    sections: tuple[str, ...]
    """Sections of the recipe that decide the result, and single settings of other sections
    (``training.resource_thresholds``): what stands in the manifest."""
    inputs: dict[str, Input] = field(default_factory=dict)
    parallel: Literal["no", "workers", "ranks"] = "no"
    """``workers``: the stage forks its own; ``ranks``: started once per process by a launcher."""
    trains: bool = False
    """Takes a ds_config."""
    undeciding: tuple[str, ...] = ()
    """Settings of its sections that stand in the manifest but change nothing in the result."""
    needs_recipe: bool = True
    """Where it has sections; False: their defaults serve where no recipe is named."""

    @property
    def work(self) -> Work | None:
        """What it keeps in ``OUT.run`` of an interrupted run, where it does."""
        if self.name == "upcycle":
            return "assembly"
        if self.name == "make_shards":
            return "sharding"
        if self.parallel == "ranks":
            return "training" if self.trains else "translation"
        return None

    def deciding(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Of the settings in a manifest, those on which the stage's result depends."""
        chosen = chosen_settings(config, (*self.sections, "ds_config"))
        of_machine = (f"ds_config.{key}" for key in UNDECIDING_KEYS)
        return without_settings(chosen, (*undeciding(self.undeciding, config), *of_machine))


def stage_config(stage: Stage, *, recipe: Recipe, ds_config: str) -> dict[str, Any]:
    """The settings of a stage as they stand in its manifest."""
    config = recipe.sections(stage.sections)
    return {**config, "ds_config": load_ds_config(ds_config)} if stage.trains else config


@dataclass(frozen=True)
class StageCall:
    """All that a stage is told: settings, opened inputs, where to write."""

    stage: Stage
    recipe: Recipe
    artifacts: Mapping[str, Artifact]
    """Input name → artifact; for inputs that take many, ``input/name`` → artifact."""
    raw: Mapping[str, RawInput]
    """Input name → raw text."""
    out_dir: Path
    records: Mapping[str, InputRecord]
    config: Mapping[str, object]
    """The recipe's sections (and ds_config) as they stand in the manifest."""
    processes: int = 1
    mpi: bool = False
    """Whether the workers are the ranks of a launcher, where the stage has such."""
    overwrite: bool = False
    clock: float = field(default_factory=time.monotonic, compare=False)
    """When the stage began, in seconds of the monotonic clock."""

    @property
    def ds_config(self) -> Mapping[str, Any]:
        """Of a training stage: how the machine is used, read once, when the call was made."""
        ds_config = self.config["ds_config"]
        assert isinstance(ds_config, Mapping)
        return ds_config

    @property
    def key(self) -> str:
        """Of the stage's output: its settings and the digests of its inputs."""
        return stage_key(
            stage=self.stage.name,
            kind=self.stage.makes,
            config=self.config,
            inputs={name: record.digest for name, record in self.records.items()},
        )

    def new_artifact(
        self, *, wall_seconds: float | None = None
    ) -> AbstractContextManager[ArtifactWriter]:
        """The stage's output, built within the block (``artifacts.artifact.new_artifact``).

        Its wall time counts from the beginning of the call, unless the stage knows of earlier
        attempts and says how long all of them took.
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
        """The artifacts of an input that takes several, by name, in the order given."""
        prefix = f"{name}/"
        return {
            key.removeprefix(prefix): artifact
            for key, artifact in self.artifacts.items()
            if key.startswith(prefix)
        }
