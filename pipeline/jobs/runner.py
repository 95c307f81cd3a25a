"""Run a plan on this machine, and show what a run would do.

Stages run in order, each as a command of its own, or several side by side that do not need each
other. Stages that are up to date are skipped, and the same command continues after a failure or a
stop.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import cycle, islice

from pydantic import TypeAdapter

from pipeline.artifacts.artifact import (
    MANIFEST_NAME,
    open_artifact,
    read_manifest,
    refuse_changed,
)
from pipeline.artifacts.corpus import statistic
from pipeline.artifacts.locks import exclusive, sole_writer
from pipeline.artifacts.manifest import run_dir, why_no_data
from pipeline.artifacts.places import (
    plan_lock_path,
    refuse_other_kind,
    refuse_to_overwrite,
    replaced_dir,
    restore,
    unfinished_dirs,
    why_not_ours,
)
from pipeline.artifacts.run_folders import finish_removal, saved_work, set_aside
from pipeline.config.ds_config import check_ranks
from pipeline.config.recipe import load_recipe, override_texts
from pipeline.errors import (
    EXIT_RUN_AGAIN,
    EXIT_USER_ERROR,
    ArtifactError,
    ConfigError,
    Interrupted,
    UserError,
)
from pipeline.jobs.freshness import (
    change_of_files,
    forecast,
    going_on,
    losses,
    reason_to_run,
    refusal,
    training_done,
    why_lost,
)
from pipeline.jobs.job_endings import describe_exit
from pipeline.jobs.launch import StopRequests, launch
from pipeline.jobs.plan import ResolvedPlan, Task, manifest_of
from pipeline.machine import gpu_names, processes_here, visible_gpus
from pipeline.stage import named_path
from pipeline.terminal import listed, text_table

_GROUPS = TypeAdapter(dict[str, list[str]])
MAX_RERUNS = 3
"""Most reruns of a stage that asks to be run again, while each run saves something new."""

EXIT_FAILED = 1
"""Exit code of a stage that failed without saying so; running it again would not help."""


def run_plan(
    resolved: ResolvedPlan,
    *,
    rebuild: Collection[str] = (),
    jobs: int = 1,
    launcher: Callable[..., int] = launch,
    program: Sequence[str] = ("-m", "pipeline"),
    say: Callable[[str], None] = print,
) -> int:
    """Run every stage that is not up to date, in order, and print a summary.

    Python runs ``program`` as the command line. Stages of ``rebuild`` may train anew: their earlier
    training is then set aside. Up to ``jobs`` stages that do not need each other run at once: a
    stage of ranks then has one process, all divide their threads, and each has a GPU of its own as
    far as there are GPUs.

    Returns:
        0; the exit code of the stage that failed.

    Raises:
        ConfigError: the plan lacks an input or a stage to rebuild, or its ranks fit no training.
        ArtifactError: another run holds the folder, training would be thrown away, or a stage
            reads from one that is left out and not made yet.
        Interrupted: a signal came, and no stage failed.
    """
    _refuse_unready(resolved, rebuild, jobs=jobs)
    lock_path = plan_lock_path(resolved.out_dir)
    with exclusive(lock_path, what=str(resolved.out_dir)), StopRequests() as requests:
        refuse_losses(resolved, rebuild=rebuild)
        free_gpus = deque(islice(cycle(gpu_names() if jobs > 1 else ()), jobs))

        def launch_stage(task: Task) -> int:
            gpu = free_gpus.popleft() if free_gpus else None
            try:
                return launcher(
                    [*program, *stage_arguments(resolved, task)],
                    processes=_processes_of(task, jobs=jobs),
                    threads=max(1, task.planned.threads // jobs),
                    requests=requests,
                    gpu=gpu,
                )
            finally:
                if gpu is not None:
                    free_gpus.append(gpu)

        run = _Run(resolved, rebuild, launch_stage, requests, say)
        try:
            return run.all_stages(jobs)
        finally:
            order = [task.name for task in resolved.tasks]
            rows = sorted(run.summary, key=lambda row: order.index(row[0]))
            if rows:
                say(text_table(["stage", "", "seconds"], rows))


def _refuse_unready(resolved: ResolvedPlan, rebuild: Collection[str], *, jobs: int) -> None:
    """Refuse a run, or its forecast, that lacks an input or trains on ranks that cannot."""
    resolved.require_inputs()
    check_rebuild(resolved, rebuild)
    for task in resolved.tasks:
        refuse_unfit_inputs(resolved, task)
        refuse_missing_inputs(resolved, task)
        refuse_other_kind(task.out_dir, kind=task.stage.makes)
        if "batches" in task.stage.sections and not task.is_made:
            _refuse_unfit_ranks(task, processes=_processes_of(task, jobs=jobs))


def refuse_unfit_inputs(resolved: ResolvedPlan, task: Task) -> None:
    """Refuse data from outside that a stage cannot read, before other stages work for it in vain.

    Raises:
        ArtifactError: it does not exist, or is no artifact of the kind that is wanted.
    """
    for key, source in task.planned.sources().items():
        kind = task.stage.inputs[key.partition("/")[0]].kind
        if source.startswith("$") and source[1:] in resolved.given:
            given = resolved.given[source[1:]]
            if kind != "raw":
                open_artifact(given.only_path(), kind=kind)
            elif problem := next(filter(None, map(why_no_data, given.paths)), ""):
                raise ArtifactError(problem)


def _processes_of(task: Task, *, jobs: int) -> int:
    """Return the processes of a stage, one if several stages run at once."""
    return task.planned.processes if task.stage.parallel == "ranks" and jobs == 1 else 1


def _refuse_unfit_ranks(task: Task, *, processes: int) -> None:
    """Raise ConfigError for ranks that a training would refuse, after the stages before it."""
    recipe = load_recipe(task.recipe or None, task.overrides)
    try:
        check_ranks(recipe, ranks=processes_here(processes, gpus=visible_gpus().count))
    except ConfigError as error:
        raise ConfigError(f"Stage {task.name!r}: {error}") from error


def check_rebuild(resolved: ResolvedPlan, names: Collection[str]) -> None:
    """Raise ConfigError if a stage that is to be rebuilt is unknown or left out."""
    chosen = {task.name for task in resolved.tasks}
    for name in names:
        resolved.require_stage(name, "--rebuild")
        if name not in chosen:
            raise ConfigError(
                f"--rebuild {name}: --only or --until leaves that stage out. Name it there, too, "
                "or leave out --rebuild."
            )


def refuse_losses(resolved: ResolvedPlan, *, rebuild: Collection[str]) -> None:
    """Refuse, before a stage runs, every loss that is certain by now.

    Raises:
        ArtifactError: training would be thrown away, and that is not asked for; or a stage would
            replace an artifact of another kind, or files that are none.
    """
    for task in resolved.tasks:
        refuse_other_kind(task.out_dir, kind=task.stage.makes)
    lost = losses(resolved, forecast(resolved))
    for task in resolved.tasks:
        cause = lost.get(task.name)
        if isinstance(cause, ArtifactError):
            raise cause
        if cause is not None and task.name not in rebuild:
            raise ArtifactError(refusal(task, cause))
    for task in resolved.tasks:
        if manifest_of(task.out_dir) is None:  # as the stage itself would
            refuse_to_overwrite(task.out_dir, overwrite=True)


def refuse_missing_inputs(
    resolved: ResolvedPlan, task: Task, *, submitted: Collection[str] = ()
) -> None:
    """Raise ArtifactError if a stage reads from one that is neither chosen, made nor submitted."""
    for other in resolved.left_out(task):
        if not other.is_made and other.name not in submitted:
            raise ArtifactError(
                f"Stage {task.name} needs {other.name}, which is not made yet. Pass --only "
                f"{other.name}, too, or --until {task.name}, which includes all that it needs."
            )


def refuse_unfit_groups(resolved: ResolvedPlan, made: Task) -> None:
    """Refuse language groups, once they are made, that a later stage would refuse after training.

    Raises:
        ConfigError: a recipe expects another number of groups; names its stage.
    """
    if made.stage.makes != "groups":
        return
    artifact = open_artifact(made.out_dir, kind="groups")
    num_groups = len(statistic(artifact, "groups", _GROUPS))
    for task in resolved.tasks:
        if made.name in task.planned.dependencies() and "model" in task.stage.sections:
            moe = load_recipe(task.recipe or None, task.overrides).model.moe
            if moe is not None and moe.num_groups not in (None, num_groups):
                raise ConfigError(
                    f"Stage {task.name} expects {moe.num_groups} language groups "
                    f"(model.moe.num_groups), and {made.name} has {num_groups}. Change one of them."
                )


@dataclass
class _Run:
    """One run of a plan."""

    _resolved: ResolvedPlan
    _rebuild: Collection[str]  # stages that may train anew
    _launch_stage: Callable[[Task], int]  # returns the exit code
    _requests: StopRequests
    _say: Callable[[str], None]
    summary: list[list[str]] = field(default_factory=list)
    """Stage, result and seconds of all stages so far."""

    def all_stages(self, jobs: int) -> int:
        """Run the stages that are not up to date; return the exit code of the run."""
        waiting, codes = [*self._resolved.tasks], dict[str, int]()
        refusals: list[UserError] = []
        running: dict[Future[int], Task] = {}
        with ThreadPoolExecutor(jobs) as pool:
            while True:
                if not codes:
                    unmade = {task.name for task in (*waiting, *running.values())}
                    ready = [t for t in waiting if unmade.isdisjoint(t.planned.dependencies())]
                    for task in ready[: jobs - len(running)]:
                        waiting.remove(task)
                        running[self._start(task, pool if jobs > 1 else None)] = task
                if not running:
                    break
                for ended in wait(running, return_when=FIRST_COMPLETED).done:
                    task = running.pop(ended)
                    try:
                        code = ended.result()
                    except UserError as error:
                        code = EXIT_USER_ERROR
                        self.summary.append([task.name, "refused", ""])
                        if running or refusals:  # else it is the last line of the command
                            self._say(f"{task.name}: {error}")
                        refusals.append(error)
                    if code:
                        codes[task.name] = code
                if codes and running and self._requests.received is None:
                    left = listed(task.name for task in running.values())
                    self._say(f"mmnmt run: {listed(codes)} failed; waiting for {left}")
        if not codes:
            return 0
        failed = [name for name, code in codes.items() if code != EXIT_RUN_AGAIN]
        if self._requests.received is not None and not failed:
            raise Interrupted(f"stopped by {self._requests.received.name} in {listed(codes)}")
        if refusals:
            raise refusals[0]
        code = codes[failed[0]]
        self._say(
            f"mmnmt run: stage {listed(failed)} failed ({describe_exit(code)}); no stage after it "
            "was started: mend the cause and run the same command again."
        )
        return code

    def _start(self, task: Task, pool: ThreadPoolExecutor | None) -> "Future[int]":
        """Bring a stage up to date, in a thread of the pool, or here and now without one."""
        if pool is not None:
            return pool.submit(self._up_to_date, task)
        done = Future[int]()
        done.set_result(self._up_to_date(task))
        return done

    def _up_to_date(self, task: Task) -> int:
        """Run the task if it must; return 0 if its artifact exists afterwards."""
        if self._requests.received is not None:
            return EXIT_RUN_AGAIN
        if replaced_dir(task.out_dir).exists() and not task.out_dir.exists():
            with sole_writer(task.out_dir):  # else a job may be replacing it at this moment
                restore(task.out_dir)
        reason = reason_to_run(self._resolved, task)
        refuse_edits(task)
        if reason is None:
            self._say(f"{task.name}: already done")
            if problem := finish_removal(task.out_dir):
                self._say(f"{task.name}: {problem}")
            self.summary.append([task.name, "already done", ""])
            refuse_unfit_groups(self._resolved, task)
            return 0
        refuse_losses(self._resolved, rebuild=self._rebuild)
        self._set_aside(task)
        self._say_what_is_stale(task)
        self._say(f"{task.name}: running {task.stage.name} ({reason})")
        started = time.monotonic()
        code = self._run_until_done(task)
        if code > 128 and self._requests.received is not None:  # a signal ended it
            code = EXIT_RUN_AGAIN
        state = "done" if code == 0 else "stopped" if code == EXIT_RUN_AGAIN else "failed"
        self.summary.append([task.name, state, f"{time.monotonic() - started:.1f}"])
        if code == 0:
            refuse_unfit_groups(self._resolved, task)
        return code

    def _say_what_is_stale(self, task: Task) -> None:
        """Print which artifacts of left-out stages are read although they are stale."""
        for other in self._resolved.left_out(task):
            with suppress(ArtifactError):  # its own inputs are gone
                if reason := reason_to_run(self._resolved, other):
                    self._say(f"{task.name}: takes {other.name} as it is ({reason})")

    def _set_aside(self, task: Task) -> None:
        """Keep earlier training under another name if training begins anew."""
        cause = why_lost(task, digests=self._resolved.digests(task))
        if cause is not None and task.name not in self._rebuild:
            raise ArtifactError(refusal(task, cause))
        if cause is not None:
            done = training_done(task)
            with sole_writer(task.out_dir):
                place = set_aside(task.out_dir)
            self._say(f"{task.name}: {done} set aside as {place} ({cause})")

    def _run_until_done(self, task: Task) -> int:
        """Rerun a stage that asks for it and saved something new, at most MAX_RERUNS times."""
        for rerun in range(MAX_RERUNS + 1):
            saved = saved_work(task.out_dir)
            code = self._launch_stage(task)
            if code == 0 and read_manifest(task.out_dir) is None:
                self._say(f"{task.name}: ended without an error but left no finished artifact")
                return EXIT_FAILED
            if code != EXIT_RUN_AGAIN or self._requests.received is not None:
                return code
            if saved_work(task.out_dir) <= saved:
                self._say(f"{task.name}: asks to be run again but saved nothing new")
                return EXIT_FAILED
            self._say(f"{task.name}: asks to be run again ({rerun} of {MAX_RERUNS} times so far)")
        return EXIT_FAILED


def refuse_edits(task: Task) -> None:
    """Raise ArtifactError if edits of a stage's artifact would be lost or passed on."""
    try:
        read_manifest(task.out_dir)
    except ArtifactError:
        return  # the stage refuses such a folder itself
    refuse_changed(task.out_dir)


def stage_arguments(resolved: ResolvedPlan, task: Task) -> list[str]:
    """Return the command line of one stage of a plan: the command and its options.

    Whatever exists at its output is stale or an unfinished run, which is resumed with the same
    settings and replaced with others. Useless training was set aside before: a model exists there
    only if it is trained for longer.
    """
    arguments = [task.stage.name]
    if task.stage.sections and task.recipe:
        arguments.append(f"--recipe={task.recipe}")
    arguments += [f"--set={text}" for text in override_texts(task.overrides)]
    for name, source in task.planned.inputs.items():
        option = f"--{name}"
        if isinstance(source, str):
            first, *others = resolved.values(source)
            arguments += [option, first, *others] if others else [f"{option}={first}"]
        else:
            named = [named_path(entry, resolved.path(value)) for entry, value in source.items()]
            arguments += [option, *named]
    if task.stage.parallel == "workers":
        arguments.append(f"--processes={task.planned.processes}")
    if task.stage.trains:
        arguments.append(f"--ds-config={task.planned.ds_config}")
    replaces = not task.stage.trains or (task.out_dir / MANIFEST_NAME).is_file()
    return [*arguments, f"--out={task.out_dir}", *(["--overwrite"] if replaces else [])]


# ---------------------------------------------------------------- looking


def dry_run(
    resolved: ResolvedPlan,
    *,
    rebuild: Collection[str] = (),
    jobs: int = 1,
    say: Callable[[str], None] = print,
) -> None:
    """Print for each stage whether it would run, and why; start nothing.

    Raises:
        ConfigError: the plan lacks an input or a stage to rebuild, or its ranks fit no training.
        ArtifactError: a stage reads from one that is left out and not made yet, or would replace an
            artifact of another kind.
    """
    _refuse_unready(resolved, rebuild, jobs=jobs)
    reasons = forecast(resolved)
    lost = losses(resolved, reasons)
    for task in resolved.tasks:
        reason, change = reasons[task.name], change_of_files(task)
        is_there = task.name not in lost and os.path.lexists(task.out_dir)
        if is_there and not manifest_of(task.out_dir) and (why := why_not_ours(task.out_dir)):
            say(f"{task.name}: would be refused (its folder {why})")
        elif change is not None:
            say(f"{task.name}: would be refused ({change})")
        elif reason is not None:
            training = _fate_of_training(task, reasons=reasons, lost=lost, rebuild=rebuild)
            say(f"{task.name}: would run ({_joined(reason, training)})")
        else:
            say(f"{task.name}: done")


def _fate_of_training(
    task: Task,
    *,
    reasons: Mapping[str, str | None],
    lost: Mapping[str, str | ArtifactError],
    rebuild: Collection[str] = (),
) -> str | None:
    """Describe what happens to a stage's training if it runs; None if there is none."""
    cause = lost.get(task.name)
    if isinstance(cause, ArtifactError):
        return f"it is refused: {cause}"
    done = training_done(task)
    inputs_may_change = any(reasons.get(name) is not None for name in task.planned.dependencies())
    if done is None:
        return None
    if cause is None and not inputs_may_change:
        return going_on(task)
    condition = "" if cause else " if its inputs change"
    if task.name in rebuild:
        return f"{done} would be set aside{condition}"
    return f"{done} would be lost{condition}: it is refused without --rebuild {task.name}"


def status_rows(resolved: ResolvedPlan) -> list[list[str]]:
    """Return name, state and explanation of each stage, by its artifacts, without the scheduler.

    Raw data that is not given counts as unchanged.
    """
    reasons = forecast(resolved)
    lost = losses(resolved, reasons)
    return [[task.name, *_status(task, reasons, lost)] for task in resolved.tasks]


def _status(
    task: Task, reasons: Mapping[str, str | None], lost: Mapping[str, str | ArtifactError]
) -> tuple[str, str]:
    """Return state and explanation of a stage."""
    reason = reasons[task.name]
    if (change := change_of_files(task)) is not None:
        return "changed", _joined(change, reason)
    if reason is None:
        manifest = read_manifest(task.out_dir)
        assert manifest is not None, "a stage without a reason to run has a manifest"
        return "done", f"{manifest.run.started}, {manifest.run.wall_seconds:.1f} s"
    training = _fate_of_training(task, reasons=reasons, lost=lost)
    begun = run_dir(task.out_dir).exists() and not task.is_made
    if begun or unfinished_dirs(task.out_dir):
        return "in progress", _joined(None if reason == "missing" else reason, training)
    if reason == "missing":
        return reason, ""
    if not task.is_made and not task.out_dir.exists():
        return "missing", reason
    return "stale", _joined(reason, training)


def _joined(*texts: str | None) -> str:
    return "; ".join(filter(None, texts))
