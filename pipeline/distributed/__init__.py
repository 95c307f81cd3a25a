"""Run one program on several ranks.

``world.py`` finds and opens the world of ranks; ``collectives.py`` has their collectives.
``watchdog.py`` waits for ranks that work and ends a run in which none does, by the counts of
``progress.py``. ``signals.py`` handles requests to stop, and ``workers.py`` has worker
processes of stages that compute on their own.
"""
