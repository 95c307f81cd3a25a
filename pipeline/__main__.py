"""Run the command line: the script ``mmnmt``, and ``python -m pipeline`` for launchers.

Signals that ask for a stop stay blocked while the command line is imported: one that comes in that
second ends in the same sentence as later, and not in a traceback or without a word.
"""

import signal


def command() -> None:
    """Import and run the command line, which lets signals in once it can handle them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1})
    from pipeline import cli

    cli.command()


if __name__ == "__main__":
    command()
