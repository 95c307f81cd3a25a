"""Implement the command line ``mmnmt``.

Every stage is a command; further commands are for plans, recipes and checkpoints. A stage's options
follow from its entry in ``pipeline/registry.py``: a recipe, one directory per input, an output
directory. This package imports neither torch nor a stage until a stage is to run: help, errors in
options and "already done" appear at once.
"""

import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from pipeline.cli.commands import COMMANDS
from pipeline.cli.ending import guarded
from pipeline.cli.parser import Command, CommandParser, refuse_paths
from pipeline.cli.stage_commands import commands_of_stages, find_stage, stage_main
from pipeline.distributed.process import interruptible
from pipeline.distributed.world import leave, own_rank
from pipeline.machine import installed_version, prepare_process
from pipeline.registry import STAGES

__all__ = ["command", "main", "stage_main"]


def command() -> NoReturn:
    """Run the command ``mmnmt`` and exit."""
    prepare_process()
    leave(main())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with its arguments; return the exit code.

    If a launcher started several ranks, only rank 0 does anything besides stages.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    stage, options_of_stage = find_stage(arguments)
    if stage is not None:
        return stage_main(stage.name, options_of_stage)
    if (rank := own_rank()) != 0:  # one process is enough, however many a launcher started
        print(
            f"mmnmt: rank {rank} does nothing, since rank 0 runs the command. If no launcher "
            "started this process, unset RANK and the other variables of a launcher.",
            file=sys.stderr,
        )
        return 0
    parser = _parser()
    words = [name.split() for name in COMMANDS]
    if not arguments:
        parser.print_help()
        return 0
    first = dict.fromkeys([*commands_of_stages(), *(name for name, *_ in words)])
    parser.refuse_unknown_command(arguments[0], [*first], words)
    if arguments[:1] == ["checkpoint"] and len(arguments) > 1:
        below = [second for first, *rest in words if first == "checkpoint" for second in rest]
        parser.refuse_unknown_command(arguments[1], below, words)
    options = parser.parse_args(arguments)
    chosen: Command = options.chosen

    def act() -> int:
        with interruptible():
            refuse_paths(options)
            return chosen.action(options)

    # ``upcycle`` is a stage, too: the job that starts it waits for a report of its end.
    return guarded(chosen.name, act, is_rank=chosen.name in STAGES, leads=True)


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="mmnmt",
        description="Massively multilingual translation with mixtures of experts, in stages.",
        epilog="mmnmt STAGE --help lists a stage's options.",
    )
    parser.add_argument("--version", action="version", version=f"mmnmt {installed_version()}")
    settings: dict[str, Any] = {"required": True, "metavar": "COMMAND", "title": "commands"}
    parsers = parser.add_subparsers(dest="command", **settings)
    for name, one in COMMANDS.items():
        if " " not in name:
            one.add_to(parsers)
    about = "inspect checkpoints and other artifacts, and make new ones from them"
    checkpoint = parsers.add_parser("checkpoint", help=about, description=about)
    below = checkpoint.add_subparsers(dest="checkpoint_command", **settings)
    for name, one in COMMANDS.items():
        if " " in name:
            one.add_to(below)
    for name, stages in commands_of_stages().items():
        if name in parsers.choices:
            continue  # ``upcycle`` has a form of its own for users
        kinds = {kind: stage.help for kind, stage in stages.items() if kind}
        about = stages[""].help if "" in stages else "; ".join(": ".join(k) for k in kinds.items())
        stage_parser = parsers.add_parser(name, help=about, description=about)
        if "" not in stages:
            metavar = "|".join(kinds)
            stage_parser.add_argument("kind", choices=[*kinds], metavar=metavar)
            stage_parser.instead = {"--": f" before {metavar}. Write one of them before it"}
    return parser
