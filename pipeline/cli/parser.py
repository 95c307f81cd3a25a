"""Parse command lines with argparse, suggesting the nearest name for a mistyped one."""

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from pipeline.artifacts.manifest import as_text, is_text
from pipeline.artifacts.places import refuse_path
from pipeline.config.recipe import Recipe, load_recipe, parse_overrides, recipe_names
from pipeline.config.settings import shown
from pipeline.errors import ConfigError, hint
from pipeline.stage import problem_of_name, split_named_path


class _Help(argparse.HelpFormatter):
    """A help formatter that marks required options in their own line."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        about = action.help
        if about and action.required and action.option_strings:
            return f"{about} (required)"
        return about


class CommandParser(argparse.ArgumentParser):
    """The parser of one command; its subparsers are of the same class.

    The error for an unknown option suggests the nearest known one. Options cannot be abbreviated,
    and one that takes one value cannot be repeated: all values but the last would be lost.
    """

    instead: Mapping[str, str] = {}
    """Option of another form of the command → the end of a sentence that says what to do.

    The empty name stands for a word that no option reads, and ``--`` for any option."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"allow_abbrev": False, "formatter_class": _Help, **settings})

    def parse_known_args(  # type: ignore[override]  # argparse's overloads
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse as argparse does, after checking that every long option exists."""
        given = list(sys.argv[1:] if args is None else args)
        if self._subparsers is not None:  # options belong to the command that comes before them
            return super().parse_known_args(given, namespace)
        self._refuse_wrong_options(given)
        found, unread = super().parse_known_args(given, namespace)
        if unread := [word for word in unread if word != "--"]:
            fix = self._fix_of_unread(unread[0], given)
            self.error(f"nothing reads {shown(' '.join(unread))!r}. {fix}")
        return found, unread

    def _fix_of_unread(self, unread: str, given: Sequence[str]) -> str:
        """Return what to do about a word too many, often meant for the option before it."""
        if unread.partition("+")[0] in recipe_names():
            return f"Pass --recipe {unread}"
        place = given.index(unread)
        before = [word.partition("=")[0] for word in given[max(0, place - 2) : place]]
        name = next((word for word in reversed(before) if word.startswith("--")), "")
        is_repeated = isinstance(self._option_string_actions.get(name), argparse._AppendAction)
        return f"Repeat {name} before it" if is_repeated else self.instead.get("", "Leave it out")

    def _refuse_wrong_options(self, given: Sequence[str]) -> None:
        known = [
            name
            for action in self._actions
            for name in action.option_strings
            if name.startswith("--") and action.help != argparse.SUPPRESS
        ]
        seen: set[str] = set()
        for word in given:
            name = word.partition("=")[0]
            if name == "--":
                return
            if name in seen:
                self.error(f"{name} is there twice. Pass it once")
            if isinstance(self._option_string_actions.get(name), argparse._StoreAction):
                seen.add(name)
            if name[:2] == "--" and " " not in word and name not in self._option_string_actions:
                fix = self.instead.get(name) or self._takers_of(name) or self.instead.get("--")
                fix = fix or hint(name, known)
                self.error(f"there is no option {name!r}{fix}")

    def _takers_of(self, name: str) -> str:
        """Return what to write for an option that is called after the value of others.

        For example ``--only STAGE`` for ``--stage``; empty if no option takes such a value.
        """
        wanted = name.removeprefix("--").upper().removesuffix("S")
        takers = [action for action in self._actions if action.metavar == wanted]
        if not all(action.option_strings for action in takers):
            return f" before {wanted}. Leave it out."
        options = (f"'{action.option_strings[0]} {wanted}'" for action in takers)
        return f". Did you mean {' or '.join(options)}?" if takers else ""

    def refuse_unknown_command(
        self, name: str, known: Sequence[str], every: Iterable[Sequence[str]]
    ) -> None:
        """Exit with the usage if ``name`` is neither an option nor a known command.

        ``every`` has the words of all commands, some of which may end with this name.
        """
        if not name.startswith("-") and name not in known:
            elsewhere = [" ".join(words) for words in every if words[-1] == name]
            fix = f". Did you mean 'mmnmt {elsewhere[0]}'?" if elsewhere else hint(name, known)
            self.error(f"there is no command {name!r}{fix}")


Option: TypeAlias = tuple[str, dict[str, Any]]
"""Name of an option and the settings of ``add_argument``."""


def add_options(parser: argparse._ActionsContainer, options: Iterable[Option]) -> None:
    """Add options to a parser, or to a group of one."""
    for name, settings in options:
        parser.add_argument(name, **settings)


@dataclass(frozen=True)
class Command:
    """A command that is not a stage."""

    name: str
    """The words after ``mmnmt``: ``run``, ``checkpoint inspect``."""
    about: str
    action: Callable[[argparse.Namespace], int]
    """Run the command with its options; return the exit code."""
    options: tuple[Option, ...]

    def parser(self) -> CommandParser:
        """Return the parser of the command, which has this command as ``chosen``."""
        return self._filled(CommandParser(prog=f"mmnmt {self.name}", description=self.about))

    def add_to(self, parsers: "argparse._SubParsersAction[CommandParser]") -> None:
        """Add the parser of the command to the parsers of other commands."""
        name = self.name.rpartition(" ")[2]
        self._filled(parsers.add_parser(name, help=self.about, description=self.about))

    def _filled(self, parser: CommandParser) -> CommandParser:
        add_options(parser, self.options)
        parser.set_defaults(chosen=self)
        return parser


_DIGITS = 20
"""Digits from which a number is out of every range."""


def place(text: str) -> str:
    """Parse a name, a path or NAME=PATH; an empty path would be the current folder."""
    if not text or text.startswith("="):
        lack = "has no name before =" if text else "is empty"
        raise argparse.ArgumentTypeError(
            f"it {lack}. Write a name or a path; . is the current folder"
        )
    return text


def path_option(text: str) -> Path:
    """Parse an option: a path."""
    return Path(place(text))


def whole_number(most: int, *, least: int = 1) -> Callable[[str], int]:
    """Return an option type: whole numbers from ``least`` to ``most``."""

    def read(text: str) -> int:
        digits = text if text.isascii() and text.isdecimal() and len(text) < _DIGITS else "-1"
        if not least <= int(digits) <= most:
            raise argparse.ArgumentTypeError(
                f"{shown(text)!r} is not a whole number from {least} to {most:,}"
            )
        return int(digits)

    return read


MOST_PROFILED = 20
"""Most updates of a profile: its trace grows with every operator."""


def update_window(text: str) -> tuple[int, int]:
    """Parse an option ``FIRST:LAST``: at most MOST_PROFILED updates, counted from 1."""
    words = text.split(":")
    is_number = [word.isascii() and word.isdecimal() and len(word) < _DIGITS for word in words]
    if len(words) == 2 and all(is_number):
        first, last = map(int, words)
        if 1 <= first <= last < first + MOST_PROFILED:
            return first, last
    raise argparse.ArgumentTypeError(
        f"{shown(text)!r} is not FIRST:LAST, at most {MOST_PROFILED} updates, for example 100:110"
    )


def share(text: str) -> float:
    """Parse an option: a number of more than 0 and at most 1."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError(
            f"{shown(text)!r} is not a number of more than 0 and at most 1"
        )
    return number


def named_paths(pairs: list[str], option: str) -> dict[str, Path]:
    """Parse the ``NAME=PATH`` of several directories.

    Raises:
        ConfigError: one is not of that form, a name cannot be used, or is there twice.
    """
    paths: dict[str, Path] = {}
    for pair in pairs:
        name, path = split_named_path(pair)
        if not name or not path:
            raise ConfigError(f"{option} {pair!r} is not of the form NAME=PATH. Write both.")
        if problem := problem_of_name(name):
            raise ConfigError(f"{option} {pair!r}: {problem}")
        if name in paths:
            raise ConfigError(f"{option} names {name!r} twice. Give each its own name.")
        paths[name] = Path(path)
    return paths


def refuse_paths(options: argparse.Namespace) -> None:
    """Refuse option values that are paths no stage can use, and a current folder that is gone.

    Raises:
        ConfigError: names the path.
    """
    try:
        Path.cwd()
    except FileNotFoundError as error:
        raise ConfigError("The current folder was removed. Change to another one.") from error
    for name, value in vars(options).items():
        for entry in value if isinstance(value, list) else [value]:
            if isinstance(entry, Path):
                refuse_path(entry, is_output=name == "out")
            elif isinstance(entry, str) and not is_text(entry):
                raise ConfigError(
                    f"{as_text(Path(entry))} is not UTF-8. Rename what it names, or name something "
                    "else."
                )


def chosen_recipe(options: argparse.Namespace) -> Recipe:
    """Load the recipe that ``--recipe`` and ``--set`` choose; defaults if none is named.

    Raises:
        ConfigError: there is no such recipe, or a setting does not exist or fit.
    """
    return load_recipe(options.recipe, parse_overrides(options.overrides))
