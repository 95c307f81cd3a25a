"""The command ``mmnmt`` as it is installed: Ctrl-C waits while the command line is loaded."""

import signal
from typing import NoReturn


def command() -> NoReturn:
    """Run the command line, which answers Ctrl-C in a sentence once it can."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    from pipeline import cli

    cli.command()


if __name__ == "__main__":
    command()
