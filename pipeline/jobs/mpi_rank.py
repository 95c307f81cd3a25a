"""Run a stage as a rank of MPI in a SLURM job.

``inside_job`` starts ``python -m pipeline.jobs.mpi_rank STAGE --mpi …`` once per rank. Rank 0 runs
the stage, and the other ranks compute its tasks (``mpi4py.futures``). Only rank 0 answers requests
to stop and reports the end of the stage. Another rank reports only that it was told to end: if a
rank leaves no report, it was killed.
"""

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from pipeline.distributed.rounds import node_name
from pipeline.distributed.world import rank_of
from pipeline.errors import EXIT_USER_ERROR
from pipeline.jobs.job_endings import REPORTS, End, EndReport, RankEnd


def main(arguments: Sequence[str]) -> None:
    """Lead a stage as rank 0, or compute its tasks until rank 0 ends."""
    stage, rank = arguments[0], rank_of(os.environ)

    def describe(end: End, cause: str) -> RankEnd:
        size = int(os.environ.get("SLURM_NTASKS", "1"))
        return RankEnd(rank, size, node_name(), end, cause, stage=stage)

    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until the stage handles it
    report = EndReport(Path(os.environ[REPORTS]), describe=describe)
    with nullcontext() if rank == 0 else report.noting_sigterm():
        try:
            from mpi4py.futures.__main__ import main as serve
        except (ImportError, RuntimeError) as error:
            report.write("failed", f"MPI cannot be used ({error}). Install mmnmt[mpi] and MPI.")
            sys.exit(EXIT_USER_ERROR)
        sys.argv = ["mpi4py.futures", "-m", "pipeline", *arguments]
        serve()


if __name__ == "__main__":
    main(sys.argv[1:])
