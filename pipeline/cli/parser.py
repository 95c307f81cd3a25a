"""The parser of command lines: argparse's, with suggestions for wrong names."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from pipeline.hints import hint


class _Help(argparse.HelpFormatter):
    """Help in which required options are marked, in their own line too."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        about = action.help
        if about and action.required and action.option_strings:
            return f"{about} (required)"
        return about


class CommandParser(argparse.ArgumentParser):
    """Parser of one command; its subparsers are of the same class.

    An option that the command does not have ends with the nearest one that it has; options are
    never abbreviated.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"allow_abbrev": False, "formatter_class": _Help, **settings})

    def parse_known_args(  # type: ignore[override]  # argparse's overloads
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse what is known, as argparse does, once every long option is known to exist."""
        given = list(sys.argv[1:] if args is None else args)
        if self._subparsers is None:  # else options belong to the command that comes before them
            self._refuse_unknown_options(given)
        return super().parse_known_args(given, namespace)

    def _refuse_unknown_options(self, given: Sequence[str]) -> None:
        known = [
            name
            for action in self._actions
            for name in action.option_strings
            if name.startswith("--") and action.help != argparse.SUPPRESS
        ]
        for word in given:
            name = word.partition("=")[0]
            if name == "--":
                return
            if name[:2] == "--" and " " not in word and name not in self._option_string_actions:
                self.error(f"there is no option {name!r}{hint(name, known)}")

    def refuse_unknown_command(self, name: str, known: Sequence[str]) -> None:
        """End with the usage where ``name`` is neither an option nor one of the commands."""
        if not name.startswith("-") and name not in known:
            self.error(f"there is no command {name!r}{hint(name, known)}")
