"""Estimates of a run's memory, kernel launches and time, without running it.

``memory`` estimates the memory of a training rank, from ``activations`` and the allocations of
ZeRO. ``launches`` counts operators on the meta device, for a pass or decoding step of ``passes``.
``step_time`` forecasts their time on one of ``devices``, and ``choices`` the time of updates on
several GPUs. ``fitting`` refuses jobs that lack memory, and ``disk`` estimates what a plan stores.
"""
