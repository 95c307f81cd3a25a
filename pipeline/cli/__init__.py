"""Implement the command line ``mmnmt``.

Every stage is a command; further commands are for plans, recipes and checkpoints. A stage's options
follow from its entry in ``stages/registry.py``: a recipe, one directory per input, an output
directory. This package imports neither torch nor a stage until one is to run, so that help, errors
in options and "already done" appear at once.
"""

import sys
from collections.abc import Sequence
from typing import NoReturn

from pipeline import installed_version
from pipeline.cli.checkpoint_commands import (
    CHECKPOINT_NAMES,
    EXPORT_COMMANDS,
    add_checkpoint_commands,
)
from pipeline.cli.cluster_commands import CLUSTER_COMMANDS
from pipeline.cli.doctor_command import DOCTOR_COMMANDS
from pipeline.cli.ending import guarded, own_rank
from pipeline.cli.estimate_command import ESTIMATE_COMMANDS
from pipeline.cli.parser import Command, CommandParser, refuse_paths
from pipeline.cli.plan_commands import PLAN_COMMANDS
from pipeline.cli.recipe_commands import RECIPE_COMMANDS
from pipeline.cli.report_command import REPORT_COMMANDS
from pipeline.cli.serve_command import SERVE_COMMANDS
from pipeline.cli.stage_commands import stage_main
from pipeline.distributed.world import leave
from pipeline.machine import prepare_process
from pipeline.stages.registry import STAGES

__all__ = ["command", "main", "stage_main"]


COMMANDS = (
    *PLAN_COMMANDS,
    *CLUSTER_COMMANDS,
    *DOCTOR_COMMANDS,
    *RECIPE_COMMANDS,
    *ESTIMATE_COMMANDS,
    *REPORT_COMMANDS,
    *EXPORT_COMMANDS,
    *SERVE_COMMANDS,
)
OTHER_COMMANDS = (*(one.name for one in COMMANDS), "checkpoint")
"""Names of the commands that are not stages."""


def command() -> NoReturn:
    """Run the command ``mmnmt`` and exit."""
    prepare_process()
    leave(main())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with its arguments; return the exit code.

    If a launcher started several ranks, only rank 0 does anything besides stages.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in STAGES:
        return stage_main(arguments[0], arguments[1:])
    if own_rank() != 0:
        return 0  # one process is enough, however many a launcher started
    parser = _parser()
    if arguments:
        parser.refuse_unknown_command(arguments[0], [*STAGES, *OTHER_COMMANDS])
    if arguments[:1] == ["checkpoint"] and len(arguments) > 1:
        parser.refuse_unknown_command(arguments[1], CHECKPOINT_NAMES)
    options = parser.parse_args(arguments)
    chosen: Command = options.chosen

    def act() -> int:
        refuse_paths(options)
        return chosen.action(options)

    return guarded(chosen.name, act)


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="mmnmt",
        description="Massively multilingual translation with mixtures of experts, in stages.",
        epilog="mmnmt STAGE --help lists a stage's options.",
    )
    parser.add_argument("--version", action="version", version=f"mmnmt {installed_version()}")
    parsers = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", title="commands"
    )
    for one in COMMANDS:
        one.describe_in(parsers.add_parser(one.name, help=one.about, description=one.about))
    about = "inspect checkpoints and other artifacts, and make new ones from them"
    add_checkpoint_commands(parsers.add_parser("checkpoint", help=about, description=about))
    for stage in STAGES.values():
        parsers.add_parser(stage.name, help=stage.help)
    return parser
