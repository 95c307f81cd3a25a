"""End a command with an exit code, and one line for an error that the user can fix.

If the launcher names a folder for reports (``jobs.job_endings.REPORTS``), a rank leaves its error
there as its last act, and the launcher prints the errors of all ranks, each text once. Otherwise
the rank prints its error itself.
"""

import errno
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path

from pipeline.artifacts.artifact import UNWRITABLE
from pipeline.distributed import process
from pipeline.distributed.process import let_signals_in
from pipeline.distributed.rounds import node_name
from pipeline.distributed.watchdog import BEFORE_END
from pipeline.distributed.world import launched_size, own_rank
from pipeline.errors import (
    EXIT_RUN_AGAIN,
    EXIT_USER_ERROR,
    AgreedStop,
    ArtifactError,
    ConfigError,
    Interrupted,
    RankLost,
    UserError,
    to_write,
)
from pipeline.jobs.job_endings import REPORTS, End, EndReport, RankEnd

_BROKEN_STORAGE = (errno.EIO, errno.ESTALE)
"""Errors of a disk or a file server, after which a job is worth another start on other nodes."""
EXIT_LOST = 1
EXIT_KEYBOARD = 130
EXIT_BROKEN_PIPE = 141
FIRST_SPEAKS_SECONDS = 10.0
"""Seconds in which the first rank of a node reports an error that the others have, too."""

_LOCAL_RANK_NAMES = (
    *("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"),
)
"""Variables with the number of a rank within its node, in order of precedence."""

_CONNECTION = re.compile(
    r"\bgloo\b|NCCL|TCPStore|DistStoreError|DistNetworkError|Connection (closed|reset|refused)"
    "|Broken pipe",
    re.IGNORECASE,
)
"""Words in the errors of torch.distributed when another rank is gone. They are of type
RuntimeError or a subclass of it (torch 2.11), so only name and text tell them from other errors."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def guarded(
    name: str, action: Callable[[], int], *, is_rank: bool = False, leads: bool = False
) -> int:
    """Run a command; turn errors that a user can fix into one line and an exit code.

    Args:
        name: Name of the command.
        action: Work of the command; returns its exit code.
        is_rank: Whether this is a rank of a stage, which reports its end to its launcher.
        leads: Whether other ranks, if there are any, only compute tasks for this one (MPI). It can
            then stop without their agreement.
    """
    reports = _Reports(name, is_rank=is_rank)
    BEFORE_END[:] = [lambda cause: reports.write("again", cause)]
    with reports.end.noting_sigterm() if reports.end else nullcontext():
        return _guarded(name, action, reports=reports, leads=leads)


def _guarded(name: str, action: Callable[[], int], *, reports: "_Reports", leads: bool) -> int:
    try:
        let_signals_in()
        code = action()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader had enough: leave nothing to flush at exit
        reports.write("lost", "the reader of its output has ended")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except Interrupted as error:
        reason = str(error) or "stopped as asked"
        is_alone = (launched_size(os.environ) or 1) == 1
        # SIGTERM may be no request, but what srun sends because another rank was killed.
        is_free = is_alone or (leads and signal.SIGTERM.name not in reason)
        is_agreed = is_free or isinstance(error, AgreedStop)
        reports.write("again" if is_agreed else "lost", reason)  # at once: see ``noting_sigterm``
        say_once(f"mmnmt {name}: {reason}: run the same command again to go on.")
        return EXIT_RUN_AGAIN
    except UserError as error:
        reports.write_or_print("lost" if isinstance(error, RankLost) else "failed", error)
        return EXIT_USER_ERROR
    except OSError as error:
        if error.errno not in UNWRITABLE and (
            reports.write_crash(error) or error.errno not in _BROKEN_STORAGE
        ):
            raise
        _give_up_output()
        reports.write_or_print("failed", _describe_os_error(error))
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        say_once(f"mmnmt {name}: stopped by Ctrl-C.")
        reports.write("lost", "stopped by Ctrl-C")
        return EXIT_KEYBOARD
    except SystemExit as error:  # argparse has printed what is wrong
        if error.code:
            reports.write("failed", "the command line cannot be used; the log says why")
        raise
    except Exception as error:
        if reports.write_crash(error) == "lost":
            return EXIT_LOST
        raise
    reports.write("done" if code == 0 else "failed", "" if code == 0 else f"exit code {code}")
    return code


class _Reports:
    """Reports of how this process ended, for the launcher that asked for them."""

    def __init__(self, name: str, *, is_rank: bool) -> None:
        folder = os.environ.get(REPORTS) if is_rank else None
        self._name = name
        self.end = EndReport(Path(folder), describe=self._describe) if folder else None

    def write(self, end: End, cause: str) -> bool:
        """Report an end; return whether the launcher will read it."""
        return self.end is not None and self.end.write(end, cause)

    def _describe(self, end: End, cause: str) -> RankEnd:
        return RankEnd(
            stage=self._name,
            rank=own_rank(),
            size=launched_size(os.environ) or 1,
            node=node_name(),
            end=end,
            cause=cause,
            update=process.last_update(),
        )

    def write_or_print(self, end: End, error: UserError) -> None:
        """Report an error that the user can fix, or print it if no launcher does."""
        if not self.write(end, str(error)):
            _report(self._name, error)

    def write_crash(self, error: Exception) -> End | None:
        """Report an error that no stage handles; return as what, None if its traceback is to.

        The traceback of a lost connection shows where this rank waited, and not the cause.
        """
        if isinstance(error, RuntimeError):  # its traceback loses torch's C++ frames, too
            error.args = (str(error).partition("\nException raised from ")[0],)
        cause = f"{type(error).__name__}: {error}".removesuffix(": ")
        is_consequence = isinstance(error, RuntimeError) and _CONNECTION.search(cause)
        end: End = "lost" if is_consequence else "crashed"
        if self.write(end, cause):
            return end
        if not is_consequence or (launched_size(os.environ) or 1) == 1:
            return None
        text = cause.partition(". ")[0].removesuffix(".")
        _report(
            self._name,
            RankLost(
                f"A connection to another rank was lost ({text}). Look for the rank that ended "
                "first: at its own error above, or at how the launcher says that it ended."
            ),
        )
        return end


def _describe_os_error(error: OSError) -> ArtifactError:
    """Describe an OSError that no stage handles: a full disk, a directory without permission."""
    return ArtifactError(
        f"{error.filename or 'A file'} could not be read or written "
        f"({error.strerror or error}): {to_write(error)}, or name another place. Then run the "
        "command again."
    )


def _give_up_output() -> None:
    """Discard buffered output if standard output is what cannot be written."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _report(name: str, error: UserError) -> None:
    """Print an error on one line.

    A wrong setting is the same on every rank of a node, so the first rank there reports it, and the
    others wait for that; other errors can be one rank's own.
    """
    rank = own_rank()
    if rank == 0 or not isinstance(error, ConfigError) or _is_first_on_node(os.environ):
        place = f"rank {rank}: " if rank else ""
        # A file's name may hold a line end, or what a terminal obeys.
        text = _CONTROL.sub(lambda found: repr(found[0])[1:-1], f"{place}{error}")
        _print_error(f"mmnmt {name}: {text}")
    else:  # torchrun ends the first rank, which may not have spoken yet, as soon as this one ends
        time.sleep(FIRST_SPEAKS_SECONDS)


def _print_error(text: str) -> None:
    """Print a line on standard error; if that cannot be written, the exit code tells."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def _is_first_on_node(environment: Mapping[str, str]) -> bool:
    return next((environment[name] for name in _LOCAL_RANK_NAMES if name in environment), "") == "0"


def say_once(text: str) -> None:
    """Print a line on standard error, only on rank 0."""
    if own_rank() == 0:
        _print_error(text)


def say(text: str) -> None:
    """Print a line on standard output and flush it, before a child prints anything."""
    print(text, flush=True)
