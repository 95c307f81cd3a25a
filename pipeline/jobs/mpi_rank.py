"""Run a stage as one of the MPI ranks of a SLURM job.

``slurm_job`` starts ``python -m pipeline.jobs.mpi_rank STAGE --mpi …`` once per rank. Rank 0 runs
the stage, and the other ranks compute its tasks (``mpi4py.futures``). Rank 0 alone answers requests
to stop and reports the end of the stage. Another rank reports only that it was told to end, so a
rank without a report is the one that was killed.
"""

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from pipeline.distributed.board import node_name
from pipeline.distributed.world import rank_of
from pipeline.errors import EXIT_USER_ERROR
from pipeline.jobs.attempts import REPORTS, End, RankEnd, one_line, write_end

EXIT_TOLD_TO_END = 128 + signal.SIGTERM


def main(arguments: Sequence[str]) -> None:
    """Lead a stage as rank 0, or compute its tasks until rank 0 ends."""
    stage = arguments[0]
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until the stage handles it
    if rank_of(os.environ) != 0:
        signal.signal(signal.SIGTERM, lambda *_: _end_as_told(stage))
    try:
        from mpi4py.futures.__main__ import main as serve
    except (ImportError, RuntimeError) as error:
        _report(stage, "failed", f"MPI cannot be used ({error}). Install mmnmt[mpi] and MPI.")
        sys.exit(EXIT_USER_ERROR)
    sys.argv = ["mpi4py.futures", "-m", "pipeline", *arguments]
    serve()


def _end_as_told(stage: str) -> None:
    _report(stage, "lost", "told to end because another rank had ended")
    os._exit(EXIT_TOLD_TO_END)


def _report(stage: str, end: End, cause: str) -> None:
    rank, size = rank_of(os.environ), int(os.environ.get("SLURM_NTASKS", "1"))
    report = RankEnd(rank, size, node_name(), end, one_line(cause), stage=stage)
    write_end(Path(os.environ[REPORTS]), report)


if __name__ == "__main__":
    main(sys.argv[1:])
