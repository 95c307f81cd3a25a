"""Estimates of what a run costs, without running it.

``memory`` estimates the memory of a training rank, from ``activations`` and from what ZeRO
allocates. ``operators`` counts the operators of a step on the meta device. ``step_time`` turns the
counts into the least time on a GPU, and counts what expert parallelism sends. Read ``memory``
first.
"""
