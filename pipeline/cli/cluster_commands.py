"""Run plans on a cluster: ``mmnmt submit``, ``mmnmt cancel`` and ``mmnmt logs``."""

import argparse
import re
from pathlib import Path

from pipeline.cli.estimate_command import MAX_RANKS
from pipeline.cli.parser import Command, whole_number
from pipeline.cli.plan_commands import (
    add_place_options,
    add_plan_options,
    add_rebuild_option,
    placed_plan,
    plan_dir,
)
from pipeline.jobs.plan import Task, load_plan, place_plan
from pipeline.jobs.scheduler import Scheduler
from pipeline.jobs.site import Allocation, load_site
from pipeline.jobs.submission import cancel_jobs, last_log, show_commands, submit_plan


def _submit(options: argparse.Namespace) -> int:
    site = load_site(options.site)
    options.out = plan_dir(options).absolute()  # jobs may start in another directory
    placed = placed_plan(options, auto=site.auto_ds_config)
    if options.dry_run:
        scheduler = Scheduler() if Scheduler.is_here() else None
        show_commands(
            placed, site, rebuild=options.rebuild, check=_refuse_unfit, scheduler=scheduler
        )
        return 0
    submit_plan(placed, site, rebuild=options.rebuild, check=_refuse_unfit)
    return 0


def _refuse_unfit(task: Task, allocation: Allocation) -> None:
    if not task.stage.trains:
        return
    from pipeline.estimates.fitting import refuse_unfit  # once there is a model to estimate

    refuse_unfit(task, allocation)


def _cancel(options: argparse.Namespace) -> int:
    placed = place_plan(load_plan(options.plan), out_dir=options.out)
    cancel_jobs(placed, options.only)
    return 0


def _logs(options: argparse.Namespace) -> int:
    of_rank = re.compile("" if options.rank is None else rf"\s*0*{options.rank}: ")
    path = last_log(place_plan(load_plan(options.plan), out_dir=options.out), options.stage)
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if of_rank.match(line):  # as srun labels it
                print(line, end="")
    return 0


def _add_submit_options(parser: argparse.ArgumentParser) -> None:
    add_plan_options(parser)
    parser.add_argument(
        "--site", type=Path, required=True, metavar="FILE", help="site file (TOML) of the cluster"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the commands as lines of bash; run none"
    )
    add_rebuild_option(parser)


def _add_cancel_options(parser: argparse.ArgumentParser) -> None:
    add_place_options(parser)
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="STAGE",
        help="cancel the job of STAGE alone (repeatable)",
    )


def _add_logs_options(parser: argparse.ArgumentParser) -> None:
    add_place_options(parser)
    parser.add_argument("stage", metavar="STAGE", help="stage whose newest job's log to print")
    parser.add_argument(
        "--rank",
        type=whole_number(MAX_RANKS, least=0),
        metavar="K",
        help="print the lines of this rank alone",
    )


CLUSTER_COMMANDS = (
    Command(
        "submit",
        "submit the stages of a plan that are not up to date as SLURM jobs",
        _add_submit_options,
        _submit,
    ),
    Command("cancel", "cancel the SLURM jobs of a plan", _add_cancel_options, _cancel),
    Command("logs", "print the log of a stage's newest SLURM job", _add_logs_options, _logs),
)
