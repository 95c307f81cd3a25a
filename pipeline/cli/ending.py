"""End a command with an exit code, and one line for an error that the user can fix."""

import os
import sys
from collections.abc import Callable, Mapping

from pipeline.artifacts.artifact import UNWRITABLE
from pipeline.distributed.signals import let_ctrl_c_in
from pipeline.distributed.world import rank_of
from pipeline.errors import (
    EXIT_RUN_AGAIN,
    EXIT_USER_ERROR,
    ArtifactError,
    ConfigError,
    Interrupted,
    UserError,
    to_write,
)

EXIT_KEYBOARD = 130
EXIT_BROKEN_PIPE = 141

_SIZE_NAMES = {
    "RANK": ("WORLD_SIZE",),
    "SLURM_STEP_ID": ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
    "OMPI_COMM_WORLD_RANK": ("OMPI_COMM_WORLD_SIZE",),
    "PMI_RANK": ("PMI_SIZE",),
}
"""Variable that identifies a launcher → variables with its number of ranks, in order of
precedence."""


def guarded(name: str, action: Callable[[], int]) -> int:
    """Run a command; turn errors that a user can fix into one line and an exit code."""
    try:
        let_ctrl_c_in()
        code = action()
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader had enough: leave nothing to flush at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except Interrupted as error:
        reason = str(error) or "stopped as asked"
        say_once(f"mmnmt {name}: {reason}: run the same command again to go on.")
        return EXIT_RUN_AGAIN
    except UserError as error:
        _report(name, error)
        return EXIT_USER_ERROR
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        _give_up_output()
        _report(name, _describe_os_error(error))
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        say_once(f"mmnmt {name}: stopped by Ctrl-C.")
        return EXIT_KEYBOARD


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

    A wrong setting is the same on every rank, so rank 0 alone reports it; other errors can be one
    rank's own.
    """
    rank = own_rank()
    if rank == 0:
        print(f"mmnmt {name}: {error}", file=sys.stderr, flush=True)
    elif not isinstance(error, ConfigError):
        print(f"mmnmt {name}: rank {rank}: {error}", file=sys.stderr, flush=True)


def say_once(text: str) -> None:
    """Print a line on standard error, from rank 0 alone."""
    if own_rank() == 0:
        print(text, file=sys.stderr, flush=True)


def say(text: str) -> None:
    """Print a line on standard output and flush it, so that it precedes the output of a child."""
    print(text, flush=True)


def own_rank() -> int:
    """Return this process's rank according to its launcher; 0 without one."""
    try:
        return rank_of(os.environ)
    except ConfigError:  # a rank that cannot be read: it will be reported where it is used
        return 0


def launched_size(environment: Mapping[str, str]) -> int | None:
    """Return how many ranks a launcher started; None if the environment does not tell."""
    for mark, names in _SIZE_NAMES.items():
        if mark in environment:
            sizes = [environment[name] for name in names if name in environment]
            return int(sizes[0]) if sizes and sizes[0].isdecimal() else None
    return None
