"""Run plans, here or as jobs of a cluster, show how far they are, and check this machine."""

import argparse
import os
import re
from pathlib import Path

from pipeline.artifacts.raw_input import RawInput, raw_input
from pipeline.cli.ending import say, say_once
from pipeline.cli.parser import named_paths
from pipeline.config.ds_config import AUTO
from pipeline.config.recipe import parse_overrides
from pipeline.distributed.world import is_launched, launched_size
from pipeline.errors import EXIT_USER_ERROR, ConfigError
from pipeline.jobs.job_status import show_jobs
from pipeline.jobs.plan import ResolvedPlan, Task, default_dir, load_plan, resolve_plan
from pipeline.jobs.runner import dry_run, run_plan
from pipeline.jobs.site import Allocation, load_site
from pipeline.jobs.slurm_commands import Scheduler
from pipeline.jobs.submission import cancel_jobs, last_log, read_jobs, show_commands, submit_plan
from pipeline.terminal import listed


def run(options: argparse.Namespace) -> int:
    """Run the stages of a plan, or print what would run."""
    placed = _placed_plan(options, processes=options.processes)
    if options.dry_run:
        dry_run(placed, rebuild=options.rebuild)
        return 0
    started = launched_size(os.environ) if is_launched(os.environ) else None
    if started is not None and started > 1:
        say_once(
            f"mmnmt run: a launcher started {started} ranks, and only rank 0 runs the plan, on "
            "its machine. Start it once: it starts the processes of its stages itself."
        )
    return run_plan(placed, rebuild=options.rebuild, jobs=options.jobs, say=say)


def status(options: argparse.Namespace) -> int:
    """Print the state of each stage."""
    record = read_jobs(_plan_dir(options))
    show_jobs(_placed_plan(options, auto=record.ds_config if record else AUTO))
    return 0


def submit(options: argparse.Namespace) -> int:
    """Submit the stages of a plan as jobs, or print the commands."""
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
        from pipeline.estimates.devices import refuse_unfit  # once there is a model to estimate

        refuse_unfit(task, allocation)


def cancel(options: argparse.Namespace) -> int:
    """Cancel the jobs of a plan."""
    cancel_jobs(resolve_plan(load_plan(options.plan), out_dir=options.out), options.only)
    return 0


def logs(options: argparse.Namespace) -> int:
    """Print the log of the newest job of a stage."""
    path = last_log(resolve_plan(load_plan(options.plan), out_dir=options.out), options.stage)
    with path.open(encoding="utf-8", errors="replace") as lines:
        ranks = set()
        for line in lines:
            label = re.match(r"\s*(\d+): ", line)  # by srun
            ranks |= {int(label[1])} if label else set()
            if options.rank is None or (label and int(label[1]) == options.rank):
                print(line, end="")
    if options.rank is not None and options.rank not in ranks:
        known = f"Its ranks are {listed(map(str, sorted(ranks)))}" if ranks else "Leave --rank out"
        raise ConfigError(f"{path} has no line of rank {options.rank}. {known}.")
    return 0


def doctor(options: argparse.Namespace) -> int:
    """Print the findings of all checks; return an error code if something is wrong."""
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
        overlay=options.overlay or "",
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
