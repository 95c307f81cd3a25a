"""Estimates of a run's memory, kernel launches and time, without running it.

``memory`` estimates the memory of a training rank, from ``activations`` and the allocations of
ZeRO. ``launches`` counts operators of a pass or decoding step on the meta device. ``step_time``
forecasts their time on one of ``devices``, and of updates on several GPUs. ``devices`` also says
what fits: passes on a GPU, and stages in a job. ``disk`` estimates what a plan stores.
"""
