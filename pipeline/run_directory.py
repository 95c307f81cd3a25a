"""The working folder of a training stage, ``OUT.run``: training states, best weights, metrics.

``states/update-000100`` are training states, of which the last few are kept; ``best`` holds the
weights of the best validation so far; ``metrics.jsonl`` the curves. One process group writes it at
a time. A run resumes from the highest complete state.
"""

import errno
import fcntl
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from pipeline.artifacts import (
    Artifact,
    ArtifactWriter,
    InputRecord,
    Kind,
    RunRecord,
    open_artifact,
    read_manifest,
    replace_directory,
    seal_artifact,
)
from pipeline.distributed import World, from_rank_zero, gather_objects, wait_for_all
from pipeline.errors import ArtifactError, CheckpointError, UserError


class RunDirectory:
    """Paths and bookkeeping of one training run, shared by all its ranks."""

    def __init__(
        self,
        out_dir: Path,
        *,
        stage: str,
        config: Mapping[str, object],
        inputs: Mapping[str, InputRecord],
        world: World,
    ) -> None:
        self.directory = out_dir.parent / f"{out_dir.name}.run"
        self.states_dir = self.directory / "states"
        self.best_dir = self.directory / "best"
        self.metrics_path = self.directory / "metrics.jsonl"
        self._stage, self._config, self._inputs = stage, config, inputs
        self._world = world

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder for this run; it is released when the process ends, however it ends.

        Raises:
            ArtifactError: another run holds it.
        """
        stream: IO[str] | None = None
        problem: str | None = None
        if self._world.rank == 0:
            self.directory.mkdir(parents=True, exist_ok=True)
            stream = (self.directory / "lock").open("a+")
            problem = _lock(stream, self.directory)
        problem = from_rank_zero(problem)
        if problem:
            raise ArtifactError(problem)
        try:
            yield
        finally:
            if stream is not None:
                stream.close()

    def resume_from(self, *, overwrite: bool) -> Artifact | None:
        """The highest complete training state of this very run, or None to begin.

        Unfinished leftovers are removed. A state of other settings or inputs is an error that
        names the difference, or is removed with ``overwrite``.
        """
        name: str | None = None
        problem: str | None = None
        if self._world.rank == 0:
            try:
                name = self._newest_state(overwrite=overwrite)
            except UserError as error:
                problem = str(error)
        name, problem = from_rank_zero((name, problem))
        if problem:
            raise CheckpointError(problem)
        return open_artifact(self.states_dir / name, kind="training_state") if name else None

    def _newest_state(self, *, overwrite: bool) -> str | None:
        for leftover in [*self.directory.glob(".*"), *self.states_dir.glob(".*")]:
            if leftover.is_dir():
                print(f"{leftover}: unfinished, removed", file=sys.stderr)
                shutil.rmtree(leftover)
        names = self.state_names()
        if not names:
            shutil.rmtree(self.best_dir, ignore_errors=True)
            self.metrics_path.unlink(missing_ok=True)
            return None
        newest = names[-1]
        manifest = open_artifact(self.states_dir / newest, kind="training_state").manifest
        change = describe_change(
            without_topology(manifest.config), without_topology(self._config)
        ) or describe_change(
            {name: record.digest for name, record in manifest.inputs.items()},
            {name: record.digest for name, record in self._inputs.items()},
        )
        if change is None:
            return newest
        if not overwrite:
            raise CheckpointError(
                f"{self.directory} holds a run with other settings or inputs ({change}): continue "
                "with those, name another --out, or pass --overwrite to begin anew."
            )
        print(f"{self.directory}: begun anew, since {change}", file=sys.stderr)
        shutil.rmtree(self.states_dir)
        shutil.rmtree(self.best_dir, ignore_errors=True)
        self.metrics_path.unlink(missing_ok=True)
        return None

    def state_names(self) -> list[str]:
        """Names of the complete states, oldest first."""
        if not self.states_dir.is_dir():
            return []
        found = self.states_dir.iterdir()
        return sorted(entry.name for entry in found if read_manifest(entry) is not None)

    def write(self, out_dir: Path, *, kind: Kind, write: Callable[[ArtifactWriter], None]) -> None:
        """Write an artifact together: every rank adds its files, rank 0 seals it.

        Raises:
            ArtifactError: on all ranks, if any of them could not write.
        """
        temporary_dir = out_dir.parent / f".{out_dir.name}.unfinished"
        started, clock = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
        if self._world.rank == 0:
            shutil.rmtree(temporary_dir, ignore_errors=True)
            temporary_dir.mkdir(parents=True)
        wait_for_all()
        writer = ArtifactWriter(temporary_dir)
        self._together(lambda: write(writer), temporary_dir, out_dir)
        if self._world.rank == 0:
            seal = RunRecord(started=started, wall_seconds=round(time.monotonic() - clock, 3))

        def finish() -> None:
            if self._world.rank == 0:
                seal_artifact(
                    writer,
                    kind=kind,
                    stage=self._stage,
                    config=self._config,
                    inputs=self._inputs,
                    run=seal,
                )
                replace_directory(temporary_dir, out_dir)

        self._together(finish, temporary_dir, out_dir)

    def _together(self, action: Callable[[], None], temporary_dir: Path, out_dir: Path) -> None:
        """Run an action on all ranks; a failure of one is an error on all."""
        problem: str | None = None
        try:
            action()
        except OSError as error:
            reason = "no space is left" if error.errno == errno.ENOSPC else str(error)
            problem = f"rank {self._world.rank}: {reason}"
        problems = [entry for entry in gather_objects(problem) if entry]
        if problems:
            if self._world.rank == 0:
                shutil.rmtree(temporary_dir, ignore_errors=True)
            raise ArtifactError(
                f"{out_dir} could not be written ({problems[0]}): what was saved before is kept; "
                "make room and run again."
            )

    def prune(self, *, keep_last: int) -> None:
        """Remove all but the newest states."""
        if self._world.rank == 0:
            for name in self.state_names()[:-keep_last]:
                shutil.rmtree(self.states_dir / name)


def without_topology(config: Mapping[str, object]) -> dict[str, object]:
    """The settings that decide a run's result: a run may resume on other ranks or ZeRO stages."""
    kept = {key: value for key, value in config.items() if key != "ds_config"}
    training = kept.get("training")
    if isinstance(training, Mapping):
        kept["training"] = {k: v for k, v in training.items() if k != "expert_parallel_size"}
    return kept


def describe_change(old: Mapping[str, object], new: Mapping[str, object]) -> str | None:
    """The first setting that differs, as ``training.updates: 10 → 20``; None if none does."""
    for key in sorted({*old, *new}):
        before, after = old.get(key), new.get(key)
        if before == after:
            continue
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            return f"{key}.{describe_change(before, after)}"
        return f"{key}: {before} → {after}"
    return None


def link_or_copy(source: Path, target: Path) -> None:
    """A hard link where the file system has them, a copy otherwise."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _lock(stream: IO[str], directory: Path) -> str | None:
    """Take the lock and sign it; the sentence to refuse with where it is taken."""
    for _ in range(20):
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            time.sleep(0.25)
            continue
        stream.truncate(0)
        stream.write(f"process {os.getpid()} on {os.uname().nodename}\n")
        stream.flush()
        return None
    stream.seek(0)
    holder = stream.read().strip() or "another process"
    return f"{directory} is being written by {holder}: wait for it, or stop it."
