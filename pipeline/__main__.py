"""Run the command line: the script ``mmnmt``, and ``python -m pipeline`` for launchers.

SIGINT stays blocked while the command line is imported, so that Ctrl-C in that second ends in one
sentence and not in a traceback.
"""

import signal
from typing import NoReturn


def command() -> NoReturn:
    """Import and run the command line, which unblocks SIGINT once it can handle it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    from pipeline import cli

    cli.command()


if __name__ == "__main__":
    command()
