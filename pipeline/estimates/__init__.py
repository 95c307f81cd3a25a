"""Estimates of a run's memory, operators and step time, without running it.

``memory`` estimates the memory of a training rank, from ``activations`` and the allocations of
ZeRO. ``operators`` counts the operators of a step on the meta device. ``step_time`` turns the
counts into a lower bound of the time on a GPU, and counts the exchanges of expert parallelism.
``network`` estimates exchanges between GPUs, ``simulation`` puts all of it together for whole
updates on a cluster, and ``simulated_plan`` does so for a plan. Read ``memory`` first.
"""
