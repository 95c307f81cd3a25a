"""Start one stage on this machine as one process or several, and end all of them together.

Every child gets the variables of a world of its own on the loopback address and a session of its
own: a terminal's Ctrl-C reaches it once, through the parent. On Linux, it dies with its parent even
if that is killed outright. Stages report their errors in a temporary folder, and each
is printed once, however many ranks met it.
"""

import ctypes
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Self

from pipeline.distributed.signals import ctrl_c_held_back, handled_by
from pipeline.distributed.world import LOOPBACK, World, free_port
from pipeline.errors import EXIT_RUN_AGAIN
from pipeline.jobs.job_endings import REPORTS, causes_to_print, describe_exit, read_ends
from pipeline.machine import processes_here, visible_gpus

GRACE_SECONDS = 15.0
"""Seconds between asking the surviving ranks to end and killing them."""

LEAVING_SECONDS = 900.0
"""Seconds after which ranks are killed that do not follow one that ended with "run me again"."""

MAX_PROCESSES = 1024
"""Most processes on one machine; more is a typing mistake."""

_STOPPED_BY_CTRL_C = (128 + signal.SIGINT, -signal.SIGINT)
_POLL_SECONDS = 0.05
_PR_SET_PDEATHSIG = 1
_FOLDER_PREFIX = "mmnmt-reports-"
_SECONDS_TO_LOCK = 60.0
"""A folder without a lock is abandoned after this time: a launcher locks it after making it."""


class StopRequests:
    """Remembers signals to stop that arrive while children run, and forwards them.

    A context manager; ``received`` is the first signal, or None.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._watched: list[list[subprocess.Popen[bytes]]] = []
        self._handling = handled_by(self._forward)

    def __enter__(self) -> Self:
        self._handling.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._handling.__exit__(None, None, None)

    def watch(self, children: list[subprocess.Popen[bytes]]) -> None:
        """Forward signals to these children, too, including one already received."""
        self._watched.append(children)
        if self.received is not None:
            _signal_all(children, self.received)

    def forget(self, children: list[subprocess.Popen[bytes]]) -> None:
        """Forward no more signals to these children."""
        with suppress(ValueError):  # not all of them were started
            self._watched.remove(children)

    def _forward(self, number: signal.Signals) -> None:
        self.received = self.received or number
        for children in self._watched:
            _signal_all(children, number)


def launch(
    arguments: Sequence[str],
    *,
    processes: int,
    threads: int,
    requests: StopRequests | None = None,
    grace_seconds: float = GRACE_SECONDS,
    leaving_seconds: float = LEAVING_SECONDS,
) -> int:
    """Run ``python ARGUMENTS`` as ``processes`` ranks of one world and wait for them.

    If one fails, the others are asked to end, and killed after ``grace_seconds``; if one ends since
    all agreed to stop, the others are killed after ``leaving_seconds``. A signal to stop
    is forwarded, and the children decide; a caller that wants to know of it passes ``requests``,
    already entered. SIGINT stays pending in a child until that unblocks it, as the command line
    does once it can handle it (``signals.let_ctrl_c_in``).

    Returns:
        0; EXIT_RUN_AGAIN if a child said so and none failed; else the code of the first child
        that failed (128 + the signal that killed it).
    """
    children: list[subprocess.Popen[bytes]] = []
    port = free_port()
    processes = _processes_here(processes)
    with (
        nullcontext(requests) if requests else StopRequests() as asked,
        _reports_folder() as reports,
    ):
        variables = {"OMP_NUM_THREADS": str(threads), REPORTS: reports}
        try:
            for rank in range(processes):
                world = World(rank, processes, rank, processes, LOOPBACK, port)
                with ctrl_c_held_back():  # until the child can handle SIGINT
                    children.append(_start(arguments, variables | world.environment()))
            asked.watch(children)
            return _wait(children, grace_seconds=grace_seconds, leaving_seconds=leaving_seconds)
        finally:
            asked.forget(children)
            _kill(children)
            _print_causes(Path(reports), size=processes)


@contextmanager
def _reports_folder() -> Iterator[str]:
    """Make a temporary folder for reports, and remove folders of launchers that were killed.

    A launcher locks its folder: the lock ends with the process, even after kill -9.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER_PREFIX}*"):
        with suppress(OSError):  # another user's, or in use
            if time.time() - folder.stat().st_mtime > _SECONDS_TO_LOCK:
                os.close(_lock(folder))
                shutil.rmtree(folder)
    with tempfile.TemporaryDirectory(prefix=_FOLDER_PREFIX, ignore_cleanup_errors=True) as name:
        locked = None
        with suppress(OSError):  # a file system without locks: nobody can take this for abandoned
            locked = _lock(Path(name))
        try:
            yield name
        finally:
            if locked is not None:
                os.close(locked)


def _lock(folder: Path) -> int:
    """Return an open file that holds the lock of a folder; raise OSError if it is held already."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(opened)
        raise
    return opened


def _print_causes(reports: Path, *, size: int) -> None:
    """Print the errors that ranks of a stage reported, without repetition."""
    for cause in causes_to_print(read_ends(reports)):
        if cause.end != "crashed":  # its traceback is printed already
            text = cause.line(size=size, with_nodes=False)
            print(f"mmnmt {cause.stage}: {text}", file=sys.stderr, flush=True)


def _processes_here(wanted: int) -> int:
    """Return how many processes to start, at most one per GPU; print it if fewer than wanted."""
    gpus = visible_gpus().count
    possible = processes_here(wanted, gpus=gpus)
    if possible < wanted:
        line = f"mmnmt: {possible} of {wanted} processes, one for each GPU: there are {gpus}."
        print(line, file=sys.stderr, flush=True)
    return possible


def _start(arguments: Sequence[str], variables: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, *arguments],
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
    children: list[subprocess.Popen[bytes]], *, grace_seconds: float, leaving_seconds: float
) -> int:
    """Wait for all children; a bounded time after the first that failed, or said "again"."""
    failure, said_again, deadline = 0, False, float("inf")
    while any(child.poll() is None for child in children):
        if not failure and (failure := _first_failure(children)):
            deadline = min(deadline, time.monotonic() + grace_seconds)
            _announce(children)
            if failure != 128 + signal.SIGINT:  # Ctrl-C reached all, and rank 0 is to say so
                _signal_all(children, signal.SIGTERM)
        if not said_again and _said_again(children):
            said_again, deadline = True, min(deadline, time.monotonic() + leaving_seconds)
        if time.monotonic() > deadline:
            _kill(children)
            return failure or EXIT_RUN_AGAIN
        time.sleep(_POLL_SECONDS)
    return failure or _first_failure(children) or (EXIT_RUN_AGAIN if _said_again(children) else 0)


def _said_again(children: list[subprocess.Popen[bytes]]) -> bool:
    return any(child.returncode == EXIT_RUN_AGAIN for child in children)


def _first_failure(children: list[subprocess.Popen[bytes]]) -> int:
    """Return the exit code of a child that failed, or 0; a signal counts as 128 + its number."""
    for child in children:
        code = child.poll()
        if code not in (None, 0, EXIT_RUN_AGAIN):
            assert code is not None
            return code if code > 0 else 128 - code
    return 0


def _announce(children: list[subprocess.Popen[bytes]]) -> None:
    for rank, child in enumerate(children):
        if child.returncode in _STOPPED_BY_CTRL_C:
            return  # as asked; rank 0 says so
        if child.returncode not in (None, 0, EXIT_RUN_AGAIN) and len(children) > 1:
            cause = describe_exit(child.returncode)
            line = f"mmnmt: rank {rank} of {len(children)} ended with {cause}: ending the others."
            print(line, file=sys.stderr, flush=True)
            return


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
