"""Run one program on several ranks.

``world.py`` finds and opens the world of ranks; ``collectives.py`` has what they do together.
``heartbeat.py`` waits for ranks that work, ``signals.py`` handles requests to stop, and
``workers.py`` has worker processes of stages that compute on their own.
"""
