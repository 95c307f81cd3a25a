"""Run plans, here or as jobs of a cluster, show how far they are, and check this machine."""

import argparse
import os
import re
from pathlib import Path

from pipeline.artifacts.raw_input import RawInput, raw_input
from pipeline.cli.ending import launched_size, say, say_once
from pipeline.cli.parser import REPEATABLE, SET, Command, named_paths, option, whole_number
from pipeline.config.ds_config import AUTO
from pipeline.config.overrides import parse_overrides
from pipeline.distributed.world import is_launched
from pipeline.errors import EXIT_USER_ERROR
from pipeline.jobs.job_status import show_jobs
from pipeline.jobs.launch import MAX_PROCESSES
from pipeline.jobs.plan import ResolvedPlan, Task, default_dir, load_plan, plan_names, resolve_plan
from pipeline.jobs.runner import dry_run, run_plan
from pipeline.jobs.site import Allocation, load_site
from pipeline.jobs.slurm_commands import Scheduler
from pipeline.jobs.submission import cancel_jobs, last_log, read_jobs, show_commands, submit_plan

MAX_RANKS = 10**5
"""Most ranks of a job."""


def _run(options: argparse.Namespace) -> int:
    placed = _placed_plan(options, processes=options.processes)
    if options.dry_run:
        dry_run(placed, rebuild=options.rebuild)
        return 0
    started = launched_size(os.environ) if is_launched(os.environ) else None
    if started is not None and started > 1:
        say_once(
            f"mmnmt run: a launcher started {started} ranks, and rank 0 alone runs the plan, on "
            "its machine. Start it once: it starts the processes of its stages itself."
        )
    return run_plan(placed, rebuild=options.rebuild, say=say)


def _status(options: argparse.Namespace) -> int:
    record = read_jobs(_plan_dir(options))
    show_jobs(_placed_plan(options, auto=record.ds_config if record else AUTO))
    return 0


def _submit(options: argparse.Namespace) -> int:
    site = load_site(options.site)
    options.out = _plan_dir(options).absolute()  # jobs may start in another directory
    placed = _placed_plan(options, auto=site.auto_ds_config)
    if options.dry_run:
        scheduler = Scheduler() if Scheduler.is_here() else None
        show_commands(
            placed, site, rebuild=options.rebuild, check=_refuse_unfit, scheduler=scheduler
        )
    else:
        submit_plan(placed, site, rebuild=options.rebuild, check=_refuse_unfit)
    return 0


def _refuse_unfit(task: Task, allocation: Allocation) -> None:
    if task.stage.trains:
        from pipeline.estimates.fitting import refuse_unfit  # once there is a model to estimate

        refuse_unfit(task, allocation)


def _cancel(options: argparse.Namespace) -> int:
    cancel_jobs(resolve_plan(load_plan(options.plan), out_dir=options.out), options.only)
    return 0


def _logs(options: argparse.Namespace) -> int:
    of_rank = re.compile("" if options.rank is None else rf"\s*0*{options.rank}: ")
    path = last_log(resolve_plan(load_plan(options.plan), out_dir=options.out), options.stage)
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if of_rank.match(line):  # as srun labels it
                print(line, end="")
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from pipeline.doctor import examine

    placed = None if options.plan is None else _placed_plan(options)
    out_dir = options.out or Path("runs") if placed is None else placed.out_dir
    wrong = 0
    for finding in examine(placed, out_dir=out_dir, site=options.site):
        say(finding.line())
        wrong += finding.mark == "wrong"
    return EXIT_USER_ERROR if wrong else 0


def _plan_dir(options: argparse.Namespace) -> Path:
    """Return the directory of all stages of the plan that the options name."""
    chosen: Path | None = options.out
    return chosen or default_dir(load_plan(options.plan))


def _placed_plan(
    options: argparse.Namespace, *, processes: int | None = None, auto: str = AUTO
) -> ResolvedPlan:
    """Return the plan that the options name, and the stages that they choose."""
    return resolve_plan(
        load_plan(options.plan),
        out_dir=options.out,
        overlay=options.overlay,
        overrides=parse_overrides(options.overrides),
        given=_given(options.input),
        processes=processes,
        auto=auto,
    ).chosen(only=options.only, until=options.until)


def _given(pairs: list[str]) -> dict[str, RawInput]:
    """Map each input of a plan to its path or paths."""
    values: dict[str, list[str]] = {}
    for pair in pairs:
        for name, path in named_paths([pair], "--input").items():
            values.setdefault(name, []).append(str(path))
    return {name: raw_input(of_name) for name, of_name in values.items()}


_PLAN = f"{', '.join(plan_names())}, or PATH.toml"
_PLACE = (
    option("plan", about=_PLAN),
    option("--out", "DIR", "directory of all stages (default: runs/PLAN)", type=Path),
)
_CHANGES = (
    option("--with", "OVERLAY", "overlay for every recipe", dest="overlay", default=""),
    SET,
    option(
        "--input",
        "NAME=PATH",
        "outside data that the plan needs",
        nargs="+",
        action="extend",
        default=[],
    ),
    option(
        "--only",
        "STAGE",
        "run STAGE alone; it reads existing artifacts as they are (repeatable)",
        **REPEATABLE,
    ),
    option("--until", "STAGE", "run STAGE and all that it depends on (repeatable)", **REPEATABLE),
)
_REBUILD = option(
    "--rebuild",
    "STAGE",
    "let STAGE train anew if its settings or inputs differ; the earlier training is kept as "
    "STAGE.before-1 (repeatable)",
    **REPEATABLE,
)
_PROCESSES = option(
    "--processes",
    "N",
    "number of processes of every stage, instead of the plan's",
    type=whole_number(MAX_PROCESSES),
)
_RANK = whole_number(MAX_RANKS, least=0)
PLAN_COMMANDS = (
    Command(
        "run",
        "run the stages of a plan that are not up to date",
        _run,
        (
            *_PLACE,
            *_CHANGES,
            option("--dry-run", None, "print what would run and why; start nothing"),
            _REBUILD,
            _PROCESSES,
        ),
    ),
    Command(
        "status",
        "show which stages of a plan are done, running, waiting, stale or missing, and why",
        _status,
        (*_PLACE, *_CHANGES),
    ),
    Command(
        "submit",
        "submit the stages of a plan that are not up to date as SLURM jobs",
        _submit,
        (
            *_PLACE,
            *_CHANGES,
            option("--site", "FILE", "site file (TOML) of the cluster", type=Path, required=True),
            option("--dry-run", None, "print the commands as lines of bash; run none"),
            _REBUILD,
        ),
    ),
    Command(
        "cancel",
        "cancel the SLURM jobs of a plan",
        _cancel,
        (*_PLACE, option("--only", "STAGE", "cancel only this job (repeatable)", **REPEATABLE)),
    ),
    Command(
        "logs",
        "print the log of a stage's newest SLURM job",
        _logs,
        (
            *_PLACE,
            option("stage", "STAGE", "print the log of the newest job of this stage"),
            option("--rank", "K", "print only the lines of this rank", type=_RANK),
        ),
    ),
    Command(
        "doctor",
        "check this machine for a plan: packages, devices, storage, disk space; with fixes",
        _doctor,
        (
            option("plan", about=_PLAN, nargs="?"),
            *_PLACE[1:],
            *_CHANGES,
            option("--site", "FILE", "site file (TOML) of a cluster, to check it", type=Path),
        ),
    ),
)
