"""The command line ``mmnmt``: one verb per stage, and verbs for plans, recipes and checkpoints.

A stage's options follow from its entry in ``stages.py``: a recipe, one folder per input, an output
folder. This package imports neither torch nor a stage until one is to run, so that help, errors in
options and "already done" come at once.
"""

import sys
from collections.abc import Sequence
from importlib import metadata
from typing import NoReturn

from pipeline.cli.checkpoint_commands import CHECKPOINT_COMMANDS, EXPORT_VERBS, add_checkpoint_verbs
from pipeline.cli.ending import guarded, own_rank
from pipeline.cli.parser import CommandParser, Verb, refuse_paths
from pipeline.cli.plan_commands import PLAN_VERBS
from pipeline.cli.recipe_commands import RECIPE_VERBS
from pipeline.cli.stage_commands import stage_main
from pipeline.cli.survey_command import SURVEY_VERBS
from pipeline.distributed.world import leave
from pipeline.machine import prepare_process
from pipeline.stages.registry import STAGES

__all__ = ["command", "main", "stage_main"]


VERBS = (*PLAN_VERBS, *RECIPE_VERBS, *SURVEY_VERBS, *EXPORT_VERBS)
OTHER_COMMANDS = (*(verb.command for verb in VERBS), "checkpoint")
"""Those beside the stages."""


def command() -> NoReturn:
    """The command ``mmnmt``."""
    prepare_process()
    leave(main())


def main(argv: Sequence[str] | None = None) -> int:
    """What the command does with its arguments; returns its exit code.

    As one of several ranks that a launcher started, only rank 0 does anything beside stages.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in STAGES:
        return stage_main(arguments[0], arguments[1:])
    if own_rank() != 0:
        return 0  # one process does it, however many a launcher started
    parser = _parser()
    if arguments:
        parser.refuse_unknown_command(arguments[0], [*STAGES, *OTHER_COMMANDS])
    if arguments[:1] == ["checkpoint"] and len(arguments) > 1:
        parser.refuse_unknown_command(arguments[1], CHECKPOINT_COMMANDS)
    options = parser.parse_args(arguments)
    verb: Verb = options.chosen

    def act() -> int:
        refuse_paths(options)
        return verb.action(options)

    return guarded(verb.command, act)


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="mmnmt",
        description="Massively multilingual translation with mixtures of experts, in stages.",
        epilog="mmnmt STAGE --help lists a stage's options.",
    )
    parser.add_argument("--version", action="version", version=f"mmnmt {metadata.version('mmnmt')}")
    verbs = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", title="commands"
    )
    for verb in VERBS:
        verb.describe_in(verbs.add_parser(verb.command, help=verb.about, description=verb.about))
    about = "look into checkpoints and other artifacts, and make new ones of them"
    add_checkpoint_verbs(verbs.add_parser("checkpoint", help=about, description=about))
    for stage in STAGES.values():
        verbs.add_parser(stage.name, help=stage.help)
    return parser
