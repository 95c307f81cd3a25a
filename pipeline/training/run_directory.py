"""Manage the run directory of a training stage, ``OUT.run``.

``states/update-000100`` are training states, the last few of which are kept. ``best`` holds the
weights of the best validation so far, ``mean`` the mean of the last states at the end of a run that
makes one, ``metrics.jsonl`` the curves, and ``quarantine.jsonl`` the micro-batches that were left
out, if any (:class:`Quarantine`).

One process group writes the directory at a time. A run resumes from the highest complete state.
When it is done, the directory is removed unless the recipe says otherwise (``saving.keep_states``).

Invariant: a rank of an attempt that was given up and runs on publishes nothing and cannot reach the
files of the next attempt. Each rank checks the lock before it writes its part and before an
artifact is sealed, and the folder in which one is built has the token of the lock in its name.
"""

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as validated_dataclass

from pipeline.artifacts.artifact import (
    Artifact,
    ArtifactWriter,
    FileRecord,
    InputRecord,
    Kind,
    RunRecord,
    open_artifact,
    read_manifest,
    seal_artifact,
    settle_files,
)
from pipeline.artifacts.locks import Lock, held_lock, lock_path, refuse_if_lost, sole_writer
from pipeline.artifacts.manifest import run_dir, updates_of_name
from pipeline.artifacts.places import (
    discard_working,
    files_below,
    make_working,
    refuse_to_overwrite,
    remove_artifact,
    replace_directory,
    restore,
)
from pipeline.artifacts.run_folders import (
    Whole,
    announce_removal,
    change_of_total,
    claim_run_folder,
    leftovers,
    remove_contents,
    remove_emptied,
    run_lock_path,
    state_names,
    states_dir,
    updates_done,
    why_not_to_go_on,
    withdraw_removal,
    working_dir,
)
from pipeline.batching.global_step import MicroBatch
from pipeline.checkpoints.weights import PART_FOLDERS, part_prefix
from pipeline.config.documents import JsonLines
from pipeline.config.ds_config import precision_of
from pipeline.distributed.world import World, all_max, from_rank_zero, gather_objects, on_rank_zero
from pipeline.errors import ArtifactError, CheckpointError, UserError, describe_os_error
from pipeline.training.optim import learning_rate
from pipeline.training.settings import OptimizerConfig


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
        self._out_dir, self.directory = out_dir, run_dir(out_dir)
        self.states_dir = states_dir(self.directory)
        self.best_dir = self.directory / "best"
        self.mean_dir = self.directory / "mean"
        self.metrics_path = self.directory / "metrics.jsonl"
        self.quarantine_path = self.directory / "quarantine.jsonl"
        self._stage, self._config, self._inputs = stage, config, inputs
        self._world = world
        self._pending: _PendingWrite | None = None
        self._lock: Lock | None = None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Claim the directory under the lock of the output, which a command holds already.

        All ranks call this and know the lock of rank 0.

        Raises:
            ArtifactError: another run holds it, or it is not a run's folder.
        """
        with ExitStack() as stack:

            def claim() -> Lock:
                held = held_lock(lock_path(self._out_dir))
                lock = held or stack.enter_context(sole_writer(self._out_dir))
                claim_run_folder(self.directory, work="training")
                return lock

            self._lock = on_rank_zero(claim, path=self.directory, error=ArtifactError)
            stack.callback(setattr, self, "_lock", None)
            yield

    def resume_from(self) -> Artifact | None:
        """Return the highest complete training state of this run, or None to begin.

        Unfinished leftovers are removed. Settings or inputs with which the state cannot be
        continued (``artifacts/run_folders.py``) are an error that names the difference: states
        are set aside before a run begins, or never. A changed number of updates is printed.
        """
        name = on_rank_zero(self._newest_state, path=self.directory, error=CheckpointError)
        return open_artifact(self.states_dir / name, kind="training_state") if name else None

    def _newest_state(self) -> str | None:
        withdraw_removal(self.directory)
        self._remove_leftovers()
        names = self.state_names()
        for place in self.states_dir.glob("update-*"):
            if place.name not in names:  # else it would be in the way only after its updates
                refuse_to_overwrite(place, overwrite=True)
        if not names:
            self._remove_results()
            return None
        newest = names[-1]
        state = open_artifact(self.states_dir / newest, kind="training_state")
        digests = {name: record.digest for name, record in self._inputs.items()}
        change = why_not_to_go_on(state, config=self._config, digests=digests)
        if change is None:
            self._say_change_of_total(state)
            self._say_change_of_arithmetic(state)
            return newest
        raise CheckpointError(
            f"{self.directory} holds a run with other settings or inputs ({change}). Continue "
            "with those, name another --out, or pass --overwrite, which keeps that run next to it "
            "and begins anew."
        )

    def _remove_results(self) -> None:
        for place in filter(os.path.lexists, (self.best_dir, self.mean_dir)):
            remove_artifact(place)
        for path in (self.metrics_path, self.quarantine_path):
            path.unlink(missing_ok=True)

    def _say_change_of_total(self, state: Artifact) -> None:
        """Print that a run continues to another number of updates, and its learning rates."""
        change = change_of_total(state, config=self._config)
        if change is not None:
            unit = _unit_of_updates(self._config)
            of_unit = "" if unit == "tokens" else f" of {unit}"
            print(
                f"{self.directory}: goes on after update {change['after']:,} to "
                f"{change['to']:,} updates{of_unit} instead of {change['from']:,}; "
                f"{_describe_rates(self._config, change)}",
                file=sys.stderr,
            )

    def _say_change_of_arithmetic(self, state: Artifact) -> None:
        """Print that a run continues in another precision, which rounds updates otherwise."""
        before, now = map(_arithmetic, (state.manifest.config, self._config))
        if before != now:
            print(
                f"{self.directory}: goes on after update {updates_done(state):,} in {now} instead "
                f"of {before}, which rounds updates otherwise; pass the earlier --ds-config to "
                "keep its precision",
                file=sys.stderr,
            )

    def best_after(self, update: int) -> dict[str, Any]:
        """Return update and perplexity of the kept weights if they are not older than ``update``.

        An attempt that ended before it saved a state may have kept them. If it validated at other
        updates, or trained with other learning rates, the run may not reach those weights again.
        """
        manifest = read_manifest(self.best_dir)
        found = manifest.statistics if manifest else {}
        if found.get("update", -1) < update:
            return {}
        return {"best_update": found["update"], "best_perplexity": found["perplexity"]}

    def _remove_leftovers(self) -> None:
        """Remove what a killed write left of a state or of kept weights, and nothing else."""
        for leftover in leftovers(self.directory):
            restore(leftover.with_name(leftover.name[1:].rpartition(".")[0]))
            if leftover.is_dir():
                discard_working(leftover)
                print(f"{leftover}: unfinished, removed", file=sys.stderr)

    def state_dir(self, update: int) -> Path:
        """Return the directory of the state after an update."""
        return self.states_dir / f"update-{update:07d}"

    def states_after(self) -> list[int]:
        """Return the updates after which there are complete states; all ranks call this."""
        found = map(updates_of_name, self.state_names() if self._world.rank == 0 else ())
        return from_rank_zero(sorted(found))

    def state_names(self) -> list[str]:
        """Return the names of the complete states, oldest first."""
        return state_names(self.directory)

    def write(
        self,
        out_dir: Path,
        *,
        kind: Kind,
        write: Callable[[ArtifactWriter], None],
        in_background: bool = False,
    ) -> None:
        """Write an artifact together: every rank adds and hashes its files, rank 0 seals it.

        In the background, it is there once ``publish_written`` or ``wait`` has seen all ranks done.

        Raises:
            ArtifactError: on all ranks, if any of them could not write (this or an earlier one).
        """
        self.wait()
        pending = _PendingWrite(
            out_dir, kind=kind, rank=self._world.rank, write=write, lock=self._lock
        )
        # Together, since writing may be collective: a rank that alone knew better would be missing.
        pending.check()
        lost = next(filter(None, gather_objects(pending.problem)), None)

        def begin() -> str | None:
            if lost is None:
                pending.begin()
            return lost

        self._agree(begin)
        self._pending = pending
        if in_background:
            pending.start()
        else:
            pending.run()
            self._publish(pending)

    def publish_written(self) -> None:
        """Publish a background write if all ranks are done; all ranks call this."""
        if self._pending is None:
            return
        running = torch.tensor(int(self._pending.is_running()))
        if not all_max(running).item():
            self._publish(self._pending)

    def wait(self) -> None:
        """Wait for a background write and seal it; all ranks call this."""
        if self._pending is not None:
            self._pending.join()
            self._publish(self._pending)

    def _publish(self, pending: "_PendingWrite") -> None:
        self._pending = None
        pending.check()
        results = gather_objects((pending.problem, pending.records))
        problem = next((entry for entry, _ in results if entry), None)
        files = {name: record for _, records in results for name, record in records.items()}

        def seal() -> str | None:
            if problem is None:
                self._refuse_if_lost()
                pending.seal(files, stage=self._stage, config=self._config, inputs=self._inputs)
            return problem

        self._agree(seal, on_failure=pending.discard)

    def _refuse_if_lost(self) -> None:
        if self._lock is not None:
            self._lock.refuse_if_lost()

    def _agree(
        self,
        action: Callable[[], str | None],
        *,
        on_failure: Callable[[], None] | None = None,
    ) -> None:
        """Let rank 0 act; its failure, returned or raised, is an error on all ranks."""
        problem: str | None = None
        if self._world.rank == 0:
            try:
                problem = action()
            except OSError as error:
                problem = describe_os_error(error)
            except UserError as error:
                problem = str(error)
            if problem and on_failure is not None:
                on_failure()
        problem = from_rank_zero(problem)
        if problem:
            raise ArtifactError(
                f"Nothing could be written to {self.directory} ({problem}): what was saved before "
                "is kept. Mend the cause and run again."
            )

    def prune(self, *, keep_last: int, updates_kept: Collection[int] = ()) -> None:
        """Remove all states but the newest and those after the updates to be kept.

        A state that contains files of the user stays.
        """
        if self._world.rank == 0:
            self._refuse_if_lost()
            kept = {self.state_dir(update).name for update in updates_kept}
            for name in self.state_names()[:-keep_last]:
                if name not in kept:
                    with suppress(UserError, OSError):
                        remove_artifact(self.states_dir / name)

    def remove_mean(self) -> None:
        """Remove the mean once the artifact exists; rank 0 only.

        It stays if it cannot be removed.
        """
        self._refuse_if_lost()
        with suppress(UserError, OSError):
            remove_artifact(self.mean_dir)

    def announce_removal(self, *, key: str) -> None:
        """Record that nothing here is needed once the artifact with that key exists; rank 0 only.

        The next start of the stage finishes the removal if this process does not.
        """
        self._refuse_if_lost()
        announce_removal(self.directory, key=key)

    def remove(self) -> None:
        """Remove what training wrote here, and the directory if it is then empty; rank 0 only.

        The artifact exists already: what cannot be removed is printed, and no error.
        """
        self._refuse_if_lost()
        try:
            remove_contents(self.directory)
            problem = remove_emptied(self.directory)
        except OSError as error:
            problem = f"{self.directory} could not be removed ({describe_os_error(error)})."
        if problem:
            print(problem, file=sys.stderr, flush=True)


def _arithmetic(config: Mapping[str, Any]) -> str:
    """Return the types in which a run computes and accumulates gradients."""
    ds_config = config.get("ds_config", {})
    precision = precision_of(ds_config)
    accumulates_in = ds_config.get("data_types", {}).get("grad_accum_dtype") or precision
    return f"{precision} (gradients accumulated in {accumulates_in})"


class _PendingWrite:
    """One artifact on its way to disk, as seen by one rank."""

    def __init__(
        self,
        out_dir: Path,
        *,
        kind: Kind,
        rank: int,
        write: Callable[[ArtifactWriter], None],
        lock: Lock | None,
    ) -> None:
        self.problem: str | None = None
        self.records: dict[str, FileRecord] = {}
        self._out_dir, self._kind, self._rank, self._write = out_dir, kind, rank, write
        self._lock = lock
        self._writer = ArtifactWriter(working_dir(out_dir, lock))
        self._started = datetime.now(UTC).isoformat(timespec="seconds")
        self._clock = time.monotonic()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Create the directory, on rank 0, before any rank writes."""
        make_working(self._writer.directory)

    def start(self) -> None:
        self._thread = threading.Thread(target=self.run, name=f"write {self._out_dir.name}")
        self._thread.start()

    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def run(self) -> None:
        """Write this rank's files, hash them and force them to disk."""
        directory = self._writer.directory
        try:
            self._write(self._writer)
            files = filter(self._is_mine, files_below(directory))
            self.records = settle_files(self._writer, files)
        except OSError as error:
            self.problem = f"rank {self._rank}: {describe_os_error(error)}"
        except Exception as error:  # a bug; the other ranks wait for this rank's result
            traceback.print_exc()
            self.problem = f"rank {self._rank}: {type(error).__name__}: {error}"

    def check(self) -> None:
        """Note as a problem of this rank that the lock is lost.

        It explains a failed write: whoever took the lock removed the working folder.
        """
        loss = self._lock.loss() if self._lock is not None else None
        if loss is not None:
            self.problem = f"rank {self._rank}: {loss}"

    def _is_mine(self, path: Path) -> bool:
        """Return whether this rank wrote a file: its parts, and on rank 0 all other files."""
        if path.parent.name in PART_FOLDERS:
            return path.name.startswith(part_prefix(self._rank))
        return self._rank == 0

    def seal(
        self,
        files: Mapping[str, FileRecord],
        *,
        stage: str,
        config: Mapping[str, object],
        inputs: Mapping[str, InputRecord],
    ) -> None:
        """Write the manifest and move the artifact into place; rank 0 only."""
        wall_seconds = round(time.monotonic() - self._clock, 3)
        seal_artifact(
            self._writer,
            kind=self._kind,
            stage=stage,
            config=config,
            inputs=inputs,
            run=RunRecord(started=self._started, wall_seconds=wall_seconds),
            files=files,
        )
        replace_directory(self._writer.directory, self._out_dir)

    def discard(self) -> None:
        discard_working(self._writer.directory)


def _unit_of_updates(config: Mapping[str, Any]) -> str:
    return str(config["training"].get("updates_of", "tokens"))


def _describe_rates(config: Mapping[str, Any], change: Mapping[str, int]) -> str:
    """Describe how another number of updates changes the learning rate from here on."""
    optimizer = OptimizerConfig.model_validate(config.get("optimizer", {}))
    update = max(change["after"], optimizer.warmup_updates) + 1
    before, now = (
        learning_rate(optimizer, update, total_updates=change[total]) for total in ("from", "to")
    )
    if before == now:
        return f"the {optimizer.schedule} schedule of the learning rate does not depend on them"
    text = f"the {optimizer.schedule} schedule of the learning rate ends at the new number"
    if _unit_of_updates(config) != "tokens":
        return text  # the model's own numbers of updates are not known yet
    return f"{text}: at update {update:,} the rate is {now:.3g} instead of {before:.3g}"


MOST_IN_A_ROW = 10
"""Updates in a row without some of their micro-batches, of which the last ends training."""
SHOWN_LINES = 5
"""Most lines per direction that a message lists."""


@validated_dataclass(frozen=True)
class LeftOut:
    """A micro-batch that an update leaves out."""

    update: Whole
    micro_batch: Whole
    labels: Whole
    lines: Mapping[str, Sequence[Whole]]
    """Direction → lines, from 1, of the pair's shards."""

    @property
    def described(self) -> str:
        """``micro-batch 3 (de-en lines 7, 12; ru-en line 1)``."""
        parts = [_described(direction, lines) for direction, lines in self.lines.items()]
        return f"micro-batch {self.micro_batch} ({'; '.join(parts)})"


def _described(direction: str, lines: Sequence[int]) -> str:
    shown = ", ".join(map(str, lines[:SHOWN_LINES]))
    more = f" and {len(lines) - SHOWN_LINES} more" if len(lines) > SHOWN_LINES else ""
    return f"{direction} {'line' if len(lines) == 1 else 'lines'} {shown}{more}"


def left_out(plan: MicroBatch, *, update: int, micro_batch: int, pairs: Sequence[str]) -> LeftOut:
    """Return the record of a micro-batch; ``pairs`` are the names of its pair numbers."""
    lines: dict[str, list[int]] = {}
    for pair, is_reverse, line in zip(plan.pair_B, plan.reverse_B, plan.line_B, strict=True):
        first, second = pairs[pair].split("-")
        direction = f"{second}-{first}" if is_reverse else f"{first}-{second}"
        lines.setdefault(direction, []).append(int(line) + 1)
    found = {direction: sorted(numbers) for direction, numbers in sorted(lines.items())}
    return LeftOut(update, micro_batch, plan.num_labels, found)


class Quarantine:
    """The micro-batches that a run leaves out; all ranks call its methods together.

    ``quarantine.jsonl`` has one JSON object per line: the update, the micro-batch's index in it,
    its labels, and its lines by direction, counted from 1 in the order of the shards. It is on disk
    before the update is made without them, so that a run that is resumed before that update makes
    the same one.
    """

    def __init__(self, path: Path, *, world: World) -> None:
        self.path = path
        self.entries: list[LeftOut] = []
        self._world = world
        self._file = JsonLines(path)

    def read(self) -> None:
        """Read what earlier attempts at the run recorded.

        Raises:
            CheckpointError: on all ranks, where the file cannot be read or is none of a run.
        """
        self.entries = on_rank_zero(self._read, path=self.path, error=CheckpointError)

    def of_update(self, update: int) -> frozenset[int]:
        """Return the indices of an update's micro-batches that are left out."""
        return frozenset(one.micro_batch for one in self.entries if one.update == update)

    def would_end_training(self, update: int) -> bool:
        """Return whether each of the updates right before this one lacks some micro-batch."""
        return all(map(self.of_update, range(update - MOST_IN_A_ROW + 1, update)))

    def add(self, entries: Sequence[LeftOut]) -> None:
        """Record micro-batches, on disk when this returns, and print them.

        Raises:
            CheckpointError: on all ranks, where that cannot be written.
        """
        on_rank_zero(lambda: self._write(entries), path=self.path, error=CheckpointError)
        self.entries += entries
        if self._world.rank == 0:
            for one in entries:
                print(
                    f"update {one.update}: {one.described} is left out, since its gradient is not "
                    f"finite; see {self.path}",
                    file=sys.stderr,
                )

    def _read(self) -> list[LeftOut]:
        if not self.path.is_file():
            return self.entries
        # removes a last line that a killed run left incomplete
        self._file.truncate_after(sys.maxsize)
        reader = TypeAdapter(LeftOut)
        try:
            return [reader.validate_python(record) for record in self._file.read()]
        except ValidationError as error:
            raise CheckpointError(
                f"{self.path} has a line that names no micro-batch. Restore the file, or begin the "
                "run anew."
            ) from error

    def _write(self, entries: Sequence[LeftOut]) -> None:
        refuse_if_lost(run_lock_path(self.path.parent))
        for one in entries:
            self._file.write(vars(one))
        with self.path.open("rb") as stream:
            os.fsync(stream.fileno())
