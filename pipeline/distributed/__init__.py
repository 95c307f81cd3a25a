"""Run one program on several ranks.

``world.py`` finds and opens the world of ranks, and has its collectives. ``watchdog.py`` waits for
ranks that work and ends a run in which none does, by the counts of ``process.py``, which also
handles requests to stop. ``workers.py`` has worker processes of stages that compute on their own.
"""
