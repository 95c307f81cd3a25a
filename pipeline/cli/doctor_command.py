"""Check this machine before a plan runs: ``mmnmt doctor``."""

import argparse
from pathlib import Path

from pipeline.cli.ending import say
from pipeline.cli.parser import Command
from pipeline.cli.plan_commands import add_plan_options, placed_plan
from pipeline.errors import EXIT_USER_ERROR


def _doctor(options: argparse.Namespace) -> int:
    from pipeline.doctor import examine

    placed = None if options.plan is None else placed_plan(options)
    out_dir = options.out or Path("runs") if placed is None else placed.out_dir
    wrong = 0
    for finding in examine(placed, out_dir=out_dir, site=options.site):
        say(finding.line())
        wrong += finding.mark == "wrong"
    return EXIT_USER_ERROR if wrong else 0


def _add_doctor_options(parser: argparse.ArgumentParser) -> None:
    add_plan_options(parser, is_optional=True)
    parser.add_argument(
        "--site", type=Path, metavar="FILE", help="site file (TOML) of a cluster, to check it"
    )


DOCTOR_COMMANDS = (
    Command(
        "doctor",
        "check this machine for a plan: packages, devices, storage, disk space; with fixes",
        _add_doctor_options,
        _doctor,
    ),
)
