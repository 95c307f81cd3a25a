"""Ends a stage of a plan at a call that changes state, goes on, and compares with no such end.

``python -m support.crash_points FOLDER`` tries every point, or with ``--part I/N`` one in N, until
the ``--minutes`` are over; it prints a line for each of the ``--stages``.

The run of the plan, its stage and the tasks of its workers are one process, forked from one that
has loaded all code. It is killed before its k-th call, or, where that is a write, after half of it.
With ``--rank``, the plan's run starts two ranks, and the rank of that number is killed.
"""

import argparse
import itertools
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from mmap import mmap
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, get_args
from unittest import mock

from pipeline import cli
from pipeline.artifacts import locks
from pipeline.artifacts.artifact import MANIFEST_NAME, read_manifest
from pipeline.distributed import workers
from pipeline.distributed.world import StopFlag
from pipeline.jobs import launch, runner
from support.forked import _Launched, forking
from support.short_plan import STAGES, write_plan
from support.state_changes import seeing
from support.tiny_plan import in_this_process
from support.tiny_training import read_metrics

LONGEST_SECONDS = 240.0
How = Literal["anew", "asked to stop", "in place"]
"""Whether a stage begins anew, is asked to stop after every update, or replaces an artifact."""


class _InThisProcess(workers.Pool):
    """Workers whose tasks run in the stage's process, where their calls are seen."""

    def __init__(self, _processes: int, shared: bytes) -> None:
        workers._receive(shared)

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done = Future[Any]()
        done.set_result(function(*args, **kwargs))
        return done

    def in_order(self, function: Callable[..., Any], tasks: Iterable[Any]) -> Iterator[Any]:
        return map(function, tasks)


@dataclass(frozen=True)
class Point:
    """Where to end: at call ``number`` of a stage, counted in a rank or in the whole run."""

    stage: str
    number: int | None
    """None to count the calls and end nothing."""
    rank: int | None = None
    how: How = "anew"


def _run(plan: Path, out_dir: Path, point: Point, count_path: Path, log_path: Path) -> None:
    """Run the plan up to a stage, in this process, and end at the point."""
    descriptor = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    counted = mmap(-1, 8)  # shared with ranks

    def meet(act: Callable[[], object]) -> None:
        number = int.from_bytes(counted[:], "little")
        if number == point.number:
            act()
            os.kill(os.getpid(), signal.SIGKILL)
        counted[:] = (number + 1).to_bytes(8, "little")

    def see(name: str, _path: str, half: Callable[[], object]) -> None:
        if point.rank is None or os.environ.get("RANK") == str(point.rank):
            meet(lambda: None)
            if name.endswith("write"):
                meet(half)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(locks, "BEAT_SECONDS", 3600.0))
        stack.enter_context(mock.patch.object(workers, "WorkerPool", _InThisProcess))
        if point.rank is None:
            here = {"launcher": in_this_process}
            stack.enter_context(mock.patch.dict(runner.run_plan.__kwdefaults__, here))
        else:
            forked = SimpleNamespace(Popen=_Launched)
            stack.enter_context(mock.patch.object(launch, "subprocess", forked))
        if point.how == "asked to stop":
            asked = property(lambda _: True, lambda *_: None)
            stack.enter_context(mock.patch.object(StopFlag, "requested", asked, create=True))
            stack.enter_context(mock.patch.object(runner, "MAX_RERUNS", 0))
        stack.enter_context(seeing(out_dir, see))
        code = cli.main(["run", str(plan), "--out", str(out_dir), "--until", point.stage])
    count_path.write_text(str(int.from_bytes(counted[:], "little")))
    sys.stdout.flush()
    os._exit(code)


class Sweep:
    """A plan, what lies in its folder after each stage, and ends at any call of a stage."""

    def __init__(self, folder: Path, *, stages: Iterable[str] = STAGES) -> None:
        self._folder, self.out_dir = folder, folder / "runs"
        folder.mkdir(parents=True, exist_ok=True)
        self._plan = write_plan(folder)
        last = max(STAGES.index(stage) for stage in stages)
        self._kept("").mkdir(parents=True)
        for stage in STAGES[: last + 1]:
            self.undisturbed(Point(stage, None))

    def undisturbed(self, point: Point) -> int:
        """Run a stage to its end, keep the result to compare with, and return its calls."""
        self.restore_before(point)
        code = self._act(point)
        assert code == 0 or point.how == "asked to stop", f"{point}: {code}: {self._said()}"
        if point.how == "anew":
            shutil.rmtree(self._kept(point.stage), ignore_errors=True)
            shutil.copytree(self.out_dir, self._kept(point.stage), symlinks=True)
        return int(self._count_path.read_text())

    def restore_before(self, point: Point) -> None:
        """Put back what lay in the plan's folder before a stage."""
        before = ["", *STAGES][STAGES.index(point.stage)]
        shutil.rmtree(self.out_dir, ignore_errors=True)
        shutil.copytree(self._kept(before), self.out_dir, symlinks=True)
        if point.how == "in place":
            place = self.out_dir / point.stage
            shutil.copytree(self._kept(point.stage) / point.stage, place)
            manifest = json.loads((place / MANIFEST_NAME).read_text())
            manifest["key"] = "of other inputs"
            for made_from in manifest["inputs"].values():
                made_from["digest"] = "of another time"
            (place / MANIFEST_NAME).write_text(json.dumps(manifest))

    def end_and_go_on(self, point: Point) -> tuple[bool, list[str]]:
        """Return whether a stage was ended at a point, and what is wrong after it went on."""
        self.restore_before(point)
        code = self._act(point)
        is_ended = code == -signal.SIGKILL if point.rank is None else code != 0
        problems = ["it hangs"] if code is None else []
        code = self._act(replace(point, number=None, how="anew"))
        if code != 0:
            problems.append(f"then exit code {code}: {self._said()}")
        else:
            problems += self.wrong_after(point)
        return is_ended, [f"{point}: {problem}" for problem in problems]

    def _said(self) -> str:
        return self._log_path.read_text(errors="replace")[-1500:]

    def _act(self, point: Point) -> int | None:
        self._log_path.unlink(missing_ok=True)
        given = (self._plan, self.out_dir, point, self._count_path, self._log_path)
        process = forking().Process(target=_run, args=given)
        process.start()
        process.join(LONGEST_SECONDS)
        if process.exitcode is None:
            process.kill()
            process.join()
            return None
        return process.exitcode

    def wrong_after(self, point: Point) -> list[str]:
        """Return what is left, missing or different after a stage has gone on."""
        expected = self._kept(point.stage)
        found, wanted = names_below(self.out_dir), names_below(expected)
        if found != wanted:
            return [f"left {found - wanted}, misses {wanted - found}"]
        return differences(self.out_dir / point.stage, expected / point.stage)

    @property
    def _count_path(self) -> Path:
        return self._folder / "count"

    @property
    def _log_path(self) -> Path:
        return self._folder / "log"

    def _kept(self, stage: str) -> Path:
        return self._folder / "after" / (stage or "nothing")


def names_below(folder: Path) -> set[str]:
    """Return the relative names of everything below a folder."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


def differences(found: Path, expected: Path) -> list[str]:
    """Return how an artifact differs from one that should be equal but for times."""
    mine, theirs = read_manifest(found), read_manifest(expected)
    if mine is None or theirs is None:
        return [f"{found.name} is not finished"]
    problems = [
        f"{found.name}: {name} differs"
        for name in ("key", "digest")
        if getattr(mine, name) != getattr(theirs, name)
    ]
    for name, record in theirs.files.items():
        ours, reference = found / name, expected / name
        if name.endswith("metrics.jsonl"):
            is_equal = read_metrics(ours) == read_metrics(reference)
        else:  # the bytes themselves: what manifests say of them may be wrong in both
            is_equal = record.is_note or ours.read_bytes() == reference.read_bytes()
        if not is_equal:
            problems.append(f"{found.name}: {name} differs")
    return problems


def _main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--stages", nargs="+", default=STAGES, choices=STAGES)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--minutes", type=float, default=1e6)
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--how", default="anew", choices=get_args(How))
    options = parser.parse_args()
    deadline = time.monotonic() + 60 * options.minutes
    part, parts = map(int, options.part.split("/"))
    sweep = Sweep(options.folder.resolve(), stages=options.stages)
    problems = 0
    for stage in options.stages:
        first = Point(stage, None, options.rank, options.how)
        numbers = range(part, sweep.undisturbed(first), parts)
        done = ends = 0
        try:
            for number in itertools.takewhile(lambda _: time.monotonic() < deadline, numbers):
                is_ended, wrong = sweep.end_and_go_on(replace(first, number=number))
                done, ends, problems = done + 1, ends + is_ended, problems + len(wrong)
                for problem in wrong:
                    print(problem, flush=True)
        finally:
            print(f"{stage}: {done} of {len(numbers)} points, {ends} ends", flush=True)
    print(f"{problems} problems", flush=True)
    return int(problems > 0)


if __name__ == "__main__":
    sys.exit(_main())
