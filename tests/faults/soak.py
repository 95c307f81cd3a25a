"""Signals any process of a running plan at random, starts the plan again, and compares the result.

``PYTHONPATH=.:tests python tests/faults/soak.py --minutes N --seed S`` prints one line at its end,
also if it is asked to end, and exits with 1 if a run hung, a process was left, an artifact was lost
or is another one, the last run failed, or no plan was finished and compared. The minutes include
the undisturbed plan; when they are over, no signal is sent, and the plan goes on to its end.
"""

import argparse
import ctypes
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

from support.crash_points import differences, names_below
from support.forked import forking, start_command
from support.short_plan import STAGES, write_plan

from pipeline.artifacts.artifact import MANIFEST_NAME
from pipeline.artifacts.run_folders import state_names

SIGNALS = (signal.SIGKILL,) * 4 + (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGSTOP)
LONGEST_SECONDS = 600.0
"""Seconds without a new file or an end after which a run hangs."""
LEAVING_SECONDS = 60.0
"""Seconds in which every process has ended after the plan's."""
FAULTS = ("hangs", "left", "lost", "differences", "failures")
"""Counts of what must not happen."""
_PR_SET_CHILD_SUBREAPER = 36


def children_of(parent: int) -> list[int]:
    """Return the processes below one, zombies left out, nearest first."""
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, its_parent = path.read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                parents.setdefault(int(its_parent), []).append(int(path.parent.name))
    found = parents.get(parent, [])
    for process in found:
        found.extend(parents.get(process, []))
    return found


def kill(processes: Iterable[int]) -> None:
    for number in processes:
        with suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)


class Soak:
    """One plan, its undisturbed result, and what was met so far."""

    def __init__(self, folder: Path, counts: Counter[str], *, seed: int) -> None:
        self._random, self._plan = random.Random(seed), write_plan(folder)
        self._out_dir, self._expected = folder / "runs", folder / "undisturbed"
        self._spared: set[int] = set()
        self.counts, began = counts, time.monotonic()
        self._start(self._expected).join(LONGEST_SECONDS)
        assert (self._expected / STAGES[-1] / MANIFEST_NAME).is_file(), "it failed undisturbed"
        self._longest_wait = (time.monotonic() - began) / 8
        """Seconds between two signals at most, if each run makes an artifact."""
        self._made: set[str] = set()
        self._trained: dict[str, str] = {}
        self._in_vain = 0
        """Runs since the last that made an artifact."""

    def _start(self, out_dir: Path) -> BaseProcess:
        process = start_command(["run", str(self._plan), "--out", str(out_dir)])
        # The server that forks, and what keeps track of its semaphores, are no part of the plan.
        self._spared = set(children_of(os.getpid())) - {process.pid, *children_of(process.pid or 0)}
        return process

    def disturb_until(self, deadline: float) -> None:
        """Start the plan again and again, each time with signals; leave the last in peace."""
        is_last = False
        while not is_last:
            is_last = time.monotonic() >= deadline
            self.counts["resumes" if self._out_dir.exists() else "beginnings"] += 1
            process = self._start(self._out_dir)
            while process.is_alive() and time.monotonic() < deadline:
                self._wait_for_moment(process, deadline)
                if process.is_alive() and time.monotonic() < deadline:
                    self._signal_one(process)
            self._end(process)
            self._look_for_losses()
            if process.exitcode == 0:
                self._compare()
                is_last = time.monotonic() >= deadline
            elif is_last:  # no signal was sent to it
                self.counts["failures"] += 1

    def _wait_for_moment(self, process: BaseProcess, deadline: float) -> None:
        """Wait a random time, longer while nothing is made, or until something is written."""
        seconds = self._random.uniform(0.0, self._longest_wait * (1 + self._in_vain))
        until = min(time.monotonic() + seconds, deadline)
        is_event = self._random.random() < 0.5
        before = self._being_written()
        while process.is_alive() and time.monotonic() < until:
            if is_event and self._being_written() - before:
                self.counts["events"] += 1
                return
            time.sleep(0.002)

    def _being_written(self) -> set[str]:
        places = (".*.unfinished", "*.run/states/.*.unfinished", "*.run/.*.unfinished")
        found = set[str]()
        for place in places:
            with suppress(FileNotFoundError):  # a folder was removed meanwhile
                found.update(map(str, self._out_dir.glob(place)))
        return found

    def _signal_one(self, process: BaseProcess) -> None:
        """Signal a process of the plan; a stopped one goes on after a while."""
        assert process.pid is not None
        target = self._random.choice([process.pid, *children_of(process.pid)])
        number = self._random.choice(SIGNALS)
        with suppress(ProcessLookupError):
            os.kill(target, number)
            self.counts["signals"] += 1
            self.counts[number.name] += 1
            if number == signal.SIGSTOP:
                time.sleep(self._random.uniform(0.1, 3.0))
                os.kill(target, signal.SIGCONT)

    def _end(self, process: BaseProcess) -> None:
        """Wait for the end of a run and of all its processes; kill what does not end."""
        process.join(LONGEST_SECONDS)
        if process.is_alive():
            self.counts["hangs"] += 1
            process.kill()
        with suppress(ChildProcessError):  # processes that were left and have ended since
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        give_up = time.monotonic() + LEAVING_SECONDS
        while left := set(children_of(os.getpid())) - self._spared - {process.pid}:
            if time.monotonic() > give_up:
                self.counts["left"] += len(left)
                kill(left)
                return
            time.sleep(0.05)

    def _look_for_losses(self) -> None:
        """Count artifacts and states that were there after an earlier run and are not now."""
        made = {name for name in STAGES if (self._out_dir / name / MANIFEST_NAME).is_file()}
        lost = self._made - made
        for name in {"dense", "tuned"} - made:
            newest = max(state_names(self._out_dir / f"{name}.run"), default="")
            lost |= {name} if newest < self._trained.get(name, "") else set()
            self._trained[name] = newest
        self._in_vain = 0 if made - self._made else self._in_vain + 1
        self._made = made
        self.counts["lost"] += len(lost)
        for name in lost:
            print(f"lost: {name}", flush=True)

    def _compare(self) -> None:
        """Compare a finished plan with the undisturbed one, and begin anew."""
        found = [problem for stage in STAGES for problem in self._differences(stage)]
        rest = names_below(self._out_dir) ^ names_below(self._expected)
        found += [f"only in one: {sorted(rest)[:9]}"] if rest else []
        for problem in found:
            print(problem, flush=True)
        self.counts["plans"] += 1
        self.counts["differences"] += len(found)
        shutil.rmtree(self._out_dir)
        self._made, self._trained = set(), {}

    def _differences(self, stage: str) -> list[str]:
        return differences(self._out_dir / stage, self._expected / stage)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    deadline = time.monotonic() + 60 * options.minutes
    # Processes that a killed one leaves become children of this one, where they are seen.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    forking()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    counts = Counter[str]()
    try:
        with tempfile.TemporaryDirectory(prefix="mmnmt-soak-") as folder:
            try:
                Soak(Path(folder), counts, seed=options.seed).disturb_until(deadline)
            finally:
                kill(children_of(os.getpid()))  # so that none writes into the folder
    finally:
        print(line_of(counts), flush=True)
    return int(not counts["plans"] or any(counts[name] for name in FAULTS))


def line_of(counts: Counter[str]) -> str:
    """Return what was met, in one line."""
    kinds = ", ".join(f"{counts[n.name]} {n.name}" for n in dict.fromkeys(SIGNALS))
    return (
        f"{counts['signals']} signals ({kinds}; {counts['events']} while files were written), "
        f"{counts['resumes']} resumes, {counts['plans']} plans finished, {counts['hangs']} hangs, "
        f"{counts['left']} processes left, {counts['lost']} artifacts lost, "
        f"{counts['differences']} differences, {counts['failures']} failures in peace"
    )


if __name__ == "__main__":
    sys.exit(main())
