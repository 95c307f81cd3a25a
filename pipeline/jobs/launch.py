"""Start one stage on this machine as one process or several, and end all of them together.

Every child gets the variables of a world of its own on the loopback address and a session of its
own: a terminal's Ctrl-C reaches it once, through the parent. On Linux, it dies with its parent even
if that is killed outright. Stages report their ends in a temporary folder: from these and from who
ended first follow the exit code and the line about the cause, which is printed once, however many
ranks met it.
"""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path

from pipeline.artifacts.locks import exclusive, is_abandoned
from pipeline.distributed.process import held_back
from pipeline.distributed.world import LOOPBACK, StopFlag, World, free_port
from pipeline.errors import EXIT_RUN_AGAIN, EXIT_USER_ERROR, ArtifactError
from pipeline.jobs.job_endings import (
    REPORTS,
    TOLD_TO_END,
    describe_exit,
    merged,
    read_ends,
    report_name,
)
from pipeline.machine import processes_here, visible_gpus

GRACE_SECONDS = 15.0
"""Seconds between asking the surviving ranks to end and killing them."""

LEAVING_SECONDS = 60.0
"""Seconds after which ranks are killed that do not follow one that ended with "run me again". They
have nothing to do any more: all had met before it ended, or it was lost."""

MAX_PROCESSES = 1024
"""Most processes on one machine; more is a typing mistake."""

_STOPPED_BY_CTRL_C = 128 + signal.SIGINT
_POLL_SECONDS = 0.05
_SETTLE_SECONDS = 0.25
"""Seconds to wait for the rank that is the cause: it can end a moment after one that it left."""
_PR_SET_PDEATHSIG = 1
_FOLDER_PREFIX = "mmnmt-reports-"
_LOCK_NAME = "lock"
_SECONDS_TO_LOCK = 60.0
"""Seconds after which a launcher has locked its folder; before, the lock may look abandoned."""


class StopRequests(StopFlag):
    """Remembers signals to stop that arrive while children run, and forwards them."""

    def __init__(self) -> None:
        super().__init__()
        self._watched: list[list[subprocess.Popen[bytes]]] = []

    def watch(self, children: list[subprocess.Popen[bytes]]) -> None:
        """Forward signals to these children, too, including one already received."""
        self._watched.append(children)
        if self.received is not None:
            _signal_all(children, self.received)

    def forget(self, children: list[subprocess.Popen[bytes]]) -> None:
        """Forward no more signals to these children."""
        with suppress(ValueError):  # not all of them were started
            self._watched.remove(children)

    def _note(self, number: signal.Signals) -> None:
        super()._note(number)
        for children in [*self._watched]:  # another thread may forget some
            _signal_all(children, number)


def launch(
    arguments: Sequence[str],
    *,
    processes: int,
    threads: int,
    requests: StopRequests | None = None,
    gpu: str | None = None,
    grace_seconds: float = GRACE_SECONDS,
    leaving_seconds: float = LEAVING_SECONDS,
) -> int:
    """Run ``python ARGUMENTS`` as ``processes`` ranks of one world and wait for them.

    If one fails, or stops although no other was to, the others are asked to end, and killed after
    ``grace_seconds``; if one ends since all agreed to stop, the others are killed after
    ``leaving_seconds``. A signal to stop is forwarded, and the children decide; a caller that wants
    to know of it passes ``requests``, already entered. Signals stay pending in a child until that
    unblocks them, as the command line does once it can handle them (``signals.let_signals_in``).
    ``gpu`` is the ``CUDA_VISIBLE_DEVICES`` of the ranks, unless they see what this process sees.

    Returns:
        0; EXIT_RUN_AGAIN if a child said so and none failed before; else the code of the child that
        is the cause (128 + the signal that killed it).
    """
    children: list[subprocess.Popen[bytes]] = []
    port = free_port()
    processes = _processes_here(processes)
    with (
        nullcontext(requests) if requests else StopRequests() as asked,
        _reports_folder() as reports,
    ):
        # The store of a torchrun that started this process is not that of these ranks.
        of_torchrun = {"TORCHELASTIC_USE_AGENT_STORE": "False"}
        variables = {"OMP_NUM_THREADS": str(threads), REPORTS: reports, **of_torchrun}
        if gpu is not None:
            variables["CUDA_VISIBLE_DEVICES"] = gpu
        try:
            for rank in range(processes):
                world = World(rank, processes, rank, processes, LOOPBACK, port)
                with held_back():  # until the child can handle them
                    children.append(_start(arguments, variables | world.environment()))
            asked.watch(children)
            grace = (grace_seconds, leaving_seconds)
            first = _wait(children, Path(reports), asked=asked, grace=grace)
        finally:
            asked.forget(children)
            _kill(children)
        codes = [_exit_code(child) or 0 for child in children]
        code, lines = _conclude(codes, first, Path(reports), is_asked=asked.received is not None)
        for line in lines:
            print(line, file=sys.stderr, flush=True)
        return code


@contextmanager
def _reports_folder() -> Iterator[str]:
    """Make a temporary folder for reports, and remove folders of launchers that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER_PREFIX}*"):
        with suppress(OSError):  # another user's
            is_old = time.time() - folder.stat().st_mtime > _SECONDS_TO_LOCK
            if is_old and is_abandoned(folder / _LOCK_NAME):
                shutil.rmtree(folder)
    with (
        tempfile.TemporaryDirectory(prefix=_FOLDER_PREFIX, ignore_cleanup_errors=True) as name,
        ExitStack() as stack,
    ):
        with suppress(ArtifactError):  # a full disk; nobody takes a folder without lock for left
            stack.enter_context(exclusive(Path(name, _LOCK_NAME), what=name))
        yield name


def _conclude(
    codes: Sequence[int], first: Collection[int], reports: Path, *, is_asked: bool
) -> tuple[int, list[str]]:
    """Return the exit code of a stage, and the lines about the cause of its end.

    Causes are the errors that ranks reported; else a rank that ended without a word among the
    ``first``, before the others were asked to; else the words of ranks that were left.
    """
    size = len(codes)
    ends = [end for end in read_ends(reports) if end.cause != TOLD_TO_END]
    failed = [end for end in ends if end.end == "failed"]
    crashed = [end for end in ends if end.end == "crashed"]
    crashed.sort(key=lambda end: (reports / report_name(end.rank)).stat().st_mtime_ns)
    again = [rank for rank in first if codes[rank] == EXIT_RUN_AGAIN]
    silent = sorted(set(first) - {end.rank for end in ends} - {*again}, key=lambda r: not codes[r])
    failures = [code for code in codes if code not in (0, EXIT_RUN_AGAIN)]
    if failed or crashed:
        causes = merged(failed or crashed[:1])
        if not failed and size == 1:
            causes = []  # its traceback is printed already
        rank = (failed or crashed)[0].rank
        code = codes[rank] if rank in first else EXIT_USER_ERROR if failed else 1
    elif silent and failures and not (again and not codes[silent[0]]):
        how = describe_exit(codes[silent[0]])
        line = f"mmnmt: rank {silent[0]} of {size} ended with {how}: ending the others."
        is_told = is_asked or codes[silent[0]] == _STOPPED_BY_CTRL_C or size == 1
        return codes[silent[0]] or failures[0], [] if is_told else [line]
    else:
        lost = [end for end in ends if end.end == "lost" and (not again or end.rank in again)]
        causes = [] if is_asked else merged(lost)  # rank 0 said that it stops
        stops = again or (EXIT_RUN_AGAIN in codes and not failures)
        code = EXIT_RUN_AGAIN if stops else (failures or [0])[0]
    lines = (cause.line(size=size, with_nodes=False) for cause in causes)
    return code, [f"mmnmt {cause.stage}: {line}" for cause, line in zip(causes, lines, strict=True)]


def _processes_here(wanted: int) -> int:
    """Return how many processes to start, at most one per GPU; print it if fewer than wanted."""
    gpus = visible_gpus().count
    possible = processes_here(wanted, gpus=gpus)
    if possible < wanted:
        line = f"mmnmt: {possible} of {wanted} processes, one for each GPU: there are {gpus}."
        print(line, file=sys.stderr, flush=True)
    return possible


def _start(arguments: Sequence[str], variables: dict[str, str]) -> subprocess.Popen[bytes]:
    # A folder "pipeline" or a file "random.py" of the current folder must not replace our modules.
    safe_path = [] if {"", str(Path.cwd())} & {*sys.path} else ["-P"]
    return subprocess.Popen(
        [sys.executable, *safe_path, *arguments],
        env=os.environ | variables,
        start_new_session=True,
        preexec_fn=_die_with_parent() if sys.platform == "linux" else None,
    )


def _die_with_parent() -> Callable[[], None]:
    """Return the function to run between fork and exec; this loads its library before."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    parent_id = os.getpid()

    def arrange() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent_id:  # it died before we asked to be told
            os.kill(os.getpid(), signal.SIGKILL)

    return arrange


def _wait(
    children: list[subprocess.Popen[bytes]],
    reports: Path,
    *,
    asked: StopRequests,
    grace: tuple[float, float],
) -> set[int]:
    """Wait for all children; a bounded time after the first that failed, or that stops.

    Return the ranks that ended before the others were asked to.
    """
    first: set[int] = set()
    failed_deadline, leaving_deadline = float("inf"), float("inf")
    while any(child.poll() is None for child in children):
        found = {rank: _exit_code(child) for rank, child in enumerate(children)}
        codes = {rank: code for rank, code in found.items() if code is not None}
        failures = [code for code in codes.values() if code not in (0, EXIT_RUN_AGAIN)]
        stops = [rank for rank, code in codes.items() if code == EXIT_RUN_AGAIN]
        if stops:
            leaving_deadline = min(leaving_deadline, time.monotonic() + grace[1])
        left = stops and not first and asked.received is None and _stops_alone(stops, reports)
        if not first and (failures or left):
            time.sleep(_SETTLE_SECONDS)
            first = {rank for rank, child in enumerate(children) if child.poll() is not None}
            failed_deadline = time.monotonic() + grace[0]
            if failures[:1] != [_STOPPED_BY_CTRL_C]:  # Ctrl-C reached all; rank 0 is to say so
                _signal_all(children, signal.SIGTERM)
        if time.monotonic() > min(failed_deadline, leaving_deadline):
            first = first or {*codes}
            _kill(children)
        time.sleep(_POLL_SECONDS)
    return first or {*range(len(children))}


def _stops_alone(ranks: Sequence[int], reports: Path) -> bool:
    """Return whether a rank that asks to be run again did not agree on it with the others."""
    return any(end.end == "lost" and end.rank in ranks for end in read_ends(reports))


def _exit_code(child: subprocess.Popen[bytes]) -> int | None:
    """Return the exit code of a child that has ended; a signal counts as 128 + its number."""
    code = child.poll()
    return code if code is None or code >= 0 else 128 - code


def _signal_all(children: list[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    for child in children:
        child.send_signal(number)


def _kill(children: list[subprocess.Popen[bytes]]) -> None:
    """Kill the remaining children with their workers, and collect them."""
    for child in children:
        if child.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
