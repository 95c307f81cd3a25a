"""What an entry point sets in its process: for itself, and for what it starts.

Entry points are the command, the stages as modules of their own, and the benchmarks. Nothing else
calls this, so that whoever imports the package keeps a process as it was.
"""

import io
import os
import sys

from pipeline.kernels.allocator import keep_freed_memory

SPIN_COUNT = "6000"
"""Threads wait for the next parallel operator, some 50 µs, before they sleep.

Sleeping at once (0) makes small models slower on CPU; waiting as long as is the default takes the
cores from whatever else the machine does.
"""


def prepare_process() -> None:
    """Say how memory is kept and how threads wait, unless the environment does.

    Standard output and standard error write characters that their encoding lacks as escapes: a
    table is not lost to one arrow in it. Threads are libgomp's, which reads its variables when
    torch loads it: to be called before.
    """
    keep_freed_memory()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
