"""Run the command line: the script ``mmnmt``, and ``python -m pipeline`` for launchers.

Signals that ask for a stop stay blocked while the command line is imported: one that comes in that
second ends in the same sentence as later, and not in a traceback or without a word.
"""

import signal
import sys


def command() -> None:
    """Import and run the command line, which lets signals in once it can handle them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1})
    try:
        from pipeline import cli

        cli.command()
    except ModuleNotFoundError as error:
        package = (error.name or "pipeline").partition(".")[0]
        if package in ("pipeline", "data_prep"):
            raise  # a bug
        print(
            f"mmnmt: The package {package} is not installed for {sys.executable}. Run pip install "
            f"mmnmt there, or pip install {package.replace('_', '-')}.",
            file=sys.stderr,
        )
        sys.exit(2)


if __name__ == "__main__":
    command()
