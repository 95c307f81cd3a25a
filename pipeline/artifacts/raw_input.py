"""Raw inputs, which no stage made: files and folders, or a data set of the Hugging Face hub.

A manifest records files by their digest, and a data set by its commit, which identifies the text
without fetching it.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from pipeline.artifacts.digests import raw_digest
from pipeline.artifacts.manifest import InputRecord, json_digest
from pipeline.errors import ConfigError

HUB = "hub:"
"""Prefix of an option's value that names a data set of the hub."""

_DATASET = re.compile(r"hub:(?P<name>[\w.-]+/[\w.-]+)@(?P<revision>[0-9a-f]{40})", re.ASCII)


@dataclass(frozen=True)
class RawPaths:
    """Folders or files on this machine, in the order given."""

    paths: tuple[Path, ...]

    @property
    def values(self) -> tuple[str, ...]:
        """Return the values of the option that name these paths."""
        return tuple(map(str, self.paths))

    def named(self, name: str) -> dict[str, Path]:
        """Return the paths by input name: ``name``, or ``name/1``, ``name/2``, … of several."""
        if len(self.paths) == 1:
            return {name: self.paths[0]}
        return {f"{name}/{number}": path for number, path in enumerate(self.paths, start=1)}

    def records(self, name: str) -> dict[str, InputRecord]:
        """Return the manifest's record of each path by input name.

        Raises:
            ArtifactError: A path does not exist.
        """
        return {
            key: InputRecord(kind="raw", path=str(path.absolute()), digest=raw_digest(path))
            for key, path in self.named(name).items()
        }

    def only_path(self) -> Path:
        """Return the single path.

        Raises:
            ConfigError: There are several.
        """
        if len(self.paths) > 1:
            raise ConfigError(
                f"{', '.join(self.values)} are several paths where one is wanted. Name one."
            )
        return self.paths[0]


@dataclass(frozen=True)
class HubDataset:
    """Data set of the Hugging Face hub at one commit."""

    name: str
    """Name of the data set, ``OWNER/NAME``."""
    revision: str
    """Commit, all 40 hexadecimal digits."""

    def __str__(self) -> str:
        return f"{HUB}{self.name}@{self.revision}"

    @property
    def values(self) -> tuple[str, ...]:
        """Return the values of the option that name this data set."""
        return (str(self),)

    def named(self, name: str) -> dict[str, Path]:
        """Return no paths, because nothing of it on this machine could be overwritten."""
        del name
        return {}

    def records(self, name: str) -> dict[str, InputRecord]:
        """Return the manifest's record by input name, without fetching anything."""
        return {name: InputRecord(kind="raw", path=str(self), digest=json_digest(str(self)))}

    def only_path(self) -> Path:
        """Refuse, because a data set has no path.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(f"{self} is a data set of the hub where a path is wanted. Name a path.")


RawInput: TypeAlias = RawPaths | HubDataset


def raw_input(values: Sequence[str]) -> RawInput:
    """Return the raw input that the values of an option name.

    Raises:
        ConfigError: A data set of the hub that is not pinned or not alone, or one path twice.
    """
    datasets = [value for value in values if value.startswith(HUB)]
    if not datasets:
        return _raw_paths(values)
    found = _DATASET.fullmatch(datasets[0])
    if found is None:
        raise ConfigError(
            f"{datasets[0]} does not say which text it is. Write hub:OWNER/NAME@REVISION, where "
            "REVISION is the full commit of 40 digits (branches and tags can move)."
        )
    if len(values) > 1:
        raise ConfigError(
            f"{datasets[0]} is one of {len(values)} raw inputs. Name one data set of the hub "
            "alone, or paths."
        )
    return HubDataset(name=found["name"], revision=found["revision"])


def _raw_paths(values: Sequence[str]) -> RawPaths:
    paths = tuple(map(Path, values))
    repeated = [str(path) for path in paths if paths.count(path) > 1]
    if repeated:
        raise ConfigError(f"{repeated[0]} is named twice. Name each path once.")
    return RawPaths(paths)
