"""mmnmt: massively multilingual machine translation with mixtures of experts, in stages."""

import os

# Two settings for training on CPU that libraries read when torch loads them.
#
# Threads wait for the next parallel operator, some 50 µs, before they sleep (libgomp). Sleeping at
# once costs small models a third of their speed; waiting as long as is the default takes the cores
# from whatever else the machine does.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "6000")
# Large tensors get large pages (torch). Gradients of stacked experts are made and freed at every
# step, and having them mapped in small pages takes a third of a wide layer's time.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
