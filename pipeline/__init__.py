"""mmnmt: massively multilingual machine translation with mixtures of experts, in stages.

A verb is a file here, a noun is a folder; ``stages`` is the place to begin. The rooms, and in what
order to read them, are in the README.
"""

import os

from pipeline.kernels.allocator import keep_freed_memory

keep_freed_memory()

# Read when torch loads libgomp: threads wait for the next parallel operator, some 50 µs, before
# they sleep. Sleeping at once (GOMP_SPINCOUNT=0) makes small models slower on CPU; waiting as long
# as is the default takes the cores from whatever else the machine does.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "6000")
