"""Run plans here and show their status: ``mmnmt run`` and ``mmnmt status``."""

import argparse
import os
from pathlib import Path

from pipeline.artifacts.raw_input import RawInput, raw_input
from pipeline.cli.ending import launched_size, say, say_once
from pipeline.cli.parser import Command, add_set_option, named_paths, whole_number
from pipeline.config.ds_config import AUTO
from pipeline.config.overrides import parse_overrides
from pipeline.distributed.world import is_launched
from pipeline.jobs.job_status import show_jobs
from pipeline.jobs.launch import MAX_PROCESSES
from pipeline.jobs.plan import PlacedPlan, default_dir, load_plan, place_plan, plan_names
from pipeline.jobs.runner import dry_run, run_plan
from pipeline.jobs.submission import read_jobs


def _run(options: argparse.Namespace) -> int:
    placed = placed_plan(options, processes=options.processes)
    if options.dry_run:
        dry_run(placed, rebuild=options.rebuild)
        return 0
    _say_who_runs_it()
    return run_plan(placed, rebuild=options.rebuild, say=say)


def _say_who_runs_it() -> None:
    """Say that a plan needs no launcher, if one started several ranks of it."""
    started = launched_size(os.environ) if is_launched(os.environ) else None
    if started is not None and started > 1:
        say_once(
            f"mmnmt run: a launcher started {started} ranks, and rank 0 alone runs the plan, on "
            "its machine. Start it once: it starts the processes of its stages itself."
        )


def _status(options: argparse.Namespace) -> int:
    record = read_jobs(plan_dir(options))
    show_jobs(placed_plan(options, auto=record.ds_config if record else AUTO))
    return 0


def plan_dir(options: argparse.Namespace) -> Path:
    """Return the directory of all stages of the plan that the options name."""
    chosen: Path | None = options.out
    return chosen or default_dir(load_plan(options.plan))


def placed_plan(
    options: argparse.Namespace, *, processes: int | None = None, auto: str = AUTO
) -> PlacedPlan:
    """Return the plan that the options name, and the stages that they choose."""
    return place_plan(
        load_plan(options.plan),
        out_dir=options.out,
        overlay=options.overlay,
        overrides=parse_overrides(options.overrides),
        given=_given(options.input),
        processes=processes,
        auto=auto,
    ).chosen(only=options.only, until=options.until)


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    add_plan_options(parser)
    parser.add_argument(
        "--dry-run", action="store_true", help="print what would run and why; start nothing"
    )
    add_rebuild_option(parser)
    parser.add_argument(
        "--processes",
        type=whole_number(MAX_PROCESSES),
        metavar="N",
        help="number of processes of every stage, instead of the plan's",
    )


def add_rebuild_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--rebuild``, which lets training begin anew."""
    parser.add_argument(
        "--rebuild",
        action="append",
        default=[],
        metavar="STAGE",
        help="let STAGE train anew if its settings or inputs differ; the earlier training is kept "
        "as STAGE.before-1 (repeatable)",
    )


def add_place_options(parser: argparse.ArgumentParser, *, is_optional: bool = False) -> None:
    """Add a plan, which may be left out if ``is_optional``, and its directory."""
    about = f"{', '.join(plan_names())}, or PATH.toml"
    parser.add_argument("plan", nargs="?" if is_optional else None, help=about)
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="directory of all stages (default: runs/PLAN)"
    )


def add_plan_options(parser: argparse.ArgumentParser, *, is_optional: bool = False) -> None:
    """Add a plan with its directory, its inputs, and changes of its settings and stages."""
    add_place_options(parser, is_optional=is_optional)
    parser.add_argument(
        "--with", dest="overlay", default="", metavar="OVERLAY", help="overlay for every recipe"
    )
    add_set_option(parser)
    parser.add_argument(
        "--input",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=PATH",
        help="outside data that the plan needs",
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="STAGE",
        help="run STAGE alone; it reads existing artifacts as they are (repeatable)",
    )
    parser.add_argument(
        "--until",
        action="append",
        default=[],
        metavar="STAGE",
        help="run STAGE and all that it depends on (repeatable)",
    )


PLAN_COMMANDS = (
    Command("run", "run the stages of a plan that are not up to date", _add_run_options, _run),
    Command(
        "status",
        "show which stages of a plan are done, running, waiting, stale or missing, and why",
        add_plan_options,
        _status,
    ),
)


def _given(pairs: list[str]) -> dict[str, RawInput]:
    """Map each input of a plan to its path or paths."""
    values: dict[str, list[str]] = {}
    for pair in pairs:
        for name, path in named_paths([pair], "--input").items():
            values.setdefault(name, []).append(str(path))
    return {name: raw_input(of_name) for name, of_name in values.items()}
