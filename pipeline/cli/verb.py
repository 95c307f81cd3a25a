"""What a command beside the stages is: its name, its options, its code."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Verb:
    """One command beside the stages."""

    command: str
    """As it is typed after ``mmnmt``: ``run``, ``checkpoint inspect``."""
    about: str
    add_options: Callable[[argparse.ArgumentParser], None]
    action: Callable[[argparse.Namespace], int]
    """What it does with its options; returns the exit code."""

    def describe_in(self, parser: argparse.ArgumentParser) -> None:
        """Give a parser the verb's options, and what it finds the verb itself."""
        self.add_options(parser)
        parser.set_defaults(chosen=self)
